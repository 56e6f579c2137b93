"""Stage 2: the draft's vocabulary, the verifier's most frequent loss tokens.

Reads one or several tokenized_data.jsonl and writes OUTPUT_DIR/d2t.npy (int64 offsets), t2d.npy
(bool) and coverage.png. Always in are the end-of-turn tokens, and of the tokenizer's added tokens
those that occur at loss positions.
"""

import io
import time
from pathlib import Path

from common import artifacts, cli, errors, progress
from common.manifest import Output, Stage

STAGE = "vocab"
SIZES = 8000, 16000, 32000, 64000  # of which the coverage is told too


def parse_args():
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path")
    p.add_argument(
        "--prepared-data",
        "--data-path",
        type=cli.path_text,
        nargs="+",
        metavar="PATH",
        help="folders written by 01, or the files in them; of several, PATH,weight=.. is a share",
    )
    p.add_common("--output-dir", "--max-samples")
    p.add_argument(
        "--draft-vocab-size",
        type=cli.positive_int,
        default=32000,
        metavar="TOKENS",
        help="tokens that the draft can propose",
    )
    p.add_common("--dry-run", "--overwrite", "--trust-remote-code", "--seed")
    p.need("--model-path", "--prepared-data", "--output-dir")
    return p.parse()


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    out = Path(args.output_dir)

    # ---------------------------------------------------------------- check
    from common.data import samples
    from common.data.vocab_map import (
        build_map,
        choose_tokens,
        coverage_by_size,
        draw_coverage,
        files_hash,
        merge_counts,
        parse_prepared,
    )
    from common.verifier.config import load_verifier

    model = load_verifier(args.model_path)
    folders, weights = parse_prepared(args.prepared_data)
    artifacts.check_apart(out, args.model_path, *folders)
    size = args.draft_vocab_size
    if size > model.vocab_size:
        raise errors.UserError(
            f"--draft-vocab-size {size} is over the verifier's {model.vocab_size} tokens"
        )
    special = special_ids(args.model_path, model)
    settings = {
        "draft_vocab_size": size,
        "target_vocab_size": model.vocab_size,
        "max_samples": args.max_samples,
        "weights": weights,
        "special_ids": artifacts.sha256_json(sorted(special)),
    }
    prepared = [samples.prepared_identity(folder) for folder in folders]
    for folder in folders:
        samples.check_tokenizer(folder, model)
    inputs = {"prepared": prepared if len(prepared) > 1 else prepared[0]}
    output = Output(out, Stage(STAGE, settings, inputs), args.overwrite)
    state = output.earlier_run()
    if state == "complete":
        progress.log(f"vocab: {out} is complete (--overwrite makes it again)")
        return

    # ---------------------------------------------------------------- work
    import numpy as np

    counts_of_each = []
    for folder in folders:
        counts = np.zeros(model.vocab_size, dtype=np.int64)
        for sample in samples.read_samples(folder, args.max_samples, model.vocab_size):
            np.add.at(counts, sample.input_ids[sample.loss_mask], 1)
        if not counts.any():
            raise errors.UserError(f"{folder / samples.FILE}: no loss tokens in it")
        counts_of_each.append(counts)
    counts = merge_counts(counts_of_each, weights)
    always = np.zeros(model.vocab_size, dtype=bool)
    always[[i for i in special if i < model.vocab_size and counts[i]]] = True
    always[[i for i in model.end_ids if i < model.vocab_size]] = True
    chosen, filler = choose_tokens(counts, always, size)
    d2t, t2d = build_map(chosen, model.vocab_size)
    covered = coverage_by_size(counts)
    coverage = float(counts[t2d].sum() / counts.sum())
    distinct = int((counts > 0).sum())
    total = int(sum(c.sum() for c in counts_of_each))
    by_size = {str(n): round(covered(n), 6) for n in SIZES}
    told = [n for n in SIZES if n < model.vocab_size and n != size]
    others = ", ".join(f"{n}: {100 * covered(n):.2f}%" for n in told)
    text = (
        f"{size} of {model.vocab_size} tokens cover {100 * coverage:.2f}% of {total}"
        f"{' weighted' if weights else ''} loss tokens{others and f' (other sizes: {others})'};"
        f" {distinct} distinct, {int(always.sum())} special always in, {filler} filler slots"
    )
    if args.dry_run:
        progress.log(f"vocab: dry run: {text}; nothing was written")
        return

    # ---------------------------------------------------------------- write
    output.lock(state)
    output.empty()
    final = {
        "loss_tokens": total,
        "distinct_tokens": distinct,
        "coverage": coverage,
        "coverage_by_size": by_size,
        "special_tokens": int(always.sum()),
        "filler_slots": filler,
    }
    with (
        artifacts.atomic_file(out / "d2t.npy") as d2t_file,
        artifacts.atomic_file(out / "t2d.npy") as t2d_file,
    ):
        files = d2t_file, t2d_file
        for file, array in zip(files, (d2t, t2d), strict=True):
            data = io.BytesIO()  # of a full disk numpy says how many items it wrote
            np.save(data, array, allow_pickle=False)
            file.write(data.getvalue())
            file.flush()
        # before the files have their names: a map without a manifest is taken for somebody else's
        digest = files_hash(Path(f.name) for f in files)
        seconds = time.monotonic() - started
        output.finish(final, digest, seconds)
    draw_coverage(out / "coverage.png", counts, size)
    progress.log(f"vocab: {text}; {progress.duration(seconds)} -> {out}")


def special_ids(model_path: str, model) -> set[int]:
    """Ids of the tokenizer's added special tokens, read from its files without loading it."""
    from common.verifier.files import optional_file

    found = set(model.end_ids)
    for name, ids_of in (
        ("tokenizer.json", lambda x: [t["id"] for t in x.get("added_tokens") or []]),
        ("added_tokens.json", lambda x: x.values()),
        ("tokenizer_config.json", lambda x: (x.get("added_tokens_decoder") or {}).keys()),
    ):
        path = optional_file(model_path, name)
        try:
            found |= {int(i) for i in ids_of(artifacts.read_json(path))} if path else set()
        except (TypeError, KeyError, ValueError, AttributeError) as e:
            raise errors.UserError(
                f"{path}: its added tokens are not as tokenizers write them ({errors.one_line(e)});"
                " download the file again"
            ) from None
    return found


if __name__ == "__main__":
    errors.run(main)
