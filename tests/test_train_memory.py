"""Memory of a training step on a CPU: what the plan says, against what is allocated; refusals."""

import json
from pathlib import Path

import pytest
import torch

from common.draft.activations import RowSize, activations
from common.draft.linear_products import LinearProducts
from common.draft.packed_row import make_row
from common.host_memory import available_memory, left_in_cgroups
from common.training.step import step_loss
from tests.conftest import fails, must, script, train_args
from tests.test_eagle3 import H, V, fresh, shape, target

pytestmark = pytest.mark.quick


def peak_of_step(draft, lengths, answer, depths):
    """Bytes that a row's forward and backward pass have allocated at once, float32."""
    T, t, linears = sum(lengths), target(), LinearProducts(torch.float32)
    mask = torch.cat([torch.arange(n) >= n - answer for n in lengths])
    ids = torch.arange(T) % V
    row = make_row(torch.ones(T, 4, H), None, ids, mask, lengths, depths, "answer")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as seen:
        loss, _ = step_loss(draft, linears, t, row, [1.0] * depths)
        loss.backward()
        linears.add_gradients()
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


@pytest.mark.parametrize(
    ("lengths", "answer", "depths", "more"),
    [
        ([128] * 8, 100, 3, {}),
        ([128] * 8, 100, 6, {"norm_before_fc": True}),
        ([128] * 8, 100, 3, {"intermediate_size": 1024}),
        ([512] * 2, 400, 3, {}),
        ([2048], 2000, 2, {}),  # in blocks
    ],
)
@pytest.mark.parametrize("train_lm_head", [True, False])
def test_a_steps_activations_are_those_counted(lengths, answer, depths, more, train_lm_head):
    draft = fresh(shape(**more), target())
    draft.lm_head.weight.requires_grad_(train_lm_head)
    found = peak_of_step(draft, lengths, answer, depths)
    found -= sum(4 * p.numel() for p in draft.parameters() if p.requires_grad)  # their gradients
    row = RowSize(sum(lengths), [(answer, n) for n in lengths])
    counted = activations(draft.shape, 4, row, depths, train_lm_head)
    assert 0.8 < found / counted.total < 1.1


def test_what_does_not_fit_is_refused_by_plan_and_run(tiny_stages, tmp_path):
    """A draft whose weights would fit, but not its activations at 16 depths."""
    inner = available_memory() // 50_000
    more = ("--ttt-steps", 16, "--draft-shape", json.dumps({"intermediate_size": inner}))
    for flag in ((), ("--dry-run",)):
        result = script("04_train.py", *train_args(tiny_stages, tmp_path / "d", *more, *flag))
        fails(result, "GB of memory and", "are available; lower --max-batch-tokens or --ttt-steps",
              folder=tmp_path / "d")  # fmt: skip


def test_the_plan_tells_attention(tiny_stages, tmp_path):
    result = must(script("04_train.py", *train_args(tiny_stages, tmp_path / "d", "--dry-run")))
    assert "GB of memory; of it attention 0." in result.stdout


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        # version 2: the job's limit, then its parent's, with the cache given back
        (
            "0::/batch/job7\n",
            {
                "batch/job7/memory.max": "9000\n",
                "batch/job7/memory.current": "4000\n",
                "batch/job7/memory.stat": "anon 5\nactive_file 1000\ninactive_file 500\n",
                "batch/memory.max": "max\n",
            },
            [6500],
        ),
        # version 1 inside a container: the path is the host's
        (
            "5:cpu,cpuacct:/docker/3f\n4:memory:/docker/3f\n",
            {
                "memory/memory.limit_in_bytes": "700",
                "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "total_active_file 10\ntotal_inactive_file 20\n",
            },
            [0],
        ),
        ("0::/\n", {}, []),
    ],
)
def test_a_containers_limit_counts(own, files, left, tmp_path):
    for name, text in files.items():
        path = Path(tmp_path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(left_in_cgroups(own, tmp_path)) == left
