"""The planned forward passes of stage 3, and what fails in them.

Files are written beside the following passes (writer.py), so a pass's result comes a pass or two
after it ran.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError, again, one_line
from common.extraction import selfcheck
from common.extraction.forward import (
    Work,
    captured_answer,
    forward,
    one_pass,
    one_token,
    rank0,
    reset_engine,
    start_capture,
)
from common.extraction.outcomes import Results
from common.extraction.probe import check_first_unit
from common.progress import Progress, Stopper, log
from common.states.files import hidden_file, read_hidden
from common.states.journal import Journal

FAILED_PASSES = 3  # in a row without one good sample: the engine is checked
# A run warms up only if it has this many times the passes of the warm-up: where few long passes
# make up a run, as on a CPU, warming up would cost more than it tells.
WARM_UP_SHARE = 10


def run_units(llm: Any, work: Work, journal: Journal, checked: list[int], stop: Stopper) -> None:
    """Run the passes of `work.todo`, noting each in the journal once its files are on the disk.

    A pass that fails, or holds a sample whose states are not finite, runs again by itself, then
    what failed in it sample by sample; what fails alone is noted as missing, and the run goes on.

    Args:
        checked: samples of the first pass that the probe holds.
    """
    start_capture(llm, work, work.max_batch_tokens, work.storage_dtype)
    warm_up(llm, work)
    for index in checked:  # what an earlier run left there is not to be checked
        hidden_file(work.out, index).unlink(missing_ok=True)
    left = sum(len(s.input_ids) for s in work.samples.values())
    bar = Progress("extract", work.total_tokens, "tokens", initial=work.total_tokens - left)
    check = functools.partial(check_first_unit, work, work.todo[0][1], checked)
    sound = [ids for _, ids in work.batch(checked[:1], selfcheck.PROBE_TOKENS)]
    if not checked and journal.done:  # a resume whose every probe failed
        sound = finished_sample(work.out, journal)
    passes = Passes(llm, work, Results(work.samples, work.out, journal, bar), check, sound)
    for unit, indices in work.todo:
        passes.results.open(unit, indices)
        passes.run(unit, indices)
        if passes.results.failed:
            passes.finish()
        if stop.code:
            break
    passes.finish()
    rank0(llm, "capture_stop")
    bar.close()


def warm_up(llm: Any, work: Work) -> None:
    """Run the largest pass, the one of most samples, the last and an odd one; write nothing.

    What would run out of memory does so now instead of after hours, and the kernels that
    vLLM compiles for such sizes (a second or two each) do not disturb rate and ETA.
    """

    def size(members: list[int]) -> int:
        return sum(len(work.samples[i].input_ids) for i in members)

    passes = [members for _, members in work.todo]
    picked = [max(passes, key=size), max(passes, key=len), passes[-1]]
    picked += [members for members in passes if size(members) % 2][:1]
    if len(passes) < WARM_UP_SHARE * len(picked):
        return
    for n, members in enumerate(picked):
        if members in picked[:n]:
            continue
        try:
            forward(llm, work.batch(members))
        except Exception as e:
            reason = one_line(e)
            reset_engine(llm, reason)
            if "out of memory" in reason.lower() or "OutOfMemory" in reason:
                raise UserError(
                    f"a pass of {size(members)} tokens ran out of memory before any was written"
                    f" ({reason}); lower --max-batch-tokens or --gpu-memory-utilization"
                ) from e
            log(f"extract: a warm-up pass failed ({reason}); its samples are tried again in time")
            continue
        rank0(llm, "capture_drop")
    rank0(llm, "capture_clean_cache")


def finished_sample(out: Path, journal: Journal) -> list[np.ndarray]:
    """Token ids int32 [T], T > 1, of the beginning of a sample that an earlier run has finished;
    none if it has none."""
    for entry in journal.done.values():
        for index in entry["checksums"]:
            _, ids = read_hidden(hidden_file(out, int(index)), selfcheck.PROBE_TOKENS)
            if len(ids) > 1:
                return [ids.numpy().astype(np.int32)]
    return []


class Passes:
    """Runs planned passes, each as one step of vLLM's engine.

    `sound`: token ids of a sample that passed; shows whether failures are the engine's.

    With asynchronous scheduling (GPUs) the engine's queue takes two: `run` launches a pass
    behind the one that computes and returns when that one is done, so that the GPU never
    waits for this process. A pass is scheduled when its requests are the only ones waiting,
    hence the layout is the planned one either way.
    """

    def __init__(
        self,
        llm: Any,
        work: Work,
        results: Results,
        check_first: Callable[[], None],
        sound: list[np.ndarray],
    ):
        self.work, self.results, self.sound = work, results, sound
        self._check_first: Callable[[], None] | None = check_first
        self._llm, self._engine = llm, llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._executor = core.model_executor
        self._queue = core.batch_queue  # None: one pass at a time
        self._launched: list[tuple[int, list[int]]] = []  # units that vLLM may still compute
        self._submitted: Future | None = None
        self._requests = 0

    def run(self, unit: int, indices: list[int]) -> None:
        """Run samples as one pass and have its rows written."""
        batch = self.work.batch(indices)
        self._launched.append((unit, indices))
        try:
            self._launch(batch)
        except Exception as e:  # whatever a library or the machine raises: found out one by one
            self._recover(e)
            return
        if self._queue is None:
            self._launched.clear()
        else:
            del self._launched[:-1]
        if self._engine.get_num_unfinished_requests() > sum(len(m) for _, m in self._launched):
            raise UserError(
                f"vLLM did not run {len(batch)} samples in one step, so the result would depend on"
                " chance; raise --gpu-memory-utilization or lower --max-batch-tokens"
            )
        if self._submitted is not None and self._check_first is not None:
            self._take_all()  # the first pass is checked before the second is written
        earlier = self._submitted
        args = (unit, batch, str(self.work.out))
        self._submitted = self._executor.collective_rpc("capture_submit", args=args, non_block=True)
        self._take(earlier)

    def finish(self) -> None:
        """Wait until all passes are computed and written, failed samples tried again."""
        self._drain()
        while self.results.failed:
            # NaN that a sample left in the KV cache would spread to those that come after.
            rank0(self._llm, "capture_clean_cache")
            self.run(*self.results.failed.pop(0))
            self._drain()
            if not self.results.failed:
                rank0(self._llm, "capture_clean_cache")
        if len(self.results.failed_passes) >= FAILED_PASSES:
            self._check_engine()

    def _check_engine(self) -> None:
        """After passes without one good sample: UserError unless one that the probe found sound
        still is, so that the samples are at fault."""
        batch = list(enumerate(self.sound))
        passed = self.results.failed_passes
        try:
            outputs = forward(self._llm, batch, prompt_logprobs=0)
            rank0(self._llm, "capture_drop")
        except Exception as e:
            reason = one_line(e)
            reset_engine(self._llm, reason)
            outputs, passed = [], [*passed, reason]
        found = [p.logprob for o in outputs for t in o.prompt_logprobs[1:] for p in t.values()]
        if not found or not np.isfinite(found).all():
            raise UserError(
                f"{len(passed)} passes in a row failed, each sample alone too ({passed[-1]}); the"
                " verifier or the machine is at fault, not the samples. What is finished is saved;"
                f" {again()} to continue"
            )
        passed.clear()

    def _launch(self, batch: list) -> None:
        for _, ids_T in batch:
            self._requests += 1
            self._engine.add_request(
                str(self._requests),
                {"prompt_token_ids": ids_T.tolist()},
                one_token(),
            )
        self._engine.step()

    def _drain(self) -> None:
        try:
            while self._engine.has_unfinished_requests():
                self._engine.step()
        except Exception as e:
            self._recover(e)
        self._launched.clear()
        self._take_all()

    def _take_all(self) -> None:
        """Wait for the files of all submitted passes."""
        submitted, self._submitted = self._submitted, None
        self._take(submitted)
        self.results.take(rank0(self._llm, "capture_finish"))
        if self._check_first is not None and submitted is not None:
            self._check_first()
            self._check_first = None

    def _take(self, submitted: Future | None) -> None:
        """Take the answer of a capture_submit that was sent a pass ago."""
        if submitted is not None:
            answer = captured_answer(submitted.result())
            one_pass(answer["passes"])
            self.results.take(answer["finished"])

    def _recover(self, error: Exception) -> None:
        """After a failed pass, make the engine ready for the next; UserError if it is dead.

        The passes in vLLM's queue count as failed; those before them are whole.
        """
        reason = one_line(error)
        lost, self._launched = self._launched, []
        submitted, self._submitted = self._submitted, None
        results = reset_engine(self._llm, reason)
        if submitted is not None:
            results += captured_answer(submitted.result())["finished"]
        units = {unit for unit, _ in lost}
        self.results.take([r for r in results if r["unit"] not in units])
        for unit, indices in lost:
            log(f"extract: pass {unit} of {len(indices)} samples failed: {reason}")
            self.results.fail(unit, indices, reason)
