"""The planned batches of 03, each a forward pass, and what fails in them.

Files are written beside the following batches (writer.py), so a batch's result comes a batch or
two after it ran.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError, again, one_line
from common.extraction.batching import Batch
from common.extraction.engine import (
    captured_answer,
    forward,
    one_token,
    rank0,
    reset_engine,
    start_capture,
    written,
)
from common.extraction.outcomes import Outcomes
from common.extraction.selfcheck import PROBE_TOKENS, check_first_batch
from common.extraction.work import SampleIds, Work
from common.progress import Progress, Stopper, log
from common.states.files import hidden_file, read_hidden
from common.states.journal import Journal

FAILED_BATCHES = 3  # in a row without one good sample: the engine is checked
# A run warms up only if it has this many times the batches of the warm-up: where few long batches
# make up a run, as on a CPU, warming up would cost more than it shows.
WARM_UP_SHARE = 10


def run_batches(llm: Any, work: Work, journal: Journal, checked: list[int], stop: Stopper) -> None:
    """Run the batches of `work.todo`, noting each in the journal once its files are on the disk.

    A batch that fails, or holds a sample whose states are refused, runs again by itself, then
    what failed in it sample by sample; what fails alone is noted as missing, and the run continues.

    Args:
        checked: samples of the first batch that the probe holds.
    """
    start_capture(llm, work.capture, work.max_batch_tokens, work.capture.form.dtype)
    warm_up_engine(llm, work)
    for index in checked:  # what an earlier run left there is not to be checked
        hidden_file(work.out, index).unlink(missing_ok=True)
    total, left = work.plan.tokens, work.tokens([*work.samples])
    bar = Progress("extract", total, "tokens", initial=total - left)
    check = functools.partial(check_first_batch, work, work.todo[0].indices, checked)
    sound = work.inputs(checked[:1], PROBE_TOKENS)
    if not checked and journal.done:  # a resume whose every probe failed
        sound = finished_sample(work.out, journal)
    runner = Runner(llm, work, Outcomes(work.samples, work.out, journal, bar), check, sound)
    for batch in work.todo:
        runner.outcomes.open(batch)
        runner.run(batch)
        if runner.outcomes.failed:
            runner.finish()
        if stop.code:
            break
    runner.finish()
    rank0(llm, "capture_stop")
    bar.close()


def warm_up_engine(llm: Any, work: Work) -> None:
    """Run the largest batch, the one of most samples, the last and an odd one; write nothing.

    What would run out of memory does so now instead of after hours, and the kernels that
    vLLM compiles for such sizes (a second or two each) do not disturb rate and ETA.
    """
    batches = [batch.indices for batch in work.todo]
    picked = [max(batches, key=work.tokens), max(batches, key=len), batches[-1]]
    picked += [indices for indices in batches if work.tokens(indices) % 2][:1]
    if len(batches) < WARM_UP_SHARE * len(picked):
        return
    for n, indices in enumerate(picked):
        if indices in picked[:n]:
            continue
        try:
            forward(llm, work.inputs(indices))
        except Exception as e:
            reason = one_line(e)
            reset_engine(llm, reason)
            if "out of memory" in reason.lower() or "OutOfMemory" in reason:
                raise UserError(
                    f"a batch of {work.tokens(indices)} tokens ran out of memory before any was"
                    f" written ({reason}); lower --max-batch-tokens or --gpu-memory-utilization"
                ) from e
            log(f"extract: a warm-up batch failed ({reason}); its samples are tried again in time")
            continue
        rank0(llm, "capture_drop")
    rank0(llm, "capture_clean_cache")


def finished_sample(out: Path, journal: Journal) -> list[SampleIds]:
    """The beginning, T > 1, of a sample that an earlier run has finished; none if it has none."""
    for entry in journal.done.values():
        for index in entry.checksums:
            _, ids = read_hidden(hidden_file(out, index), PROBE_TOKENS)
            if len(ids) > 1:
                return [(index, ids.numpy().astype(np.int32))]
    return []


class Runner:
    """Runs planned batches, each as one step of vLLM's engine.

    `sound`: a sample that passed; shows whether failures are the engine's.

    With asynchronous scheduling (GPUs) the engine's queue takes two: `run` launches a batch
    behind the one that computes and returns when that one is done, so that the GPU never
    waits for this process. A batch is scheduled when its requests are the only ones waiting,
    hence the layout is the planned one either way.
    """

    def __init__(
        self,
        llm: Any,
        work: Work,
        outcomes: Outcomes,
        check_first: Callable[[], None],
        sound: list[SampleIds],
    ):
        self.work, self.outcomes, self.sound = work, outcomes, sound
        self._check_first: Callable[[], None] | None = check_first
        self._llm, self._engine = llm, llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._executor = core.model_executor
        self._queue = core.batch_queue  # None: one batch at a time
        self._launched: list[Batch] = []  # that vLLM may still compute
        self._submitted: Future | None = None
        self._requests = 0

    def run(self, batch: Batch) -> None:
        """Run samples as one forward pass and have its rows written."""
        samples = self.work.inputs(batch.indices)
        self._launched.append(batch)
        try:
            self._launch(samples)
        except Exception as e:  # whatever a library or the machine raises: found out one by one
            self._recover(e)
            return
        if self._queue is None:
            self._launched.clear()
        else:
            del self._launched[:-1]
        expected = sum(len(b.indices) for b in self._launched)
        if self._engine.get_num_unfinished_requests() > expected:
            raise UserError(
                f"vLLM did not run {len(samples)} samples in one step, so the result would depend"
                " on chance; raise --gpu-memory-utilization or lower --max-batch-tokens"
            )
        if self._submitted is not None and self._check_first is not None:
            self._collect_all()  # the first batch is checked before the second is written
        earlier = self._submitted
        args = (batch.number, samples, str(self.work.out))
        self._submitted = self._executor.collective_rpc("capture_submit", args=args, non_block=True)
        self._collect(earlier)

    def finish(self) -> None:
        """Wait until all batches are computed and written, failed samples tried again."""
        self._drain()
        while self.outcomes.failed:
            # NaN that a sample left in the KV cache would spread to those that come after.
            rank0(self._llm, "capture_clean_cache")
            self.run(self.outcomes.failed.pop(0))
            self._drain()
            if not self.outcomes.failed:
                rank0(self._llm, "capture_clean_cache")
        if len(self.outcomes.failed_batches) >= FAILED_BATCHES:
            self._check_engine()

    def _check_engine(self) -> None:
        """After batches without one good sample: UserError unless one that the probe found sound
        still is, so that the samples are at fault."""
        failed = self.outcomes.failed_batches
        try:
            outputs = forward(self._llm, self.sound, prompt_logprobs=0)
            rank0(self._llm, "capture_drop")
        except Exception as e:
            reason = one_line(e)
            reset_engine(self._llm, reason)
            outputs, failed = [], [*failed, reason]
        found = [p.logprob for o in outputs for t in o.prompt_logprobs[1:] for p in t.values()]
        if not found or not np.isfinite(found).all():
            raise UserError(
                f"{len(failed)} batches in a row failed, each sample alone too ({failed[-1]}); the"
                " verifier or the machine is at fault, not the samples. What is finished is saved;"
                f" {again()} to continue"
            )
        failed.clear()

    def _launch(self, samples: list[SampleIds]) -> None:
        for _, ids_T in samples:
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
        self._collect_all()

    def _collect_all(self) -> None:
        """Wait for the files of all submitted batches."""
        submitted, self._submitted = self._submitted, None
        self._collect(submitted)
        self.outcomes.add(rank0(self._llm, "capture_finish"))
        if self._check_first is not None and submitted is not None:
            self._check_first()
            self._check_first = None

    def _collect(self, submitted: Future | None) -> None:
        """Collect the answer of a capture_submit that was sent a batch ago."""
        if submitted is not None:
            self.outcomes.add(written(captured_answer(submitted.result())))

    def _recover(self, error: Exception) -> None:
        """After a failed batch, make the engine ready for the next; UserError if it is dead.

        The batches in vLLM's queue count as failed; those before them are complete.
        """
        reason = one_line(error)
        lost, self._launched = self._launched, []
        submitted, self._submitted = self._submitted, None
        results = reset_engine(self._llm, reason)
        if submitted is not None:
            results += captured_answer(submitted.result()).finished
        numbers = {batch.number for batch in lost}
        self.outcomes.add([r for r in results if r.number not in numbers])
        for batch in lost:
            log(f"extract: batch {batch.number} of {len(batch.indices)} samples failed: {reason}")
            self.outcomes.fail(batch.number, dict.fromkeys(batch.indices, reason))
