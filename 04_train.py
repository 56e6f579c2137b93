"""Stage 4: train an EAGLE-3 draft on 03's hidden states, with training-time test.

Reads the prepared samples, the vocabulary map, the hidden states, and of the verifier only
its embedding, head and final norm. Writes into --output-dir a checkpoint in speculators'
format that vLLM loads as it is (config.json, model.safetensors), metrics.jsonl, curves.png
and state/ for resuming. Run the same command again after a kill: it continues where the
last state was saved, to the same bits.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import os
import time
from pathlib import Path

from common import artifacts, cli, progress

STAGE = "train"


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path", "--prepared-data", "--vocab-map", "--hidden-states")
    p.add_common("--output-dir", "--max-samples", "--max-seq-len", "--layers")
    p.add_argument("--epochs", type=cli.counted(1000), default=10)
    p.add_argument(
        "--max-batch-tokens",
        type=cli.positive_int,
        default=8192,
        metavar="TOKENS",
        help="token budget of one optimizer step's packed row",
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
    p.add_argument("--lr", type=cli.between(1e-9, 1), default=1e-3, help="peak learning rate")
    p.add_argument("--warmup", type=cli.between(0, 1), default=0.05, help="fraction of all steps")
    p.add_argument("--weight-decay", type=cli.between(0, 1), default=0.0)
    p.add_argument("--clip", type=cli.between(1e-6, 1e6), default=1.0, help="largest gradient norm")
    p.add_argument(
        "--heldout-fraction", type=cli.between(0, 0.9), default=0.05, help="of conversations"
    )
    p.add_argument("--train-lm-head", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--norm-before-residual", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--norm-before-fc", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--norm-output", action=argparse.BooleanOptionalAction, default=False)
    p.add_argument(
        "--draft",
        type=cli.json_object,
        default={},
        metavar="JSON",
        help="shape of the draft: intermediate_size, num_attention_heads, num_key_value_heads,"
        " head_dim, rope_theta, rms_norm_eps (default: the verifier's)",
    )
    p.add_argument("--save-every", type=cli.positive_int, default=200, metavar="STEPS")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    p.add_argument("--compute-dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    p.add_common("--seed", "--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--prepared-data", "--vocab-map", "--hidden-states", "--output-dir")
    return p.parse()


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    # CUDA's matrix products repeat their bits only with a fixed workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    started = time.monotonic()
    out = Path(args.output_dir)

    # ---------------------------------------------------------------- check
    from common import draft_shape, hidden_files, hidden_folder, samples, verifier, vocab

    model = verifier.load_verifier(args.model_path)
    prepared = samples.prepared_folder(args.prepared_data)
    vocab_map = Path(args.vocab_map)
    artifacts.check_apart(out, prepared, vocab_map, args.hidden_states)
    d2t, t2d = vocab.load_map(vocab_map, model.vocab_size)
    vocab_report = artifacts.read_report(vocab_map, "vocab")
    hidden = hidden_folder.open_hidden(Path(args.hidden_states))
    inputs = {
        "prepared": samples.prepared_identity(prepared),
        "vocab": vocab_report["content_sha256"],
        "extract": hidden.content_sha256,
        "verifier": verifier.fingerprint(model),
    }
    check_inputs(inputs, prepared, vocab_map, vocab_report, hidden, args)
    layers = check_layers(args.layers, model, hidden)
    count = max(hidden.lengths) + 1
    count = min(count, args.max_samples or count)
    held_samples = hidden.lengths.keys()  # 03 may have skipped some
    found = samples.read_samples(prepared, count, model.vocab_size, held_samples)
    data = {s.index: s for s in found}
    for sample in data.values():
        size = len(sample.input_ids)
        hidden_files.check_hidden_file(hidden.file(sample.index), size, *hidden.shape)
        if size > min(args.max_batch_tokens, args.max_seq_len):
            raise cli.UserError(
                f"sample {sample.id!r} has {size} tokens, over --max-batch-tokens"
                f" {args.max_batch_tokens} or --max-seq-len {args.max_seq_len}; raise it"
            )
    shape = draft_shape.draft_shape(
        args.draft,
        model,
        len(layers) - 1,
        len(d2t),
        norm_before_residual=args.norm_before_residual,
        norm_before_fc=args.norm_before_fc,
        norm_output=args.norm_output,
    )
    device, dtype = choose_compute(args.device, args.compute_dtype)
    settings = run_settings(args, shape, layers, device, dtype, count)
    state = artifacts.earlier_run(out, STAGE, settings, inputs, args.overwrite)
    if state == "complete":
        progress.log(f"train: {out} is complete (--overwrite makes it again)")
        return

    for package in ("speculators", "matplotlib"):  # needed when the training is over
        if importlib.util.find_spec(package) is None:
            raise cli.UserError(f"the package {package} is not installed; see requirements.txt")

    # ---------------------------------------------------------------- plan
    from common import curves, loading, packing, serving

    lengths = {i: len(s.input_ids) for i, s in data.items()}
    held = {
        i: n
        for i, n in lengths.items()
        if packing.is_heldout(data[i].conversation, args.heldout_fraction)
    }
    train = {i: n for i, n in lengths.items() if i not in held}
    # An answer of one token gives the draft nothing to predict.
    idle = {i for i in train if not packing.carries_loss(data[i], args.loss_rule)}
    train = {i: n for i, n in train.items() if i not in idle}
    if not train:
        raise cli.UserError(
            f"{prepared}: nothing to train on ({len(held)} samples held out, {len(idle)} without a"
            " loss position); lower --heldout-fraction or prepare more"
        )
    plan = [
        (epoch, row)
        for epoch in range(args.epochs)
        for row in packing.pack_rows(train, args.max_batch_tokens, args.seed * 100_003 + epoch)
    ]
    tokens = sum(lengths[i] for _, row in plan for i in row)
    progress.log(
        f"train: {len(train)} samples ({sum(train.values())} tokens), {len(held)} held out;"
        f" {args.epochs} epochs, {len(plan)} steps of at most {args.max_batch_tokens} tokens;"
        f" {args.ttt_steps} depths, {shape.draft_vocab_size} draft tokens, {dtype} on {device}"
    )
    # two states (the new one is whole before the old one goes) and the checkpoint
    size = draft_shape.parameter_count(shape)
    needed = size * (2 * 12 + 4)
    progress.log(
        f"train: {size / 1e6:.1f} M parameters; up to {needed / 1e9:.2f} GB of disk,"
        f" {size * 16 / 1e9:.2f} GB of memory for weights, gradients and optimizer, activations"
        " beside"
    )
    held_bytes = sum(p.stat().st_size for p in out.rglob("*.safetensors"))
    artifacts.require_space(out, needed - held_bytes)
    if args.dry_run:
        progress.log("train: dry run, every check passed; nothing was loaded or written")
        return
    artifacts.prepare_output(out, args.overwrite)
    report = functools.partial(artifacts.report, STAGE, settings, inputs)
    artifacts.write_json(out / artifacts.REPORT, report({}, None, 0))

    # ---------------------------------------------------------------- work
    longest = max(sum(lengths[i] for i in row) for _, row in plan)
    # whatever the loss, a server accepts along paths inside answers
    readers = [
        loading.RowReader(hidden, data, args.ttt_steps, rule, longest, device == "cuda")
        for rule in (args.loss_rule, "answer")
    ]
    run = (args, model, shape, layers, device, dtype, d2t, t2d)
    result, spent = train_draft(run, readers, plan, held, lengths, out)

    # ---------------------------------------------------------------- report
    curves.draw_curves(out)
    serving.check_draft(out, model)
    digest = artifacts.sha256_file(out / "model.safetensors")
    seconds = time.monotonic() - started
    counts = {"samples": len(train), "heldout": len(held), "steps": len(plan), "tokens": tokens}
    artifacts.write_json(
        out / artifacts.REPORT,
        report(counts, digest, seconds, heldout=result, train_seconds=round(spent, 2)),
    )
    heldout = f"held-out acceptance length {result['acceptance_length']}, " if result else ""
    progress.log(
        f"train: {heldout}{len(plan)} steps, {tokens} tokens in {progress.duration(spent)}"
        f" ({tokens / max(spent, 1e-9):.0f} tok/s); this run {progress.duration(seconds)} -> {out}"
    )


def train_draft(run, readers, plan, held, lengths, out: Path) -> tuple[dict | None, float]:
    """Train to the end of the plan, resuming from the newest state, and export the
    checkpoint; returns the last held-out measure and the seconds of all steps of all runs."""
    import torch

    from common import checkpoint, curves, export, loading, packing, training
    from common.draft_shape import flops_of_row

    args, model, shape, layers, device, dtype, d2t, t2d = run
    reader, judge = readers
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    teacher, masters = training.build(model, shape, d2t, device, dtype, args.seed)
    masters.lm_head.weight.requires_grad_(args.train_lm_head)
    trained = [p for p in masters.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    begun, heldout, spent = 0, None, 0.0
    newest = checkpoint.latest_state(out / "state")
    if newest is not None:
        saved = checkpoint.load_state(newest, masters, optimizer)
        begun, heldout, spent = saved["step"], saved["heldout"], saved["seconds"]
        progress.log(f"train: continuing after step {begun} of {len(plan)}")
    trainer = training.Trainer(masters, dtype, optimizer, args.clip)
    curves.keep_metrics(out / "metrics.jsonl", begun)
    row_tokens = [sum(lengths[i] for i in row) for _, row in plan]
    held_rows = packing.pack_rows(held, args.max_batch_tokens, None)
    bar = progress.Progress("train", sum(row_tokens), "tokens", initial=sum(row_tokens[:begun]))
    stopper = progress.Stopper()
    last = time.monotonic()

    with open(out / "metrics.jsonl", "a", encoding="utf-8") as metrics:

        def note(line: dict) -> None:
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()

        def settle(step: int, sums: training.StepSums, work: packing.RowWork, lr: float) -> None:
            """Note a finished step; its time is that since the one before."""
            nonlocal last, spent
            found = sums.metrics(step, work.losses)
            seconds, last = time.monotonic() - last, time.monotonic()
            spent += seconds
            epoch, tokens = plan[step - 1][0], row_tokens[step - 1]
            flops = flops_of_row(shape, reader.tokens, work.columns, work.losses)
            speed = {
                "tokens": tokens,
                "tokens_per_second": round(tokens / seconds, 1),
                "tflops": round(flops / seconds / 1e12, 3),
            }
            note({"step": step, "epoch": epoch, **found, "lr": lr, **speed})
            shown = " ".join(f"{a:.3f}" for a in found["accuracy_by_depth"])
            text = f"step {step}/{len(plan)} epoch {epoch + 1} loss {found['loss']:.3f} acc {shown}"
            bar.add(tokens, text)

        rows = loading.rows_ahead(reader, [row for _, row in plan[begun:]], device)
        waiting: tuple | None = None  # the step launched last: a GPU is still at it
        for step in range(begun + 1, len(plan) + 1):
            epoch, indices = plan[step - 1]
            samples = [reader.samples[i] for i in indices]
            work = packing.row_work(samples, args.ttt_steps, args.loss_rule)
            weights = [args.ttt_decay**k / max(1, n) for k, n in enumerate(work.losses)]
            lr = args.lr * training.schedule(step - 1, len(plan), args.warmup)
            sums = trainer.step(teacher, itertools.islice(rows, 1), weights, lr)
            if waiting is not None:
                settle(*waiting)
            waiting = (step, sums, work, lr)
            ends = step == len(plan) or plan[step][0] != epoch
            if not (ends or stopper.code or step % args.save_every == 0):
                continue
            settle(*waiting)
            waiting = None
            if held_rows and ends:
                heldout = training.measure(trainer.draft, teacher, judge, held_rows, device)
                note({"step": step, "epoch": epoch, **heldout})
                progress.log(
                    f"train: epoch {epoch + 1} held-out accuracy {heldout['heldout_accuracy']}"
                    f" acceptance length {heldout['acceptance_length']}"
                )
            if stopper.code or step % args.save_every == 0 or step == len(plan):
                extra = {"heldout": heldout, "seconds": round(spent, 2)}
                checkpoint.save_state(out / "state", step, masters, optimizer, extra)
            if stopper.code and step < len(plan):
                raise cli.Interrupted(
                    stopper.code, f"state after step {step} saved; run again to continue"
                )
            last = time.monotonic()
    bar.close()
    maps = torch.from_numpy(d2t), torch.from_numpy(t2d)
    export.export_draft(out, masters, model, layers[:-1], args.ttt_steps, *maps, dtype)
    return heldout, spent


def check_inputs(inputs, prepared, vocab_map, vocab_report, hidden, args) -> None:
    """The map and the states must come from this prepared data and this verifier."""
    artifacts.must_match(
        "prepared data",
        vocab_map,
        vocab_report["inputs"].get("prepared"),
        prepared,
        inputs["prepared"],
        "run 02 on this prepared data, or pass the --vocab-map made from it",
    )
    artifacts.must_match(
        "prepared data",
        hidden.path,
        hidden.inputs.get("prepared"),
        prepared,
        inputs["prepared"],
        "run 03 on this prepared data, or pass the --hidden-states made from it",
    )
    artifacts.must_match(
        "verifier",
        hidden.path,
        hidden.inputs.get("verifier"),
        Path(args.model_path),
        inputs["verifier"],
        "pass the --model-path that 03 was run with, or run 03 on this one",
    )


def check_layers(asked, model, hidden) -> list[int]:
    """The folder's layers, which must be those expected and end with the final one."""
    held = hidden.settings["layers"]
    expected = sorted(asked) if asked else model.default_layers()
    if held != expected:
        raise cli.UserError(
            f"{hidden.path}: holds layers {held}, expected {expected}; pass the layers that 03"
            " captured as --layers here, or run 03 with other ones"
        )
    if held[-1] != model.num_layers - 1 or len(held) != 4:
        raise cli.UserError(
            f"{hidden.path}: holds layers {held}; training needs three layers (vLLM feeds a draft"
            f" of this format three) and the final one, {model.num_layers - 1} (the targets)"
        )
    return held


def choose_compute(device: str, dtype: str):
    """Resolve `auto`: CUDA where there is one; bfloat16 where the processor computes in it."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise cli.UserError("--device cuda: torch sees no CUDA GPU")
    if dtype == "auto":
        fast = device == "cuda" or torch.cpu._is_avx512_bf16_supported()
        dtype = "bfloat16" if fast else "float32"
    return device, getattr(torch, dtype)


def run_settings(args, shape, layers, device, dtype, count) -> dict:
    """What decides the weights: a resume or a reuse must have the same."""
    from dataclasses import asdict

    names = [
        "epochs",
        "max_batch_tokens",
        "ttt_steps",
        "ttt_decay",
        "loss_rule",
        "lr",
        "warmup",
        "weight_decay",
        "clip",
        "heldout_fraction",
        "train_lm_head",
        "seed",
    ]
    return {
        **{n: getattr(args, n) for n in names},
        "draft": asdict(shape),
        "layers": layers,
        "samples": count,
        "device": device,
        "compute_dtype": str(dtype).removeprefix("torch."),
    }


if __name__ == "__main__":
    cli.run(main)
