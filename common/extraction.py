"""The forward passes of stage 3: the probe, the planned passes, and what fails in them.

Files are written beside the following passes (common/writer.py), so a pass's result comes
a pass or two after it ran.
"""

import functools
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from common import selfcheck
from common.cli import UserError, one_line
from common.engine import SHORTEST, engine_died
from common.hidden_files import hidden_file
from common.journal import Journal
from common.progress import Progress, Stopper, log
from common.results import Results, raise_write_error
from common.samples import Sample
from common.verifier import Verifier

PROBE = ".probe"
FAILED_PASSES = 3  # in a row without one good sample: the engine is checked
PROBE_TRIES = 24  # of a few samples each
# A run warms up only if it has this many times the passes of the warm-up: where few long passes
# make up a run, as on a CPU, warming up would cost more than it tells.
WARM_UP_SHARE = 10


@dataclass(frozen=True)
class Work:
    """What a run extracts: `todo` lists (unit, indices of its samples still to do)."""

    model: Verifier
    layers: list[int]
    verifier_dtype: str
    storage_dtype: str
    max_batch_tokens: int
    samples: dict[int, Sample]
    todo: list[tuple[int, list[int]]]
    out: Path
    total_tokens: int  # of the folder, done and to do

    def batch(self, indices: list[int], longest: int | None = None) -> list:
        """(index, token ids int32 [T]) of samples, cut to `longest`."""
        return [(i, self.samples[i].input_ids[:longest]) for i in indices]


# ---------------------------------------------------------------- vLLM


def rank0(llm: Any, method: str, *args: Any) -> Any:
    """Call a method of common/capture.py on all workers; the answer of the one that captures."""
    return captured_answer(llm.collective_rpc(method, args=args))


def captured_answer(answers: list) -> Any:
    """The answer of the rank that captures, the only one that gives any."""
    return next(r for r in answers if r is not None)


def forward(llm: Any, batch: list, **sampling: Any) -> list:
    """One forward pass over the batch."""
    return llm.generate(
        [{"prompt_token_ids": ids.tolist()} for _, ids in batch],
        one_token(**sampling),
        use_tqdm=False,
    )


def one_token(**sampling: Any) -> Any:
    """Sampling parameters of a prefill: the one token that vLLM insists on."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0, detokenize=False, **sampling)


def start_capture(llm: Any, work: Work, tokens: int, dtype: str) -> None:
    shape = (tokens, work.model.hidden_size)
    rank0(llm, "capture_start", work.layers, work.model.num_layers, shape, dtype)


# ---------------------------------------------------------------- the probe


def run_probe(llm: Any, work: Work, head: dict | None, resumed: bool) -> list[int]:
    """Check the capture on the beginnings of a few samples, before any data.

    The probe's files keep the verifier's dtype; they stay in PROBE for check_first_unit.

    Args:
        head: the verifier's norm [H] and lm_head [V, H]; None unless the final layer is captured.
        resumed: an earlier run has finished passes, so the verifier is sound.

    Returns:
        The samples probed. Those whose states are not finite, or whose pass fails, are left out
        (they are found again, and skipped, in their own pass); UserError when none are left.
    """
    waiting = probe_order(work)
    if not waiting:
        log("self-check: not possible, every sample left is a single token")
        # vLLM-CPU's AMX attention crashes on a process's first pass if it is all single tokens
        forward(llm, [(0, np.zeros(SHORTEST, np.int32))])
        return []
    room = max(1, min(selfcheck.PROBE_SAMPLES, work.max_batch_tokens // selfcheck.PROBE_TOKENS))
    tokens = min(work.max_batch_tokens, selfcheck.PROBE_SAMPLES * selfcheck.PROBE_TOKENS)
    start_capture(llm, work, tokens, work.verifier_dtype)
    why = ""
    for _ in range(PROBE_TRIES):
        indices, waiting = waiting[:room], waiting[room:]
        if not indices:
            break
        try:
            outputs, received, bad = probe_pass(llm, work, indices)
        except Exception as e:
            if isinstance(e, UserError | OSError):
                raise
            why = one_line(e)
            reset_engine(llm, why)
            continue
        if not bad:
            rank0(llm, "capture_stop")
            check_probe(work, head, indices, outputs, received)
            return indices
        why = f"sample {work.samples[bad[0]].id!r} gives NaN or Inf"
        log(f"self-check: {why}; probing others")
        waiting = [i for i in indices if i not in bad] + waiting
        rank0(llm, "capture_clean_cache")
    rank0(llm, "capture_stop")
    if resumed:
        log(f"self-check: not repeated, every sample tried failed ({why})")
        return []
    raise UserError(
        f"every sample probed failed ({why}); nothing was written. Are the verifier's weights"
        " right?"
    )


def probe_order(work: Work) -> list[int]:
    """Samples to probe, those of the first pass first: it is compared with the probe.

    The others are taken from all over the plan, in which neighbours are alike in length: what
    is wrong with the longest need not be wrong with the rest. Single tokens prove nothing.
    """
    (_, first), *others = work.todo
    turns = zip_longest(*(members for _, members in others[:: max(1, len(others) // 32)]))
    order = [*first, *(i for turn in turns for i in turn if i is not None)]
    return [i for i in order if len(work.samples[i].input_ids) > 1]


def probe_pass(llm: Any, work: Work, indices: list[int]) -> tuple[list, dict, list[int]]:
    """One pass over the beginnings of samples: (vLLM's outputs, per layer the difference from
    what the next layer received, samples that are not finite)."""
    probe = work.out / PROBE
    shutil.rmtree(probe, ignore_errors=True)
    batch = work.batch(indices, selfcheck.PROBE_TOKENS)
    rank0(llm, "capture_check_layers", True)
    outputs = forward(llm, batch, prompt_logprobs=0)
    received = rank0(llm, "capture_check_layers", False)
    submitted = rank0(llm, "capture_submit", 0, batch, str(probe))
    one_pass(submitted["passes"])
    (result,) = submitted["finished"] + rank0(llm, "capture_finish")
    raise_write_error(result)
    return outputs, received, result["bad"]


def check_probe(work: Work, head: dict | None, indices: list[int], outputs: list, received) -> None:
    """The probe's states against the verifier's log-probabilities and the layers' inputs."""
    selfcheck.check_received(received, work.layers, work.model.num_layers)
    text = f"layers {work.layers[:-1]} are what the next layer receives"
    if head is not None:
        theirs = {
            i: [p[t].logprob for t, p in zip(ids.tolist()[1:], o.prompt_logprobs[1:], strict=True)]
            for (i, ids), o in zip(
                work.batch(indices, selfcheck.PROBE_TOKENS), outputs, strict=True
            )
        }
        mean, count = selfcheck.check_final_layer(
            work.out / PROBE, theirs, head["norm"], head["lm_head"], work.model.rms_norm_eps
        )
        text = (
            f"the final layer reproduces the verifier's log-probabilities (mean |difference|"
            f" {mean:.2g} over {count} tokens), {text}"
        )
    log(f"self-check: {text}")


def check_first_unit(work: Work, unit: list[int], checked: list[int]) -> None:
    """The first batch, once written, must agree with the probe; otherwise it goes again."""
    checked = [i for i in checked if hidden_file(work.out, i).exists()]  # not those that failed
    if not checked:
        log("self-check: the first batch holds no sample of the probe; it is not compared")
        return
    try:
        dtypes = {work.storage_dtype, work.verifier_dtype}
        median = selfcheck.check_layout(work.out, work.out / PROBE, checked, dtypes)
    except UserError:
        for index in unit:
            hidden_file(work.out, index).unlink(missing_ok=True)
        raise
    log(f"self-check: the first batch agrees with the probe (median {median:.1g})")


# ---------------------------------------------------------------- the passes


def one_pass(passes: int) -> None:
    if passes != 1:
        raise UserError(
            f"vLLM ran {passes} forward passes for a planned one, so the result would depend on"
            " chance; raise --gpu-memory-utilization or lower --max-batch-tokens"
        )


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
    passes = Passes(llm, work, Results(work.samples, work.out, journal, bar), check, checked[:1])
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


def reset_engine(llm: Any, reason: str) -> list[dict]:
    """After a failed pass, make the engine ready for the next; returns the writers' results of
    the passes before.

    UserError where that cannot be: a dead engine, or several ranks. When one rank fails, the
    others have gone on with the pass, and their collective operations would pair with those of
    the next one.
    """
    ranks = llm.llm_engine.vllm_config.parallel_config.world_size
    if ranks > 1:
        raise engine_died(f"or one of its {ranks} ranks failed in a pass: {reason}; see the log")
    try:
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        if engine.engine_core.engine_core.batch_queue is not None:
            engine.engine_core.engine_core.batch_queue.clear()
        return rank0(llm, "capture_drop")
    except Exception as second:
        raise engine_died(reason) from second


class Passes:
    """Runs planned passes, each as one step of vLLM's engine.

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
        sound: list[int],
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
        batch = self.work.batch(self.sound, selfcheck.PROBE_TOKENS)
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
                " run the same command again to continue"
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
