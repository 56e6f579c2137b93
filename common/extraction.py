"""The forward passes of stage 3: the probe, the planned passes, and what fails in them.

Files are written beside the following passes (common/writer.py), so a pass's result comes
a pass or two after it ran.
"""

import functools
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import selfcheck
from common.cli import UserError
from common.hidden_files import hidden_file
from common.journal import Journal
from common.progress import Progress, Stopper, log
from common.samples import Sample
from common.settling import Settling, raise_os_error
from common.verifier import Verifier

PROBE = ".probe"


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
    return next(r for r in llm.collective_rpc(method, args=args) if r is not None)


def forward(llm: Any, batch: list, **sampling: Any) -> list:
    """One forward pass over the batch: each request makes the one token vLLM insists on."""
    from vllm import SamplingParams

    return llm.generate(
        [{"prompt_token_ids": ids.tolist()} for _, ids in batch],
        SamplingParams(max_tokens=1, temperature=0, detokenize=False, **sampling),
        use_tqdm=False,
    )


def start_capture(llm: Any, work: Work, tokens: int, dtype: str) -> None:
    shape = (tokens, work.model.hidden_size)
    rank0(llm, "capture_start", work.layers, work.model.num_layers, shape, dtype)


# ---------------------------------------------------------------- the probe


def run_probe(llm: Any, work: Work, head: dict | None, resumed: bool) -> list[int]:
    """Check the capture on the beginnings of the first pass's samples, before any data.

    The probe's files keep the verifier's dtype; they stay in PROBE for check_first_unit.

    Args:
        head: the verifier's norm [H] and lm_head [V, H]; None unless the final layer is captured.
        resumed: an earlier run has finished passes, so the verifier is sound.

    Returns:
        The samples probed. One whose states are not finite is left out (it is found again, and
        skipped, in its own pass); UserError when none are.
    """
    probe = work.out / PROBE
    room = max(1, work.max_batch_tokens // selfcheck.PROBE_TOKENS)
    indices = work.todo[0][1][: min(selfcheck.PROBE_SAMPLES, room)]
    tokens = min(work.max_batch_tokens, selfcheck.PROBE_SAMPLES * selfcheck.PROBE_TOKENS)
    start_capture(llm, work, tokens, work.verifier_dtype)
    while True:
        shutil.rmtree(probe, ignore_errors=True)
        batch = work.batch(indices, selfcheck.PROBE_TOKENS)
        rank0(llm, "capture_check_layers", True)
        outputs = forward(llm, batch, prompt_logprobs=0)
        received = rank0(llm, "capture_check_layers", False)
        submitted = rank0(llm, "capture_submit", 0, batch, str(probe))
        one_pass(submitted["passes"])
        (result,) = submitted["finished"] + rank0(llm, "capture_finish")
        raise_os_error(result)
        if not result["bad"]:
            break
        named = work.samples[result["bad"][0]].id
        indices = [i for i in indices if i not in result["bad"]]
        if not indices and resumed:
            raise UserError(
                f"sample {named!r} gives NaN or Inf again; mend or remove it, or accept that it is"
                " missing with --allow-missing"
            )
        if not indices:
            raise UserError(
                f"sample {named!r}: its hidden states hold NaN or Inf, as have those of all samples"
                " probed; nothing was written. Are the verifier's weights right?"
            )
        log(f"self-check: sample {named!r} gives NaN or Inf; probing the others")
        rank0(llm, "capture_clean_cache")
    rank0(llm, "capture_stop")
    selfcheck.check_received(received, work.layers, work.model.num_layers)
    text = f"layers {work.layers[:-1]} are what the next layer receives"
    if head is not None:
        theirs = {
            i: [p[t].logprob for t, p in zip(ids.tolist()[1:], o.prompt_logprobs[1:], strict=True)]
            for (i, ids), o in zip(batch, outputs, strict=True)
        }
        mean, count = selfcheck.check_final_layer(
            probe, theirs, head["norm"], head["lm_head"], work.model.rms_norm_eps
        )
        text = (
            f"the final layer reproduces the verifier's log-probabilities (mean |difference|"
            f" {mean:.2g} over {count} tokens), {text}"
        )
    log(f"self-check: {text}")
    return indices


def check_first_unit(work: Work, unit: list[int], checked: list[int]) -> None:
    """The first batch, once written, must agree with the probe; otherwise it goes again."""
    checked = [i for i in checked if hidden_file(work.out, i).exists()]  # not those that failed
    if not checked:
        raise UserError("every sample of the first batch that was probed failed; see above")
    try:
        dtypes = {work.storage_dtype, work.verifier_dtype}
        median = selfcheck.check_layout(work.out, work.out / PROBE, checked, dtypes)
    except UserError:
        for index in unit:
            hidden_file(work.out, index).unlink(missing_ok=True)
        raise
    log(f"self-check: the first batch agrees with the probe (median {median:.1g})")


# ---------------------------------------------------------------- the passes


def answer_of(call: Future) -> Any:
    """The answer of the rank that captures to a call that was sent without waiting."""
    return next(r for r in call.result() if r is not None)


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
    rehearse(llm, work)
    for index in checked:  # what an earlier run left there is not to be checked
        hidden_file(work.out, index).unlink(missing_ok=True)
    left = sum(len(s.input_ids) for s in work.samples.values())
    bar = Progress("extract", work.total_tokens, "tokens", initial=work.total_tokens - left)
    check = functools.partial(check_first_unit, work, work.todo[0][1], checked)
    settling = Settling(work.samples, work.out, journal, bar)
    passes = Passes(llm, work, settling, check)
    for unit, indices in work.todo:
        passes.settling.open(unit, indices)
        passes.run(unit, indices)
        if passes.settling.failed:
            passes.finish()
        if stop.code:
            break
    passes.finish()
    rank0(llm, "capture_stop")
    bar.close()


def rehearse(llm: Any, work: Work) -> None:
    """Run the largest pass, the one of most samples, the last and an odd one; keep nothing.

    What would run out of memory does so now instead of after hours, and the kernels that
    vLLM compiles for such sizes (a second or two each) do not disturb rate and ETA. A run of
    few passes goes without.
    """

    def size(members: list[int]) -> int:
        return sum(len(work.samples[i].input_ids) for i in members)

    passes = [members for _, members in work.todo]
    picked = [max(passes, key=size), max(passes, key=len), passes[-1]]
    picked += [members for members in passes if size(members) % 2][:1]
    if len(passes) < 10 * len(picked):
        return
    for n, members in enumerate(picked):
        if members in picked[:n]:
            continue
        try:
            forward(llm, work.batch(members))
        except Exception as e:  # of one sample, it is found out in its own pass
            text = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
            reset_engine(llm, text)
            if "out of memory" in text.lower() or "OutOfMemory" in text:
                raise UserError(
                    f"a rehearsal of a pass of {size(members)} tokens ran out of memory ({text});"
                    " nothing was written; lower --max-batch-tokens or --gpu-memory-utilization"
                ) from e
            continue
        rank0(llm, "capture_drop")
    rank0(llm, "capture_clean_cache")


def reset_engine(llm: Any, reason: str) -> list[dict]:
    """After a failed pass, make the engine ready for the next; UserError if it is dead.

    Returns the writers' results of the passes before.
    """
    time.sleep(1)  # vLLM's monitor needs a moment to notice a dead worker
    try:
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        if engine.engine_core.engine_core.batch_queue is not None:
            engine.engine_core.engine_core.batch_queue.clear()
        return rank0(llm, "capture_drop")
    except Exception as second:
        raise UserError(
            f"vLLM's engine died ({reason}); what it finished is saved, run the same command again"
            " to continue"
        ) from second


class Passes:
    """Runs planned passes, each as one step of vLLM's engine.

    With asynchronous scheduling (GPUs) the engine's queue takes two: `run` launches a pass
    behind the one that computes and returns when that one is done, so that the GPU never
    waits for this process. A pass is scheduled when its requests are the only ones waiting,
    hence the layout is the planned one either way.
    """

    def __init__(self, llm: Any, work: Work, settling: Settling, check_first: Callable[[], None]):
        self.work, self.settling = work, settling
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
        while self.settling.failed:
            # NaN that a sample left in the KV cache would spread to those that come after.
            rank0(self._llm, "capture_clean_cache")
            self.run(*self.settling.failed.pop(0))
            self._drain()

    def _launch(self, batch: list) -> None:
        from vllm import SamplingParams

        for _, ids_T in batch:
            self._requests += 1
            self._engine.add_request(
                str(self._requests),
                {"prompt_token_ids": ids_T.tolist()},
                SamplingParams(max_tokens=1, temperature=0, detokenize=False),
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
        self.settling.take(rank0(self._llm, "capture_finish"))
        if self._check_first is not None and submitted is not None:
            self._check_first()
            self._check_first = None

    def _take(self, submitted: Future | None) -> None:
        """Take the answer of a capture_submit that was sent a pass ago."""
        if submitted is not None:
            answer = answer_of(submitted)
            one_pass(answer["passes"])
            self.settling.take(answer["finished"])

    def _recover(self, error: Exception) -> None:
        """After a failed pass, make the engine ready for the next; UserError if it is dead.

        The passes in vLLM's queue count as failed; those before them are whole.
        """
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        lost, self._launched = self._launched, []
        submitted, self._submitted = self._submitted, None
        results = reset_engine(self._llm, reason)
        if submitted is not None:
            results += answer_of(submitted)["finished"]
        units = {unit for unit, _ in lost}
        self.settling.take([r for r in results if r["unit"] not in units])
        for unit, indices in lost:
            log(f"extract: pass {unit} of {len(indices)} samples failed: {reason}")
            self.settling.fail(unit, indices, reason)


def clear_probe(out: Path) -> None:
    shutil.rmtree(out / PROBE, ignore_errors=True)
