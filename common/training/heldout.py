"""The held-out measure: how many of a draft's tokens a server would accept.

Shape suffixes: n predictions of one depth, N query positions, U target states, K depths, H hidden
size, D draft vocabulary.
"""

from typing import Any

import torch

from common.draft.linear_products import LinearProducts
from common.draft.model import Eagle3Draft, ttt_states
from common.draft.packed_row import PackedRow
from common.training.loader import RowReader, rows_ahead
from common.training.step import Target, Trainer


class HeldOut:
    """The held-out measure at the end of each epoch, and the weights of the best one.

    Args:
        reader: of rows whose loss follows the rule "answer": whatever the training's, a server
            accepts along paths inside answers.
        rows: of held-out samples; none, and nothing is measured.
        patience: epochs without a better one after which the training ends.
    """

    def __init__(
        self, trainer: Trainer, reader: RowReader, rows: list[list[int]], patience: int | None
    ):
        self.trainer, self.reader, self.rows, self.patience = trainer, reader, rows, patience
        self.best: dict[str, Any] | None = None  # its measure, step and epoch
        self.weights: dict[str, torch.Tensor] = {}  # of the best epoch, on the first rank
        self.measured = 0  # the last step measured after

    def measure(self, step: int, epoch: int) -> dict[str, Any] | None:
        """Measure the draft after a step; remember its weights if it is the best so far.

        Returns:
            Accuracy per depth and the acceptance length they imply, over all ranks; None where
            nothing is held out.
        """
        if not self.rows:
            return None
        trainer, ranks = self.trainer, self.trainer.ranks
        device = trainer.draft.fc.weight.device.type
        if trainer.linears.float8:
            trainer.eval_linears.refresh()
        counts = torch.zeros(self.reader.depths, 4, dtype=torch.int64)
        for row in rows_ahead(self.reader, ranks.share(self.rows), device):
            counts += heldout_counts(trainer.draft, trainer.eval_linears, trainer.target, row)
        found = acceptance_rates(ranks.sum(counts.to(device)).cpu())
        self.measured = step
        if self.best is None or found["acceptance_length"] > self.best["acceptance_length"]:
            self.best = {"step": step, "epoch": epoch, **found}
            self.keep_weights()
        return found

    def keep_weights(self) -> None:
        """Remember the present weights as the best."""
        if self.trainer.ranks.first:
            self.weights = {}  # two copies would not fit every GPU
            dtype = self.trainer.linears.dtype
            self.weights = {
                name: p.detach().to(dtype if p.dim() == 2 else p.dtype, copy=True)
                for name, p in self.trainer.draft.named_parameters()
            }

    def patience_over(self, epoch: int) -> bool:
        """Whether the training ends after this epoch."""
        return bool(self.patience and self.best and epoch - self.best["epoch"] >= self.patience)

    def counters(self) -> dict[str, Any]:
        """For the state; see restore."""
        return {"best": self.best, "measured": self.measured}

    def restore(self, counters: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        """Resume from a state, whose own weights are the best's unless it brings others."""
        self.best, self.measured = counters["best"], counters["measured"]
        if self.best is None:
            return
        if self.best["step"] == counters["step"]:
            self.keep_weights()
        else:
            self.weights = weights


@torch.no_grad()
def heldout_counts(
    draft: Eagle3Draft, linears: LinearProducts, target: Target, row: PackedRow
) -> torch.Tensor:
    """Count the draft's hits on held-out samples against the verifier's own choice.

    A hit is the draft's argmax being the argmax of the verifier's full vocabulary.

    Returns:
        int64 [K, 4] on the CPU: predictions; hits; predictions whose query position hit at every
        shallower depth (those that a server would come to verify); hits among these.
    """
    device = row.ids_T.device
    theirs_U = target.tokens(row)
    out = torch.zeros(len(row.tokens_KN), 4, dtype=torch.int64)
    chain_N = torch.ones(len(row.query_N), dtype=torch.bool, device=device)
    states = ttt_states(draft, linears, target.embed_VH, row)
    head_DH = linears.copy(draft.lm_head.weight)
    for k, (one, state_NH) in enumerate(zip(row.losses, states, strict=True)):
        at_n, theirs_n = one.at_n[: one.real], theirs_U[one.target_n[: one.real]]
        normed_nH = draft.norm(state_NH[at_n])
        ours_n = torch.cat([(x @ head_DH.T).argmax(-1) for x in normed_nH.split(512)])
        hit_n = target.token_D[ours_n] == theirs_n
        tried = int(chain_N[at_n].sum())
        chain_N[at_n] &= hit_n
        out[k] = torch.tensor([one.real, int(hit_n.sum()), tried, int(chain_N[at_n].sum())])
    return out


def acceptance_rates(counts: torch.Tensor) -> dict[str, Any]:
    """Rates of `heldout_counts` sums: accuracy per depth, accuracy where every shallower depth
    hit, and the mean acceptance length that the latter imply, 1 + c0 + c0 c1 + ..."""
    n = counts.clamp(min=1).double()
    accuracy = counts[:, 1] / n[:, 0]
    conditional = counts[:, 3] / n[:, 2]
    return {
        "heldout_accuracy": [round(float(x), 4) for x in accuracy],
        "conditional_accuracy": [round(float(x), 4) for x in conditional],
        "acceptance_length": round(1 + float(conditional.cumprod(0).sum()), 4),
        "predictions": int(counts[0, 0]),
    }
