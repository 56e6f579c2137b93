"""What runs otherwise on a GPU, against the CPU's plain form: needs one."""

import pytest
import torch

from common.attention import TTTAttention, attend_by_sample
from common.losses import linear_kl, teacher_probs
from common.training import Trainer
from common.ttt_step import heldout_counts, step_loss
from tests.test_eagle3 import DEPTHS, MULTI_TURN, counts, fresh, pack, sample, shape, teacher

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def on_gpu(t):
    moved = {k: v.cuda() for k, v in vars(t).items() if isinstance(v, torch.Tensor)}
    return type(t)(**(vars(t) | moved))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.cpu().double() - b.cpu().double()).norm() / b.cpu().double().norm())


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_flex_attention_with_diagonals_is_the_plain_form(kv_heads):
    """Outputs and gradients of every input at every depth, with multi-turn samples."""
    torch.manual_seed(0)
    row = pack([*MULTI_TURN, sample(4, [(70, 160), (3, 20)])])
    T, N, d = len(row.ids_T), len(row.columns_N), 64
    parts = {"q": (N, 8, d), "k": (T, kv_heads, d), "v": (T, kv_heads, d)}
    parts |= {f"own{n}": (N, kv_heads, d) for n in range(4)}
    plain = {k: torch.randn(size).requires_grad_() for k, size in parts.items()}
    there = {k: v.detach().cuda().requires_grad_() for k, v in plain.items()}
    weight = torch.randn(N, 8, d)
    own = [(plain["own0"], plain["own1"]), (plain["own2"], plain["own3"])]
    attention = TTTAttention(row.to("cuda"), there["k"], there["v"])
    for depth in range(3):
        if depth:
            attention.add_own(there[f"own{2 * depth - 2}"], there[f"own{2 * depth - 1}"])
        want = attend_by_sample(plain["q"], plain["k"], plain["v"], own[:depth], row)
        found = attention(there["q"])
        assert relative(found, want) < 2e-3  # TF32 products
        for tensors, out, w in ((plain, want, weight), (there, found, weight.cuda())):
            for x in tensors.values():
                x.grad = None
            (out * w).sum().backward(retain_graph=True)
        for name, x in plain.items():
            other = there[name].grad
            if x.grad is not None and other is not None and float(x.grad.norm()) > 0:
                assert relative(other, x.grad) < 5e-3, (depth, name)


@pytest.mark.parametrize("rule", ["answer", "next"])
def test_the_step_is_that_of_the_cpu(rule):
    t = teacher()
    results = []
    for device in ("cpu", "cuda"):
        draft = fresh(shape(), t).to(device)
        row = pack(MULTI_TURN, rule).to(device)
        weights = [1 / n for n in counts(row)]
        loss, sums = step_loss(draft, on_gpu(t) if device == "cuda" else t, row, weights)
        loss.backward()
        results.append((loss, sums, [p.grad for p in draft.parameters()]))
    (loss_a, sums_a, ga), (loss_b, sums_b, gb) = results
    assert relative(loss_b.detach(), loss_a.detach()) < 1e-3
    assert torch.equal(sums_a[1], sums_b[1].cpu())
    for x, y in zip(ga, gb, strict=True):
        assert relative(y, x) < 1e-2


def test_kl_in_one_kernel_is_the_chunked_one():
    g = torch.Generator().manual_seed(0)
    states, head = torch.randn(300, 64, generator=g), torch.randn(1000, 64, generator=g) * 0.3
    logits, at = torch.randn(200, 1000, generator=g) * 3, torch.randint(0, 200, (300,), generator=g)
    found = []
    for device in ("cpu", "cuda"):
        s, h = (x.to(device).requires_grad_() for x in (states, head))
        total, predicted = linear_kl(s, h, teacher_probs(logits.to(device)), at.to(device), 290)
        total.backward()
        found.append((total.detach(), s.grad, h.grad, predicted))
    for a, b in zip(*found, strict=True):
        assert relative(b.float(), a.float()) < 2e-3


def test_rows_of_other_lengths_compile_nothing():
    t = on_gpu(teacher())
    trainer = Trainer(fresh(shape(), t).cuda(), torch.bfloat16, [], 1.0)
    lengths = [(40, 300), (100, 90), (7, 500), (30, 200), (90, 700)]
    compiled = []
    for seed, turn in enumerate(lengths):
        row = pack([sample(seed, [turn]), *MULTI_TURN]).to("cuda")
        trainer.step(t, [row], [1.0] * DEPTHS, 1e-3).metrics(seed, counts(row))
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[0] > 0
    assert compiled[-1] == compiled[1]


def test_heldout_counts_are_those_of_the_cpu():
    t = teacher()
    draft = fresh(shape(), t)
    want = heldout_counts(draft, t, pack(MULTI_TURN))
    assert torch.equal(heldout_counts(draft.cuda(), on_gpu(t), pack(MULTI_TURN).to("cuda")), want)
