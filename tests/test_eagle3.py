"""The TTT step against speculators' own forward and against plain forms of itself."""

import pytest
import torch

from common.draft import packed_row
from common.draft.config import DraftShape, flops_of_step, training_memory
from common.draft.linear_products import LinearProducts
from common.draft.loss_table import loss_table
from common.draft.losses import linear_kl, target_probs
from common.draft.model import Eagle3Draft, initialize, ttt_states
from common.draft.packed_row import make_row
from common.training.heldout import acceptance_rates, heldout_counts
from common.training.optimizers import make_optimizers, optimizer_state
from common.training.step import Target, step_loss
from common.verifier.head import HeadFacts

pytestmark = pytest.mark.quick

H, V, D, DEPTHS = 64, 96, 40, 3
PLAIN = LinearProducts(torch.float32)


def shape(**more):
    base = dict(
        hidden_size=H,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        num_aux_layers=3,
        draft_vocab_size=D,
        vocab_size=V,
    )
    return DraftShape(**(base | more))


def target():
    g = torch.Generator().manual_seed(5)
    tokens = torch.sort(torch.randperm(V, generator=g)[:D]).values
    head = torch.randn(V, H, generator=g) * 0.1
    return Target(
        HeadFacts("float32", False, 1e-6),
        bias_V=None,
        bias_D=None,
        embed_VH=torch.randn(V, H, generator=g),
        head_VH=head,
        head_DH=head[tokens],
        norm_H=torch.rand(H, generator=g) + 0.5,
        token_D=tokens,
    )


def fresh(s, t):
    torch.manual_seed(1)
    draft = Eagle3Draft(s)
    initialize(draft, t.head_DH)
    with torch.no_grad():
        for p in draft.parameters():
            if p.dim() == 1:
                p.uniform_(0.5, 1.5)
            elif p is not draft.lm_head.weight:
                p.mul_(5)
    return draft


def sample(seed, turns):
    """One sample whose mask is 0 for the first and 1 for the second of each pair in turns."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.tensor(
        [v for pair in turns for v, n in zip((0, 1), pair, strict=True) for _ in range(n)]
    )
    T = len(mask)
    return dict(
        aux=torch.randn(T, 3 * H, generator=g),
        last=torch.randn(T, H, generator=g),
        ids=torch.randint(0, V, (T,), generator=g),
        mask=mask.bool(),
    )


def pack(samples, rule="answer"):
    return make_row(
        torch.stack(
            [
                *torch.cat([s["aux"] for s in samples]).chunk(3, -1),
                torch.cat([s["last"] for s in samples]),
            ],
            1,
        ),
        None,
        torch.cat([s["ids"] for s in samples]),
        torch.cat([s["mask"] for s in samples]),
        [len(s["ids"]) for s in samples],
        DEPTHS,
        rule,
    )


def counts(row):
    return [one.real for one in row.losses]


def mean_loss(draft, t, row, decay=1.0, linears=None):
    """(loss whose depths are means, sums [2, K])"""
    weights = [decay**k / n for k, n in enumerate(counts(row))]
    weights += [0.0] * (DEPTHS - len(weights))
    return step_loss(draft, linears or PLAIN, t, row, weights)


# user turns of 1 to 3 tokens between answers, and a sample without a deep position
MULTI_TURN = [
    sample(1, [(5, 7), (1, 4), (3, 9), (2, 1)]),
    sample(2, [(3, 2)]),
    sample(3, [(9, 12), (2, 5)]),
]


@pytest.mark.parametrize("decay", [1.0, 0.7])
@pytest.mark.parametrize(
    "flags",
    [
        dict(norm_before_residual=True),
        dict(norm_before_residual=False),
        dict(norm_before_fc=True, norm_output=True),
        dict(fc_norm=True),
    ],
)
def test_loss_and_gradients_equal_speculators(flags, decay):
    """One unpacked sample under speculators' rule: loss and every gradient to 1e-4."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch

    from common.draft.export import speculators_config
    from common.verifier.config import Verifier

    s, t = shape(**flags), target()
    draft = fresh(s, t)
    one = MULTI_TURN[0]
    row = pack([one], "next")
    ours, _ = mean_loss(draft, t, row, decay)
    ours.backward()
    PLAIN.add_gradients()

    verifier = Verifier("none", {}, {}, 4, H, V, 1e-6, 4096, ())
    theirs = Eagle3DraftModel(speculators_config(s, verifier, [0, 1, 2], DEPTHS))
    state = {k: v.detach().clone() for k, v in draft.state_dict().items()}
    state |= {
        "embed_tokens.weight": t.embed_VH,
        "verifier_lm_head.weight": t.head_DH,
        "verifier_norm.weight": t.norm_H,
        "d2t": t.token_D - torch.arange(D),
        "t2d": torch.isin(torch.arange(V), t.token_D),
    }
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [m for m in missing if "rotary" not in m]
    theirs.lm_head.weight.requires_grad_(True)
    batch = shift_batch(
        {
            "input_ids": one["ids"],
            "hidden_states": one["aux"],
            "verifier_last_hidden_states": one["last"],
            "loss_mask": one["mask"],
            "lengths": torch.tensor([len(one["ids"])]),
            "position_ids": torch.arange(len(one["ids"])),
        }
    )
    lengths = batch.pop("lengths")
    _, loss, _ = theirs(
        **{k: v[None] for k, v in batch.items()},
        document_ids=torch.zeros(1, int(lengths), dtype=torch.long),
        ttt_steps=DEPTHS,
        ttt_step_loss_decay=decay,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    loss.backward()
    assert float(ours.detach()) == pytest.approx(float(loss.detach()), rel=1e-4)
    gradients = dict(theirs.named_parameters())
    for name, parameter in draft.named_parameters():
        a, b = parameter.grad, gradients[name].grad
        assert a is not None
        assert b is not None
        assert float((a - b).norm() / b.norm()) < 1e-4, name


@pytest.mark.parametrize("rule", ["answer", "next"])
def test_only_needed_positions_give_the_plain_result(rule, monkeypatch):
    """Computing the needed positions alone changes neither loss nor gradients against all."""
    t = target()
    results = []
    for every in (False, True):
        if every:
            monkeypatch.setattr(
                packed_row, "query_positions", lambda table: torch.arange(table.shape[1])
            )
        draft = fresh(shape(), t)
        row = pack(MULTI_TURN, rule)
        loss, sums = mean_loss(draft, t, row)
        loss.backward()
        PLAIN.add_gradients()
        results.append((counts(row), loss.detach(), sums, [p.grad for p in draft.parameters()]))
        assert every == (len(row.query_N.unique()) == len(row.ids_T))
    (counts_a, loss_a, sums_a, ga), (counts_b, loss_b, sums_b, gb) = results
    assert counts_a == counts_b
    assert torch.equal(sums_a[1], sums_b[1])
    assert float(loss_a) == pytest.approx(float(loss_b), rel=1e-5)
    for x, y in zip(ga, gb, strict=True):
        assert torch.allclose(x, y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("turns", [[(5, 130), (1, 4)], [(300, 90), (3, 400), (2, 1)]])
def test_block_lists_are_flex_attentions_own(turns):
    """Of query positions that skip user turns and cross samples, against create_block_mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    row = pack([sample(7, turns), *MULTI_TURN, sample(8, [(40, 500)])])
    N, T = len(row.query_N), len(row.ids_T)

    def seen(_b, _h, n, t):
        query = row.query_N[n]
        return (row.sample_T[query] == row.sample_T[t]) & (t <= query)

    mask = create_block_mask(seen, None, None, N, T, device="cpu")
    want = [x for x in mask.as_tuple(flatten=False) if isinstance(x, torch.Tensor)]
    assert len(want) == len(row.blocks) == 8
    assert int(row.blocks[2].sum()) > 0
    assert all(torch.equal(a, b) for a, b in zip(want, row.blocks, strict=True))
    assert all(x.is_contiguous() for x in row.blocks)  # the kernels read them as rows


def test_packing_never_mixes_samples():
    """A packed row's sums per depth are those of its samples alone."""
    t = target()
    draft = fresh(shape(), t)
    packed = pack(MULTI_TURN)
    alone = [pack([s]) for s in MULTI_TURN]
    sums = mean_loss(draft, t, packed)[1]
    assert counts(packed) == [
        sum(counts(r)[k] for r in alone if len(r.losses) > k) for k in range(DEPTHS)
    ]
    assert torch.allclose(sums, sum(mean_loss(draft, t, r)[1] for r in alone), rtol=1e-5)


def easy_target():
    """Of five tokens, three of them the draft's, so that chance alone hits often."""
    g = torch.Generator().manual_seed(3)
    tokens = torch.tensor([1, 2, 4])
    head = torch.randn(5, H, generator=g)
    return Target(
        HeadFacts("float32", False, 1e-6), bias_V=None, bias_D=None,
        embed_VH=torch.randn(5, H, generator=g), head_VH=head, head_DH=head[tokens],
        norm_H=torch.rand(H, generator=g) + 0.5, token_D=tokens,
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["answer", "next"])
def test_hits_are_those_of_each_query_position_alone(rule):
    """Held-out hits, chains and training's hits, counted one position at a time."""
    t = easy_target()
    draft = fresh(shape(vocab_size=5, draft_vocab_size=3), t)
    samples = [sample(n, [(3, 60 + n), (2, 50), (1, 3)]) for n in range(6)]
    for s in samples:
        s["ids"] %= 5
    held = torch.zeros(DEPTHS, 4, dtype=torch.int64)
    hits = torch.zeros(DEPTHS)
    for s in samples:
        alone = pack([s], rule)
        states = ttt_states(draft, PLAIN, t.embed_VH, alone)
        table = loss_table(s["mask"], [0], DEPTHS, rule)
        normed = (
            s["last"]
            * (s["last"].pow(2).mean(-1, keepdim=True) + t.facts.norm_eps).rsqrt()
            * t.norm_H
        )
        theirs = (normed @ t.head_VH.T).argmax(-1)
        for query in range(len(s["ids"])):
            chain = True
            for k in range(DEPTHS):
                if not table[k, query]:
                    continue
                place = alone.query_N.tolist().index(query)
                logits = draft.norm(states[k][place]) @ draft.lm_head.weight.T
                ours = t.token_D[logits.argmax()]
                at = query + 2 + k
                hits[k] += at < len(s["ids"]) and bool(ours == s["ids"][at])
                hit = bool(ours == theirs[query + 1 + k])
                held[k] += torch.tensor([1, hit, chain, chain and hit])
                chain = chain and hit
    assert held[2, 3] > 2  # there are chains to the end
    row = pack(samples, rule)
    assert torch.equal(heldout_counts(draft, PLAIN, t, row), held)
    assert torch.equal(mean_loss(draft, t, row)[1][1].detach(), hits)


def test_acceptance_follows_from_the_counts():
    rates = acceptance_rates(torch.tensor([[10, 6, 10, 6], [8, 5, 5, 4], [6, 4, 4, 1]]))
    assert rates["conditional_accuracy"] == [0.6, 0.8, 0.25]
    assert rates["acceptance_length"] == pytest.approx(1 + 0.6 + 0.48 + 0.12)


@pytest.mark.parametrize("train_lm_head", [True, False])
@pytest.mark.parametrize("norms", [{}, {"norm_before_fc": True}])
def test_a_steps_operations_are_those_counted(train_lm_head, norms):
    """flops_of_step against torch's count of the products that run, attention's left out."""
    from torch.utils.flop_counter import FlopCounterMode

    t = target()
    s = shape(**norms)
    draft = fresh(s, t)
    draft.lm_head.weight.requires_grad_(train_lm_head)
    row = pack(MULTI_TURN)
    linears = LinearProducts(torch.float32)
    aten = torch.ops.aten

    def in_place(_sum, a, b, **_):
        return 2 * a[0] * a[1] * b[1]

    counter = FlopCounterMode(display=False, custom_mapping={aten.addmm_: in_place})
    with counter:
        loss, _ = mean_loss(draft, t, row, linears=linears)
        loss.backward()
        linears.add_gradients()
    ran = sum(counter.get_flop_counts()["Global"].get(op, 0) for op in (aten.mm, aten.addmm_))
    rows = [len(one.at_n) for one in row.losses]
    counted = flops_of_step(s, len(row.ids_T), len(row.query_N), rows, train_lm_head)
    # the target rows are those of all depths together
    counted += 2 * (len(row.target_U) - max(rows)) * H * D
    assert counted == ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train_lm_head", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_memory_that_a_step_needs_at_least(dtype, train_lm_head, optimizer):
    """All matrices that there are after a step, in bytes; Muon's own head is AdamW's, with a
    tensor more than is asked for."""
    draft = fresh(shape(), target())
    draft.lm_head.weight.requires_grad_(train_lm_head)
    optimizers = make_optimizers(draft, optimizer, 1e-3, 0.0, 1)
    linears = LinearProducts(dtype)
    matrices = [p for p in draft.parameters() if p.dim() == 2]
    for p in draft.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    for one in optimizers:
        one.step()
    held = [x for p in matrices for x in (p.detach(), p.grad, linears.copy(p)) if x is not None]
    held += [x for x in optimizer_state(draft, optimizers).values() if x.dim() == 2]
    sizes = {x.data_ptr(): x.numel() * x.element_size() for x in held}  # a float32 copy is none
    found = sum(sizes.values()) + 2 * V * H * dtype.itemsize  # the verifier's
    count = 2 if optimizer == "adamw" else 1
    needed = training_memory(draft.shape, dtype.itemsize, 1, count, train_lm_head)
    head = 4 * D * H if optimizer == "muon" and train_lm_head else 0
    assert needed == found - head


def test_linear_kl_is_kl_with_its_gradient():
    g = torch.Generator().manual_seed(0)
    states = torch.randn(37, H, generator=g, requires_grad=True)
    head = torch.nn.Parameter(torch.randn(D, H, generator=g))
    logits = torch.randn(20, D, generator=g) * 3
    at = torch.randint(0, 20, (37,), generator=g)
    total, predicted = linear_kl(PLAIN, states, head, target_probs(logits.clone()), at, 37)
    (total * 0.3).backward()
    PLAIN.add_gradients()
    s2, h2 = states.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    log_q = (s2 @ h2.T).log_softmax(-1)
    log_p = logits.double().log_softmax(-1)[at]
    expected = (log_p.exp() * (log_p - log_q)).sum()
    (expected * 0.3).backward()
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert torch.equal(predicted, log_q.argmax(-1))
    for mine, reference in ((states, s2), (head, h2)):
        assert mine.grad is not None
        assert reference.grad is not None
        assert torch.allclose(mine.grad.double(), reference.grad, atol=1e-5)
