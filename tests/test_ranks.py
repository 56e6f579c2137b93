"""Training on several processes: the same run as on one, and any number can go on with it."""

import json
import shutil
import signal
import subprocess

import psutil
import pytest
import torch

from common.manifest import MANIFEST
from tests.conftest import (
    ENVIRONMENT,
    ROOT,
    ended,
    fails,
    free_port,
    lines_of,
    must,
    python,
    script,
    started,
    train_args,
    wait_until,
)

GPUS = torch.cuda.device_count()
SETTINGS = ("--compute-dtype", "float32", "--device", "cpu", "--max-batch-tokens", 256,
            "--epochs", 4)  # fmt: skip


def torchrun(*args) -> subprocess.Popen:
    """Two ranks as torchrun starts them."""
    return started("-m", "torch.distributed.run", "--nproc-per-node", 2, *args, fresh=True)


def losses(folder) -> list[float]:
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x["loss"] for x in lines if "loss" in x]


@pytest.fixture(scope="module")
def alone(tiny_stages, tmp_path_factory):
    """The run of one process, two rows a step."""
    out = tmp_path_factory.mktemp("alone") / "draft"
    must(script("04_train.py", *train_args(tiny_stages, out, *SETTINGS, "--rows-per-step", 2)))
    return out


def finished(args) -> str:
    """Run two ranks to the end, with what torchrun sets; returns what they printed."""
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        python(
            [ROOT / "04_train.py", *args], env=ENVIRONMENT | names | {"RANK": n, "LOCAL_RANK": n}
        )
        for n in "01"
    ]
    return "".join(must(ended(rank, 300)).stdout for rank in ranks)


@pytest.fixture(scope="module")
def together(tiny_stages, tmp_path_factory):
    """The run of two ranks; returns (folder, what they printed)."""
    out = tmp_path_factory.mktemp("together") / "draft"
    return out, finished(train_args(tiny_stages, out, *SETTINGS))


def test_two_ranks_train_as_one(alone, together):
    out, output = together
    assert output.count("train: held-out acceptance length") == 1
    assert losses(out) == pytest.approx(losses(alone), abs=1e-5)


@pytest.mark.parametrize(
    ("more", "near"),
    [
        # Muon orthogonalizes in bfloat16, which makes a last bit of the gradient a larger one
        (("--optimizer", "muon", "--rows-per-step", 2, "--epochs", 1, "--max-samples", 12), 1e-4),
        # one rank has more rows of a step than the other
        (("--rows-per-step", 3, "--weight-decay", 0.01), 1e-5),
        # the second rank never has a row
        (("--rows-per-step", 1, "--epochs", 1, "--max-samples", 12), 1e-5),
    ],
)
def test_two_ranks_train_as_one_otherwise(tiny_stages, tmp_path, more, near):
    one, two = tmp_path / "one", tmp_path / "two"
    must(script("04_train.py", *train_args(tiny_stages, one, *SETTINGS, *more)))
    shutil.copytree(one, two)  # a finished run, which all ranks must take for gone
    output = finished(train_args(tiny_stages, two, *SETTINGS, *more, "--overwrite"))
    assert json.loads((two / MANIFEST).read_text())["counts"]["steps"] == len(losses(two))
    assert losses(two) == pytest.approx(losses(one), abs=near)
    uneven = more[more.index("--rows-per-step") + 1] % 2 == 1
    assert ("some wait for the others" in output) == uneven


def test_two_ranks_go_on_to_the_same_bits(tiny_stages, together, tmp_path):
    """One of them alone is asked to stop; both do."""
    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, *SETTINGS)
    run = torchrun("04_train.py", *args)
    wait_for_steps(run, out)
    rank_processes(run)[1].send_signal(signal.SIGTERM)
    result = ended(run)
    assert result.returncode != 0
    assert "saved; run the same command again to continue" in result.stderr
    assert "continuing after step" in finished(args)
    draft = "model.safetensors"
    assert (out / draft).read_bytes() == (together[0] / draft).read_bytes()


def wait_for_steps(run: subprocess.Popen, out) -> None:
    """Return when two steps are noted."""
    wait_until(run, lambda: lines_of(out / "metrics.jsonl") > 2)


def rank_processes(run: subprocess.Popen) -> list[psutil.Process]:
    """The ranks' processes, in the order of their start."""
    return [p for p in psutil.Process(run.pid).children() if "04_train.py" in p.cmdline()]


def test_one_process_goes_on_where_two_were_stopped(tiny_stages, alone, tmp_path):
    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, *SETTINGS)
    run = torchrun("04_train.py", *args)
    wait_for_steps(run, out)
    run.send_signal(signal.SIGTERM)
    result = ended(run)
    assert result.returncode != 0
    assert "saved; run the same command again to continue" in result.stderr
    again = must(script("04_train.py", *args))  # two rows a step, as it was begun
    assert "continuing after step" in again.stdout
    assert losses(out) == pytest.approx(losses(alone), abs=1e-5)


ON_GPUS = ("--device", "cuda", "--save-every", 20, "--epochs", 60)  # its steps are quick


@pytest.mark.parametrize(
    "more",
    [
        ("--save-every", 2),
        pytest.param(ON_GPUS, marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")),
    ],
)
def test_a_killed_rank_ends_the_run_clearly(tiny_stages, alone, tmp_path, more):
    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, *SETTINGS, *more)
    run = torchrun("04_train.py", *args)
    wait_until(run, lambda: bool(list((out / "state").glob("step_*"))))
    rank_processes(run)[1].kill()
    on_gpus = more == ON_GPUS  # where NCCL waits on, until ranks.LATE_SECONDS are over
    result = ended(run, 60 if on_gpus else 30)
    assert result.returncode != 0
    assert ("still waits for another one" if on_gpus else "has lost another rank") in result.stderr
    assert "common/training/step.py" not in result.stderr  # no traceback of ours
    again = must(script("04_train.py", *args))
    assert "continuing after step" in again.stdout
    if not on_gpus:
        assert losses(out) == pytest.approx(losses(alone), abs=1e-5)


def test_gradients_that_are_done_in_another_order_are_summed_with_their_own(tmp_path):
    """One rank has nothing for the first."""
    code = tmp_path / "sums.py"
    code.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from common.training.ranks import GradientSum, start_ranks
ranks = start_ranks("cpu")
parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
for n, p in enumerate(parameters[ranks.rank:], ranks.rank):
    p.grad = torch.full((2,), 10.0**n * (ranks.rank + 1))
summed = GradientSum(ranks, parameters)
for n in ((0, 1, 2), (2, 1))[ranks.rank]:
    summed.done(parameters[n])
summed.finish()
sums = [p.grad[0].item() for p in parameters]
open(f"{{sys.argv[1]}}/{{ranks.rank}}", "w").write(str(sums))
""")
    must(ended(torchrun(code, tmp_path)))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[1.0, 30.0, 300.0]"] * 2


def test_a_rank_that_waits_in_c_ends_after_a_signal():
    """As NCCL waits for a rank that is gone: no Python runs, and no handler of a signal."""
    code = (
        "import hashlib\n"
        "from common.training import ranks\n"
        "from common.progress import Stopper\n"
        "Stopper()\n"
        "ranks.end_when_late(1)\n"
        "print('ready', flush=True)\n"
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 2 * 10**9)\n"
    )
    run = started("-c", code)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGTERM)
    fails(ended(run, 20), "1 s after the signal this rank still waits", "run the same command")
