"""The triton kernels: attention's own keys, float8 casts; by its interpreter, without a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from common.draft.attention import merge_own_keys_plain

ROOT = Path(__file__).resolve().parent.parent


def test_kernels_are_their_plain_forms():
    """In a process of its own: triton decides as it is imported whether to interpret."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).resolve())]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["same", "same", "same"]


def test_own_keys_merged_by_torch_are_the_plain_form():
    check_own_keys(merge_own_keys_plain, 8, 8, 64)
    check_own_keys(merge_own_keys_plain, 6, 2, 20)


def plain(q, base, lse, k0, v0, k1, v1):
    """The softmax over the base block and two own keys, written out."""
    times, scale = q.shape[1] // k0.shape[1], q.shape[2] ** -0.5
    scores = [(q * k.repeat_interleave(times, 1)).sum(-1) * scale for k in (k0, k1)]
    total = torch.stack([lse, *scores]).logsumexp(0)
    out = base * (lse - total).exp()[..., None]
    for score, v in zip(scores, (v0, v1), strict=True):
        out = out + (score - total).exp()[..., None] * v.repeat_interleave(times, 1)
    return out


def check_own_keys(merge: Callable[..., torch.Tensor], h: int, g: int, d: int) -> None:
    """Output and all gradients; 11 query positions do not fill the last program."""
    torch.manual_seed(0)
    N = 11
    x = {"q": torch.randn(N, h, d), "base": torch.randn(N, h, d), "lse": torch.randn(N, h)}
    x |= {name: torch.randn(N, g, d) for name in ("k0", "v0", "k1", "v1")}
    exact = {name: v.double().requires_grad_() for name, v in x.items()}
    ours = {name: v.clone().requires_grad_() for name, v in x.items()}
    want = plain(**exact)
    keys, values = [ours["k0"], ours["k1"]], [ours["v0"], ours["v1"]]
    found = merge(ours["q"], ours["base"], ours["lse"], keys, values)
    weight = torch.randn_like(found)
    (want * weight.double()).sum().backward()
    (found * weight).sum().backward()
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    for name, v in exact.items():
        gradient = ours[name].grad
        assert gradient is not None
        torch.testing.assert_close(gradient.double(), v.grad, rtol=1e-5, atol=1e-5)
    print("same")


def check_casts() -> None:
    """To float16, for the interpreter does not round to float8 as a GPU does."""
    from common.draft.float8 import amax_of, cast

    torch.manual_seed(0)
    x = torch.randn(200, 150) ** 3
    most = float(x.abs().max())
    found = amax_of([x[:50], x[50:]])
    assert float(found.view(torch.float32)) == most
    half, limit = torch.float16, torch.finfo(torch.float16).max
    rows, columns = torch.empty(200, 150, dtype=half), torch.empty(150, 200, dtype=half)
    inverse = torch.empty(1)
    cast(x, found, rows, inverse)
    cast(x, found, columns.T, inverse)
    torch.testing.assert_close(inverse, torch.tensor([most / limit]))
    torch.testing.assert_close(rows.float(), x / inverse, rtol=1e-3, atol=1e-3)
    assert torch.equal(columns.T, rows)
    for bad in ("nan", "inf"):
        x[3, 4] = float(bad)
        cast(x, amax_of([x]), rows, inverse)
        assert not torch.isfinite(inverse).any()
    print("same")


if __name__ == "__main__":
    from common.draft.attention_kernel import merge_own_keys

    check_own_keys(merge_own_keys, 8, 8, 64)
    check_own_keys(
        merge_own_keys, 6, 2, 20
    )  # shared key/value heads; sizes that are no powers of two
    check_casts()
