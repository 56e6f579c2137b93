"""What runs otherwise on a GPU, against the CPU's plain form: needs one."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from common.data.samples import Sample
from common.draft.attention import TTTAttention, attend_by_sample
from common.draft.linear_products import LinearProducts
from common.draft.losses import linear_kl, target_probs
from common.draft.packed_row import tensors_of
from common.states.files import hidden_file
from common.states.folder import HiddenFolder
from common.training.heldout import heldout_counts
from common.training.loader import RowReader, rows_ahead
from common.training.step import Trainer, step_loss
from tests.test_eagle3 import DEPTHS, MULTI_TURN, counts, fresh, pack, sample, shape, target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def on_gpu(t, dtype=torch.float32):
    """A target on the GPU, its matrices in the compute dtype."""
    moved = {k: v.cuda() for k, v in vars(t).items() if isinstance(v, torch.Tensor)}
    moved |= {k: v.to(dtype) for k, v in moved.items() if v.dim() == 2}
    return type(t)(**(vars(t) | moved))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_flex_attention_with_own_keys_is_the_plain_form(kv_heads):
    """Outputs and gradients of every input at every depth, with multi-turn samples."""
    torch.manual_seed(0)
    row = pack([*MULTI_TURN, sample(4, [(70, 160), (3, 20)])])
    T, N, d = len(row.ids_T), len(row.query_N), 64
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
            (out * w).sum().backward()
        for name, x in plain.items():
            other = there[name].grad
            assert (x.grad is None) == (other is None)
            if x.grad is not None and other is not None and float(x.grad.norm()) > 0:
                assert relative(other, x.grad) < 5e-3, (depth, name)


@pytest.mark.parametrize("rule", ["answer", "next"])
def test_the_step_is_that_of_the_cpu(rule):
    t = target()
    results = []
    for device in ("cpu", "cuda"):
        draft = fresh(shape(), t).to(device)
        row = pack(MULTI_TURN, rule).to(device)
        weights = [1 / n for n in counts(row)]
        linears = LinearProducts(torch.float32)
        there = on_gpu(t) if device == "cuda" else t
        loss, sums = step_loss(draft, linears, there, row, weights)
        loss.backward()
        linears.add_gradients()
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
        s, h = states.to(device, copy=True).requires_grad_(), torch.nn.Parameter(head.to(device))
        linears, probs = LinearProducts(torch.float32), target_probs(logits.to(device, copy=True))
        total, predicted = linear_kl(linears, s, h, probs, at.to(device), 290)
        total.backward()
        linears.add_gradients()
        found.append((total.detach(), s.grad, h.grad, predicted))
    for a, b in zip(*found, strict=True):
        assert relative(b.float(), a.float()) < 2e-3


def test_rows_of_other_lengths_compile_nothing():
    t = on_gpu(target(), torch.bfloat16)
    trainer = Trainer(fresh(shape(), target()).cuda(), t, LinearProducts(torch.bfloat16), [], 1.0)
    # as RowReader fills rows: of one length, with other query positions in each
    lengths = [(40, 300), (190, 150), (7, 333), (40, 300), (90, 250)]
    compiled = []
    for seed, turn in enumerate(lengths):
        row = pack([sample(seed, [turn]), *MULTI_TURN]).to("cuda")
        trainer.step(iter([row]), 1, [1.0] * DEPTHS, 1e-3).metrics(seed, counts(row))
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[0] > 0
    assert compiled[-1] == compiled[1]


def test_heldout_counts_are_those_of_the_cpu():
    t = target()
    draft = fresh(shape(), t)
    want = heldout_counts(draft, LinearProducts(torch.float32), t, pack(MULTI_TURN))
    row = pack(MULTI_TURN).to("cuda")
    found = heldout_counts(draft.cuda(), LinearProducts(torch.float32), on_gpu(t), row)
    assert torch.equal(found, want)


# between two of a float8 format's numbers next to 0
FINEST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}


@pytest.mark.parametrize("size", [(200, 176), (1024, 4096)])
def test_float8_cast_in_both_layouts(size):
    from common.draft.float8 import GRADIENTS, VALUES, amax_of, cast

    x = torch.randn(size, device="cuda", dtype=torch.bfloat16) ** 3
    found = amax_of([x, x * 2])
    most = 2 * float(x.abs().max())
    assert float(found.view(torch.float32)) == most
    for dtype in (VALUES, GRADIENTS):
        rows, columns = torch.empty_like(x, dtype=dtype), torch.empty_like(x.T, dtype=dtype)
        inverse, limit = torch.empty(1, device="cuda"), torch.finfo(dtype).max
        cast(x, found, rows, inverse)
        cast(x, found, columns.T, inverse)
        assert float(inverse) == pytest.approx(most / limit)
        assert torch.equal(columns.T.float(), rows.float())
        # a GPU's quotient may differ in its last bit, and with it what lies between two values
        other = rows.float() != (x.float() * (limit / most)).to(dtype).float()
        assert other.float().mean() < 1e-3
        step = FINEST[dtype] * float(inverse)
        torch.testing.assert_close(rows.float() * inverse, x.float(), rtol=0.13, atol=step)


def test_float8_products_of_matrices_that_share_an_input():
    from common.draft.float8 import Float8Weights, amax_of, weight_gradients8

    weights = tuple(torch.randn(n, 1024, device="cuda") for n in (2048, 512))
    x = torch.randn(384, 1024, device="cuda", dtype=torch.bfloat16)
    dys = [torch.randn(384, n, device="cuda", dtype=torch.bfloat16) * 1e-6 for n in (2048, 512)]
    copies = Float8Weights(weights)
    ys, x_amax = copies.products(x)
    dx, dy_amax = copies.input_gradient(dys, True)
    for y, w in zip(ys, weights, strict=True):
        assert relative(y, x.float() @ w.T) < 0.05
    assert dx is not None
    assert relative(dx, torch.cat(dys, 1).float() @ torch.cat(weights)) < 0.08
    found = weight_gradients8([[(dy, dy_amax)] for dy in dys], [(x, amax_of([x]))])
    assert torch.equal(x_amax, amax_of([x]))
    for gradient, dy in zip(found, dys, strict=True):
        assert relative(gradient, dy.float().T @ x.float()) < 0.08


def test_float8_step_is_near_that_of_bfloat16():
    t = on_gpu(target(), torch.bfloat16)
    row = pack([*MULTI_TURN, sample(4, [(72, 160), (3, 20)])]).to("cuda")
    assert len(row.ids_T) % 16 == 0  # as RowReader's
    results = []
    for float8 in (False, True):
        trainer = Trainer(
            fresh(shape(), target()).cuda(), t, LinearProducts(t.head_DH.dtype, float8), [], 1
        )
        sums = trainer.backward(row, [1 / n for n in counts(row)])
        results.append((sums[0], dict(trainer.draft.named_parameters())))
    (sums_a, ga), (sums_b, gb) = results
    assert relative(sums_b, sums_a) < 0.02
    for name, parameter in ga.items():
        a, b = parameter.grad, gb[name].grad
        assert a is not None
        assert b is not None
        assert 0 < relative(b, a) < 0.2, name


def test_a_gradient_that_is_not_finite_stays_so_in_float8():
    from common.draft.float8 import amax_of, weight_gradients8

    x, dy = (torch.randn(128, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for bad in ("nan", "inf"):
        dy[3, 4] = float(bad)
        found = next(weight_gradients8([[(dy, amax_of([dy]))]], [(x, amax_of([x]))]))
        assert not torch.isfinite(found).any()


def test_rows_read_ahead_are_those_read_alone(tmp_path):
    """Six rows through two buffers, while the GPU is busy with the one before."""
    lengths = {n: 200 + 13 * n for n in range(6)}
    samples = {}
    for n, length in lengths.items():
        g = np.random.default_rng(n)
        ids, mask = g.integers(0, 96, length).astype(np.int32), np.arange(length) > 20
        samples[n] = Sample(n, str(n), ids, mask)
        tensors = {
            "token_ids": torch.from_numpy(ids).long(),
            "hidden_states": torch.from_numpy(g.standard_normal((length, 4, 64))).bfloat16(),
        }
        path = hidden_file(tmp_path, n)
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)
    settings = {"layers": [0, 1, 2, 3], "hidden_size": 64, "dtype": "bfloat16"}
    there = dict.fromkeys(lengths, tmp_path)
    hidden = HiddenFolder(tmp_path, settings, {}, "", lengths, there, tmp_path)
    reader = RowReader(hidden, samples, DEPTHS, "answer", max(lengths.values()), pin=True)
    busy = torch.randn(4096, 4096, device="cuda")
    plan = [[n] for n in lengths]
    for indices, row in zip(plan, rows_ahead(reader, plan, "cuda"), strict=True):
        for _ in range(20):
            busy = busy @ busy * 1e-3
        want = reader.read(indices)
        for mine, other in zip(tensors_of(row), tensors_of(want), strict=True):
            assert torch.equal(mine.cpu(), other)
