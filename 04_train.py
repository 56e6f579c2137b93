"""Stage 4: train an EAGLE-3 draft on 03's hidden states, with training-time test.

Reads the prepared samples, the vocabulary map, the hidden states, and of the verifier only
its embedding, head and final norm. Writes into --output-dir a checkpoint in speculators'
format that vLLM loads as it is (config.json, model.safetensors), metrics.jsonl, curves.png
and state/ for resuming. Run the same command again after a kill: it continues where the
last state was saved, to the same bits.
"""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import artifacts, cli, progress

STAGE = "train"
SHAPE_KEYS = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
)


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path", "--prepared-data", "--vocab-map", "--hidden-states")
    p.add_common("--output-dir", "--max-samples", "--max-seq-len", "--layers")
    p.add_argument("--epochs", type=cli.positive_int, default=10)
    p.add_argument(
        "--max-batch-tokens",
        type=cli.positive_int,
        default=8192,
        metavar="TOKENS",
        help="token budget of one optimizer step's packed row",
    )
    p.add_argument("--ttt-steps", type=cli.positive_int, default=3, help="depths trained")
    p.add_argument("--ttt-decay", type=float, default=1.0, help="weight of depth k is decay**k")
    p.add_argument(
        "--loss-rule",
        choices=["answer", "next"],
        default="answer",
        help="answer: whole path inside an answer; next: speculators' rule",
    )
    p.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    p.add_argument("--warmup", type=float, default=0.05, help="fraction of all steps")
    p.add_argument("--weight-decay", type=float, default=0.0)
    p.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    p.add_argument("--heldout-fraction", type=float, default=0.05, help="of conversations")
    p.add_argument("--train-lm-head", action=cli.argparse.BooleanOptionalAction, default=True)
    p.add_argument(
        "--norm-before-residual", action=cli.argparse.BooleanOptionalAction, default=True
    )
    p.add_argument("--norm-before-fc", action=cli.argparse.BooleanOptionalAction, default=True)
    p.add_argument("--norm-output", action=cli.argparse.BooleanOptionalAction, default=False)
    p.add_argument(
        "--draft",
        type=cli.json_object,
        default={},
        metavar="JSON",
        help=f"shape of the draft: {', '.join(SHAPE_KEYS)}",
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
    started = time.monotonic()
    out = Path(args.output_dir)

    # ---------------------------------------------------------------- check
    from common import hidden_files, samples, verifier, vocab

    model = verifier.load_verifier(args.model_path)
    prepared = samples.prepared_folder(args.prepared_data)
    vocab_map, hidden = Path(args.vocab_map), Path(args.hidden_states)
    d2t, t2d = vocab.load_map(vocab_map, model.vocab_size)
    vocab_report = artifacts.read_report(vocab_map, "vocab")
    hidden_report = artifacts.read_report(hidden, "extract")
    inputs = {
        "prepared": samples.prepared_identity(prepared),
        "vocab": vocab_report["content_sha256"],
        "extract": hidden_report["content_sha256"],
        "verifier": verifier.fingerprint(model),
    }
    check_inputs(inputs, prepared, vocab_map, vocab_report, hidden, hidden_report, args)
    layers = check_layers(args.layers, model, hidden, hidden_report)
    count = hidden_report["counts"]["num_samples"]
    count = min(count, args.max_samples or count)
    data = {s.index: s for s in samples.read_samples(prepared, count, model.vocab_size)}
    storage = hidden_report["settings"]["dtype"]
    for sample in data.values():
        path = hidden_files.hidden_file(hidden, sample.index)
        size = len(sample.input_ids)
        hidden_files.check_hidden_file(path, size, len(layers), model.hidden_size, storage)
        if size > args.max_batch_tokens:
            raise cli.UserError(
                f"sample {sample.id!r} has {size} tokens, over --max-batch-tokens"
                f" {args.max_batch_tokens}; raise it"
            )
    shape = draft_shape(args, model, len(layers) - 1, len(d2t))
    device, dtype = choose_compute(args.device, args.compute_dtype)
    settings = run_settings(args, shape, layers, device, dtype, count)
    state = artifacts.earlier_run(out, STAGE, settings, inputs, args.overwrite)
    if state == "complete":
        progress.log(f"train: {out} is complete (--overwrite makes it again)")
        return

    # ---------------------------------------------------------------- plan
    from common import packing

    lengths = {i: len(s.input_ids) for i, s in data.items()}
    held = {
        i: n
        for i, n in lengths.items()
        if packing.is_heldout(data[i].conversation, args.heldout_fraction)
    }
    train = {i: n for i, n in lengths.items() if i not in held}
    if not train:
        raise cli.UserError(
            f"{prepared}: all {len(held)} samples fall into the held-out split; lower"
            " --heldout-fraction or prepare more"
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
    if args.dry_run:
        progress.log("train: dry run, every check passed; nothing was loaded or written")
        return
    artifacts.prepare_output(out, args.overwrite)
    report = dict(stage=STAGE, settings=settings, inputs=inputs)
    artifacts.write_json(
        out / artifacts.REPORT,
        artifacts.report(**report, counts={}, data_sha256=None, elapsed_seconds=0),
    )

    # ---------------------------------------------------------------- work
    fill = packing.fill_to(args.max_batch_tokens) if device == "cpu" else 0
    reader = packing.RowReader(hidden, data, args.ttt_steps, args.loss_rule, fill)
    run = (args, model, shape, layers, device, dtype, d2t, t2d)
    result = train_draft(run, reader, plan, held, lengths, out)

    # ---------------------------------------------------------------- report
    draw_curves(out)
    digest = artifacts.sha256_file(out / "model.safetensors")
    seconds = time.monotonic() - started
    counts = {"samples": len(train), "heldout": len(held), "steps": len(plan), "tokens": tokens}
    artifacts.write_json(
        out / artifacts.REPORT,
        artifacts.report(
            **report,
            counts=counts,
            data_sha256=digest,
            elapsed_seconds=seconds,
            heldout=result,
        ),
    )
    heldout = f"held-out acceptance length {result['acceptance_length']}, " if result else ""
    progress.log(
        f"train: {heldout}{len(plan)} steps, {tokens} tokens; this run"
        f" {progress.duration(seconds)} -> {out}"
    )


def train_draft(run, reader, plan, held, lengths, out: Path) -> dict | None:
    """Train to the end of the plan, resuming from the newest state; returns the last
    held-out measure. Exports the checkpoint at the end."""
    import torch

    from common import checkpoint, export, packing, ttt_step

    args, model, shape, layers, device, dtype, d2t, t2d = run
    torch.use_deterministic_algorithms(True)
    teacher, draft = build(args, model, shape, d2t, device, dtype)
    trained = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    step, heldout = 0, None
    newest = checkpoint.latest_state(out / "state")
    if newest is not None:
        saved = checkpoint.load_state(newest, draft, optimizer)
        step, heldout = saved["step"], saved["heldout"]
        progress.log(f"train: continuing after step {step} of {len(plan)}")
    keep_metrics(out / "metrics.jsonl", step)
    weights = [args.ttt_decay**k for k in range(args.ttt_steps)]
    total = sum(lengths[i] for _, row in plan for i in row)
    seen = sum(lengths[i] for _, row in plan[:step] for i in row)
    bar = progress.Progress("train", total, "tokens", initial=seen)
    stopper = progress.Stopper()
    held_rows = packing.pack_rows(held, args.max_batch_tokens, None)
    peak = float(model_flops(shape, args.ttt_steps))

    def save() -> None:
        checkpoint.save_state(out / "state", step, draft, optimizer, {"heldout": heldout})

    with (
        ThreadPoolExecutor(1) as loader,
        open(out / "metrics.jsonl", "a", encoding="utf-8") as metrics,
    ):
        ahead = loader.submit(reader.read, plan[step][1]) if step < len(plan) else None
        while step < len(plan):
            began = time.monotonic()
            epoch, _ = plan[step]
            row = to_device(ahead.result(), device)
            if step + 1 < len(plan):
                ahead = loader.submit(reader.read, plan[step + 1][1])
            lr = args.lr * schedule(step, len(plan), args.warmup)
            for group in optimizer.param_groups:
                group["lr"] = lr
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                result = ttt_step.step_loss(draft, teacher, row, weights, dtype)
            optimizer.zero_grad()
            result.loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained, args.clip)
            optimizer.step()
            step += 1
            loss = float(result.loss)
            if not math.isfinite(loss):
                raise cli.UserError(
                    f"step {step}: the loss is {loss}; the last good state is in {out / 'state'}."
                    " Lower --lr and start again with --overwrite"
                )
            losses = [float(s) / n for s, n in zip(result.loss_sums, result.counts, strict=True)]
            accuracy = [int(c) / n for c, n in zip(result.correct, result.counts, strict=True)]
            n = sum(lengths[i] for i in plan[step - 1][1])
            seconds = time.monotonic() - began
            line = {
                "step": step,
                "epoch": epoch,
                "loss": round(loss, 5),
                "loss_by_depth": [round(x, 5) for x in losses],
                "accuracy_by_depth": [round(x, 4) for x in accuracy],
                "lr": lr,
                "grad_norm": round(float(norm), 4),
                "tokens": n,
                "tokens_per_second": round(n / seconds, 1),
                "tflops": round(peak * n / seconds / 1e12, 3),
            }
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
            shown = " ".join(f"{a:.3f}" for a in accuracy)
            bar.add(n, f"step {step}/{len(plan)} epoch {epoch + 1} loss {loss:.3f} acc {shown}")
            if step == len(plan) or plan[step][0] != epoch:
                heldout = measure(draft, teacher, reader, held_rows, device, dtype)
                if heldout:
                    metrics.write(json.dumps({"step": step, "epoch": epoch, **heldout}) + "\n")
                    metrics.flush()
                    progress.log(
                        f"train: epoch {epoch + 1} held-out accuracy {heldout['heldout_accuracy']}"
                        f" acceptance length {heldout['acceptance_length']}"
                    )
            if stopper.code or step % args.save_every == 0 or step == len(plan):
                save()
            if stopper.code and step < len(plan):
                raise cli.Interrupted(
                    stopper.code, f"state after step {step} saved; run again to continue"
                )
    bar.close()
    export.export_draft(
        out,
        draft,
        model,
        layers[:-1],
        args.ttt_steps,
        torch.from_numpy(d2t),
        torch.from_numpy(t2d),
        torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
    )
    return heldout


def build(args, model, shape, d2t, device, dtype):
    """Return (teacher, draft) on the device: the verifier's three tensors and a fresh draft."""
    import torch

    from common import eagle3, ttt_step, verifier

    tensors = verifier.read_tensors(model, ("embed_tokens", "lm_head", "norm"))
    target_D = torch.from_numpy(d2t) + torch.arange(len(d2t))
    head_VH = tensors["lm_head"]
    teacher = ttt_step.Teacher(
        embed_VH=tensors["embed_tokens"].to(device, dtype),
        head_VH=head_VH.to(device, dtype),
        head_DH=head_VH[target_D].to(device, dtype),
        norm_H=tensors["norm"].to(device, torch.float32),
        eps=model.rms_norm_eps,
        target_D=target_D.to(device),
    )
    torch.manual_seed(args.seed)
    draft = eagle3.Eagle3Draft(shape)
    eagle3.initialize(draft, head_VH[target_D])
    draft.to(device)
    draft.lm_head.weight.requires_grad_(args.train_lm_head)
    return teacher, draft


def measure(draft, teacher, reader, held_rows, device, dtype) -> dict | None:
    """Held-out accuracy and simulated acceptance length, None without held-out samples."""
    import torch

    from common import ttt_step

    if not held_rows:
        return None
    counts = torch.zeros(reader.depths, 3, dtype=torch.int64)
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        for indices in held_rows:
            row = to_device(reader.read(indices), device)
            counts += ttt_step.heldout_counts(draft, teacher, row, dtype)
    found = ttt_step.acceptance(counts)
    return {"heldout_accuracy": found.pop("accuracy"), **found}


def to_device(row, device: str):
    from dataclasses import replace

    if device == "cpu":
        return row
    moved = {
        name: getattr(row, name).pin_memory().to(device, non_blocking=True)
        for name in ("aux_TAH", "last_TH", "ids_T", "positions_T")
    }
    return replace(row, **moved)


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor of the peak learning rate: linear warm-up, then a cosine to 0."""
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def model_flops(shape, depths: int) -> int:
    """Floating-point operations a token, as if every token carried loss at every depth."""
    s = shape
    q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    fc = s.num_aux_layers * s.hidden_size**2
    layer = 2 * s.hidden_size * (q + 2 * kv) + q * s.hidden_size
    layer += 3 * s.hidden_size * s.intermediate_size
    head = s.hidden_size * s.draft_vocab_size
    return 6 * (fc + depths * (layer + head)) + 2 * head


def keep_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps that are about to be done again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:  # the line that a kill cut
            break
    with artifacts.atomic_file(path, "w") as f:
        f.writelines(kept)


def draw_curves(out: Path) -> None:
    """curves.png: loss and accuracy a depth over the steps, held-out accuracy at epoch ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [x for x in lines if "loss" in x]
    held = [x for x in lines if "heldout_accuracy" in x]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for k in range(len(steps[0]["loss_by_depth"])):
        here = [x for x in steps if len(x["loss_by_depth"]) > k]
        x = [p["step"] for p in here]
        left.plot(x, [p["loss_by_depth"][k] for p in here], color=f"C{k}", label=f"depth {k}")
        right.plot(x, [p["accuracy_by_depth"][k] for p in here], color=f"C{k}", alpha=0.4)
        if held:
            right.plot(
                [p["step"] for p in held],
                [p["heldout_accuracy"][k] for p in held],
                color=f"C{k}",
                marker="o",
                label=f"depth {k}, held out",
            )
    left.set(xlabel="step", ylabel="KL(verifier || draft)", title="loss")
    right.set(xlabel="step", ylabel="accuracy", title="accuracy: training (pale), held out")
    left.legend()
    if held:
        right.legend()
    figure.tight_layout()
    with artifacts.atomic_file(out / "curves.png") as f:
        figure.savefig(f, format="png", dpi=110)
    pyplot.close(figure)


def check_inputs(inputs, prepared, vocab_map, vocab_report, hidden, hidden_report, args) -> None:
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
        hidden,
        hidden_report["inputs"].get("prepared"),
        prepared,
        inputs["prepared"],
        "run 03 on this prepared data, or pass the --hidden-states made from it",
    )
    artifacts.must_match(
        "verifier",
        hidden,
        hidden_report["inputs"].get("verifier"),
        Path(args.model_path),
        inputs["verifier"],
        "pass the --model-path that 03 was run with, or run 03 on this one",
    )


def check_layers(asked, model, hidden: Path, hidden_report) -> list[int]:
    """The folder's layers, which must be those expected and end with the final one."""
    held = hidden_report["settings"]["layers"]
    expected = sorted(asked) if asked else model.default_layers()
    if held != expected:
        raise cli.UserError(
            f"{hidden}: holds layers {held}, expected {expected}; run 03 with"
            f" --layers {' '.join(map(str, expected))}, or pass --layers"
            f" {' '.join(map(str, held))} here"
        )
    if held[-1] != model.num_layers - 1 or len(held) < 2:
        raise cli.UserError(
            f"{hidden}: holds layers {held}; training needs the final layer"
            f" {model.num_layers - 1} (its targets) and at least one before it"
        )
    return held


def draft_shape(args, model, num_aux: int, draft_vocab_size: int):
    """The draft's shape: --draft where given, otherwise the verifier's own."""
    from common.eagle3 import DraftShape

    given = dict(args.draft)
    unknown = [k for k in given if k not in SHAPE_KEYS]
    if unknown:
        raise cli.UserError(
            f"--draft: unknown key {unknown[0]}{cli.nearest(unknown[0], list(SHAPE_KEYS))}"
        )
    text = model.text
    heads = int(given.get("num_attention_heads") or text["num_attention_heads"])
    rope = text.get("rope_parameters") or {}
    shape = DraftShape(
        hidden_size=model.hidden_size,
        intermediate_size=int(given.get("intermediate_size") or text["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(given.get("num_key_value_heads") or heads),
        head_dim=int(given.get("head_dim") or model.hidden_size // heads),
        rope_theta=float(
            given.get("rope_theta") or text.get("rope_theta") or rope.get("rope_theta") or 10000.0
        ),
        rms_norm_eps=float(given.get("rms_norm_eps") or model.rms_norm_eps),
        num_aux_layers=num_aux,
        draft_vocab_size=draft_vocab_size,
        vocab_size=model.vocab_size,
        norm_before_residual=args.norm_before_residual,
        norm_before_fc=args.norm_before_fc,
        norm_output=args.norm_output,
    )
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise cli.UserError(
            f"--draft: {shape.num_attention_heads} heads are no multiple of"
            f" {shape.num_key_value_heads} key/value heads"
        )
    return shape


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

    names = (
        "epochs max_batch_tokens ttt_steps ttt_decay loss_rule lr warmup weight_decay clip"
        " heldout_fraction train_lm_head seed"
    ).split()
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
