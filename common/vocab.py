"""The map between the verifier's vocabulary and the draft's smaller one.

d2t int64 [draft_vocab]: target id = draft id + d2t[draft id] (an offset, as vLLM reads it).
t2d bool [target_vocab]: whether a target token has a draft id. Draft ids ascend with
target ids.
"""

from pathlib import Path

import numpy as np

from common.cli import UserError


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


def build_map(chosen: np.ndarray, target_vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (d2t int64 [draft_vocab] offsets, t2d bool [target_vocab])."""
    t2d = np.zeros(target_vocab_size, dtype=bool)
    t2d[chosen] = True
    d2t = chosen.astype(np.int64) - np.arange(len(chosen), dtype=np.int64)
    return d2t, t2d


def load_map(folder: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Read (d2t, t2d) and check that they are each other's inverse over `vocab_size`."""
    arrays = []
    for name, dtype in (("d2t", np.int64), ("t2d", np.bool_)):
        path = folder / f"{name}.npy"
        try:
            array = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; run 02_build_vocab_map.py first") from None
        except (ValueError, EOFError) as e:
            raise UserError(f"{path}: not a readable .npy file ({e}); run 02 again") from None
        if not isinstance(array, np.ndarray):
            raise UserError(f"{path}: not a readable .npy file (an archive); run 02 again")
        if array.ndim != 1 or array.dtype != dtype:
            raise UserError(
                f"{path}: is {array.dtype} {array.shape}, expected {np.dtype(dtype)}; run 02 again"
            )
        arrays.append(array)
    d2t, t2d = arrays
    targets = d2t + np.arange(len(d2t))
    if len(t2d) != vocab_size or not np.array_equal(targets, np.flatnonzero(t2d)):
        raise UserError(
            f"{folder}: d2t ({len(d2t)}) and t2d ({len(t2d)}) are not a map of the verifier's"
            f" {vocab_size} tokens; run 02 again"
        )
    return d2t, t2d
