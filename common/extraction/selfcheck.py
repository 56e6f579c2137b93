"""Whether the capture is right, checked against the verifier before data is written.

* The final layer: log_softmax(lm_head(norm(h))) of the captured rows, with the tensors
  that 04 will train against, must reproduce the verifier's own prompt log-probabilities.
* Every other layer: what was captured must be what the next layer received.
* The first batch, written for real: its rows must agree with those of the probe.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import UserError
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
