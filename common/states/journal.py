"""Which batches of a hidden-states folder are done: journal.jsonl, a line per finished batch.

    {"unit": number of the batch in plan.json, "seconds": since the line before,
     "checksums": {index: xxh3_128 of the sample's file},
     "missing": {index: why it has no file}}

A line is written once the batch's files are under their names, which they get when their
bytes are on the disk, so what it names is complete; a resume looks at sizes only and `--verify`
reads the bytes. A batch that ran again has a later line, which holds. A power cut can lose
the lines since the last sync (a second of batches), which then run again.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.artifacts import (
    atomic_file,
    decode_json,
    fsync_folder,
    read_json,
    sha256_json,
    write_json,
    writing,
)
from common.errors import UserError
from common.progress import log
from common.states.files import StatesFormat, file_bytes, hidden_file

JOURNAL = "journal.jsonl"
PLAN = "plan.json"
LENGTHS = "sample_lengths.json"
SYNC_EVERY_SECONDS = 1.0


@dataclass(frozen=True)
class Plan:
    """batches: the samples' indices of each planned forward pass; lengths: index → tokens."""

    batches: list[list[int]]
    lengths: dict[int, int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths.values())


@dataclass(frozen=True)
class Entry:
    """A finished batch.

    seconds: it took, over all runs; checksums: index → xxh3_128 of the sample's file; missing:
    index → why it has none.
    """

    batch: int
    seconds: float = 0.0
    checksums: dict[int, str] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)

    def line(self) -> str:
        numbers = {"unit": self.batch, "seconds": self.seconds}
        return json.dumps(numbers | {"checksums": self.checksums, "missing": self.missing}) + "\n"

    @classmethod
    def of_line(cls, line: bytes) -> "Entry":
        found = decode_json(line)
        return cls(
            int(found["unit"]),
            float(found["seconds"]),
            {int(i): str(checksum) for i, checksum in found["checksums"].items()},
            {int(i): str(why) for i, why in found["missing"].items()},
        )


def write_plan(folder: Path, plan: Plan) -> None:
    """Note the planned batches and their samples' lengths, so that a resume need not read all
    samples again."""
    write_json(folder / LENGTHS, {str(i): n for i, n in sorted(plan.lengths.items())})
    write_json(folder / PLAN, {"units": plan.batches})


def read_plan(folder: Path) -> Plan:
    """The plan of an earlier run with the same settings and data."""
    if not (folder / PLAN).exists():
        raise UserError(
            f"{folder}: has no {PLAN}, an earlier version made it; --overwrite makes it again"
        )
    try:
        batches = [[int(i) for i in batch] for batch in read_json(folder / PLAN)["units"]]
        found = {int(i): int(n) for i, n in read_json(folder / LENGTHS).items()}
        lengths = {i: found[i] for batch in batches for i in batch}
        if not all(batches) or not sum(map(len, batches)) == len(found) == len(lengths):
            raise ValueError("other samples")
        if min(lengths) < 0 or min(lengths.values()) < 1:
            raise ValueError("no samples")
        return Plan(batches, lengths)
    except (UserError, KeyError, TypeError, ValueError, OverflowError):
        raise UserError(
            f"{folder / PLAN}, {LENGTHS}: missing or damaged; --overwrite makes the folder again"
        ) from None


def read_entries(folder: Path) -> dict[int, Entry]:
    """Batch → its last complete line."""
    path = folder / JOURNAL
    entries: dict[int, Entry] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = Entry.of_line(line)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            continue  # the line that a kill cut
        entries[entry.batch] = entry
    return entries


def finished_batches(folder: Path, plan: Plan, form: StatesFormat) -> dict[int, Entry]:
    """The journal's entries of batches whose files are all there in their sizes."""
    sizes = {}
    for rows in folder.glob("rows_*-*"):
        with os.scandir(rows) as files:
            for f in files:
                if f.is_dir():
                    raise UserError(
                        f"{f.path}: is a folder, 03 writes a file of that name; move it"
                    )
                sizes[rows.name, f.name] = f.stat().st_size
    expected = {n: file_bytes(n, form) for n in set(plan.lengths.values())}
    done = {}
    for number, entry in read_entries(folder).items():
        members = set(plan.batches[number]) if number < len(plan.batches) else set()
        if members != {*entry.checksums, *entry.missing} or not members:
            continue
        for i in entry.checksums:
            path = hidden_file(folder, i)
            size = sizes.get((path.parent.name, path.name))
            if size != expected[plan.lengths[i]]:
                found = "missing" if size is None else f"{size} bytes"
                log(f"extract: {path} is {found}; its batch runs again")
                break
        else:
            done[number] = entry
    return done


def checksums(done: dict[int, Entry]) -> dict[int, str]:
    """Sample index → checksum of its file, ascending."""
    return dict(sorted((i, c) for entry in done.values() for i, c in entry.checksums.items()))


def missing_samples(done: dict[int, Entry]) -> dict[int, str]:
    """Sample index → why it has no file, ascending."""
    return dict(sorted((i, why) for entry in done.values() for i, why in entry.missing.items()))


def data_sha256(found: dict[int, str]) -> str:
    """Hash of the data: of every sample's index and checksum."""
    return sha256_json([[i, checksum] for i, checksum in sorted(found.items())])


class Journal:
    """Appends finished batches; `done` holds those of all runs. Closed at the end of a `with`."""

    def __init__(self, folder: Path, done: dict[int, Entry]):
        self.folder, self.done = folder, done
        self.finished: set[int] = set()  # by this run
        with atomic_file(folder / JOURNAL, "w") as f:  # without what a kill cut
            f.writelines(entry.line() for entry in done.values())
        self._file = open(folder / JOURNAL, "a", encoding="utf-8")  # noqa: SIM115 (see __exit__)
        self._folders: set[Path] = set()
        self._synced = time.monotonic()

    def add(self, new: Entry) -> None:
        """Note a batch whose files are written, or what was still missing of one noted before."""
        before = self.done.get(new.batch, Entry(new.batch))
        tried = {*new.checksums, *new.missing}
        left = {i: why for i, why in before.missing.items() if i not in tried}
        entry = Entry(
            new.batch,
            round(before.seconds + new.seconds, 4),
            before.checksums | new.checksums,
            left | new.missing,
        )
        self._folders |= {hidden_file(self.folder, i).parent for i in new.checksums}
        with writing(self.folder / JOURNAL):
            self._file.write(entry.line())
            self._file.flush()  # from here on a kill does not lose it
        self.done[entry.batch] = entry
        self.finished.add(entry.batch)
        if time.monotonic() - self._synced > SYNC_EVERY_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Make the lines, and the names of their files, last through a power cut."""
        for rows in self._folders:
            fsync_folder(rows)
        with writing(self.folder / JOURNAL):
            os.fsync(self._file.fileno())
        self._folders, self._synced = set(), time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        with writing(self.folder / JOURNAL):
            self._file.close()
