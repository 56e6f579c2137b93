"""The check before any data: beginnings of a few samples through the verifier and the capture."""

import shutil
from itertools import zip_longest
from typing import Any

import numpy as np

from common.errors import UserError, one_line
from common.extraction import selfcheck
from common.extraction.forward import Work, forward, one_pass, rank0, reset_engine, start_capture
from common.extraction.outcomes import raise_write_error
from common.manifest import PROBE
from common.progress import log
from common.states.files import hidden_file
from common.verifier.engine import SHORTEST

PROBE_TRIES = 24  # of a few samples each


def run_probe(llm: Any, work: Work, head: dict, resumed: bool) -> list[int]:
    """Check the capture on the beginnings of a few samples, before any data.

    The probe's files keep the verifier's dtype; they stay in PROBE for check_first_unit.

    Args:
        head: the verifier's norm [H] and lm_head [V, H].
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


def check_probe(work: Work, head: dict, indices: list[int], outputs: list, received) -> None:
    """The probe's states against the verifier's log-probabilities and the layers' inputs."""
    selfcheck.check_received(received, work.layers, work.model.num_layers)
    theirs = {
        i: [p[t].logprob for t, p in zip(ids.tolist()[1:], o.prompt_logprobs[1:], strict=True)]
        for (i, ids), o in zip(work.batch(indices, selfcheck.PROBE_TOKENS), outputs, strict=True)
    }
    mean, count = selfcheck.check_final_layer(
        work.out / PROBE, theirs, head["norm"], head["lm_head"], work.model.rms_norm_eps
    )
    log(
        f"self-check: the final layer reproduces the verifier's log-probabilities (mean"
        f" |difference| {mean:.2g} over {count} tokens), layers {work.layers[:-1]} are what the"
        " next layer receives"
    )


def check_first_unit(work: Work, unit: list[int], checked: list[int]) -> None:
    """The first batch, once written, must agree with the probe; UserError, and its files are
    deleted, where it does not."""
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
