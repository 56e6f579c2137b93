"""The verifier's own answers to a file of prompts, as exact output token ids.

A draft is accepted as often as its training data looks like the verifier's output, so train on
what the verifier says itself. Reads chat rows (an assistant turn at their end is dropped) and
writes OUTPUT_DIR/responses.jsonl, which 01 passes through: a line per answer with id, messages
(the answer's text and reasoning included), input_ids, loss_mask and finish_reason. Answers come
from vLLM in this process, or with --endpoint from a running OpenAI-compatible server. Run the same
command again after a kill: it continues, and keeps every answer in the file.
"""

import contextlib
import dataclasses
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import artifacts, cli, errors, progress
from common.manifest import Output, Stage
from common.regeneration.settings import RegenerateSettings

if TYPE_CHECKING:
    from common.data.rendering import Rendering
    from common.regeneration.loop import Backend
    from common.regeneration.responses import Responses
    from common.regeneration.turns import Conversation
    from common.verifier.config import Verifier

STAGE = "regenerate"


# fmt: off
def parse_args() -> RegenerateSettings:
    p = cli.Parser(STAGE, __doc__)
    add = p.add_argument
    p.add_common("--model-path", "--output-dir", "--max-samples", "--max-seq-len", "--seed")
    add("--prompts", type=cli.path_text, nargs="+", metavar="DATA",
        help="rows as 01 reads them, with the same options")
    add("--max-new-tokens", type=cli.positive_int, default=512, metavar="TOKENS",
        help="of an answer")
    add("--temperature", type=cli.between(0, 10), default=0.0, help="0 is greedy")
    add("--top-p", type=cli.between(0.001, 1), default=1.0, help="nucleus sampling")
    add("--answers-per-prompt", type=cli.positive_int, default=1, metavar="N",
        help="over 1 needs --temperature over 0")
    add("--all-turns", action="store_true",
        help="answer every turn, each after the verifier's own answers to those before")
    p.add_common("--template-args", "--date")
    add("--endpoint", type=cli.path_text, metavar="URL",
        help="a running server, as http://localhost:8000/v1 (OPENAI_API_KEY is its key)")
    add("--served-model", metavar="NAME", help="the server's (default: its only one)")
    add("--concurrency", type=cli.integer(1, 4096), default=64, help="requests under way")
    add("--retries", type=cli.non_negative_int, default=5, help="of a failed request")
    add("--request-timeout", type=cli.between(1, 1e6), default=1800, metavar="SECONDS",
        help="of an answer")
    add("--batch-size", type=cli.positive_int, default=128, help="answers decoded together")
    p.add_common("--tp-size", "--gpu-memory-utilization", "--dtype", "--engine-args")
    p.add_common("--load-timeout")
    add("--skip-bad-rows", action="store_true", help="count and drop prompts that cannot be used")
    p.add_common("--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--output-dir", "--prompts")
    return cli.as_settings(p.parse(), RegenerateSettings)
# fmt: on


@dataclass(frozen=True)
class RegenerateJob:
    """What is to be answered, once everything is checked.

    longest: tokens of a prompt; prompts, skipped: rows used and not.
    """

    output: Output
    verifier: "Verifier"
    rendering: "Rendering"
    longest: int
    conversations: "list[Conversation]"
    prompts: int
    skipped: int


def main() -> None:
    settings = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    job = check(settings)
    if job is None:
        return

    # ---------------------------------------------------------------- regenerate
    from common.regeneration.loop import regenerate
    from common.regeneration.responses import Responses, join_turns

    refused: Counter[str] = Counter()
    with contextlib.closing(Responses(job.output, settings.all_turns)) as responses:
        before = len(responses.answered)
        names = [conversation.turn_names() for conversation in job.conversations]
        unfinished = [one for one in job.conversations if one.resume(responses.answered)]
        if unfinished:
            seed = settings.seed if settings.temperature else None
            with backend_of(settings, job) as backend:
                turns = sum(map(len, names))
                refused = regenerate(backend, unfinished, responses, turns, seed)
    if settings.all_turns:
        join_turns(responses.path, names)
    report(job, responses, refused, len(responses.answered) - before, started)


def check(settings: RegenerateSettings) -> RegenerateJob | None:
    """Check everything that can be known before the first answer and lock the output folder;
    returns None when there is nothing to do."""
    from common.data.prompts import load_prompts
    from common.data.rendering import check_servers_day, rendering_of
    from common.data.sources import parse_sources, read_rows, sources_digest
    from common.regeneration.turns import conversations_of
    from common.verifier.config import load_verifier
    from common.verifier.fingerprint import fingerprint, tokenizer_fingerprint
    from common.verifier.weights import check_weights, identities

    out = Path(settings.output_dir)
    verifier = load_verifier(settings.model_path)
    sources = parse_sources(settings.prompts, settings.max_samples, "--prompts")
    artifacts.check_apart(out, settings.model_path, *(f for s in sources for f in s.files))
    if settings.answers_per_prompt > 1 and settings.temperature == 0:
        raise errors.UserError("--answers-per-prompt over 1 needs --temperature over 0")
    inputs = {
        "prompts": sources_digest(sources),
        "tokenizer": tokenizer_fingerprint(settings.model_path),
    }
    if settings.endpoint:
        inputs["verifier"] = fingerprint(verifier)
    else:
        weights = check_weights(verifier, settings.engine_args.get("model_impl", "auto"))
        inputs |= identities(verifier, weights, out, settings.dry_run)
    rows = list(read_rows(sources, settings.max_samples))
    rendering = rendering_of(settings, verifier, rows)
    verifier = dataclasses.replace(verifier, end_ids=rendering.end_ids)
    decisive = settings.manifest_settings(verifier.end_ids) | rendering.settings
    stage = Stage(STAGE, decisive, inputs)
    output = Output(out, stage, settings.overwrite)
    state = output.earlier_run()
    if state == "complete":
        progress.log(f"regenerate: {out} is complete (--overwrite makes it again)")
        return None
    if settings.endpoint:
        check_servers_day(rendering, settings.date)
    longest = verifier.longest_sample(settings.max_seq_len) - settings.max_new_tokens
    which = settings.skip_bad_rows, settings.all_turns
    prompts, skipped = load_prompts(rows, rendering.template, verifier.vocab_size, longest, *which)
    conversations = conversations_of(prompts, settings.answers_per_prompt)
    if settings.dry_run:
        progress.log(
            f"regenerate: dry run, {len(prompts)} prompts ({skipped} skipped) x"
            f" {settings.answers_per_prompt}, at most {settings.max_new_tokens} tokens each, into"
            f" {out}; nothing was written"
        )
        return None
    output.lock(state)
    return RegenerateJob(output, verifier, rendering, longest, conversations, len(prompts), skipped)


def report(
    job: RegenerateJob, responses: "Responses", refused: Counter[str], new: int, started: float
) -> None:
    """Write the manifest and the last line. refused: turns without an answer, by reason; new:
    answers of this run."""
    from common.data.conversations import CUT

    seconds = time.monotonic() - started
    answered, loops = responses.answered.values(), responses.loops
    tokens = sum(turn.tokens for turn in answered)
    reasons = Counter(turn.finish_reason for turn in answered)
    ended = Counter(turn.final for turn in answered if turn.final) + refused
    counts = {
        "prompts": job.prompts,
        "skipped": job.skipped,
        "answers": len(answered),
        "answer_tokens": tokens,
        **{f"finish_reason: {reason}": n for reason, n in sorted(reasons.items())},
        **{f"ended early: {reason}": n for reason, n in sorted(ended.items())},
    }
    if loops.answers:  # with ids
        counts |= {"looping_answers": loops.looping, "looping_tokens": loops.looping_tokens}
    job.output.finish(counts, artifacts.sha256_file(responses.path), seconds)
    ends = ", ".join(f"{reason} {n}" for reason, n in reasons.most_common())
    if ended:
        ends += "; ended early: " + ", ".join(f"{why} {n}" for why, n in ended.most_common())
    if reasons[CUT]:
        ends += f"; 01 leaves out those of {CUT}, unless --keep-unfinished"
    looping = f"; {loops}" if loops.answers else ""
    if loops.looping:
        looping += ", 01 leaves them out with --drop-looping"
    progress.log(
        f"regenerate: {len(answered)} answers{f', {tokens} tokens' if tokens else ''} (finish"
        f" reasons: {ends}){looping}; this run {new} in {progress.duration(seconds)}"
        f" -> {responses.path}"
    )


def backend_of(
    settings: RegenerateSettings, job: RegenerateJob
) -> "contextlib.AbstractContextManager[Backend]":
    """vLLM in this process, or the server of --endpoint."""
    if settings.endpoint:
        from common.regeneration.endpoint import Endpoint

        return contextlib.closing(Endpoint(settings, job.rendering.not_served))
    from common.regeneration.in_process import in_process

    return in_process(settings, job.verifier, job.rendering.template, job.longest)


if __name__ == "__main__":
    errors.run(main)
