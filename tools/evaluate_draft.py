"""Serve a draft in real vLLM and measure it, then the verifier alone on the same prompts.

Greedy decoding of held-out prompts. Reports mean acceptance length (tokens per forward pass of
the verifier, 1 + accepted) with its 95% interval over prompts, acceptance per position, tokens/s
of both, and how many answers are identical. With --hidden-states it also checks parity: that the
tensor entering the draft's `fc` inside vLLM is what 03 stored for the same tokens, and that the
draft computes from it, depth by depth, what it computed in training (acceptance would hardly show
a fault there). Each of the two loads has a process of its own.
"""

import contextlib
import ctypes
import dataclasses
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import artifacts, cli, errors, progress
from common.manifest import Output, Stage
from common.serving.settings import EvaluateSettings

if TYPE_CHECKING:
    from common.data.prompts import Prompt
    from common.serving.acceptance import DraftMeasurement
    from common.serving.checkpoint import ServedDraft
    from common.serving.generation import Run
    from common.serving.parity import StoredStates
    from common.verifier.config import Verifier

STAGE = "evaluate"
WITH_DRAFT = "with_draft.json"  # what was measured with the draft, until the rest is


# fmt: off
def parse_args() -> EvaluateSettings:
    p = cli.Parser(STAGE, __doc__)
    add = p.add_argument
    p.add_common("--model-path")
    add("--draft", type=cli.path_text, metavar="DIR", help="checkpoint written by 04")
    add("--prompts", type=cli.path_text, nargs="+", metavar="FILE", help="held-out chat rows")
    p.add_common("--output-dir", "--max-samples", "--max-seq-len", "--hidden-states")
    add("--aux-ids", type=cli.non_negative_int, nargs="+", metavar="ID",
        help="layers that the draft was trained on, as a server counts them (layer I is I + 1),"
             " where its config.json has none")
    add("--quantized-copy", action="store_true",
        help="the verifier is a quantised copy of the one that the draft was trained on")
    p.add_common("--template-args", "--date")
    add("--num-speculative-tokens", type=cli.integer(1, 128), default=3, metavar="N",
        help="tokens drafted per forward pass of the verifier (vLLM's limit is 128)")
    add("--max-new-tokens", type=cli.integer(2), default=256, metavar="TOKENS",
        help="of an answer; the first comes without a draft")
    add("--batch-size", type=cli.positive_int, default=32, help="prompts decoded together")
    # float32 is lossless: the answers with and without the draft are the same
    p.add_common("--tp-size", "--gpu-memory-utilization", "--dtype", "--engine-args")
    p.add_common("--load-timeout")
    add("--only-draft", action="store_true",
        help="measure with the draft and stop; without this flag the rest is measured")
    add("--skip-bad-rows", action="store_true", help="count and drop prompts that cannot be used")
    p.add_common("--seed", "--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--draft", "--prompts", "--output-dir")
    return cli.as_settings(p.parse(), EvaluateSettings)
# fmt: on


@dataclass(frozen=True)
class EvaluateJob:
    """What is measured, once everything is checked.

    stage, state: of the output folder, see Output.earlier_run; skipped: rows that are no prompt;
    date: that prompts say, None where they say none; stored: for parity, with --hidden-states.
    """

    stage: Stage
    state: str
    verifier: "Verifier"
    draft: "ServedDraft"
    prompts: "list[Prompt]"
    skipped: int
    date: str | None
    stored: "StoredStates | None"


def main() -> None:
    settings = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    job = check(settings)
    if job is None:
        return

    # ---------------------------------------------------------------- measure
    from common.serving.acceptance import DraftMeasurement

    out, state = Path(settings.output_dir), job.state
    measured = out / WITH_DRAFT
    have = state == "in_progress" and measured.exists()
    if have:
        progress.log("evaluate: the draft is measured already; the verifier alone is left")
    elif not settings.only_draft:
        # In a process of its own: it leaves the next load all of a GPU's memory, and some
        # verifiers hang in the second engine of a process (Kimi-K2.5 in vLLM 0.26).
        run_only_draft(job.date)
        state = Output(out, job.stage, False).earlier_run()
    output = Output(out, job.stage, settings.only_draft and settings.overwrite)
    output.lock(state)
    if settings.only_draft:
        if not have:
            found = measure_draft(settings, job)
            output.empty()
            output.begin()
            found.write(measured)
        took = progress.duration(time.monotonic() - started)
        progress.log(f"evaluate: measured with the draft, {took} -> {measured}")
        return
    prompts = {prompt.id for prompt in job.prompts}
    drafted = DraftMeasurement.read(measured, prompts, settings.num_speculative_tokens)
    report(settings, output, measure_verifier(settings, job), drafted, job.skipped, started)
    measured.unlink()


def check(settings: EvaluateSettings) -> EvaluateJob | None:
    """Check everything that can be known before the verifier loads; returns None when there is
    nothing to do."""
    from common.data.prompts import load_prompts
    from common.data.rendering import rendering_of
    from common.data.sources import parse_sources, read_rows, sources_digest
    from common.serving.checkpoint import check_draft, check_positions
    from common.verifier.config import load_verifier

    out, folder = Path(settings.output_dir), Path(settings.draft)
    verifier = load_verifier(settings.model_path)
    draft = check_draft(folder, verifier, settings.aux_ids)
    sources = parse_sources(settings.prompts, settings.max_samples, "--prompts")
    local = [f for s in sources for f in s.files]
    states = [settings.hidden_states] if settings.hidden_states else []
    artifacts.check_apart(out, settings.model_path, folder, *local, *states)
    inputs, stored = check_inputs(settings, verifier, draft)
    inputs["prompts"] = sources_digest(sources)
    rows = list(read_rows(sources, settings.max_samples))
    rendering = rendering_of(settings, verifier, rows)
    verifier = dataclasses.replace(verifier, end_ids=rendering.end_ids)
    decisive = settings.manifest_settings(verifier.end_ids) | rendering.settings
    stage = Stage(STAGE, decisive, inputs)
    state = Output(out, stage, settings.overwrite).earlier_run()
    if state == "complete":
        progress.log((out / "table.txt").read_text(encoding="utf-8").rstrip())
        progress.log(f"evaluate: {out} is complete (--overwrite makes it again)")
        return None
    longest = verifier.longest_sample(settings.max_seq_len) - settings.max_new_tokens
    prompts, skipped = load_prompts(
        rows, rendering.template, verifier.vocab_size, longest, settings.skip_bad_rows
    )
    new_tokens = settings.max_new_tokens + settings.num_speculative_tokens
    check_positions(draft, verifier, prompts, new_tokens)
    if not settings.only_draft:
        note_draft(settings, draft)
    if settings.dry_run:
        progress.log(
            f"evaluate: dry run, {folder} fits the verifier; {len(prompts)} prompts ({skipped}"
            " skipped)"
        )
        return None
    date = rendering.settings.get("date")
    return EvaluateJob(stage, state, verifier, draft, prompts, skipped, date, stored)


def check_inputs(
    settings: EvaluateSettings, verifier: "Verifier", draft: "ServedDraft"
) -> "tuple[dict[str, str], StoredStates | None]":
    """Check that the draft, and the states if there are any, were made with this verifier; returns
    the hashes of all, and the states for parity."""
    from common.serving.parity import MAX_TOKENS, stored_states
    from common.states.folder import open_hidden
    from common.states.identity import check_made_with, draft_made_with, states_made_with
    from common.verifier.fingerprint import tokenizer_fingerprint
    from common.verifier.weights import check_weights, identities

    folder, out = draft.checkpoint.folder, Path(settings.output_dir)
    inputs = {
        "draft": draft.checkpoint.digest(),
        "draft_config": artifacts.sha256_file(folder / "config.json"),
        "tokenizer": tokenizer_fingerprint(settings.model_path),
    }
    weights = check_weights(verifier, settings.engine_args.get("model_impl", "auto"))
    inputs |= identities(verifier, weights, out, settings.dry_run)
    hidden = open_hidden(Path(settings.hidden_states)) if settings.hidden_states else None
    for made in (draft_made_with(folder), states_made_with(hidden) if hidden else None):
        if made:
            check_made_with(made, verifier, inputs, settings.quantized_copy)
    if not hidden:
        return inputs, None
    budget = settings.engine_args.get("max_num_batched_tokens") or MAX_TOKENS
    stored = stored_states(hidden, draft, settings.max_seq_len, budget)
    return inputs | {"extract": hidden.content_sha256}, stored


def note_draft(settings: EvaluateSettings, draft: "ServedDraft") -> None:
    """Say what is not known of a draft from elsewhere."""
    from common.states.identity import draft_made_with

    made = draft_made_with(Path(settings.draft))
    if made is None or "verifier_weights" not in made.hashes:
        what = "no manifest says" if made is None else "its manifest does not say"
        progress.log(f"evaluate: note: {settings.draft}: {what} which verifier it was trained on")
    if draft.remark:
        progress.log(f"evaluate: note: {settings.draft}/config.json {draft.remark}")


# ---------------------------------------------------------------- measure


def run_only_draft(date: str | None) -> None:
    """Run this command with --only-draft, its prompts of the same date even after midnight; a
    failure of it ends this process the same way."""

    def end_together() -> None:
        """Linux's PR_SET_PDEATHSIG: a SIGKILL of this process leaves no verifier on the GPUs."""
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    command = [sys.executable, __file__, *sys.argv[1:], "--only-draft"]
    command += ["--date", date] if date else []
    child = subprocess.Popen(command, preexec_fn=end_together)
    try:
        status = child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if status:
        errors.finish(status if status > 0 else 128 - status)


def measure_draft(settings: EvaluateSettings, job: EvaluateJob) -> "DraftMeasurement":
    """Serve the draft, check its parity with the job's sample if it has one, and decode the
    prompts."""
    from common.serving.acceptance import DraftMeasurement, draft_counters
    from common.serving.checkpoint import served_folder
    from common.serving.generation import generate, warm_up_decoding
    from common.serving.parity import check_parity
    from common.verifier.engine import generating

    verifier, prompts, stored = job.verifier, job.prompts, job.stored
    copy, concurrency = settings.quantized_copy, settings.batch_size
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(served_folder(job.draft, Path(settings.output_dir)))
        speculative = {
            "model": str(folder),
            "method": "eagle3",
            "num_speculative_tokens": settings.num_speculative_tokens,
        }
        engine = generating(settings, verifier, STAGE, speculative_config=speculative)
        llm = stack.enter_context(engine)
        parity = check_parity(llm, stored, job.draft, copy) if stored else None
        warm_up_decoding(llm, prompts[:concurrency])
        before = draft_counters(llm)
        limits = verifier.end_ids, settings.max_new_tokens, concurrency
        run = generate(llm, prompts, *limits, "with draft")
        counters = {k: v - before.get(k, 0) for k, v in draft_counters(llm).items()}
    if not counters["drafts"]:
        raise errors.UserError("vLLM made no drafts: is the draft served by this vLLM at all?")
    return DraftMeasurement(run, counters, parity)


def measure_verifier(settings: EvaluateSettings, job: EvaluateJob) -> "Run":
    """Decode the prompts without a draft."""
    from common.serving.generation import generate, warm_up_decoding
    from common.verifier.engine import generating

    concurrency = settings.batch_size
    with generating(settings, job.verifier, STAGE) as llm:
        warm_up_decoding(llm, job.prompts[:concurrency])
        limits = job.verifier.end_ids, settings.max_new_tokens, concurrency
        return generate(llm, job.prompts, *limits, "verifier alone")


# ---------------------------------------------------------------- report


def report(
    settings: EvaluateSettings,
    output: Output,
    plain: "Run",
    drafted: "DraftMeasurement",
    skipped: int,
    started: float,
) -> None:
    """Compare the runs with and without the draft; write result.json, table.txt and manifest."""
    from common.serving.acceptance import acceptance, result_of, table, without_looping

    out, prompts = output.folder, len(plain.answers)
    result = acceptance(plain, drafted, settings.num_speculative_tokens, settings.seed)
    text = table(result, drafted.parity, settings.quantized_copy)
    (out / "table.txt").write_text(text + "\n", encoding="utf-8")
    more = result_of(drafted.parity) | ({"quantized_copy": True} if settings.quantized_copy else {})
    artifacts.write_json(out / "result.json", asdict(result) | more)
    seconds = time.monotonic() - started
    counts = {"prompts": prompts, "skipped": skipped}
    output.finish(counts, artifacts.sha256_file(out / "result.json"), seconds)
    progress.log(text)
    low, high = result.interval_95
    progress.log(
        f"evaluate: acceptance length {result.acceptance_length:.3f}"
        f" (95% {low:.3f} to {high:.3f}) over {prompts} prompts"
        f"{f' ({skipped} skipped)' if skipped else ''}; {without_looping(result)};"
        f" {progress.duration(seconds)} -> {out}"
    )


if __name__ == "__main__":
    errors.run(main)
