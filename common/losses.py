"""KL divergence between the verifier's and the draft's next-token distributions.

Both are over the draft's vocabulary (speculators 0.9, losses/eager.py: kl_div). Gradients
are made in the forward pass, in place of the logits, so that of the [N, D] tensors one
exists, in the compute dtype; softmax runs in float32 on a few rows at a time.
"""

from dataclasses import dataclass

import torch

# Elements of a chunk in float32: what a core's cache holds, or enough to fill a GPU.
CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}


def row_chunks(x_ND: torch.Tensor) -> list[slice]:
    """Slices of rows of about CHUNK_ELEMENTS elements."""
    size = max(1, CHUNK_ELEMENTS.get(x_ND.device.type, 2**26) // x_ND.shape[1])
    return [slice(a, min(a + size, len(x_ND))) for a in range(0, len(x_ND), size)]


@dataclass(frozen=True)
class TeacherProbs:
    """p_UD: the verifier's probabilities, compute dtype; negentropy_U: sum p log p, float32."""

    p_UD: torch.Tensor
    negentropy_U: torch.Tensor


@torch.no_grad()
def teacher_probs(logits_UD: torch.Tensor) -> TeacherProbs:
    """Softmax of the verifier's logits over the draft's vocabulary, in place of the logits."""
    negentropy_U = torch.empty(len(logits_UD), device=logits_UD.device)
    for part in row_chunks(logits_UD):
        log_p_nD = logits_UD[part].float().log_softmax(-1)
        p_nD = log_p_nD.exp()
        negentropy_U[part] = (p_nD * log_p_nD).sum(-1)
        logits_UD[part] = p_nD.to(logits_UD.dtype)
    return TeacherProbs(logits_UD, negentropy_U)


class LinearKL(torch.autograd.Function):
    """Sum over rows of KL(p || softmax(states @ head.T)); see `linear_kl`."""

    @staticmethod
    def forward(ctx, states_NH, head_DH, p_UD, negentropy_U, at_N, real):
        logits_ND = states_NH @ head_DH.T
        predicted_N = torch.empty(len(states_NH), dtype=torch.int64, device=states_NH.device)
        loss_N = negentropy_U[at_N]
        for part in row_chunks(logits_ND):
            logits_nD = logits_ND[part].float()
            p_nD = p_UD[at_N[part]].float()
            top_n1, predicted = logits_nD.max(-1, keepdim=True)
            predicted_N[part] = predicted[:, 0]
            loss_N[part] -= (p_nD * logits_nD).sum(-1)
            q_nD = (logits_nD - top_n1).exp_()
            sum_n1 = q_nD.sum(-1, keepdim=True)
            # log-sum-exp, weighted by sum p (1 up to the rounding of p)
            loss_N[part] += (sum_n1.log() + top_n1)[:, 0] * p_nD.sum(-1)
            logits_ND[part] = (q_nD / sum_n1).sub_(p_nD).to(logits_ND.dtype)
        d_logits_ND = logits_ND  # d loss / d logits = q - p
        d_logits_ND[real:] = 0
        grad_states = d_logits_ND @ head_DH
        grad_head = d_logits_ND.T @ states_NH if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(grad_states, grad_head)
        predicted_N = predicted_N[:real]
        ctx.mark_non_differentiable(predicted_N)
        return loss_N[:real].sum(), predicted_N

    @staticmethod
    def backward(ctx, grad_total, _grad_predicted):
        grad_states, grad_head = ctx.saved_tensors
        if grad_head is not None:
            grad_head = grad_head * grad_total.to(grad_head.dtype)
        return grad_states * grad_total.to(grad_states.dtype), grad_head, None, None, None, None


def linear_kl(
    states_NH: torch.Tensor,
    head_DH: torch.Tensor,
    teacher: TeacherProbs,
    at_N: torch.Tensor,
    real: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum of KL over the first `real` rows, float32 scalar; their argmax ids, int64).

    Args:
        states_NH: normed states, in the compute dtype.
        head_DH: the draft's head in the compute dtype; it gets a gradient where it requires one.
        teacher: the verifier's distributions, made once a step.
        at_N: the teacher's row that each state is to match.
        real: rows after these are filling (see common.packing.FILL).
    """
    return LinearKL.apply(states_NH, head_DH, teacher.p_UD, teacher.negentropy_U, at_N, real)
