"""Loss of one packed row over all TTT depths, and the held-out measure of a draft.

Shape suffixes: n losses of one depth, U rows of the teacher, K depths, H hidden size,
D draft vocabulary, V verifier's.
"""

from dataclasses import dataclass

import torch

from common.draft.linear_products import Products
from common.draft.losses import linear_kl, teacher_probs
from common.draft.model import Eagle3Draft, rms_norm_region, ttt_states
from common.draft.packed_row import PackedRow


@dataclass(frozen=True)
class Teacher:
    """The verifier's tensors, frozen, on the training device.

    embed_VH, head_VH: embedding and head; head_DH: the head's rows of the draft's vocabulary, all
    in the compute dtype; norm_H (float32), eps: final norm; target_D: draft id → target id.
    """

    embed_VH: torch.Tensor
    head_VH: torch.Tensor
    head_DH: torch.Tensor
    norm_H: torch.Tensor
    eps: float
    target_D: torch.Tensor

    def normed(self, row: PackedRow) -> torch.Tensor:
        """The final norm of the row's teacher states, [U, H]."""
        return rms_norm_region(row.last(self.head_DH.dtype), self.norm_H, self.eps)


def step_loss(
    draft: Eagle3Draft,
    products: Products,
    teacher: Teacher,
    row: PackedRow,
    weights: list[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, float32 [2, K]: each depth's sum of KL, and its hits).

    The loss is sum_k weights[k] * sum over M[k] of KL(verifier || draft). A hit is the draft's
    argmax being the data's token; one outside the draft's vocabulary is none. The gradients of
    matrices are there when the backward pass is over and products.add_gradients() has run.
    """
    states = ttt_states(draft, products, teacher.embed_VH, row)
    with torch.no_grad():
        probs = teacher_probs(teacher.normed(row) @ teacher.head_DH.T)
    loss = torch.zeros((), device=row.ids_T.device)
    sums = torch.zeros(2, len(weights), device=row.ids_T.device)
    for k, (one, state_NH) in enumerate(zip(row.losses, states, strict=True)):
        state_nH, head = draft.norm(state_NH[one.at_n]), draft.lm_head.weight
        total, predicted = linear_kl(products, state_nH, head, probs, one.teacher_n, one.real)
        loss = loss + weights[k] * total
        sums[0, k] = total.detach()
        sums[1, k] = (teacher.target_D[predicted] == one.wanted_n[: one.real]).sum()
    return loss, sums


@torch.no_grad()
def heldout_counts(
    draft: Eagle3Draft, products: Products, teacher: Teacher, row: PackedRow
) -> torch.Tensor:
    """Count the draft's hits on held-out samples against the verifier's own choice.

    A hit is the draft's argmax being the argmax of the verifier's whole vocabulary.

    Returns:
        int64 [K, 4] on the CPU: predictions; hits; predictions whose column hit at every
        shallower depth (those that a server would come to verify); hits among these.
    """
    device = row.ids_T.device
    theirs_U = argmax_ids(teacher.normed(row), teacher.head_VH)
    out = torch.zeros(len(row.tokens_KN), 4, dtype=torch.int64)
    chain_N = torch.ones(len(row.columns_N), dtype=torch.bool, device=device)
    states = ttt_states(draft, products, teacher.embed_VH, row)
    head_DH = products.copy(draft.lm_head.weight)
    for k, (one, state_NH) in enumerate(zip(row.losses, states, strict=True)):
        at_n, theirs_n = one.at_n[: one.real], theirs_U[one.teacher_n[: one.real]]
        ours_n = argmax_ids(draft.norm(state_NH[at_n]), head_DH)
        hit_n = teacher.target_D[ours_n] == theirs_n
        tried = int(chain_N[at_n].sum())
        chain_N[at_n] &= hit_n
        out[k] = torch.tensor([one.real, int(hit_n.sum()), tried, int(chain_N[at_n].sum())])
    return out


def argmax_ids(states_nH: torch.Tensor, head_XH: torch.Tensor) -> torch.Tensor:
    """argmax of states @ head.T, int64 [n], 512 rows at a time: the logits of a verifier's
    vocabulary would fill a GPU."""
    return torch.cat([(x @ head_XH.T).argmax(-1) for x in states_nH.split(512)])


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
