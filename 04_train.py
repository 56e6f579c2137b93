"""Stage 4: train an EAGLE-3 draft on 03's hidden states, with training-time test.

Reads the prepared samples, the vocabulary map, the hidden states, and of the verifier only
its embedding, head and final norm. Writes into --output-dir a checkpoint in speculators'
format that vLLM loads as it is (config.json, model.safetensors), metrics.jsonl, curves.png
and state/ for resuming. Run the same command again after a kill: it continues where the
last state was saved, to the same bits.
"""

import importlib.util
import os
import time
from pathlib import Path

from common import artifacts, cli, errors, progress
from common.manifest import Output, Stage, recorded

STAGE = "train"


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path", "--prepared-data", "--vocab-map", "--hidden-states")
    p.add_common("--output-dir", "--max-samples", "--max-seq-len", "--layers")
    p.add_argument("--epochs", type=cli.counted(1000), default=10, help="passes over the data")
    p.add_argument(
        "--max-batch-tokens",
        type=cli.positive_int,
        default=8192,
        metavar="TOKENS",
        help="token budget of a packed row",
    )
    p.add_argument(
        "--rows-per-step",
        type=cli.positive_int,
        metavar="ROWS",
        help="packed rows of one optimizer step, over all GPUs (default: one a GPU; a run that"
        " goes on keeps its own)",
    )
    p.add_argument("--ttt-steps", type=cli.counted(16), default=3, help="depths trained")
    p.add_argument(
        "--ttt-decay", type=cli.between(0.01, 1), default=1.0, help="weight of depth k is decay**k"
    )
    p.add_argument(
        "--loss-rule",
        choices=["answer", "next"],
        default="answer",
        help="answer: whole path inside an answer; next: speculators' rule",
    )
    p.add_argument(
        "--optimizer",
        choices=["adamw", "muon"],
        default="adamw",
        help="muon: for the matrices but the head, AdamW for the rest",
    )
    p.add_argument("--lr", type=cli.between(1e-9, 1), default=1e-3, help="peak learning rate")
    p.add_argument("--warmup", type=cli.between(0, 1), default=0.05, help="fraction of all steps")
    p.add_argument("--weight-decay", type=cli.between(0, 1), default=0.0, help="decoupled")
    p.add_argument("--clip", type=cli.between(1e-6, 1e6), default=1.0, help="largest gradient norm")
    p.add_argument(
        "--heldout-fraction", type=cli.between(0, 0.9), default=0.05, help="of conversations"
    )
    p.add_switch("--train-lm-head", True, "the head too, which starts as the verifier's")
    p.add_switch(
        "--norm-before-residual",
        True,
        "the normed states, not the raw ones, are the layer's residual",
    )
    p.add_switch(
        "--norm-before-fc",
        None,
        "one norm over the aux layers side by side (default: unless --fc-norm)",
    )
    p.add_switch("--fc-norm", False, "a norm each")
    p.add_switch("--norm-output", False, "the normed states go on to the next depth")
    p.add_argument(
        "--draft-shape",
        type=cli.json_object,
        default={},
        metavar="JSON",
        help="shape of the draft: intermediate_size, num_attention_heads, num_key_value_heads,"
        " head_dim, rope_theta, rms_norm_eps (default: the verifier's)",
    )
    p.add_argument(
        "--init-from",
        type=cli.path_text,
        metavar="DIR",
        help="published draft of the same shape to start from, instead of random weights",
    )
    p.add_argument(
        "--save-every",
        type=cli.positive_int,
        default=200,
        metavar="STEPS",
        help="steps between states for resuming",
    )
    p.add_argument(
        "--keep-states", type=cli.counted(100), default=1, help="newest states kept for resuming"
    )
    p.add_argument(
        "--patience",
        type=cli.positive_int,
        metavar="EPOCHS",
        help="end after so many epochs without a better held-out acceptance length",
    )
    p.add_argument("--tensorboard", action="store_true", help="also write TensorBoard's files")
    p.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: a GPU if there is one",
    )
    p.add_argument(
        "--compute-dtype",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help="of activations and of the weights' copies (auto: bfloat16 where it is fast)",
    )
    p.add_argument(
        "--float8",
        action="store_true",
        help="linears but the head in float8 (a GPU of compute capability 8.9 or later)",
    )
    p.add_common("--seed", "--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--prepared-data", "--vocab-map", "--hidden-states", "--output-dir")
    args = p.parse()
    if args.norm_before_fc is None:
        args.norm_before_fc = not args.fc_norm
    if args.norm_before_fc and args.fc_norm:
        p.error("--norm-before-fc and --fc-norm exclude each other")
    return args


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    # CUDA's matrix products repeat their bits only with a fixed workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    started = time.monotonic()
    from common.serving.checkpoint import check_draft
    from common.training import metrics
    from common.training.inputs import choose_compute
    from common.training.ranks import start_ranks

    device, dtype = choose_compute(args.device, args.compute_dtype, args.float8)
    ranks = start_ranks(device)
    job = ranks.in_turn(lambda: check(args, device, dtype, ranks))
    if job is None:
        return
    heldout, steps, spent = train_draft(args, job, device, dtype, ranks)
    if not ranks.first:
        return

    # ---------------------------------------------------------------- report
    out = Path(args.output_dir)
    metrics.draw_curves(out)
    check_draft(out, job.model)
    digest = artifacts.sha256_file(out / "model.safetensors")
    seconds = time.monotonic() - started
    tokens = sum(map(job.step_tokens, job.steps[:steps]))
    counts = {
        "samples": len(job.train),
        "heldout": len(job.held),
        "steps": steps,
        "tokens": tokens,
    }
    more = {"heldout": heldout, "train_seconds": round(spent, 2)}
    job.output.finish(counts, digest, seconds, **more)
    text = f"held-out acceptance length {heldout['acceptance_length']}, " if heldout else ""
    progress.log(
        f"train: {text}{steps} steps, {tokens} tokens in {progress.duration(spent)}"
        f" ({tokens / max(spent, 1e-9):.0f} tok/s); this run {progress.duration(seconds)}"
        f" -> {out}"
    )


# ---------------------------------------------------------------- check and plan


def check(args, device, dtype, ranks):
    """Check everything that can be known before the training, plan it and hold the output
    folder; returns its Job, None when there is nothing to do."""
    from common.draft import export
    from common.draft.checkpoint import check_initial
    from common.draft.config import (
        check_float8,
        check_on_gpu,
        draft_shape,
    )
    from common.training import packing
    from common.training.inputs import open_data, run_settings
    from common.training.setup import Job
    from common.training.state import check_state
    from common.verifier.config import load_verifier

    out = Path(args.output_dir)
    model = load_verifier(args.model_path)
    data = open_data(args, model)
    inputs = dict(data.identities)
    shape = draft_shape(
        args.draft_shape,
        model,
        len(data.layers) - 1,
        len(data.maps[0]),
        norm_before_residual=args.norm_before_residual,
        norm_before_fc=args.norm_before_fc,
        fc_norm=args.fc_norm,
        norm_output=args.norm_output,
    )
    if args.float8:
        check_float8(shape)
    if device == "cuda":
        check_on_gpu(shape)
    aux = data.layers[:-1]
    if args.init_from:
        check_initial(Path(args.init_from), shape, export.serving_layer_ids(aux))
        inputs["init_from"] = artifacts.sha256_file(Path(args.init_from) / "model.safetensors")
    earlier_rows = None if args.overwrite else recorded(out, "settings", "rows_per_step")
    rows_a_step = args.rows_per_step or earlier_rows or ranks.world
    settings = run_settings(args, shape, data, device, dtype, rows_a_step)
    output = Output(out, Stage(STAGE, settings, inputs), args.overwrite)
    state = output.earlier_run()
    if state == "complete":
        say(ranks, f"train: {out} is complete (--overwrite makes it again)")
        return None
    # used only during or after training
    for package in ("speculators", "matplotlib", *["tensorboard"] * args.tensorboard):
        if importlib.util.find_spec(package) is None:
            raise errors.UserError(f"the package {package} is not installed; see requirements.txt")

    # ---------------------------------------------------------------- plan
    train, held = packing.split_samples(data.samples, args.heldout_fraction, args.loss_rule)
    if not train:
        raise errors.UserError(
            f"{data.prepared}: nothing to train on ({len(held)} of {len(data.samples)} samples held"
            " out, the others without a loss position); lower --heldout-fraction or prepare more"
        )
    if args.patience and not held:
        raise errors.UserError(
            "--patience: no sample is held out to measure on; raise --heldout-fraction or leave it"
        )
    steps = packing.plan_steps(train, args.max_batch_tokens, args.epochs, args.seed, rows_a_step)
    job = Job(output, model, shape, data, train, held, steps)
    say_plan(args, job, rows_a_step, device, dtype, ranks)
    check_room(args, job, device, dtype, ranks)
    if ranks.first and not args.dry_run:
        output.lock(state)
    if ranks.first and not args.overwrite:  # held: another run may be dropping this state
        check_state(out / "state", len(steps))
    if args.dry_run:
        say(ranks, "train: dry run, every check passed; nothing was loaded or written")
        return None
    return job


def say_plan(args, job, rows_a_step: int, device, dtype, ranks) -> None:
    """Log what is about to be done."""
    tokens = sum(job.train.values())
    say(
        ranks,
        f"train: {len(job.train)} samples ({tokens} tokens), {len(job.held)} held out;"
        f" {args.epochs} epochs, {len(job.steps)} steps of {rows_a_step} x at most"
        f" {args.max_batch_tokens} tokens; {args.ttt_steps} depths,"
        f" {job.shape.draft_vocab_size} draft tokens, {dtype} on {ranks.world} x {device}",
    )
    if rows_a_step % ranks.world:
        say(
            ranks,
            f"train: note: {ranks.world} processes share {rows_a_step} rows a step, some wait for"
            " the others; see --rows-per-step",
        )


def check_room(args, job, device, dtype, ranks) -> None:
    """UserError where the disk, the memory or the checkpoint's format will not do."""
    from common.draft import export
    from common.draft.config import (
        memory_needed,
        parameter_count,
    )
    from common.training.inputs import require_memory

    out = Path(args.output_dir)
    # the states kept, one more (it is whole before the oldest goes), and the checkpoint
    size = parameter_count(job.shape)
    needed = size * ((args.keep_states + 1) * (12 + dtype.itemsize) + 4)
    moments = 1 if args.optimizer == "muon" else 2
    memory = memory_needed(job.shape, dtype.itemsize, ranks.world, moments, args.train_lm_head)
    say(
        ranks,
        f"train: {size / 1e6:.1f} M parameters; up to {needed / 1e9:.2f} GB of disk,"
        f" at least {memory / 1e9:.2f} GB of memory and the activations",
    )
    there = () if args.overwrite else out.rglob("*.safetensors")
    needed -= sum(p.stat().st_size for p in there)
    artifacts.require_space(out, needed, args.overwrite, "lower --keep-states")
    if device == "cuda":
        require_memory(memory)
    if ranks.first:  # last, for it takes seconds
        export.speculators_draft(job.shape, job.model, job.data.layers[:-1], args.ttt_steps, dtype)


def say(ranks, text: str) -> None:
    """Log a line that all ranks would say."""
    if ranks.first:
        progress.log(text)


# ---------------------------------------------------------------- work


def train_draft(args, job, device, dtype, ranks) -> tuple[dict | None, int, float]:
    """Train, going on from the newest state, and export the best epoch's draft; returns its
    held-out measure, the steps taken and their seconds, of all runs."""
    import torch

    from common import vml
    from common.draft import export
    from common.training import loader, packing
    from common.training.setup import load
    from common.training.state import save_state
    from common.training.step_log import StepLog
    from common.training.trainer import rehearse, schedule

    out, steps, data = Path(args.output_dir), job.steps, job.data
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    vml.settle()
    began = time.monotonic()
    loaded = load(args, job, device, dtype, ranks)
    trainer, teacher, held, begun = loaded.trainer, loaded.teacher, loaded.held, loaded.begun
    if begun:
        say(ranks, f"train: continuing after step {begun} of {len(steps)}")
    say(ranks, f"train: loaded in {progress.duration(time.monotonic() - began)}")
    if device == "cuda":
        rehearse(trainer, teacher, loaded.reader.read(steps[0].rows[0]).to(device))
        torch.cuda.synchronize()
    ranks.agree(True)  # all are there; none waits for another's kernels in its first step
    if device == "cuda":
        say(ranks, f"train: kernels ready after {progress.duration(time.monotonic() - began)}")
    if ranks.first:  # nothing that was there is lost to what fails until here
        job.output.empty()
        job.output.begin()
    tokens = list(map(job.step_tokens, steps))
    spent, reader = loaded.spent, loaded.reader
    log = StepLog(
        out, steps, tokens, begun, held.measured, spent, trainer, reader, args.tensorboard
    )
    mine = [row for step in steps[begun:] for row in step.rows[ranks.rank :: ranks.world]]
    rows = loader.rows_ahead(loaded.reader, mine, device)
    stopper = progress.Stopper()

    def end_of_epoch(number: int) -> bool:
        return number == len(steps) or steps[number].epoch != steps[number - 1].epoch

    def judge_epoch(number: int) -> bool:
        """Measure the draft on the held-out samples; returns whether to end here."""
        epoch = steps[number - 1].epoch
        found = held.measure(number, epoch)
        if found is not None:
            log.note_epoch(number, found)
        return held.stale(epoch)

    # ---------------------------------------------------------------- train
    number, ended = begun, False
    if begun and end_of_epoch(begun):
        # a run that was stopped there has saved before it measured
        ended = judge_epoch(begun) if held.measured < begun else held.stale(steps[begun - 1].epoch)
    log.restart()
    while number < len(steps) and not ended:
        step, number = steps[number], number + 1
        samples = [data.samples[i] for row in step.rows for i in row]
        work = packing.count_work(samples, args.ttt_steps, args.loss_rule)
        weights = [args.ttt_decay**k / max(1, n) for k, n in enumerate(work.losses)]
        lr = args.lr * schedule(number - 1, len(steps), args.warmup)
        count = len(step.rows[ranks.rank :: ranks.world])
        sums = trainer.step(teacher, rows, count, weights, lr, stopper.code)
        stop = log.add(number, sums, work, lr)
        due = number % args.save_every == 0  # after the last step, the draft itself follows
        if not (stop or due or end_of_epoch(number)):
            continue
        stop = log.settle() or stop
        if end_of_epoch(number) and not stop:
            ended = judge_epoch(number)
        if stop or (due and number < len(steps) and not ended):
            counters = {"seconds": round(log.spent, 2), **held.counters()}
            best = held.weights if held.best and held.best["step"] < number else {}
            save_state(out / "state", number, trainer, counters, best, args.keep_states)
        if stop:
            raise errors.Interrupted(
                stopper.code or 143,
                f"state after step {number} saved; {errors.again()} to continue",
            )
        log.restart()
    log.close()

    # ---------------------------------------------------------------- export
    if ranks.first:
        final = held.weights or {n: p.detach() for n, p in trainer.draft.named_parameters()}
        d2t, t2d = map(torch.from_numpy, data.maps)
        depths, aux = args.ttt_steps, data.layers[:-1]
        export.export_draft(out, job.shape, final, job.model, aux, depths, d2t, t2d, dtype)
    return held.best, number, log.spent


if __name__ == "__main__":
    errors.run(main)
