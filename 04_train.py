"""Stage 4: train an EAGLE-3 draft on 03's hidden states, with training-time test.

Reads the prepared samples, the vocabulary map, the hidden states, and the verifier's
embedding, head and final norm, which 03 has left beside them: the verifier itself need not be
here. Writes into --output-dir a checkpoint in speculators' format that vLLM loads as it is
(config.json, model.safetensors), metrics.jsonl, curves.png and state/ for resuming. Run the
same command again after a kill: it continues where the last state was saved, to the same bits.
"""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import artifacts, cli, errors, progress
from common.manifest import Output, Stage, recorded
from common.training.settings import TrainSettings

if TYPE_CHECKING:
    from common.training.heldout import HeldOut
    from common.training.inputs import TrainJob
    from common.training.metrics import StepLog
    from common.training.ranks import Ranks
    from common.training.setup import Training

STAGE = "train"


def parse_args() -> TrainSettings:
    p = cli.Parser(STAGE, __doc__)
    # not needed: what 03 left beside the states is enough
    p.add_common("--model-path", "--prepared-data", "--vocab-map", "--hidden-states")
    p.add_common("--output-dir", "--max-samples", "--max-seq-len", "--layers")
    add_training_flags(p)
    add_draft_flags(p)
    add_run_flags(p)
    p.add_common("--seed", "--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--prepared-data", "--vocab-map", "--hidden-states", "--output-dir")
    args = p.parse()
    if args.norm_before_fc is None:
        args.norm_before_fc = not args.fc_norm
    if args.norm_before_fc and args.fc_norm:
        p.error("--norm-before-fc and --fc-norm exclude each other")
    return cli.as_settings(args, TrainSettings)


# fmt: off
def add_training_flags(p: cli.Parser) -> None:
    add = p.add_argument
    add("--epochs", type=cli.integer(1, 1000), default=10, help="passes over the data")
    add("--max-batch-tokens", type=cli.positive_int, default=8192, metavar="TOKENS",
        help="token budget of a packed row")
    add("--rows-per-step", type=cli.positive_int, metavar="ROWS",
        help="packed rows of one optimizer step, over all GPUs (default: one per GPU; a run that"
             " resumes keeps its own)")
    add("--ttt-steps", type=cli.integer(1, 16), default=3, help="depths trained")
    add("--ttt-decay", type=cli.between(0.01, 1), default=1.0, help="weight of depth k is decay**k")
    add("--loss-rule", choices=["answer", "next"], default="answer",
        help="answer: the complete path inside an answer; next: speculators' rule")
    add("--optimizer", choices=["adamw", "muon"], default="adamw",
        help="muon: for the matrices but the head, AdamW for the rest")
    add("--lr", type=cli.between(1e-9, 1), default=1e-3, help="peak learning rate")
    add("--warmup", type=cli.between(0, 1), default=0.05, help="fraction of all steps")
    add("--weight-decay", type=cli.between(0, 1), default=0.0, help="decoupled")
    add("--clip", type=cli.between(1e-6, 1e6), default=1.0, help="largest gradient norm")
    add("--heldout-fraction", type=cli.between(0, 0.9), default=0.05, help="of conversations")
    add("--quantized-copy", action="store_true",
        help="--model-path is a quantised copy of the verifier that made the states, or they were"
             " made with one; recorded")


def add_draft_flags(p: cli.Parser) -> None:
    p.add_switch("--train-lm-head", True, "the head too, which starts as the verifier's")
    p.add_switch("--norm-before-residual", True,
                 "the normed states, not the raw ones, are the layer's residual")
    p.add_switch("--norm-before-fc", None,
                 "one norm over the aux layers side by side (default: unless --fc-norm)")
    p.add_switch("--fc-norm", False, "one norm per aux layer")
    p.add_switch("--norm-output", False, "the next depth gets the normed states")
    p.add_argument("--draft-shape", type=cli.json_object, default={}, metavar="JSON",
        help="shape of the draft: intermediate_size, num_attention_heads, num_key_value_heads,"
             " head_dim, rope_theta, rms_norm_eps (default: the verifier's)")
    p.add_argument("--init-from", type=cli.path_text, metavar="DIR",
        help="draft checkpoint of the same shape to start from, instead of random weights")


def add_run_flags(p: cli.Parser) -> None:
    add = p.add_argument
    add("--save-every", type=cli.positive_int, default=200, metavar="STEPS",
        help="steps between states for resuming")
    add("--keep-states", type=cli.integer(1, 100), default=1,
        help="newest states kept for resuming")
    add("--patience", type=cli.positive_int, metavar="EPOCHS",
        help="end after so many epochs without a better held-out acceptance length")
    add("--tensorboard", action="store_true", help="also write TensorBoard's files")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto",
        help="auto: a GPU if there is one")
    add("--compute-dtype", choices=["auto", "bfloat16", "float32"], default="auto",
        help="of activations and of the weights' copies (auto: bfloat16 where it is fast)")
    add("--float8", action="store_true",
        help="linears but the head in float8 (a GPU of compute capability 8.9 or later)")
# fmt: on


def main() -> None:
    settings = parse_args()
    progress.quiet_libraries()
    # CUDA's matrix products repeat their bits only with a fixed workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    started = time.monotonic()
    from common.training.inputs import choose_compute
    from common.training.ranks import start_ranks

    settings = choose_compute(settings)
    ranks = start_ranks(settings.device)
    job = ranks.main_process_first(lambda: check(settings, ranks))
    if job is None:
        return
    result = train(job, ranks)
    if ranks.first:
        report(job, result, time.monotonic() - started)


# ---------------------------------------------------------------- check and plan


def check(settings: TrainSettings, ranks: "Ranks") -> "TrainJob | None":
    """Check everything that can be known before the training, plan it and lock the output folder;
    returns None when there is nothing to do."""
    from common.draft.export import serving_layer_ids
    from common.draft.initial import check_initial, initial_remarks
    from common.training import inputs
    from common.training.resources import check_resources
    from common.training.state import check_state

    data = inputs.open_data(settings)
    if settings.model_path and not Path(settings.model_path).exists():
        ranks.log(
            f"train: note: --model-path {settings.model_path} is not here, nor needed; the draft"
            f" names {data.verifier.path}"
        )
    shape = inputs.check_shape(settings, data)
    identities = dict(data.identities)
    if settings.init_from:
        aux_ids = serving_layer_ids(data.layers[:-1])
        initial = check_initial(Path(settings.init_from), shape, aux_ids)
        for remark in initial_remarks(initial):
            ranks.log(f"train: note: {settings.init_from} {remark}")
        identities["init_from"] = initial.digest()
    rows = settings.rows_per_step
    if not rows and not settings.overwrite:
        found = recorded(settings.out, "settings", "rows_per_step")
        rows = found if type(found) is int and found > 0 else None  # else it is damaged
    settings = replace(settings, rows_per_step=rows or ranks.world)
    stage = Stage(STAGE, inputs.content_settings(settings, shape, data), identities)
    output = Output(settings.out, stage, settings.overwrite)
    state = output.earlier_run()
    if state == "complete":
        ranks.log(f"train: {settings.out} is complete (--overwrite makes it again)")
        return None
    inputs.check_packages(settings)

    # ---------------------------------------------------------------- plan
    job = inputs.plan_job(settings, output, shape, data)
    log_plan(job, ranks)
    check_resources(job, ranks)
    if ranks.first and not settings.dry_run:
        output.lock(state)
    if ranks.first and not settings.overwrite:  # locked: another run may be dropping this state
        check_state(settings.out / "state", len(job.steps))
    if settings.dry_run:
        ranks.log("train: dry run, every check passed; nothing was loaded or written")
        return None
    return job


def log_plan(job: "TrainJob", ranks: "Ranks") -> None:
    settings, rows = job.settings, job.rows_per_step
    ranks.log(
        f"train: {len(job.train)} samples ({sum(job.train.values())} tokens), {len(job.held)} held"
        f" out; {settings.epochs} epochs, {len(job.steps)} steps of {rows} x at most"
        f" {settings.max_batch_tokens} tokens; {settings.ttt_steps} depths,"
        f" {job.shape.draft_vocab_size} draft tokens, {settings.dtype} on {ranks.world} x"
        f" {settings.device}"
    )
    if rows % ranks.world:
        ranks.log(
            f"train: note: {ranks.world} processes share {rows} rows per step, some wait for"
            " the others; see --rows-per-step"
        )


# ---------------------------------------------------------------- work


@dataclass(frozen=True)
class Result:
    """heldout: the best epoch's measure; steps taken and their seconds, of all runs."""

    heldout: dict[str, Any] | None
    steps: int
    seconds: float


def train(job: "TrainJob", ranks: "Ranks") -> Result:
    """Train, resuming from the newest state, and export the best epoch's draft."""
    import torch

    from common import vml
    from common.draft.export import export_draft
    from common.training.setup import compile_warm_up, set_up

    settings, data, on_gpu = job.settings, job.data, job.settings.device == "cuda"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    vml.choose_kernels()

    # ---------------------------------------------------------------- load
    began = time.monotonic()
    training = set_up(job, ranks)
    trainer, heldout = training.trainer, training.heldout
    if training.start_step:
        ranks.log(f"train: continuing after step {training.start_step} of {len(job.steps)}")
    ranks.log(f"train: loaded in {progress.duration(time.monotonic() - began)}")
    if on_gpu:
        compile_warm_up(trainer, training.reader.read(job.steps[0].rows[0]).to("cuda"))
    ranks.all_ok(True)  # all are there; none waits for another's kernels in its first step
    if on_gpu:
        ranks.log(f"train: kernels ready after {progress.duration(time.monotonic() - began)}")
    if ranks.first:  # nothing that was there is lost to what fails until here
        job.output.empty()
        job.output.begin()

    # ---------------------------------------------------------------- train, then export
    steps, seconds = run_steps(job, training)
    if ranks.first:
        final = heldout.weights or {n: p.detach() for n, p in trainer.draft.named_parameters()}
        d2t, t2d = torch.from_numpy(data.d2t), torch.from_numpy(data.t2d)
        aux, depths, dtype = data.layers[:-1], settings.ttt_steps, settings.dtype
        export_draft(settings.out, job.shape, final, data.verifier, aux, depths, d2t, t2d, dtype)
    return Result(heldout.best, steps, seconds)


def run_steps(job: "TrainJob", training: "Training") -> tuple[int, float]:
    """Take the steps that are left, measure after each epoch, save states; returns (steps taken,
    their seconds), of all runs. Interrupted after a signal, once the state is saved."""
    from common.training.loader import rows_ahead
    from common.training.metrics import StepLog
    from common.training.packing import count_work, ends_epoch
    from common.training.step import schedule

    settings, steps, number = job.settings, job.steps, training.start_step
    trainer, heldout, share = training.trainer, training.heldout, training.trainer.ranks.share
    log = StepLog(job, training)
    own_rows = [row for step in steps[number:] for row in share(step.rows)]
    rows = rows_ahead(training.reader, own_rows, settings.device)
    stopper = progress.Stopper()
    # a run that was stopped at the end of an epoch has saved before it measured
    ended = number > 0 and ends_epoch(steps, number) and end_epoch(number, job, heldout, log)
    log.restart_clock()
    while number < len(steps) and not ended:
        step, number = steps[number], number + 1
        samples = [job.data.samples[i] for row in step.rows for i in row]
        work = count_work(samples, settings.ttt_steps, settings.loss_rule)
        weights = [settings.ttt_decay**k / max(1, n) for k, n in enumerate(work.losses)]
        lr = settings.lr * schedule(number - 1, len(steps), settings.warmup)
        sums = trainer.step(rows, len(share(step.rows)), weights, lr, stopper.code)
        stop = log.add(number, sums, work, lr)
        due = number % settings.save_every == 0  # after the last step, the draft itself follows
        if not (stop or due or ends_epoch(steps, number)):
            continue
        stop = log.finish_step() or stop
        if ends_epoch(steps, number) and not stop:
            ended = end_epoch(number, job, heldout, log)
        if stop or (due and number < len(steps) and not ended):
            save(number, job, training, log.seconds)
        if stop:
            text = f"state after step {number} saved; {errors.again()} to continue"
            raise errors.Interrupted(stopper.code or 143, text)
        log.restart_clock()
    log.close()
    return number, log.seconds


def save(number: int, job: "TrainJob", training: "Training", seconds: float) -> None:
    """Save the state after step `number`, with the best epoch's weights where it is another one."""
    from common.training.state import save_state

    heldout, folder = training.heldout, job.settings.out / "state"
    counters = {"seconds": round(seconds, 2), **heldout.counters()}
    best = heldout.weights if heldout.best and heldout.best["step"] < number else {}
    save_state(folder, number, training.trainer, counters, best, job.settings.keep_states)


def end_epoch(number: int, job: "TrainJob", heldout: "HeldOut", log: "StepLog") -> bool:
    """Measure the draft on the held-out samples after the last step of an epoch, unless that is
    done; returns whether --patience ends the training."""
    epoch = job.steps[number - 1].epoch
    if heldout.measured < number:
        found = heldout.measure(number, epoch)
        if found is not None:
            log.note_epoch(number, epoch, found)
    return heldout.patience_over(epoch)


# ---------------------------------------------------------------- verify and report


def report(job: "TrainJob", result: Result, elapsed: float) -> None:
    """Draw the curves, check the checkpoint, write the manifest and the last line."""
    from common.serving.checkpoint import check_draft
    from common.training.metrics import draw_curves

    out, heldout = job.settings.out, result.heldout
    draw_curves(out)
    check_draft(out, job.data.verifier)
    tokens = sum(step.tokens for step in job.steps[: result.steps])
    counts = {
        "samples": len(job.train),
        "heldout": len(job.held),
        "steps": result.steps,
        "tokens": tokens,
    }
    digest = artifacts.sha256_file(out / "model.safetensors")
    seconds = round(result.seconds, 2)
    # beside `inputs`, whose hash older folders have: for who serves or evaluates the draft
    trained_on = {
        "verifier_weights": job.data.head.verifier_weights,
        "tokenizer": job.data.head.tokenizer,
    }
    more = {"heldout": heldout, "train_seconds": seconds, "trained_on": trained_on}
    if job.settings.quantized_copy:
        more["quantized_copy"] = True
    job.output.finish(counts, digest, elapsed, **more)
    text = f"held-out acceptance length {heldout['acceptance_length']}, " if heldout else ""
    progress.log(
        f"train: {text}{result.steps} steps, {tokens} tokens in"
        f" {progress.duration(result.seconds)} ({tokens / max(result.seconds, 1e-9):.0f} tok/s);"
        f" this run {progress.duration(elapsed)} -> {out}"
    )


if __name__ == "__main__":
    errors.run(main)
