"""Which predictions carry loss, and which query positions must be computed for them.

Query position t of a sample is the draft's work from the verifier's state of token t: at depth k
it takes token t+1+k and predicts token t+2+k.

    tokens      u u u a0 a1 a2 e  u      (a0 a1 a2 e: one answer, e its end of turn)
    loss_mask   0 0 0 1  1  1  1  0
    M[0]        0 0 1 1  1  0  0  0      position t predicts t+2: a1, a2, e
    M[1]        0 0 1 1  0  0  0  0      predicts t+3: a2, e
    M[2]        0 0 1 0  0  0  0  0      predicts t+4: e

a0 is never a target (the verifier samples it) and nothing after e is. This is the only
place where the rule is made. Which tokens are answers, the mask itself, is decided when the data
are prepared, in data/chat_template.py.
"""

import torch


def loss_table(
    mask_T: torch.Tensor, starts: list[int], depths: int, rule: str = "answer"
) -> torch.Tensor:
    """Return M, bool [depths, T]: M[k, t] says that query position t carries loss at depth k.

    Args:
        mask_T: bool [T], the loss masks of a packed row of samples.
        starts: first token of each sample in the row, ascending, starting with 0.
        depths: TTT steps.
        rule: "answer": tokens t+1 .. t+2+k are answer tokens of one turn. "next":
            speculators' rule, token t+1+k is an answer token, whatever it starts from
            (speculators 0.9, models/eagle3/data.py and metrics.py); for comparison.
    """
    T = len(mask_T)
    ends_T = torch.empty(T, dtype=torch.long)  # end of each token's sample
    for start, end in zip(starts, [*starts[1:], T], strict=True):
        ends_T[start:end] = end
    t = torch.arange(T)
    table = torch.zeros(depths, T, dtype=torch.bool)

    def answer_at(offset: int) -> torch.Tensor:
        """bool [T]: token t + offset exists in the sample of t and is an answer token."""
        at = t + offset
        return (at < ends_T) & mask_T[at.clamp(max=T - 1)]

    if rule == "next":
        for k in range(depths):
            table[k] = answer_at(1 + k)
        return table
    if rule != "answer":
        raise ValueError(f"no loss rule {rule!r}")
    run = answer_at(1)
    for k in range(depths):
        run = run & answer_at(2 + k)
        table[k] = run
    return table


def query_positions(table_KT: torch.Tensor) -> torch.Tensor:
    """Return N, int64 ascending: the query positions whose state some loss needs, at any depth.

    A position's deeper states read only its own shallower ones and depth-0 keys and values,
    so no other position's queries, attention output or MLP have to run. At depth j only
    {t : M[k, t] for some k >= j} are needed, which leaves out at most j positions per answer:
    one set for all depths keeps them aligned, for less than a hundredth of the work.
    """
    return table_KT.any(0).nonzero().view(-1)
