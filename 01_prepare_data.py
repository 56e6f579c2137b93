"""Stage 1: chat data → tokenized samples with loss masks, through the verifier's template.

Reads local .json, .jsonl or .parquet files or a hub data set, in OpenAI `messages` or
ShareGPT `conversations` form; rows that hold input_ids and loss_mask already (as
tools/regenerate_responses.py writes them) pass through, checked. Writes
OUTPUT_DIR/tokenized_data.jsonl: {"id", "input_ids", "loss_mask"} a line.
"""

import functools
import itertools
import json
import time
from collections import Counter
from pathlib import Path

from common import artifacts, cli, progress

STAGE = "prepare"


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path")
    p.add_argument(
        "--dataset",
        nargs="+",
        metavar="FILE|NAME",
        help=".json, .jsonl or .parquet files, or hub names (their train split)",
    )
    p.add_common("--output-dir", "--max-samples", "--max-seq-len")
    p.add_argument(
        "--skip-bad-rows",
        action="store_true",
        help="count and drop rows that cannot be used instead of stopping at the first",
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
    from common import rows, samples, verifier

    model = verifier.load_verifier(args.model_path)
    sources = [Path(d) for d in args.dataset]
    artifacts.check_apart(out, args.model_path, *(s for s in sources if rows.is_local(s)))
    # 03 lets the verifier add one token to a sample, within its positions
    longest = min(args.max_seq_len, (model.max_positions or 2**31) - 1)
    settings = {
        "max_samples": args.max_samples,
        "max_seq_len": longest,
        "vocab_size": model.vocab_size,
        "skip_bad_rows": args.skip_bad_rows,
        "end_ids": list(model.end_ids),
    }
    inputs = {"dataset": rows.digest(sources), "tokenizer": tokenizer_identity(args.model_path)}
    state = artifacts.earlier_run(out, STAGE, settings, inputs, args.overwrite)
    if state == "complete":
        progress.log(f"prepare: {out} is complete (--overwrite makes it again)")
        return

    # ---------------------------------------------------------------- load
    from common import chat

    @functools.cache
    def tokenizer():
        """Loaded at the first chat row: tokenized rows need none."""
        return chat.load_tokenizer(args.model_path, args.trust_remote_code)

    counts: Counter[str] = Counter()

    def encode(row, n: int) -> list[dict]:
        """A row's samples, counted; a row that cannot be used ends the run or is dropped."""
        counts["rows"] += 1
        try:
            made, fates = encode_row(row, n, tokenizer, model, longest)
        except chat.RowError as e:
            if not args.skip_bad_rows:
                text = f"{row.where}: {e}; mend the row, or pass --skip-bad-rows"
                raise cli.UserError(text) from None
            made, fates = [], [f"dropped: {e.reason}"]
        except cli.UserError:  # a broken tokenized row
            if not args.skip_bad_rows:
                raise
            made, fates = [], ["dropped: broken tokenized row"]
        counts.update(fates)
        return made

    if args.dry_run:
        for n, row in enumerate(rows.read_rows(sources, 100)):
            counts["samples"] += len(encode(row, n))
        progress.log(
            f"prepare: dry run, the first {counts['rows']} rows become {counts['samples']} samples;"
            " nothing was written"
        )
        return
    artifacts.hold_output(out, STAGE, settings, inputs, args.overwrite, state)

    # ---------------------------------------------------------------- work
    bar = progress.Progress("prepare", args.max_samples or 0, "samples")
    with artifacts.atomic_file(out / samples.FILE, "w") as f:
        every = (s for n, row in enumerate(rows.read_rows(sources)) for s in encode(row, n))
        for sample in itertools.islice(every, args.max_samples):
            f.write(json.dumps(sample) + "\n")
            counts["samples"] += 1
            counts["tokens"] += len(sample["input_ids"])
            counts["loss_tokens"] += sum(sample["loss_mask"])
            bar.add(1)
        if not counts["samples"]:
            why = ", ".join(f"{k} {v}" for k, v in counts.items())
            raise cli.UserError(f"{sources[0]}: not one usable sample ({why})")
        if args.overwrite:  # now that every row was good
            artifacts.empty_output(out, Path(f.name).name)
    bar.close()

    # ---------------------------------------------------------------- report
    digest = artifacts.sha256_file(out / samples.FILE)
    seconds = time.monotonic() - started
    artifacts.write_json(
        out / artifacts.REPORT,
        artifacts.report(
            STAGE, settings, inputs, dict(counts) | {"file_sha256": digest}, digest, seconds
        ),
    )
    share = 100 * counts["loss_tokens"] / counts["tokens"]
    others = [f"{k} {v}" for k, v in counts.items() if ":" in k or k.startswith("cut")]
    progress.log(
        f"prepare: {counts['samples']} samples from {counts['rows']} rows, {counts['tokens']}"
        f" tokens, {share:.0f}% with loss;"
        f" {', '.join(others) or 'nothing cut or dropped'}; {progress.duration(seconds)} -> {out}"
    )


def encode_row(row, n: int, tokenizer, model, max_seq_len: int) -> tuple[list[dict], list[str]]:
    """Return a row's samples (as written) and what befell them, to be counted.

    Raises RowError for a conversation that cannot be used, UserError for a broken
    tokenized row.
    """
    from common import chat, samples

    name = str(row.value.get("id", f"row-{n}"))
    if "input_ids" in row.value or "loss_mask" in row.value:
        ids, mask = samples.check_sample(row.value, row.where, model.vocab_size)
        encoded = [chat.Encoded(ids.tolist(), mask.astype(int).tolist())]
    else:
        messages = chat.messages_of(row.value)
        tools = row.value.get("tools")
        encoded = chat.encode_conversation(tokenizer(), messages, tools, model.end_ids)
    made: list[dict] = []
    fates: list[str] = []
    for k, sample in enumerate(encoded):
        kept, loss = sample.input_ids[:max_seq_len], sample.loss_mask[:max_seq_len]
        if len(sample.input_ids) > max_seq_len:
            fates.append("cut to --max-seq-len")
        if not any(loss):
            fates.append("dropped: no loss tokens")
            continue
        if loss[-1] and kept[-1] not in model.end_ids:
            fates.append("note: answers without an end-of-turn token (cut when they were made?)")
        key = name if len(encoded) == 1 else f"{name}{samples.SEPARATOR}{k}"
        made.append({"id": key, "input_ids": kept, "loss_mask": loss})
    return made, fates


def tokenizer_identity(model_path: str) -> str:
    """Hash of the files that decide ids and template, so that another tokenizer is noticed."""
    from common.verifier import optional_file

    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tiktoken.model")
    found = {n: optional_file(model_path, n) for n in names}
    return artifacts.sha256_json({n: artifacts.sha256_file(p) for n, p in found.items() if p})


if __name__ == "__main__":
    cli.run(main)
