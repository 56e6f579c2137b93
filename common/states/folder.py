"""A finished hidden-states folder, or the shards of one, as 04 and the evaluation see it."""

import re
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from common.artifacts import read_json
from common.data.samples import read_samples
from common.errors import UserError
from common.manifest import MANIFEST, Stage, read_manifest
from common.progress import Progress, log
from common.states.files import FP8, check_hidden_file, file_checksum, hidden_file
from common.states.journal import (
    LENGTHS,
    checksums,
    digest,
    missing_samples,
    read_entries,
    read_plan,
)

SHARD = "shard-{}-of-{}"
VERIFY_AHEAD = 64  # files read beside the one whose result is waited for


def shard_folder(folder: Path, index: int, count: int) -> Path:
    """Folder of one shard below --output-dir."""
    return folder / SHARD.format(index, count)


@dataclass(frozen=True)
class HiddenFolder:
    """Samples with hidden states, of one folder or of all shards together.

    `settings` and `content_sha256` are those of an unsharded folder with the same files.
    """

    path: Path
    settings: dict[str, Any]
    inputs: dict[str, str]
    content_sha256: str
    lengths: dict[int, int]  # sample index → tokens, ascending
    folders: dict[int, Path]  # sample index → folder that holds its file

    @property
    def shape(self) -> tuple[int, int, str]:
        """(layers, hidden size, dtype) of the files."""
        s = self.settings
        return len(s["layers"]), s["hidden_size"], s["dtype"]

    def file(self, index: int) -> Path:
        return hidden_file(self.folders[index], index)


def open_hidden(path: Path, lone_shard: bool = False) -> HiddenFolder:
    """Read the reports of a finished folder, or of all its shards.

    UserError when one is missing, unfinished, made with other settings or data, or not the
    shard that its name says; and for a shard without the others unless `lone_shard`.
    """
    whole = (path / MANIFEST).exists()
    parts = [path] if whole else shard_folders(path)
    if not parts:
        read_json(path / MANIFEST)  # says what is wrong
    manifests = [read_manifest(part, "extract") for part in parts]
    first = manifests[0]
    settings = {k: v for k, v in first.stage.settings.items() if k != "shard"}
    for n, (part, manifest) in enumerate(zip(parts, manifests, strict=True)):
        theirs = dict(manifest.stage.settings)
        shard = theirs.pop("shard", None)
        if whole and shard and not lone_shard:
            raise UserError(
                f"{part}: is shard {shard[0]} of {shard[1]}; pass the folder that holds all of them"
            )
        if not whole and shard != [n, len(parts)]:
            raise UserError(f"{part}: holds shard {shard}, not the one that its name says")
        if (theirs, manifest.stage.inputs) != (settings, first.stage.inputs):
            raise UserError(
                f"{part}: was made with other settings or data than {parts[0]}; make one of them"
                " again"
            )
    lengths: dict[int, int] = {}
    folders: dict[int, Path] = {}
    sums: dict[int, str] = {}
    for part, manifest in zip(parts, manifests, strict=True):
        try:
            found = {int(i): int(n) for i, n in read_json(part / LENGTHS).items()}
            missing = {int(i) for i in manifest.more.get("missing", {})}
        except (TypeError, ValueError):
            raise UserError(f"{part / LENGTHS}: is damaged; make the folder again") from None
        found = {i: n for i, n in found.items() if i not in missing}
        if len(found) != manifest.counts.get("num_samples"):
            raise UserError(
                f"{part / LENGTHS}: lists {len(found)} samples, {MANIFEST} says"
                f" {manifest.counts.get('num_samples')}; make the folder again with --overwrite"
            )
        lengths |= found
        folders |= dict.fromkeys(found, part)
        if not whole:
            sums |= checksums(read_entries(part))
    stage = Stage("extract", settings, first.stage.inputs)
    content = first.content_sha256 if whole else stage.content_sha256(digest(sums))
    lengths = dict(sorted(lengths.items()))
    return HiddenFolder(path, settings, first.stage.inputs, content, lengths, folders)


def refuse_shards(path: Path) -> None:
    """UserError when a folder holds shards, which an unsharded run would hide."""
    found = sorted(p.name for p in path.glob(SHARD.format("*", "*")))
    if found:
        raise UserError(
            f"{path}: holds {found[0]}; pass --num-shards and --shard-index, or choose another"
            " --output-dir"
        )


def shard_folders(path: Path) -> list[Path]:
    """All shards below a folder; UserError when some are not there."""
    found: dict[int, dict[int, Path]] = {}
    for p in path.glob(SHARD.format("*", "*")):
        match = re.fullmatch(SHARD.format(r"(\d+)", r"(\d+)"), p.name)
        if match and p.is_dir():
            found.setdefault(int(match[2]), {})[int(match[1])] = p
    if len(found) > 1:
        raise UserError(
            f"{path}: holds shards of {' and of '.join(map(str, sorted(found)))}; keep one set"
        )
    for count, parts in found.items():
        absent = [i for i in range(count) if i not in parts]
        if absent:
            raise UserError(
                f"{path}: shards {' '.join(map(str, absent))} of {count} are not there; run 03 with"
                f" --num-shards {count} --shard-index {absent[0]}, or copy them here"
            )
        return [parts[i] for i in range(count)]
    return []


# ---------------------------------------------------------------- --verify


def verify_folder(folder: HiddenFolder, prepared: Path) -> tuple[int, int, int, int]:
    """Read every byte of a finished folder again.

    Checks the report against the journal, counts, lengths, token ids against the prepared data,
    that all states are finite, and checksums. Returns (samples, tokens, bytes, samples missing);
    UserError after the last file when any is wrong, each of which is logged.
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
            f"{folder.path}: {wrong} of {len(sums)} files are wrong (named above); delete them and"
            " run the same command without --verify, it makes them again"
        )
    return len(sums), sum(folder.lengths.values()), size, missing


def checked_journal(part: Path) -> tuple[dict[int, str], int]:
    """(checksums, number of missing samples) of one folder, whose journal must be complete and
    the one that its report was written from."""
    manifest, entries = read_manifest(part, "extract"), read_entries(part)
    units, _ = read_plan(part)
    unsettled = [u for u in range(len(units)) if u not in entries]
    if unsettled:
        raise UserError(f"{part}: pass {unsettled[0]} is not in its journal; run 03 again")
    sums = checksums(entries)
    if manifest.stage.content_sha256(digest(sums)) != manifest.content_sha256:
        raise UserError(f"{part}: its report is not of the files in its journal; run 03 again")
    return sums, len(missing_samples(entries))


def file_problem(folder: HiddenFolder, index: int, ids_T: np.ndarray, checksum: str) -> str | None:
    """What is wrong with a sample's file, or None."""
    path = folder.file(index)
    if folder.lengths[index] != len(ids_T):
        return f"{folder.lengths[index]} tokens, the prepared sample has {len(ids_T)}"
    try:
        header = check_hidden_file(path, len(ids_T), *folder.shape)
    except UserError as e:
        return str(e).removeprefix(f"{path}: ")
    if file_checksum(path) != checksum:
        return "its bytes are not those that were written (checksum)"
    begin = path.stat().st_size - max(
        v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"
    )
    data = np.memmap(path, np.uint8, "r")

    def tensor(name: str, dtype: str) -> np.ndarray:
        start, end = header[name]["data_offsets"]
        return data[begin + start : begin + end].view(dtype)

    if not np.array_equal(tensor("token_ids", "<i8"), ids_T):
        return "its token_ids are not the prepared sample's"
    states = tensor("hidden_states", "u1")
    dtype = folder.shape[2]
    if not all_finite(states, dtype):
        return "its hidden states hold NaN or Inf"
    if dtype == FP8 and not all_finite(tensor("hidden_states_scale", "u1"), "float32"):
        return "its scales hold NaN or Inf"
    return None


def all_finite(data: np.ndarray, dtype: str) -> bool:
    """Whether raw bytes (uint8) of a dtype hold finite numbers only: no exponent of all ones
    (float8_e4m3fn: no NaN, it has no infinities)."""
    kind, mask = {
        "float32": ("<u4", 0x7F800000),
        "bfloat16": ("<u2", 0x7F80),
        "float16": ("<u2", 0x7C00),
        FP8: ("u1", 0x7F),
    }[dtype]
    bits = data.view(kind)
    chunk = 1 << 22
    return not any(
        bool(((bits[i : i + chunk] & mask) == mask).any()) for i in range(0, len(bits), chunk)
    )
