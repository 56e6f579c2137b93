"""KL divergence between the verifier's and the draft's next-token distributions.

Both are over the draft's vocabulary (speculators 0.9, losses/eager.py: kl_div). Gradients
are made in the forward pass, so that no [n, D] tensor is float32: softmax runs in a GPU's
registers, or on a few rows at a time in place of the logits.

Shape suffixes: n losses of one depth, U target distributions, H hidden size, D draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch

from common.draft.compiled import region
from common.draft.linear_products import LinearProducts, Operand

# Elements of a chunk on a CPU: what a core's cache holds in float32.
CHUNK_ELEMENTS = 2**19


def row_chunks(x_nD: torch.Tensor) -> list[slice]:
    """Slices of rows of about CHUNK_ELEMENTS elements."""
    size = max(1, CHUNK_ELEMENTS // x_nD.shape[1])
    return [slice(a, min(a + size, len(x_nD))) for a in range(0, len(x_nD), size)]


@dataclass(frozen=True)
class TargetProbs:
    """p_UD: the verifier's probabilities, compute dtype; negentropy_U: sum p log p, float32."""

    p_UD: torch.Tensor
    negentropy_U: torch.Tensor


@torch.no_grad()
def target_probs(logits_UD: torch.Tensor) -> TargetProbs:
    """Softmax of the verifier's logits over the draft's vocabulary, in place of the logits."""
    if logits_UD.is_cuda:
        return TargetProbs(*softmax_rows(logits_UD))
    negentropy_U = torch.empty(len(logits_UD))
    for part in row_chunks(logits_UD):
        p_nD, negentropy_U[part] = softmax_rows(logits_UD[part])
        logits_UD[part] = p_nD
    return TargetProbs(logits_UD, negentropy_U)


@region
def softmax_rows(logits_nD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (probabilities in the logits' dtype, sum p log p float32)."""
    log_p_nD = logits_nD.float().log_softmax(-1)
    p_nD = log_p_nD.exp()
    return p_nD.to(logits_nD.dtype), (p_nD * log_p_nD).sum(-1)


@region
def kl_rows(
    logits_nD: torch.Tensor, p_UD: torch.Tensor, at_n: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (cross entropy against the target rows at_n, float32 [n]; argmax ids [n]; the
    gradient by the logits, softmax - p, in their dtype)."""
    x_nD, p_nD = logits_nD.float(), p_UD[at_n].float()
    top_n1, predicted_n1 = x_nD.max(-1, keepdim=True)
    q_nD = (x_nD - top_n1).exp()
    sum_n1 = q_nD.sum(-1, keepdim=True)
    # log-sum-exp, weighted by sum p (1 up to the rounding of p)
    loss_n = (sum_n1.log() + top_n1)[:, 0] * p_nD.sum(-1) - (p_nD * x_nD).sum(-1)
    return loss_n, predicted_n1[:, 0], (q_nD / sum_n1 - p_nD).to(logits_nD.dtype)


class LinearKL(torch.autograd.Function):
    """Sum over rows of KL(p || softmax(states @ head.T)); see `linear_kl`."""

    @staticmethod
    def forward(
        ctx: Any,
        states_nH: torch.Tensor,
        linears: LinearProducts,
        head: torch.Tensor,
        target: TargetProbs,
        at_n: torch.Tensor,
        real: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head_DH = linears.copy(head)
        logits_nD = states_nH @ head_DH.T
        if logits_nD.is_cuda:
            cross_n, predicted_n, d_logits_nD = kl_rows(logits_nD, target.p_UD, at_n)
            del logits_nD
        else:
            cross_n, predicted_n = torch.empty(len(at_n)), torch.empty_like(at_n)
            d_logits_nD = logits_nD
            for part in row_chunks(logits_nD):
                found = kl_rows(logits_nD[part], target.p_UD, at_n[part])
                cross_n[part], predicted_n[part], d_logits_nD[part] = found
        loss_n = target.negentropy_U[at_n] + cross_n
        d_logits_nD[real:] = 0
        ctx.linears, ctx.head = linears, head if head.requires_grad else None
        kept = (states_nH, d_logits_nD) if head.requires_grad else ()
        ctx.save_for_backward(d_logits_nD @ head_DH, *kept)
        predicted_n = predicted_n[:real]
        ctx.mark_non_differentiable(predicted_n)
        return loss_n[:real].sum(), predicted_n

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_states, *kept = ctx.saved_tensors
        # a float32 scalar: it keeps the tensors' dtype, and is not rounded to it first
        if kept:
            states_nH, d_logits_nD = kept
            ctx.linears.used(ctx.head, Operand(states_nH * grads[0]), Operand(d_logits_nD))
        return grad_states * grads[0], None, None, None, None, None


def linear_kl(
    linears: LinearProducts,
    states_nH: torch.Tensor,
    head: torch.Tensor,
    target: TargetProbs,
    at_n: torch.Tensor,
    real: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum of KL over the first `real` rows, float32 scalar; their argmax ids, int64).

    Args:
        states_nH: normed states, in the compute dtype.
        head: the draft's, [D, H]; its gradient, if it requires one, is added by add_gradients.
        target: the verifier's distributions, made once per row.
        at_n: the target row that each state is to match.
        real: rows after these are filling (see common.packed_row.FILL).
    """
    return LinearKL.apply(states_nH, linears, head, target, at_n, real)
