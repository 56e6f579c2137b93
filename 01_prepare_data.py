"""Stage 1: chat data → tokenized samples with loss masks, through the verifier's template.

Reads local .json, .jsonl (also .gz, .zst) or .parquet files, folders of them, or hub data sets,
in OpenAI, ShareGPT, Alpaca or prompt/response form (common/data/conversations.py); rows that hold
input_ids and loss_mask already (as tools/regenerate_responses.py writes them) pass through,
checked. Writes OUTPUT_DIR/tokenized_data.jsonl: {"id", "input_ids", "loss_mask"} per line. The mask
is 1 on the tokens of answers (decided in common/data/chat_template.py); which predictions of the
draft carry loss, 04 derives from it (common/draft/loss_table.py).
"""

import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common import artifacts, cli, errors, progress
from common.data.conversations import FORMS
from common.data.settings import PrepareSettings
from common.manifest import Output, Stage

if TYPE_CHECKING:
    from common.data.encoding import EncodedRow, SampleLine
    from common.data.loops import Loops
    from common.data.rendering import Rendering
    from common.data.sources import Source
    from common.verifier.config import Verifier

STAGE = "prepare"
DRY_RUN_ROWS = 100
FIRST_ROWS = 100  # of a source, by which it is known whether its rows need the template


# fmt: off
def parse_args() -> PrepareSettings:
    p = cli.Parser(STAGE, __doc__)
    add = p.add_argument
    p.add_common("--model-path")
    add("--dataset", type=cli.path_text, nargs="+", metavar="DATA",
        help="files, folders or hub names, each with options: NAME,config=..,split=train,"
             f"revision=..,form={'|'.join(FORMS)} (default: found by the rows' keys),"
             "weight=.. (its share of the rows read)")
    p.add_common("--output-dir", "--max-samples", "--max-seq-len")
    add("--long", choices=["cut", "drop", "split"], default="cut",
        help="what becomes of samples over --max-seq-len (split: each part a text of its own)")
    p.add_common("--template-args", "--date")
    add("--keep-unfinished", action="store_true",
        help='keep answers that the length limit cut (finish_reason "length")')
    add("--drop-looping", action="store_true",
        help="drop samples with an answer that repeats itself (common/data/loops.py)")
    add("--skip-bad-rows", action="store_true",
        help="count and drop rows that are no conversation instead of stopping at the first")
    add("--workers", type=cli.integer(1, 256), help="processes (default: cores)")
    add("--show", type=cli.integer(1, 10**9), metavar="N",
        help="print the first N samples decoded, loss tokens marked, and write nothing")
    p.add_common("--seed", "--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--dataset", "--output-dir")
    args = p.parse()
    args.workers = args.workers or len(os.sched_getaffinity(0))
    return cli.as_settings(args, PrepareSettings)
# fmt: on


def main() -> None:
    settings = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    out = Path(settings.output_dir)

    # ---------------------------------------------------------------- check
    from common.data import encoding
    from common.data.rendering import rendering_of
    from common.data.sources import check_outside, parse_sources, read_rows
    from common.verifier.config import load_verifier

    verifier = load_verifier(settings.model_path)
    sources = parse_sources(settings.dataset, settings.max_samples)
    artifacts.check_apart(out, settings.model_path, *(f for s in sources for f in s.files))
    check_outside(out, sources)
    firsts = (row for s in sources for row in itertools.islice(read_rows([s]), FIRST_ROWS))
    files = [file for s in sources for file in s.files]
    rendering = rendering_of(settings, verifier, firsts, files)
    settings = dataclasses.replace(settings, date=rendering.date)
    verifier = dataclasses.replace(verifier, end_ids=rendering.end_ids)
    stage = stage_of(settings, verifier, sources, rendering)
    output = Output(out, stage, settings.overwrite)
    if settings.show:
        encoding.show(settings, verifier, read_rows(sources))
        return
    state = output.earlier_run()
    if state == "complete":
        progress.log(f"prepare: {out} is complete (--overwrite makes it again)")
        return
    if settings.dry_run:
        rows = read_rows(sources, DRY_RUN_ROWS)
        log_dry_run(encoding.encode_rows(settings, verifier, rows))
        return
    output.lock(state)

    # ---------------------------------------------------------------- work
    rows = read_rows(sources, enough=settings.max_samples or float("inf"))
    encoded = encoding.encode_rows(settings, verifier, rows)
    counts, answers = write_samples(encoded, settings.max_samples, output, sources[0].name, started)

    # ---------------------------------------------------------------- report
    share = 100 * counts["loss_tokens"] / counts["tokens"]
    progress.log(
        f"prepare: {counts['samples']} samples from {counts['rows']} rows, {counts['tokens']}"
        f" tokens, {share:.0f}% with loss{counted_events(counts) or '; nothing cut or dropped'};"
        f" {answers}; {progress.duration(time.monotonic() - started)} -> {out}"
    )


def stage_of(
    settings: PrepareSettings,
    verifier: "Verifier",
    sources: list["Source"],
    rendering: "Rendering",
) -> Stage:
    """What decides the samples; hashed into the manifest."""
    from common.data.sources import sources_digest
    from common.verifier.fingerprint import tokenizer_fingerprint

    decisive = {
        "max_samples": settings.max_samples,
        "max_seq_len": verifier.longest_sample(settings.max_seq_len),
        "long": settings.long,
        "template_args": settings.template_args,
        "keep_unfinished": settings.keep_unfinished,
        "vocab_size": verifier.vocab_size,
        "skip_bad_rows": settings.skip_bad_rows,
        "end_ids": sorted(verifier.end_ids),
    }
    if settings.drop_looping:  # no setting of earlier versions' data
        decisive["drop_looping"] = True
    inputs = {
        "dataset": sources_digest(sources),
        "tokenizer": tokenizer_fingerprint(settings.model_path),
    }
    return Stage(STAGE, decisive | rendering.settings, inputs)


def write_samples(
    encoded: Iterator["EncodedRow"],
    max_samples: int | None,
    output: Output,
    source: str,
    started: float,
) -> tuple[Counter[str], "Loops"]:
    """Write the samples and the manifest; returns its counts and those of looping answers.
    UserError where there is no sample, naming the source."""
    from common.data.loops import Loops
    from common.data.samples import FILE

    counts: Counter[str] = Counter()
    answers = Loops()
    bar = progress.Progress("prepare", max_samples or 0, "samples")
    with artifacts.atomic_file(output.folder / FILE, "w") as f:
        for line in unique_samples(encoded, counts):
            f.write(line.text)
            counts.update(samples=1, tokens=line.tokens, loss_tokens=line.answers.tokens)
            answers += line.answers
            bar.add(1)
            if counts["samples"] == max_samples:
                break
        if not counts["samples"]:
            raise errors.UserError(no_sample(source, counts))
        output.empty(Path(f.name).name)  # now that every row was good
        bar.close()
        # before the file has its name: data without a manifest are taken for somebody else's
        f.flush()
        digest = artifacts.sha256_file(Path(f.name))
        seconds = time.monotonic() - started
        counts.update(
            answers=answers.answers,
            looping_answers=answers.looping,
            looping_loss_tokens=answers.looping_tokens,
        )
        output.finish(dict(counts) | {"file_sha256": digest}, digest, seconds)
    return counts, answers


def log_dry_run(rows: Iterator["EncodedRow"]) -> None:
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row.counts)
        counts["samples"] += len(row.lines)
    progress.log(
        f"prepare: dry run, the first {counts['rows']} rows become {counts['samples']} samples"
        f"{counted_events(counts)}; nothing was written"
    )


def unique_samples(rows: Iterator["EncodedRow"], counts: Counter[str]) -> Iterator["SampleLine"]:
    """Yield the samples of encoded rows, each once; counts what becomes of rows and samples."""
    seen: set[bytes] = set()
    for row in rows:
        counts.update(row.counts)
        for line in row.lines:
            if line.content in seen:
                counts["dropped: the same as an earlier sample"] += 1
                continue
            seen.add(line.content)
            yield line


def no_sample(name: str, counts: Counter[str]) -> str:
    if counts["dropped: no assistant turn"] == counts["rows"]:
        return (
            f"{name}: its rows are prompts without an answer; let the verifier answer them first,"
            " with tools/regenerate_responses.py"
        )
    return f"{name}: not one usable sample{counted_events(counts)}"


def counted_events(counts: Counter[str]) -> str:
    """What was dropped, cut or noted on the way, for a log line."""
    found = "".join(f", {key} {n}" for key, n in sorted(counts.items()) if ":" in key)
    return found.replace(", ", "; ", 1)


if __name__ == "__main__":
    errors.run(main)
