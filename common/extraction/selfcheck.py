"""Whether the capture is right, checked against the verifier before data is written.

* The final layer: log_softmax(lm_head(norm(h))) of the captured rows, with the tensors
  that 04 will train against, must reproduce the verifier's own prompt log-probabilities.
* Every other layer: what was captured must be what the next layer received.
* The embedding: its rows, times a number, must be what enters layer 0.
* The first batch, written for real: its rows must agree with those of the probe.

All but the last are made on the beginnings of a few samples, before any data: the probe.
"""

import shutil
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError, one_line
from common.extraction.engine import (
    forward,
    rank0,
    reset_engine,
    start_capture,
    written,
)
from common.extraction.verifier_head import WATCHED_TOKENS, embedding_scale
from common.extraction.work import Work
from common.manifest import PROBE
from common.progress import log
from common.states.files import FP8, hidden_file, read_hidden
from common.verifier.logits import VerifierHead, next_token_logprobs

# Mean |difference| of log-probabilities: right states give 5e-6 in float32 and 0.015 in
# bfloat16; states of the layer before give 3.8.
LOGPROB_GATE = 0.1
# Relative difference of a token's rows between two batch layouts, the median over tokens
# (a mixture of experts sends a few tokens elsewhere in bfloat16). float8 alone moves a row by
# 2.6 %.
LAYOUT_GATE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2, FP8: 6e-2}


@dataclass(frozen=True)
class LogprobDifference:
    """mean: of absolute differences; tokens: how many were compared."""

    mean: float
    tokens: int


def check_final_layer(
    folder: Path,
    logprobs: dict[int, list[float]],
    head: VerifierHead,
) -> LogprobDifference:
    """Compare stored probe states with the verifier's log-probabilities.

    Args:
        folder: hidden-states folder of the probe.
        logprobs: sample index → the verifier's log-probability of tokens 1..T-1.

    UserError when their mean difference is over the gate.
    """
    differences = []
    for index, theirs in logprobs.items():
        hidden_TLH, ids_T = read_hidden(hidden_file(folder, index))
        ours = next_token_logprobs(hidden_TLH[:, -1], ids_T, head)
        differences.append((ours - torch.tensor(theirs)).abs())
    all_differences = torch.cat(differences)
    mean = float(all_differences.mean())
    if not mean < LOGPROB_GATE:
        raise UserError(
            "self-check failed: the captured final layer does not reproduce the verifier's"
            f" log-probabilities (mean |difference| {mean:.3f}, allowed {LOGPROB_GATE});"
            " nothing was written. Is the final layer in --layers the model's last, and is its"
            " head lm_head(RMSNorm(h))?"
        )
    return LogprobDifference(mean, len(all_differences))


def check_received(errors: dict[int, float], layer_ids: list[int], num_layers: int) -> None:
    """UserError unless every layer but the last equals what the next layer received."""
    for layer in layer_ids:
        if layer + 1 == num_layers:
            continue
        if layer not in errors or not errors[layer] < 1e-3:
            raise UserError(
                f"self-check failed: layer {layer} as captured is not what layer {layer + 1}"
                f" received (relative difference {errors.get(layer, float('nan')):.2g});"
                " nothing was written"
            )


def check_layout(folder: Path, probe: Path, indices: list[int], dtypes: set[str]) -> float:
    """Compare the first batch's files with the probe's, which ran in another layout.

    Args:
        dtypes: of the verifier and of the files; the coarser sets the gate.

    Returns:
        The median relative difference over tokens and layers; UserError over the gate.
    """
    gate = max(LAYOUT_GATE[d] for d in dtypes)
    found = []
    for index in indices:
        probe_TLH, _ = read_hidden(hidden_file(probe, index))
        batch_TLH, _ = read_hidden(hidden_file(folder, index), len(probe_TLH))
        a, b = probe_TLH.float(), batch_TLH.float()
        found.append(((a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-9)).flatten())
    median = float(torch.cat(found).median())
    if not median < gate:
        raise UserError(
            f"self-check failed: the first batch's states differ from the same samples run apart"
            f" (median relative difference {median:.3f}, allowed {gate})"
        )
    return median


# ---------------------------------------------------------------- the probe

# Prompt log-probabilities build [T, V] logits that vLLM's memory profiling does not count.
PROBE_TOKENS = 256
PROBE_SAMPLES = 4
PROBE_TRIES = 24  # of a few samples each


@dataclass(frozen=True)
class Proof:
    """indices: the samples probed; logprob_difference: mean |difference|; embedding_scale: see
    HeadFacts. None where nothing could be probed."""

    indices: list[int]
    logprob_difference: float | None
    embedding_scale: float | None


@dataclass(frozen=True)
class Probed:
    """One forward pass over the beginnings of samples.

    outputs: vLLM's, with prompt log-probabilities; received: layer → relative difference from what
    the next layer received; watched: token ids [N] and what entered layer 0 of them [N, H]; bad:
    sample → what is wrong with its states.
    """

    indices: list[int]
    outputs: list
    received: dict[int, float]
    watched: tuple[torch.Tensor, torch.Tensor]
    bad: dict[int, str]


def run_probe(llm: Any, work: Work, head: VerifierHead, resumed: bool) -> Proof:
    """Check the capture on the beginnings of a few samples, before any data.

    The probe's files keep the verifier's dtype; they stay in PROBE for check_first_batch.

    Args:
        head: to be proven beside the states.
        resumed: an earlier run has finished batches, so the verifier is sound.

    Returns:
        What was proven. Samples whose states are refused, or whose forward pass fails, are left
        out (they are found again, and skipped, in their own batch); UserError when none are left.
    """
    waiting = probe_order(work)
    if not waiting:
        log("self-check: not possible, every sample left is a single token")
        return Proof([], None, None)
    room = max(1, min(PROBE_SAMPLES, work.max_batch_tokens // PROBE_TOKENS))
    tokens = min(work.max_batch_tokens, PROBE_SAMPLES * PROBE_TOKENS)
    start_capture(llm, work.capture, tokens, work.capture.verifier_dtype)
    why = hint = ""
    for _ in range(PROBE_TRIES):
        indices, waiting = waiting[:room], waiting[room:]
        if not indices:
            break
        try:
            probed = probe(llm, work, indices)
        except Exception as e:
            if isinstance(e, UserError | OSError):
                raise
            why, hint = one_line(e), ""
            reset_engine(llm, why)
            continue
        if not probed.bad:
            rank0(llm, "capture_stop")
            return check_probe(work, head, probed)
        index, problem = next(iter(probed.bad.items()))
        why = f"sample {work.samples[index].id!r}: {problem}"
        hint = ". Are the verifier's weights right?"
        log(f"self-check: {why}; probing others")
        waiting = [i for i in indices if i not in probed.bad] + waiting
        rank0(llm, "capture_clean_cache")
    rank0(llm, "capture_stop")
    if resumed:
        log(f"self-check: not repeated, every sample tried failed ({why})")
        return Proof([], None, None)
    raise UserError(f"every sample probed failed ({why}); nothing was written{hint}")


def probe_order(work: Work) -> list[int]:
    """Samples to probe, those of the first batch first: it is compared with the probe.

    The others are taken from all over the plan, in which neighbours are alike in length: what
    is wrong with the longest need not be wrong with the rest. Single tokens prove nothing.
    """
    first, *others = (batch.indices for batch in work.probed)
    turns = zip_longest(*others[:: max(1, len(others) // 32)])
    order = [*first, *(i for turn in turns for i in turn if i is not None)]
    return [i for i in order if len(work.samples[i].input_ids) > 1]


def probe(llm: Any, work: Work, indices: list[int]) -> Probed:
    """Run the beginnings of samples as one forward pass, into PROBE."""
    folder = work.out / PROBE
    shutil.rmtree(folder, ignore_errors=True)
    samples = work.inputs(indices, PROBE_TOKENS)
    rank0(llm, "capture_check_layers", True)
    llm.collective_rpc("head_watch", args=(work.capture.verifier.num_layers, WATCHED_TOKENS))
    outputs = forward(llm, samples, prompt_logprobs=0)
    received = rank0(llm, "capture_check_layers", False)
    watched = rank0(llm, "head_watched")
    finished = written(rank0(llm, "capture_submit", 0, samples, str(folder)))
    (result,) = finished + rank0(llm, "capture_finish")
    result.raise_error()
    return Probed(indices, outputs, received, watched, result.bad)


def check_probe(work: Work, head: VerifierHead, probed: Probed) -> Proof:
    """The probe's states against the verifier's log-probabilities and the layers' inputs, and the
    embedding against layer 0's."""
    layers, num_layers = work.capture.layers, work.capture.verifier.num_layers
    check_received(probed.received, layers, num_layers)
    scale = embedding_scale(head, *probed.watched)
    samples = work.inputs(probed.indices, PROBE_TOKENS)
    theirs = {
        i: [p[t].logprob for t, p in zip(ids.tolist()[1:], o.prompt_logprobs[1:], strict=True)]
        for (i, ids), o in zip(samples, probed.outputs, strict=True)
    }
    found = check_final_layer(work.out / PROBE, theirs, head)
    log(
        f"self-check: the final layer reproduces the verifier's log-probabilities (mean"
        f" |difference| {found.mean:.2g} over {found.tokens} tokens), layers {layers[:-1]} are what"
        " the next layer receives, layer 0 receives the embedding"
        + (f" times {scale:g}" if scale != 1 else "")
    )
    return Proof(probed.indices, found.mean, scale)


def check_first_batch(work: Work, batch: list[int], checked: list[int]) -> None:
    """The first batch, once written, must agree with the probe; UserError, and its files are
    deleted, where it does not."""
    checked = [i for i in checked if hidden_file(work.out, i).exists()]  # not those that failed
    if not checked:
        log("self-check: the first batch holds no sample of the probe; it is not compared")
        return
    try:
        dtypes = {work.capture.form.dtype, work.capture.verifier_dtype}
        median = check_layout(work.out, work.out / PROBE, checked, dtypes)
    except UserError:
        for index in batch:
            hidden_file(work.out, index).unlink(missing_ok=True)
        raise
    log(f"self-check: the first batch agrees with the probe (median {median:.1g})")
