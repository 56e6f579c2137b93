"""Serve a draft in real vLLM and measure it, then the verifier alone on the same prompts.

Greedy decoding of held-out prompts. Reports mean acceptance length (tokens a forward pass
of the verifier, 1 + accepted) with its 95% interval over prompts, acceptance a position,
tokens/s of both, and how many answers are identical. With --hidden-states it also checks
that the tensor entering the draft's `fc` inside vLLM is what 03 stored for the same
tokens, and that the draft makes of it, depth by depth, what it made in training: acceptance
would hardly show it. Each of the two loads has a process of its own.
"""

import ctypes
import dataclasses
import functools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import artifacts, cli, errors, progress
from common.manifest import Output, Stage

STAGE = "evaluate"
WITH_DRAFT = "with_draft.json"  # what was measured with the draft, until the rest is


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path")
    p.add_argument("--draft", type=cli.path_text, metavar="DIR", help="checkpoint written by 04")
    p.add_argument(
        "--prompts", type=cli.path_text, nargs="+", metavar="FILE", help="held-out chat rows"
    )
    p.add_common("--output-dir", "--max-samples", "--max-seq-len", "--hidden-states")
    p.add_common("--template-args")
    p.add_argument(
        "--num-speculative-tokens",
        type=cli.positive_int,
        default=3,
        metavar="N",
        help="tokens drafted a pass of the verifier",
    )
    p.add_argument(
        "--max-new-tokens",
        type=cli.positive_int,
        default=256,
        metavar="TOKENS",
        help="of an answer",
    )
    p.add_argument("--batch-size", type=cli.positive_int, default=32, help="prompts at a time")
    # float32 is lossless: the answers with and without the draft are the same
    p.add_common("--tp-size", "--gpu-memory-utilization", "--dtype", "--engine-args")
    p.add_common("--load-timeout")
    p.add_argument(
        "--only-draft",
        action="store_true",
        help="measure with the draft and stop; without this flag the rest is measured",
    )
    p.add_common("--seed", "--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--draft", "--prompts", "--output-dir")
    return p.parse()


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    out = Path(args.output_dir)

    # ---------------------------------------------------------------- check
    from common.data import chat_template, prompts
    from common.data.sources import parse_sources, read_rows, sources_digest
    from common.serving import parity
    from common.serving.generation import check_draft, generate, warm_up
    from common.states.folder import open_hidden
    from common.verifier import engine
    from common.verifier.config import load_verifier
    from common.verifier.fingerprint import tokenizer_fingerprint
    from common.verifier.weights import check_weights, identities

    model = load_verifier(args.model_path)
    draft = Path(args.draft)
    check_draft(draft, model)
    sources = parse_sources(args.prompts, args.max_samples, "--prompts")
    local = [f for s in sources for f in s.files]
    states = [args.hidden_states] if args.hidden_states else []
    artifacts.check_apart(out, args.model_path, draft, *local, *states)
    settings = {
        "num_speculative_tokens": args.num_speculative_tokens,
        "max_new_tokens": args.max_new_tokens,
        "template_args": args.template_args,
        "max_samples": args.max_samples,
        "max_seq_len": args.max_seq_len,
        "batch_size": args.batch_size,
        "dtype": args.dtype,
        "tp_size": args.tp_size,
        "engine_args": args.engine_args,
        "end_ids": sorted(model.end_ids),
    }
    inputs = {
        "prompts": sources_digest(sources),
        "draft": artifacts.sha256_file(draft / "model.safetensors"),
        "draft_config": artifacts.sha256_file(draft / "config.json"),
        "tokenizer": tokenizer_fingerprint(args.model_path),
    }
    weights = check_weights(model)
    inputs |= identities(model, weights, out, args.dry_run)
    stored = None
    if args.hidden_states:
        folder = Path(args.hidden_states)
        inputs["extract"] = open_hidden(folder).content_sha256
        stored = parity.stored_sample(folder, draft, model, args.max_seq_len)
    stage = Stage(STAGE, settings, inputs)
    state = Output(out, stage, args.overwrite).earlier_run()
    if state == "complete":
        progress.log((out / "table.txt").read_text(encoding="utf-8").rstrip())
        progress.log(f"evaluate: {out} is complete (--overwrite makes it again)")
        return
    found = list(read_rows(sources, args.max_samples))
    parts = args.model_path, args.trust_remote_code, model.end_ids, args.template_args
    template = functools.cache(functools.partial(chat_template.load_template, *parts))
    longest = model.longest_sample(args.max_seq_len) - args.max_new_tokens
    asked, _ = prompts.load_prompts(found, template, model.vocab_size, longest)
    if args.dry_run:
        progress.log(f"evaluate: dry run, {draft} fits the verifier; {len(asked)} prompts")
        return

    # ---------------------------------------------------------------- run
    half = out / WITH_DRAFT
    measured = state == "in_progress" and half.exists()
    if measured:
        progress.log("evaluate: the draft is measured already; the verifier alone is left")
    elif not args.only_draft:
        # In a process of its own: it leaves the next load all of a GPU's memory, and some
        # verifiers hang in the second engine of a process (Kimi-K2.5 in vLLM 0.26).
        run_only_draft()
        state = Output(out, stage, False).earlier_run()
    output = Output(out, stage, args.only_draft and args.overwrite)
    output.lock(state)
    if args.only_draft:
        if not measured:
            drafted, counters, checked = run_with_draft(args, model, asked, stored)
            output.empty()
            output.begin()
            rest = {"counters": counters, "checked": checked}
            artifacts.write_json(half, dataclasses.asdict(drafted) | rest)
        seconds = time.monotonic() - started
        progress.log(f"evaluate: measured with the draft, {progress.duration(seconds)} -> {half}")
        return
    drafted, counters, checked = read_half(half)
    with engine.generating(args, model, STAGE) as llm:
        warm_up(llm, asked[: args.batch_size])
        limits = model.end_ids, args.max_new_tokens, args.batch_size
        plain = generate(llm, asked, *limits, "verifier alone")

    # ---------------------------------------------------------------- report
    result = summary(plain, drafted, counters, args.num_speculative_tokens, args.seed)
    result |= checked
    table = format_table(result, len(asked))
    (out / "table.txt").write_text(table + "\n", encoding="utf-8")
    artifacts.write_json(out / "result.json", result)
    digest = artifacts.sha256_file(out / "result.json")
    seconds = time.monotonic() - started
    output.finish({"prompts": len(asked)}, digest, seconds)
    half.unlink()
    progress.log(table)
    low, high = result["interval_95"]
    progress.log(
        f"evaluate: acceptance length {result['acceptance_length']:.3f}"
        f" (95% {low:.3f} to {high:.3f}) over {len(asked)} prompts;"
        f" {progress.duration(seconds)} -> {out}"
    )


def run_only_draft() -> None:
    """Run this command with --only-draft; ends as it ends, unless well."""

    def end_together() -> None:
        """Linux's PR_SET_PDEATHSIG: a SIGKILL of this process leaves no verifier on the GPUs."""
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    command = [sys.executable, __file__, *sys.argv[1:], "--only-draft"]
    child = subprocess.Popen(command, preexec_fn=end_together)
    try:
        status = child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if status:
        errors.finish(status if status > 0 else 128 - status)


def run_with_draft(args, model, asked, stored) -> tuple:
    """(Run with the draft, its counters, the check of its states, where there are some)."""
    from common.serving import parity
    from common.serving.generation import generate, spec_counters, warm_up
    from common.verifier import engine

    draft = Path(args.draft)
    speculative = {
        "model": str(draft),
        "method": "eagle3",
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    with engine.generating(args, model, STAGE, speculative_config=speculative) as llm:
        checked = {}
        if stored is not None:
            ids, aux_TAH = stored
            checked = parity.check_served(llm, ids, aux_TAH, draft, model)
        warm_up(llm, asked[: args.batch_size])
        before = spec_counters(llm)
        limits = model.end_ids, args.max_new_tokens, args.batch_size
        drafted = generate(llm, asked, *limits, "with draft")
        counters = {k: v - before.get(k, 0) for k, v in spec_counters(llm).items()}
    if not counters["drafts"]:
        raise errors.UserError("vLLM made no drafts: is the draft served by this vLLM at all?")
    return drafted, counters, checked


def read_half(path: Path) -> tuple:
    """(Run with the draft, its counters, the check of its states) of an earlier run."""
    from common.serving.generation import Answer, Run

    found = artifacts.read_json(path)
    answers = {k: Answer(**v) for k, v in found["answers"].items()}
    run = Run(answers, found["tokens"], found["seconds"])
    return run, found["counters"], found["checked"]


def summary(plain, drafted, counters, depths: int, seed: int) -> dict:
    """Rates of both runs.

    The acceptance length is vLLM's count. Its interval is a bootstrap over prompts (passes of
    one prompt are alike) of the tokens that each pass emitted, moved to that count: the two
    differ by the accepted tokens that fall behind an answer's end.
    """
    drafts, accepted = counters["drafts"], counters["accepted"]
    per_prompt = [(o.passes, o.passes_tokens) for o in drafted.answers.values() if o.passes]
    rng = random.Random(seed)
    means = []
    for _ in range(2000):
        picked = rng.choices(per_prompt, k=len(per_prompt))
        means.append(sum(t for _, t in picked) / sum(p for p, _ in picked))
    means.sort()
    emitted = sum(t for _, t in per_prompt) / sum(p for p, _ in per_prompt)
    length = 1 + accepted / drafts
    same = sum(plain.answers[k].ids == drafted.answers[k].ids for k in plain.answers)
    return {
        "acceptance_length": length,
        "interval_95": [length + means[49] - emitted, length + means[1949] - emitted],
        "drafts": int(drafts),
        "acceptance_by_position": [counters[f"position_{i}"] / drafts for i in range(depths)],
        "verifier_tokens_per_second": plain.tokens / plain.seconds,
        "draft_tokens_per_second": drafted.tokens / drafted.seconds,
        "speed_ratio": (drafted.tokens / drafted.seconds) / (plain.tokens / plain.seconds),
        "identical_share": same / len(plain.answers),
        "tokens": drafted.tokens,
        # drafts and the tokens emitted with them, a prompt: for paired comparisons
        "prompts": {k: [o.passes, o.passes_tokens] for k, o in drafted.answers.items()},
    }


def format_table(result: dict, count: int) -> str:
    positions = " ".join(f"{100 * a:.1f}%" for a in result["acceptance_by_position"])
    low, high = result["interval_95"]
    lines = [
        ("prompts, drafts", f"{count}, {result['drafts']}"),
        ("acceptance length", f"{result['acceptance_length']:.3f} (95% {low:.3f} to {high:.3f})"),
        ("acceptance a position", positions),
        ("verifier alone", f"{result['verifier_tokens_per_second']:.0f} tok/s"),
        (
            "with the draft",
            f"{result['draft_tokens_per_second']:.0f} tok/s ({result['speed_ratio']:.2f}x)",
        ),
        ("identical answers", f"{100 * result['identical_share']:.0f}%"),
    ]
    if "fed_states_relative_error" in result:
        lines.append(("fed states vs 03's", f"relative {result['fed_states_relative_error']:.1e}"))
    if "made_states_not_compared" in result:
        why = result["made_states_not_compared"]
        lines.append(("its states vs training's", f"not compared: {why}"))
    if "made_states_relative_error" in result:
        made = ", ".join(f"{x:.1e}" for x in result["made_states_relative_error"])
        lines.append(("its states vs training's", f"relative {made} a depth"))
    return "\n".join(f"  {name:<22} {value}" for name, value in lines)


if __name__ == "__main__":
    errors.run(main)
