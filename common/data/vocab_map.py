"""The map between the verifier's vocabulary and the draft's smaller one.

d2t int64 [draft_vocab]: target id = draft id + d2t[draft id] (an offset, as vLLM reads it).
t2d bool [target_vocab]: whether a target token has a draft id. Draft ids ascend with
target ids.
"""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.artifacts import atomic_file, read_json, sha256_file, sha256_json
from common.data.samples import FILE, prepared_folder, read_samples
from common.data.sources import weight_of
from common.errors import UserError, one_line
from common.manifest import read_manifest
from common.verifier.config import Verifier
from common.verifier.files import optional_file

# What a share of all loss tokens is counted in; any token seen at all stays over 0.
SHARES = 2**40
MAP_FILES = ("d2t.npy", "t2d.npy")


class VocabMap(NamedTuple):
    """The map of the module's docstring."""

    d2t: np.ndarray  # int64 [draft_vocab], offsets
    t2d: np.ndarray  # bool [target_vocab]


# ---------------------------------------------------------------- counting and choosing


def parse_prepared(texts: list[str]) -> tuple[list[Path], list[float] | None]:
    """(prepared folders, weights if given) of `PATH[,weight=..]`."""
    folders, weights = [], []
    for text in texts:
        path, comma, weight = text.partition(",weight=")
        folders.append(prepared_folder(path))
        if comma:
            weights.append(weight_of(weight, f"--prepared-data {text}"))
    if weights and len(weights) < len(folders):
        raise UserError("--prepared-data: give all of them a weight, or none")
    return folders, weights or None


def special_ids(verifier: Verifier) -> set[int]:
    """Ids of the tokenizer's added special tokens, read from its files without loading it."""
    found = set(verifier.end_ids)
    for name, ids_of in (
        ("tokenizer.json", lambda x: [t["id"] for t in x.get("added_tokens") or []]),
        ("added_tokens.json", lambda x: x.values()),
        ("tokenizer_config.json", lambda x: (x.get("added_tokens_decoder") or {}).keys()),
    ):
        path = optional_file(verifier.path, name)
        try:
            found |= {int(i) for i in ids_of(read_json(path))} if path else set()
        except (TypeError, KeyError, ValueError, AttributeError) as e:
            raise UserError(
                f"{path}: its added tokens are not as tokenizers write them ({one_line(e)});"
                " download the file again"
            ) from None
    return found


def count_loss_tokens(folder: Path, max_samples: int | None, vocab_size: int) -> np.ndarray:
    """How often each token is a loss token in a prepared folder, int64 [target_vocab]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in read_samples(folder, max_samples, vocab_size):
        np.add.at(counts, sample.input_ids[sample.loss_mask], 1)
    if not counts.any():
        raise UserError(f"{folder / FILE}: no loss tokens in it")
    return counts


def merge_counts(counts: list[np.ndarray], weights: list[float] | None) -> np.ndarray:
    """Loss tokens of several sets, int64 [target_vocab]: summed, or each set scaled to its share
    of the weights."""
    if weights is None:
        return np.sum(counts, axis=0)
    weights = [w / max(weights) for w in weights]
    shares = [w / sum(weights) * SHARES / c.sum() for w, c in zip(weights, counts, strict=True)]
    scaled = [np.ceil(c * s) for c, s in zip(counts, shares, strict=True)]
    return np.sum(scaled, axis=0).astype(np.int64)


def coverage_by_size(counts: np.ndarray) -> Callable[[int], float]:
    """Share of loss tokens that the n most frequent ones cover, as a function of n."""
    reached = np.cumsum(np.sort(counts)[::-1])
    return lambda n: float(reached[min(n, len(reached)) - 1] / reached[-1])


def draw_coverage(path: Path, counts: np.ndarray, size: int) -> None:
    """A picture of coverage against the size of the draft's vocabulary."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    covered = coverage_by_size(counts)
    sizes = np.unique(np.geomspace(min(256, len(counts)), len(counts), 200).astype(int))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.semilogx(sizes, [100 * covered(int(n)) for n in sizes], base=2)
    axes.axvline(size, linestyle="--", color="grey")
    axes.set_xlabel(f"tokens in the draft's vocabulary (dashed: {size})")
    axes.set_ylabel("% of loss tokens covered")
    axes.grid(alpha=0.3)
    with atomic_file(path) as f:
        figure.savefig(f, format="png", dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def always_chosen(counts: np.ndarray, special: set[int], verifier: Verifier) -> np.ndarray:
    """Tokens that are in the draft's vocabulary whatever their count, bool [target_vocab]: those
    that end a turn, and special ones that are loss tokens at all."""
    size = len(counts)
    always = np.zeros(size, dtype=bool)
    always[[i for i in special if i < size and counts[i]]] = True
    always[[i for i in verifier.end_ids if i < size]] = True
    return always


def choose_tokens(
    counts: np.ndarray, always: np.ndarray, draft_vocab_size: int
) -> tuple[np.ndarray, int]:
    """Choose the target tokens of the draft's vocabulary.

    Args:
        counts: int64 [target_vocab], how often each token is a loss token.
        always: bool [target_vocab], tokens that are in whatever their count.
        draft_vocab_size: slots, at most target_vocab.

    Returns:
        (ascending target ids int64 [draft_vocab_size], filler slots). Order: `always`, then
        by count, ties to the lower id; slots that no counted token fills take the lowest
        unused ids (never drafted often, harmless).
    """
    if int(always.sum()) > draft_vocab_size:
        raise UserError(
            f"--draft-vocab-size {draft_vocab_size}: {int(always.sum())} special tokens alone need"
            " more slots"
        )
    rank = counts.astype(np.int64) + np.where(always, np.int64(counts.sum()) + 1, 0)
    order = np.argsort(-rank, kind="stable")  # stable: ties keep the lower id first
    chosen = np.sort(order[:draft_vocab_size])
    return chosen, int((rank[chosen] == 0).sum())


def build_map(chosen: np.ndarray, target_vocab_size: int) -> VocabMap:
    """The map of the chosen target ids, int64 [draft_vocab] ascending."""
    t2d = np.zeros(target_vocab_size, dtype=bool)
    t2d[chosen] = True
    d2t = chosen.astype(np.int64) - np.arange(len(chosen), dtype=np.int64)
    return VocabMap(d2t, t2d)


# ---------------------------------------------------------------- files


def files_hash(files: Iterable[Path]) -> str:
    """Hash of a map's files, d2t's and t2d's, as the manifest's content holds it."""
    return sha256_json([sha256_file(path) for path in files])


@contextlib.contextmanager
def writing_map(folder: Path, vocab_map: VocabMap) -> Iterator[str]:
    """Write a map's files, which have their names when the block ends; yields their hash."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(atomic_file(folder / name)) for name in MAP_FILES]
        for file, array in zip(files, vocab_map, strict=True):
            data = io.BytesIO()  # of a full disk numpy says how many items it wrote
            np.save(data, array, allow_pickle=False)
            file.write(data.getvalue())
            file.flush()
        yield files_hash(Path(file.name) for file in files)


def load_map(folder: Path, vocab_size: int) -> VocabMap:
    """Read a map; UserError unless its arrays are each other's inverse over `vocab_size`, and
    those that the manifest describes."""
    manifest = read_manifest(folder, "vocab")
    d2t, t2d = (
        read_array(folder / name, dtype)
        for name, dtype in zip(MAP_FILES, (np.int64, np.bool_), strict=True)
    )
    targets = d2t + np.arange(len(d2t))
    fits = len(t2d) == vocab_size and len(d2t) > 0
    if not fits or not np.array_equal(targets, np.flatnonzero(t2d)):
        raise UserError(
            f"{folder}: d2t ({len(d2t)}) and t2d ({len(t2d)}) are not a map of the verifier's"
            f" {vocab_size} tokens; run 02 again"
        )
    data = files_hash(folder / name for name in MAP_FILES)
    if manifest.stage.content_sha256(data) != manifest.content_sha256:
        raise UserError(
            f"{folder}: its map is not the one that its manifest describes; run 02 with --overwrite"
        )
    return VocabMap(d2t, t2d)


def read_array(path: Path, dtype: type[np.generic]) -> np.ndarray:
    """A one-dimensional .npy of this dtype; UserError for anything else."""
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}; run 02_build_vocab_map.py first") from None
    except (ValueError, EOFError) as e:
        raise UserError(f"{path}: not a readable .npy file ({e}); run 02 again") from None
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path}: not a readable .npy file (an archive); run 02 again")
    if array.ndim != 1 or array.dtype != dtype:
        raise UserError(
            f"{path}: is {array.dtype} {array.shape}, expected {np.dtype(dtype)} of one"
            " dimension; run 02 again"
        )
    return array
