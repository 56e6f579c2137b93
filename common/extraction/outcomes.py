"""What became of each sample of the passes in flight: written, to run again, or given up."""

import time
from pathlib import Path

from common.data.samples import Sample
from common.progress import Progress, log
from common.states.files import hidden_file
from common.states.journal import Journal


class Results:
    """Collects the results of passes until each of a pass's samples is written or given up.

    A pass that fails runs again by itself first: what failed may have lain in the pass before
    it, and its samples' files then are those of the plan. Only what fails again runs alone.
    """

    def __init__(self, samples: dict[int, Sample], out: Path, journal: Journal, bar: Progress):
        self.samples, self.out, self.journal, self.bar = samples, out, journal, bar
        self.failed: list[tuple[int, list[int]]] = []  # (unit, samples) to run again
        self._members: dict[int, list[int]] = {}  # of passes in flight
        self._checksums: dict[int, dict[int, str]] = {}
        self._missing: dict[int, dict[int, str]] = {}
        self._again: set[int] = set()  # passes that ran by themselves
        self._alone: set[int] = set()  # samples that ran alone
        self.failed_passes: list[str] = []  # why those in a row without a good sample failed
        self._mark = time.monotonic()

    def open(self, unit: int, indices: list[int]) -> None:
        """A pass begins."""
        self._members[unit] = indices
        self._checksums[unit], self._missing[unit] = {}, {}

    def take(self, results: list[dict]) -> None:
        """Note results of the writers; OSError where they could not write."""
        for result in results:
            raise_write_error(result)
            unit = result["unit"]
            self._checksums[unit] |= result["checksums"]
            if result["bad"]:
                self.fail(unit, result["bad"], "its hidden states hold NaN or Inf")
            self._note_if_done(unit)

    def fail(self, unit: int, indices: list[int], why: str) -> None:
        """Have a pass or samples of it run again, or give up those that ran alone."""
        members = self._members[unit]
        if unit not in self._again:
            self._again.add(unit)
            if len(members) == 1:
                self._alone.update(members)
            self.open(unit, members)
            self.failed.append((unit, members))
            return
        for index in indices:
            if index in self._alone:
                self._give_up(unit, index, why)
            else:
                self._alone.add(index)
                self.failed.append((unit, [index]))
                log(f"extract: sample {self.samples[index].id!r} runs alone: {why}")
        self._note_if_done(unit)

    def _give_up(self, unit: int, index: int, why: str) -> None:
        hidden_file(self.out, index).unlink(missing_ok=True)  # an earlier run's
        sample = self.samples[index]
        log(f"extract: sample {sample.id!r} (line {index + 1}) is skipped: {why}")
        self._missing[unit][index] = why

    def _note_if_done(self, unit: int) -> None:
        """Note the pass in the journal if all its samples are written or given up."""
        if unit not in self._members:
            return
        members = self._members[unit]
        checksums, missing = self._checksums[unit], self._missing[unit]
        if len(checksums) + len(missing) < len(members):
            return
        now = time.monotonic()
        self.journal.add(unit, now - self._mark, checksums, missing)
        self._mark = now
        self.bar.add(sum(len(self.samples[i].input_ids) for i in members))
        del self._members[unit], self._checksums[unit], self._missing[unit]
        if checksums:
            self.failed_passes.clear()
        else:
            index, why = next(iter(missing.items()))
            self.failed_passes.append(f"line {index + 1}: {why}")


def raise_write_error(result: dict) -> None:
    """The error of a writer, whose type is lost on the way between processes."""
    if result["os_error"] is not None:
        raise OSError(*result["os_error"])
    if result["error"] is not None:
        raise RuntimeError(result["error"])
