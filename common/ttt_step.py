"""Loss of one training step over all TTT depths, and the held-out measure of a draft."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.eagle3 import Eagle3Draft, PackedRow, ttt_states
from common.losses import linear_kl, teacher_probs
from common.selfcheck import rms_norm


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
    loss_columns = []
    for k, (columns_N, _) in enumerate(states):
        carries_N = table[k][columns_N]
        loss_columns.append((columns_N[carries_N], carries_N))
        used_T[columns_N[carries_N] + 1 + k] = True
    with torch.no_grad():
        normed_UH = rms_norm(row.last_TH[used_T], teacher.norm_H, teacher.eps).to(dtype)
        probs = teacher_probs(normed_UH @ teacher.head_DH.T)
    place_T = used_T.cumsum(0) - 1  # token → its row of probs

    loss = torch.zeros((), device=device)
    loss_sums, correct, counts = [], [], []
    for k, (_, state_NH) in enumerate(states):
        columns, carries_N = loss_columns[k]
        if len(columns) == 0:
            break
        normed_NH = draft.norm(state_NH[carries_N])
        total, predicted = linear_kl(
            normed_NH, draft.lm_head.weight, probs, place_T[columns + 1 + k]
        )
        loss = loss + depth_weights[k] * total / len(columns)
        loss_sums.append(total.detach())
        correct.append((teacher.target_D[predicted] == row.ids_T[columns + 2 + k]).sum())
        counts.append(len(columns))
    return StepResult(loss, loss_sums, correct, counts)


@torch.no_grad()
def heldout_counts(
    draft: Eagle3Draft, teacher: Teacher, row: PackedRow, dtype: torch.dtype
) -> torch.Tensor:
    """Count the draft's hits on held-out samples against the verifier's own choice.

    A hit is the draft's argmax being the argmax of the verifier's whole vocabulary.

    Returns:
        int64 [depths, 3] on the CPU: predictions, hits, and hits with every shallower depth
        of the same column a hit too (what speculative decoding accepts).
    """
    device = row.ids_T.device
    table = row.table.to(device)
    out = torch.zeros(len(row.table), 3, dtype=torch.int64)
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
        chain_T[columns] &= hit
        out[k] = torch.tensor([len(columns), int(hit.sum()), int(chain_T[columns].sum())])
    return out


def acceptance(counts: torch.Tensor) -> dict[str, object]:
    """Rates of `heldout_counts` sums: accuracy a depth, conditional accuracy, and the mean
    acceptance length 1 + sum_k P(depths 0..k all accepted) they imply."""
    n = counts[:, 0].clamp(min=1).double()
    accuracy = counts[:, 1] / n
    chain = counts[:, 2] / n
    before = torch.cat([torch.ones(1, dtype=torch.float64), chain[:-1]])
    conditional = chain / before.clamp(min=1e-12)
    return {
        "accuracy": [round(float(x), 4) for x in accuracy],
        "conditional_accuracy": [round(float(x), 4) for x in conditional],
        "acceptance_length": round(1 + float(chain.sum()), 4),
        "predictions": int(counts[0, 0]),
    }
