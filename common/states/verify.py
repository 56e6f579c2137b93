"""A finished hidden-states folder read again, to the byte (03's --verify)."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from common.data.samples import read_samples
from common.errors import UserError
from common.manifest import read_manifest
from common.progress import Progress, log
from common.states.files import FP8, check_hidden_file
from common.states.folder import HiddenFolder
from common.states.journal import (
    LENGTHS,
    checksums,
    data_sha256,
    missing_samples,
    read_entries,
    read_plan,
)
from common.states.values import states_problem
from common.tensor_files import file_checksum

VERIFY_AHEAD = 64  # files read beside the one whose result is waited for


@dataclass(frozen=True)
class Verified:
    """What was read: files, their tokens and bytes; samples that the folder does without."""

    files: int
    tokens: int
    bytes: int
    missing: int


def verify_folder(folder: HiddenFolder, prepared: Path) -> Verified:
    """Read every byte of a finished folder again.

    Checks the manifest against the journal, counts, lengths, token ids against the prepared data,
    checksums, and the states themselves (values.py). UserError after the last file when any is
    wrong, each of which is logged.
    """
    parts = sorted(set(folder.folders.values()))
    sums: dict[int, str] = {}
    missing = 0
    for part in parts:
        found, absent = checked_journal(part)
        sums |= found
        missing += absent
    if sums.keys() != folder.lengths.keys():
        odd = sorted(sums.keys() ^ folder.lengths.keys())
        raise UserError(
            f"{folder.path}: journal and {LENGTHS} differ over sample {odd[0]}; run 03 again"
        )
    strays = sum(len(list(part.glob("rows_*-*/hs_*.safetensors"))) for part in parts) - len(sums)
    if strays > 0:
        log(f"verify: {strays} files of {folder.path} are of no sample; nothing reads them")
    bar = Progress("verify", sum(folder.lengths.values()), "tokens")
    wrong, size = 0, 0
    waiting: deque[tuple[int, Future[str | None]]] = deque()
    last = max(folder.lengths) + 1
    with ThreadPoolExecutor(4) as pool:
        samples = read_samples(prepared, last, only=folder.lengths.keys())
        for sample in chain(samples, [None] * VERIFY_AHEAD):
            if sample is not None:
                i = sample.index
                job = pool.submit(file_problem, folder, i, sample.input_ids, sums[i])
                waiting.append((i, job))
            if waiting and (sample is None or len(waiting) > VERIFY_AHEAD):
                index, future = waiting.popleft()
                problem = future.result()
                if problem:
                    wrong += 1
                    log(f"verify: {folder.file(index)}: {problem}")
                else:
                    size += folder.file(index).stat().st_size
                bar.add(folder.lengths[index])
    bar.close()
    if wrong:
        raise UserError(
            f"{folder.path}: {wrong} of {len(sums)} files are wrong (named above); delete them"
            " and run the same command without --verify, it makes them again"
        )
    return Verified(len(sums), sum(folder.lengths.values()), size, missing)


def checked_journal(part: Path) -> tuple[dict[int, str], int]:
    """(checksums, number of missing samples) of one folder, whose journal must be complete and
    the one that its manifest was written from."""
    manifest, entries = read_manifest(part, "extract"), read_entries(part)
    unsettled = [n for n in range(len(read_plan(part).batches)) if n not in entries]
    if unsettled:
        raise UserError(f"{part}: batch {unsettled[0]} is not in its journal; run 03 again")
    sums = checksums(entries)
    if manifest.stage.content_sha256(data_sha256(sums)) != manifest.content_sha256:
        raise UserError(f"{part}: its manifest is not of the files in its journal; run 03 again")
    return sums, len(missing_samples(entries))


def file_problem(folder: HiddenFolder, index: int, ids_T: np.ndarray, checksum: str) -> str | None:
    """What is wrong with a sample's file, or None."""
    path = folder.file(index)
    if folder.lengths[index] != len(ids_T):
        return f"{folder.lengths[index]} tokens, the prepared sample has {len(ids_T)}"
    try:
        places = check_hidden_file(path, len(ids_T), folder.form)
    except UserError as e:
        return str(e).removeprefix(f"{path}: ")
    if file_checksum(path) != checksum:
        return "its bytes are not those that were written (checksum)"
    data = np.memmap(path, np.uint8, "r")

    def tensor(name: str, dtype: str) -> np.ndarray:
        return data[places[name].begin : places[name].end].view(dtype)

    if not np.array_equal(tensor("token_ids", "<i8"), ids_T):
        return "its token_ids are not the prepared sample's"
    scale = None
    if folder.form.dtype == FP8:
        scale = tensor("hidden_states_scale", "<f4").reshape(-1, folder.form.layers)
    return states_problem(tensor("hidden_states", "u1"), scale, folder.form, folder.layers)
