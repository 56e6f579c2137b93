"""Stage 1: chat data → tokenized samples with loss masks, through the verifier's template.

Reads local .json, .jsonl (also .gz, .zst) or .parquet files, folders of them, or hub data sets,
in OpenAI, ShareGPT, Alpaca or prompt/response form (common/data/conversations.py); rows that hold
input_ids and loss_mask already (as tools/regenerate_responses.py writes them) pass through,
checked. Writes OUTPUT_DIR/tokenized_data.jsonl: {"id", "input_ids", "loss_mask"} a line.
"""

import os
import sys
import time
from collections import Counter
from pathlib import Path

from common import artifacts, cli, errors, progress
from common.manifest import Output, Stage

STAGE = "prepare"


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path")
    p.add_argument(
        "--dataset",
        type=cli.path_text,
        nargs="+",
        metavar="DATA",
        help="files, folders or hub names, each with options: NAME,config=..,split=train,"
        "revision=..,form=messages|conversations|alpaca|pair (default: found by the rows' keys),"
        "weight=.. (its share of the rows read)",
    )
    p.add_common("--output-dir", "--max-samples", "--max-seq-len")
    p.add_argument(
        "--long",
        choices=["cut", "drop", "split"],
        default="cut",
        help="what becomes of samples over --max-seq-len (split: each part a text of its own)",
    )
    p.add_common("--template-args")
    p.add_argument(
        "--keep-unfinished",
        action="store_true",
        help='keep answers that the length limit cut (finish_reason "length")',
    )
    p.add_argument(
        "--skip-bad-rows",
        action="store_true",
        help="count and drop rows that are no conversation instead of stopping at the first",
    )
    p.add_argument("--workers", type=cli.counted(256), help="processes (default: cores)")
    p.add_argument(
        "--show",
        type=cli.counted(10**9),
        metavar="N",
        help="print the first N samples decoded, loss tokens marked, and write nothing",
    )
    p.add_common("--seed", "--dry-run", "--overwrite", "--trust-remote-code")
    p.need("--model-path", "--dataset", "--output-dir")
    return p.parse()


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    out = Path(args.output_dir)

    # ---------------------------------------------------------------- check
    from common.data import samples
    from common.data.sources import check_outside, parse_sources, read_rows, sources_digest
    from common.verifier.config import load_verifier
    from common.verifier.fingerprint import tokenizer_fingerprint

    model = load_verifier(args.model_path)
    sources = parse_sources(args.dataset, args.max_samples)
    artifacts.check_apart(out, args.model_path, *(f for s in sources for f in s.files))
    check_outside(out, sources)
    longest = model.longest_sample(args.max_seq_len)
    settings = {
        "max_samples": args.max_samples,
        "max_seq_len": longest,
        "long": args.long,
        "template_args": args.template_args,
        "keep_unfinished": args.keep_unfinished,
        "vocab_size": model.vocab_size,
        "skip_bad_rows": args.skip_bad_rows,
        "end_ids": list(model.end_ids),
    }
    inputs = {
        "dataset": sources_digest(sources),
        "tokenizer": tokenizer_fingerprint(args.model_path),
    }
    output = Output(out, Stage(STAGE, settings, inputs), args.overwrite)
    state = "none"
    if not args.show:
        state = output.earlier_run()
    if state == "complete":
        progress.log(f"prepare: {out} is complete (--overwrite makes it again)")
        return

    # ---------------------------------------------------------------- load
    from common.data import encoding

    rules = encoding.Rules(
        model_path=args.model_path,
        trust_remote_code=args.trust_remote_code,
        vocab_size=model.vocab_size,
        end_ids=model.end_ids,
        longest=longest,
        long=args.long,
        template_args=args.template_args,
        keep_unfinished=args.keep_unfinished,
        skip_bad_rows=args.skip_bad_rows,
    )
    if args.show:
        try:
            encoding.show(rules, read_rows(sources), args.show)
        except BrokenPipeError:  # `| head` has seen enough
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        return
    counts: Counter[str] = Counter()
    if args.dry_run:
        for row in encoding.encode_rows(rules, read_rows(sources, 100), 1):
            counts.update(row.counts)
            counts["samples"] += len(row.lines)
        progress.log(
            f"prepare: dry run, the first {counts['rows']} rows become {counts['samples']} samples"
            f"{fates(counts)}; nothing was written"
        )
        return
    output.lock(state)

    # ---------------------------------------------------------------- work
    workers = args.workers or len(os.sched_getaffinity(0))
    bar = progress.Progress("prepare", args.max_samples or 0, "samples")
    with artifacts.atomic_file(out / samples.FILE, "w") as f:
        found = read_rows(sources, wanted=args.max_samples or float("inf"))
        for line in encoded(encoding.encode_rows(rules, found, workers), counts):
            f.write(line.text)
            counts.update(samples=1, tokens=line.tokens, loss_tokens=line.loss_tokens)
            bar.add(1)
            if counts["samples"] == args.max_samples:
                break
        if not counts["samples"]:
            raise errors.UserError(no_sample(sources[0].name, counts))
        output.empty(Path(f.name).name)  # now that every row was good
        bar.close()

        # ------------------------------------------------------------ report
        # before the file has its name: data without a manifest are taken for somebody else's
        f.flush()
        digest = artifacts.sha256_file(Path(f.name))
        seconds = time.monotonic() - started
        final = dict(counts) | {"file_sha256": digest}
        output.finish(final, digest, seconds)
    share = 100 * counts["loss_tokens"] / counts["tokens"]
    progress.log(
        f"prepare: {counts['samples']} samples from {counts['rows']} rows, {counts['tokens']}"
        f" tokens, {share:.0f}% with loss{fates(counts) or '; nothing cut or dropped'};"
        f" {progress.duration(seconds)} -> {out}"
    )


def encoded(rows, counts: Counter[str]):
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
    return f"{name}: not one usable sample{fates(counts)}"


def fates(counts: Counter[str]) -> str:
    """What befell rows and samples on the way, for a log line."""
    found = "".join(f", {key} {n}" for key, n in sorted(counts.items()) if ":" in key)
    return found.replace(", ", "; ", 1)


if __name__ == "__main__":
    errors.run(main)
