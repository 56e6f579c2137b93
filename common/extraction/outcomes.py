"""What became of each sample of the batches in flight: written, to run again, or given up."""

import time
from pathlib import Path

from common.data.samples import Sample
from common.extraction.batching import Batch
from common.extraction.writer import WrittenBatch
from common.progress import Progress, log
from common.states.files import hidden_file
from common.states.journal import Entry, Journal


class Outcomes:
    """Collects the results of batches until each of a batch's samples is written or given up.

    A batch that fails runs again by itself first: what failed may have lain in the batch before
    it, and its samples' files then are those of the plan. Only what fails again runs alone.
    """

    def __init__(self, samples: dict[int, Sample], out: Path, journal: Journal, bar: Progress):
        self.samples, self.out, self.journal, self.bar = samples, out, journal, bar
        self.failed: list[Batch] = []  # to run again, all or some of their samples
        self._members: dict[int, list[int]] = {}  # of batches in flight
        self._checksums: dict[int, dict[int, str]] = {}
        self._missing: dict[int, dict[int, str]] = {}
        self._again: set[int] = set()  # batches that ran by themselves
        self._alone: set[int] = set()  # samples that ran alone
        self.failed_batches: list[str] = []  # why those in a row without a good sample failed
        self._mark = time.monotonic()

    def open(self, batch: Batch) -> None:
        """A batch begins."""
        self._members[batch.number] = batch.indices
        self._checksums[batch.number], self._missing[batch.number] = {}, {}

    def add(self, results: list[WrittenBatch]) -> None:
        """Note results of the writers; OSError where they could not write."""
        for result in results:
            result.raise_error()
            self._checksums[result.number] |= result.checksums
            if result.bad:
                self.fail(result.number, result.bad)
            self._note_if_done(result.number)

    def fail(self, number: int, reasons: dict[int, str]) -> None:
        """Have a batch run again because of these samples, or they alone, or give up those that
        ran alone."""
        members = self._members[number]
        if number not in self._again:
            self._again.add(number)
            if len(members) == 1:
                self._alone.update(members)
            complete = Batch(number, members)
            self.open(complete)
            self.failed.append(complete)
            return
        for index, why in reasons.items():
            if index in self._alone:
                self._give_up(number, index, why)
            else:
                self._alone.add(index)
                self.failed.append(Batch(number, [index]))
                log(f"extract: sample {self.samples[index].id!r} runs alone: {why}")
        self._note_if_done(number)

    def _give_up(self, number: int, index: int, why: str) -> None:
        hidden_file(self.out, index).unlink(missing_ok=True)  # an earlier run's
        sample = self.samples[index]
        log(f"extract: sample {sample.id!r} (line {index + 1}) is skipped: {why}")
        self._missing[number][index] = why

    def _note_if_done(self, number: int) -> None:
        """Note the batch in the journal if all its samples are written or given up."""
        if number not in self._members:
            return
        members = self._members[number]
        checksums, missing = self._checksums[number], self._missing[number]
        if len(checksums) + len(missing) < len(members):
            return
        now = time.monotonic()
        self.journal.add(Entry(number, now - self._mark, checksums, missing))
        self._mark = now
        self.bar.add(sum(len(self.samples[i].input_ids) for i in members))
        del self._members[number], self._checksums[number], self._missing[number]
        if checksums:
            self.failed_batches.clear()
        else:
            index, why = next(iter(missing.items()))
            self.failed_batches.append(f"line {index + 1}: {why}")
