"""Loss of one training step over all TTT depths, and the held-out measure of a draft."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.eagle3 import Eagle3Draft, PackedRow, rms_norm, ttt_states
from common.losses import linear_kl, teacher_probs
from common.packing import FILL


@dataclass(frozen=True)
class Teacher:
    """The verifier's tensors, frozen, on the training device in the compute dtype.

    embed_VH, head_VH: embedding and head; head_DH: the head's rows of the draft's
    vocabulary; norm_H, eps: final norm; target_D: draft id → target id.
    """

    embed_VH: torch.Tensor
    head_VH: torch.Tensor
    head_DH: torch.Tensor
    norm_H: torch.Tensor
    eps: float
    target_D: torch.Tensor


@dataclass
class StepResult:
    """`loss` has a graph; the others are sums per depth, to be divided by `counts`."""

    loss: torch.Tensor
    loss_sums: list[torch.Tensor]
    correct: list[torch.Tensor]
    counts: list[int]


def step_loss(
    draft: Eagle3Draft,
    teacher: Teacher,
    row: PackedRow,
    depth_weights: list[float],
    dtype: torch.dtype,
) -> StepResult:
    """Loss sum_k w_k * mean over M[k] of KL(verifier || draft) of one packed row.

    The accuracy counted is against the data's token; one outside the draft's vocabulary
    counts as wrong.
    """
    states = ttt_states(draft, teacher.embed_VH, row, dtype)
    device = row.ids_T.device
    table = row.table.to(device)
    # The target of column t at depth k is what the verifier's state t+1+k says: one row of
    # teacher logits per such state, however many depths use it.
    used_T = torch.zeros(len(row.ids_T), dtype=torch.bool, device=device)
    chosen = []  # per depth: places of the loss columns among the depth's columns
    for k, (columns_N, _) in enumerate(states):
        places = table[k][columns_N].nonzero().view(-1)
        used_T[columns_N[places] + 1 + k] = True
        chosen.append(places)
    used_U = used_T.nonzero().view(-1)
    with torch.no_grad():
        last_UH = row.last_TH[filled(used_U)]
        normed_UH = rms_norm(last_UH, teacher.norm_H, teacher.eps).to(dtype)
        probs = teacher_probs(normed_UH @ teacher.head_DH.T)

    head_DH = draft.lm_head.weight.to(dtype)
    loss = torch.zeros((), device=device)
    loss_sums, correct, counts = [], [], []
    for k, (columns_N, state_NH) in enumerate(states):
        real = len(chosen[k])
        if real == 0:
            break
        places = filled(chosen[k])
        at_N = torch.searchsorted(used_U, columns_N[places] + 1 + k).clamp(max=len(used_U) - 1)
        total, predicted = linear_kl(draft.norm(state_NH[places]), head_DH, probs, at_N, real)
        loss = loss + depth_weights[k] * total / real
        loss_sums.append(total.detach())
        hits = teacher.target_D[predicted] == token_after(row, columns_N[chosen[k]], 2 + k)
        correct.append(hits.sum())
        counts.append(real)
    return StepResult(loss, loss_sums, correct, counts)


def filled(index_N: torch.Tensor) -> torch.Tensor:
    """On a CPU, the indices filled up to a multiple of FILL with their first (see there)."""
    if index_N.device.type != "cpu" or len(index_N) == 0:
        return index_N
    return torch.cat([index_N, index_N[:1].expand(-len(index_N) % FILL)])


def token_after(row: PackedRow, columns: torch.Tensor, offset: int) -> torch.Tensor:
    """The data's token `offset` after each column, -1 where the sample has ended."""
    at = (columns + offset).clamp(max=len(row.ids_T) - 1)
    inside = row.positions_T[at] == row.positions_T[columns] + offset
    return torch.where(inside, row.ids_T[at], -1)


@torch.no_grad()
def heldout_counts(
    draft: Eagle3Draft, teacher: Teacher, row: PackedRow, dtype: torch.dtype
) -> torch.Tensor:
    """Count the draft's hits on held-out samples against the verifier's own choice.

    A hit is the draft's argmax being the argmax of the verifier's whole vocabulary.

    Returns:
        int64 [depths, 4] on the CPU: predictions; hits; predictions whose column hit at every
        shallower depth (those that a server would come to verify); hits among these.
    """
    device = row.ids_T.device
    table = row.table.to(device)
    out = torch.zeros(len(row.table), 4, dtype=torch.int64)
    chain_T = torch.ones(len(row.ids_T), dtype=torch.bool, device=device)
    for k, (columns_N, state_NH) in enumerate(ttt_states(draft, teacher.embed_VH, row, dtype)):
        carries_N = table[k][columns_N]
        columns = columns_N[carries_N]
        hits = []
        for state_nH, column_n in zip(
            state_NH[carries_N].split(512), columns.split(512), strict=True
        ):
            last_nH = row.last_TH[column_n + 1 + k]
            normed_nH = rms_norm(last_nH, teacher.norm_H, teacher.eps).to(dtype)
            theirs_n = (normed_nH @ teacher.head_VH.T).argmax(-1)
            logits_nD = F.linear(draft.norm(state_nH), draft.lm_head.weight)
            hits.append(teacher.target_D[logits_nD.argmax(-1)] == theirs_n)
        if not hits:
            break
        hit = torch.cat(hits)
        tried = int(chain_T[columns].sum())
        chain_T[columns] &= hit
        out[k] = torch.tensor([len(columns), int(hit.sum()), tried, int(chain_T[columns].sum())])
    return out


def acceptance(counts: torch.Tensor) -> dict[str, object]:
    """Rates of `heldout_counts` sums: accuracy a depth, accuracy where every shallower depth
    hit, and the mean acceptance length that the latter imply, 1 + c0 + c0 c1 + ..."""
    n = counts.clamp(min=1).double()
    accuracy = counts[:, 1] / n[:, 0]
    conditional = counts[:, 3] / n[:, 2]
    return {
        "accuracy": [round(float(x), 4) for x in accuracy],
        "conditional_accuracy": [round(float(x), 4) for x in conditional],
        "acceptance_length": round(1 + float(conditional.cumprod(0).sum()), 4),
        "predictions": int(counts[0, 0]),
    }
