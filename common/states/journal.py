"""What of a hidden-states folder is done: journal.jsonl, a line a settled forward pass.

    {"unit": number of the pass in plan.json, "seconds": since the line before,
     "checksums": {index: xxh3_128 of the sample's file},
     "missing": {index: why it has no file}}

A line is written once the pass's files are under their names, which they get when their
bytes are on the disk, so what it names is whole; a resume looks at sizes only and `--verify`
reads the bytes. A pass that ran again has a later line, which holds. A power cut can lose
the lines since the last sync (a second of passes), which then run again.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from common.artifacts import (
    atomic_file,
    decode_json,
    fsync_folder,
    read_json,
    sha256_json,
    write_json,
)
from common.errors import UserError
from common.progress import log
from common.states.files import file_bytes, hidden_file

JOURNAL = "journal.jsonl"
PLAN = "plan.json"
LENGTHS = "sample_lengths.json"
SYNC_EVERY_SECONDS = 1.0


def write_plan(folder: Path, units: list[list[int]], lengths: dict[int, int]) -> None:
    """Note the planned passes and their samples' lengths, so that a resume need not read all
    samples again."""
    write_json(folder / LENGTHS, {str(i): n for i, n in sorted(lengths.items())})
    write_json(folder / PLAN, {"units": units})


def read_plan(folder: Path) -> tuple[list[list[int]], dict[int, int]]:
    """Return (units, lengths) of an earlier run with the same settings and data."""
    if not (folder / PLAN).exists():
        raise UserError(
            f"{folder}: has no {PLAN}, an earlier version made it; --overwrite makes it again"
        )
    try:
        units = [[int(i) for i in unit] for unit in read_json(folder / PLAN)["units"]]
        found = {int(i): int(n) for i, n in read_json(folder / LENGTHS).items()}
        if not all(units) or sum(map(len, units)) != len(found) or not found:
            raise ValueError("other samples")
        return units, {i: found[i] for unit in units for i in unit}
    except (UserError, KeyError, TypeError, ValueError, OverflowError):
        raise UserError(
            f"{folder / PLAN}, {LENGTHS}: missing or damaged; --overwrite makes the folder again"
        ) from None


def read_entries(folder: Path) -> dict[int, dict[str, Any]]:
    """Unit → its last whole line."""
    path = folder / JOURNAL
    entries: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = decode_json(line)
            unit = int(entry["unit"])
            entries[unit] = {
                "unit": unit,
                "seconds": float(entry["seconds"]),
                "checksums": {str(int(i)): str(h) for i, h in entry["checksums"].items()},
                "missing": {str(int(i)): str(why) for i, why in entry["missing"].items()},
            }
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
        ):  # the line that a kill cut
            continue
    return entries


def settled_units(
    folder: Path, units: list[list[int]], lengths: dict[int, int], shape: tuple[int, int, str]
) -> dict[int, dict[str, Any]]:
    """The journal's entries of passes whose files are all there in their sizes.

    Args:
        shape: (layers, hidden size, dtype) of the files.
    """
    sizes = {}
    for rows in folder.glob("rows_*-*"):
        with os.scandir(rows) as files:
            sizes.update({(rows.name, f.name): f.stat().st_size for f in files})
    expected = {n: file_bytes(n, *shape) for n in set(lengths.values())}
    done = {}
    for unit, entry in read_entries(folder).items():
        members = {str(i) for i in units[unit]} if unit < len(units) else set()
        if members != {*entry["checksums"], *entry["missing"]} or not members:
            continue
        for i in entry["checksums"]:
            path = hidden_file(folder, int(i))
            size = sizes.get((path.parent.name, path.name))
            if size != expected[lengths[int(i)]]:
                found = "missing" if size is None else f"{size} bytes"
                log(f"extract: {path} is {found}; its forward pass runs again")
                break
        else:
            done[unit] = entry
    return done


def checksums(done: dict[int, dict[str, Any]]) -> dict[int, str]:
    """Sample index → checksum of its file, ascending."""
    found = {int(i): h for entry in done.values() for i, h in entry["checksums"].items()}
    return dict(sorted(found.items()))


def missing_samples(done: dict[int, dict[str, Any]]) -> dict[int, str]:
    """Sample index → why it has no file, ascending."""
    found = {int(i): why for entry in done.values() for i, why in entry["missing"].items()}
    return dict(sorted(found.items()))


def digest(found: dict[int, str]) -> str:
    """Hash of the data: of every sample's index and checksum."""
    return sha256_json([[i, h] for i, h in sorted(found.items())])


class Journal:
    """Appends settled passes; `done` holds those of all runs. Closed at the end of a `with`."""

    def __init__(self, folder: Path, done: dict[int, dict[str, Any]]):
        self.folder, self.done = folder, done
        self.settled: set[int] = set()  # by this run
        with atomic_file(folder / JOURNAL, "w") as f:  # without what a kill cut
            f.writelines(json.dumps(entry) + "\n" for entry in done.values())
        self._file = open(folder / JOURNAL, "a", encoding="utf-8")  # noqa: SIM115 (see __exit__)
        self._folders: set[Path] = set()
        self._synced = time.monotonic()

    def add(
        self, unit: int, seconds: float, checksums: dict[int, str], missing: dict[int, str]
    ) -> None:
        """Note a pass whose files are written."""
        before = self.done.get(unit, {"seconds": 0.0, "checksums": {}, "missing": {}})
        tried = {str(i) for i in [*checksums, *missing]}
        left = {i: why for i, why in before["missing"].items() if i not in tried}
        entry = {
            "unit": unit,
            "seconds": round(before["seconds"] + seconds, 4),
            "checksums": before["checksums"] | {str(i): h for i, h in checksums.items()},
            "missing": left | {str(i): why for i, why in missing.items()},
        }
        self._folders |= {hidden_file(self.folder, i).parent for i in checksums}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()  # from here on a kill does not lose it
        self.done[unit] = entry
        self.settled.add(unit)
        if time.monotonic() - self._synced > SYNC_EVERY_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Make the lines, and the names of their files, last through a power cut."""
        for rows in self._folders:
            fsync_folder(rows)
        os.fsync(self._file.fileno())
        self._folders, self._synced = set(), time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        self._file.close()
