"""From the verifier's last layer to its next-token distribution: final norm and head.

Shape suffixes: T tokens of a sample, N rows, H hidden size, V vocabulary, X part of it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from common.verifier.head import HeadFacts


@dataclass(frozen=True)
class VerifierHead:
    """The tensors of HEAD_FILE: embed_VH, head_VH (the same where tied) and bias_V, in the dtype
    that vLLM computes in; norm_H float32."""

    facts: HeadFacts
    embed_VH: torch.Tensor
    head_VH: torch.Tensor
    bias_V: torch.Tensor | None
    norm_H: torch.Tensor


def read_head(path: Path, facts: HeadFacts) -> VerifierHead:
    """The tensors of a HEAD_FILE, mapped: what is not used is not read."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as f:
        embed_VH = f.get_tensor("embed_tokens")
        head_VH = embed_VH if facts.tied else f.get_tensor("lm_head")
        bias_V = f.get_tensor("lm_head_bias") if "lm_head_bias" in f.keys() else None  # noqa: SIM118
        return VerifierHead(facts, embed_VH, head_VH, bias_V, f.get_tensor("norm"))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32, returned in the input's dtype."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def verifier_logits(
    normed_NH: torch.Tensor,
    head_XH: torch.Tensor,
    bias_X: torch.Tensor | None,
    facts: HeadFacts,
) -> torch.Tensor:
    """Logits [N, X] as vLLM's LogitsProcessor makes them: bias, soft cap, scale, in the head's
    dtype."""
    logits_NX = normed_NH @ head_XH.T
    if bias_X is not None:
        logits_NX = logits_NX + bias_X
    if facts.soft_cap is not None:
        logits_NX = facts.soft_cap * torch.tanh(logits_NX / facts.soft_cap)
    return logits_NX if facts.logit_scale == 1.0 else facts.logit_scale * logits_NX


def next_token_logprobs(
    last_TH: torch.Tensor, ids_T: torch.Tensor, head: VerifierHead
) -> torch.Tensor:
    """Log-probability of each next token [T-1] from final-layer states before the final norm."""
    normed_TH = rms_norm(last_TH[:-1], head.norm_H, head.facts.norm_eps).to(head.head_VH.dtype)
    # One chunk of rows at a time: [64, V] float32 is 42 MB at Kimi's vocabulary.
    parts = []
    for rows, targets in zip(normed_TH.split(64), ids_T[1:].split(64), strict=True):
        logits = verifier_logits(rows, head.head_VH, head.bias_V, head.facts)
        parts.append(F.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0])
    return torch.cat(parts)
