"""Stage 2: the draft's vocabulary, the verifier's most frequent loss tokens.

Reads one or several tokenized_data.jsonl and writes OUTPUT_DIR/d2t.npy (int64 offsets), t2d.npy
(bool) and coverage.png. Always in are the end-of-turn tokens, and of the tokenizer's added tokens
those that occur at loss positions.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import artifacts, cli, errors, progress
from common.data.settings import VocabSettings
from common.manifest import Output, Stage

if TYPE_CHECKING:
    import numpy as np

    from common.data.vocab_map import VocabMap
    from common.verifier.config import Verifier

STAGE = "vocab"
SIZES = 8000, 16000, 32000, 64000  # vocabularies whose coverage is recorded beside the chosen one


# fmt: off
def parse_args() -> VocabSettings:
    p = cli.Parser(STAGE, __doc__)
    p.add_common("--model-path")
    p.add_argument("--prepared-data", "--data-path", type=cli.path_text, nargs="+", metavar="PATH",
        help="folders written by 01, or the files in them; of several, PATH,weight=.. is a share")
    p.add_common("--output-dir", "--max-samples")
    p.add_argument("--draft-vocab-size", type=cli.positive_int, default=32000, metavar="TOKENS",
        help="tokens that the draft can propose")
    p.add_common("--dry-run", "--overwrite", "--trust-remote-code", "--seed")
    p.need("--model-path", "--prepared-data", "--output-dir")
    return cli.as_settings(p.parse(), VocabSettings)
# fmt: on


def main() -> None:
    settings = parse_args()
    progress.quiet_libraries()
    started = time.monotonic()
    out, size = Path(settings.output_dir), settings.draft_vocab_size

    # ---------------------------------------------------------------- check
    from common.data import samples, vocab_map
    from common.verifier.config import load_verifier

    verifier = load_verifier(settings.model_path)
    folders, weights = vocab_map.parse_prepared(settings.prepared_data)
    artifacts.check_apart(out, settings.model_path, *folders)
    if size > verifier.vocab_size:
        raise errors.UserError(
            f"--draft-vocab-size {size} is over the verifier's {verifier.vocab_size} tokens"
        )
    special = vocab_map.special_ids(verifier)
    prepared = [samples.prepared_identity(folder) for folder in folders]
    for folder in folders:
        samples.check_tokenizer(folder, verifier)
    stage = stage_of(settings, verifier, weights, special, prepared)
    output = Output(out, stage, settings.overwrite)
    state = output.earlier_run()
    if state == "complete":
        progress.log(f"vocab: {out} is complete (--overwrite makes it again)")
        return

    # ---------------------------------------------------------------- work
    each = [
        vocab_map.count_loss_tokens(folder, settings.max_samples, verifier.vocab_size)
        for folder in folders
    ]
    counts_V = vocab_map.merge_counts(each, weights)
    always_V = vocab_map.always_chosen(counts_V, special, verifier)
    chosen, filler = vocab_map.choose_tokens(counts_V, always_V, size)
    built = vocab_map.build_map(chosen, verifier.vocab_size)
    loss_tokens = int(sum(counts.sum() for counts in each))
    figures = coverage_figures(counts_V, built, loss_tokens)
    figures |= {"special_tokens": int(always_V.sum()), "filler_slots": filler}
    text = summary(figures, size, verifier.vocab_size, weights is not None)
    if settings.dry_run:
        progress.log(f"vocab: dry run: {text}; nothing was written")
        return

    # ---------------------------------------------------------------- write
    output.lock(state)
    output.empty()
    with vocab_map.writing_map(out, built) as digest:
        # before the files have their names: a map without a manifest is taken for somebody else's
        seconds = time.monotonic() - started
        output.finish(figures, digest, seconds)
    vocab_map.draw_coverage(out / "coverage.png", counts_V, size)
    progress.log(f"vocab: {text}; {progress.duration(seconds)} -> {out}")


def stage_of(
    settings: VocabSettings,
    verifier: "Verifier",
    weights: list[float] | None,
    special: set[int],
    prepared: list[str],
) -> Stage:
    """What decides the map; hashed into the manifest."""
    decisive = {
        "draft_vocab_size": settings.draft_vocab_size,
        "target_vocab_size": verifier.vocab_size,
        "max_samples": settings.max_samples,
        "weights": weights,
        "special_ids": artifacts.sha256_json(sorted(special)),
    }
    return Stage(STAGE, decisive, {"prepared": prepared if len(prepared) > 1 else prepared[0]})


def coverage_figures(counts_V: "np.ndarray", built: "VocabMap", loss_tokens: int) -> dict[str, Any]:
    """What the map covers of the loss tokens, for the manifest.

    Args:
        counts_V: int64 [target_vocab], loss tokens after weighting; loss_tokens: before it.
    """
    from common.data.vocab_map import coverage_by_size

    covered = coverage_by_size(counts_V)
    return {
        "loss_tokens": loss_tokens,
        "distinct_tokens": int((counts_V > 0).sum()),
        "coverage": float(counts_V[built.t2d].sum() / counts_V.sum()),
        "coverage_by_size": {str(n): round(covered(n), 6) for n in SIZES},
    }


def summary(figures: dict[str, Any], size: int, vocab_size: int, weighted: bool) -> str:
    """What the map covers, for a person."""
    others = ", ".join(
        f"{n}: {100 * share:.2f}%"
        for n, share in figures["coverage_by_size"].items()
        if int(n) < vocab_size and int(n) != size
    )
    return (
        f"{size} of {vocab_size} tokens cover {100 * figures['coverage']:.2f}% of"
        f" {figures['loss_tokens']}{' weighted' if weighted else ''} loss tokens"
        f"{others and f' (other sizes: {others})'}; {figures['distinct_tokens']} distinct,"
        f" {figures['special_tokens']} special always in, {figures['filler_slots']} filler slots"
    )


if __name__ == "__main__":
    errors.run(main)
