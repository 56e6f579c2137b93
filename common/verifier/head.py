"""From the verifier's last layer to its next-token distribution: final norm and head.

Shape suffixes: T tokens of a sample, H hidden size, V vocabulary.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32, returned in the input's dtype."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def next_token_logprobs(
    last_TH: torch.Tensor,
    ids_T: torch.Tensor,
    norm_H: torch.Tensor,
    head_VH: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Log-probability of each next token [T-1] from final-layer states before the final norm."""
    normed_TH = rms_norm(last_TH[:-1], norm_H, eps)
    # One chunk of rows at a time: [64, V] float32 is 42 MB at Kimi's vocabulary.
    parts = []
    for rows, targets in zip(normed_TH.split(64), ids_T[1:].split(64), strict=True):
        logits = rows.to(head_VH.dtype) @ head_VH.T  # as the verifier computes them
        parts.append(F.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0])
    return torch.cat(parts)
