"""Training on several processes: the same run as on one, and any number can go on with it."""

import json
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from common.artifacts import REPORT
from tests.conftest import ROOT, must, script, train_args

GPUS = torch.cuda.device_count()
SETTINGS = ("--compute-dtype", "float32", "--device", "cpu", "--max-batch-tokens", 256)


def two_ranks(args) -> subprocess.Popen:
    """04 as torchrun starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2,
               "04_train.py", *args]  # fmt: skip
    return subprocess.Popen(
        list(map(str, command)), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


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
    """Run two ranks to the end; returns what they printed."""
    run = two_ranks(args)
    output, errors = run.communicate(timeout=300)
    assert run.returncode == 0, output + errors
    return output


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
        (("--optimizer", "muon", "--rows-per-step", 2), 1e-4),
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
    assert json.loads((two / REPORT).read_text())["counts"]["steps"] == len(losses(two))
    assert losses(two) == pytest.approx(losses(one), abs=near)
    uneven = more[more.index("--rows-per-step") + 1] % 2 == 1
    assert ("some wait for the others" in output) == uneven


def test_two_ranks_go_on_to_the_same_bits(tiny_stages, together, tmp_path):
    """One of them alone is asked to stop; both do."""
    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, *SETTINGS)
    run = two_ranks(args)
    wait_for_steps(run, out)
    rank_processes(run)[1].send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=300)
    assert run.returncode != 0
    assert "saved; run again to continue" in errors
    assert "continuing after step" in finished(args)
    draft = "model.safetensors"
    assert (out / draft).read_bytes() == (together[0] / draft).read_bytes()


def wait_for_steps(run: subprocess.Popen, out) -> None:
    """Return when two steps are noted."""
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rank_processes(run: subprocess.Popen) -> list[psutil.Process]:
    """The ranks' processes, in the order of their start."""
    return [p for p in psutil.Process(run.pid).children() if "04_train.py" in p.cmdline()]


def test_one_process_goes_on_where_two_were_stopped(tiny_stages, alone, tmp_path):
    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, *SETTINGS)
    run = two_ranks(args)
    wait_for_steps(run, out)
    run.send_signal(signal.SIGTERM)
    output, errors = run.communicate(timeout=300)
    assert run.returncode != 0
    assert "saved; run again to continue" in errors, output + errors
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
    run = two_ranks(args)
    deadline = time.monotonic() + 240
    while not list((out / "state").glob("step_*")):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    rank_processes(run)[1].kill()
    killed = time.monotonic()
    _, errors = run.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert run.returncode != 0
    assert "has lost another rank" in errors
    assert "common/training.py" not in errors  # no traceback of ours
    again = must(script("04_train.py", *args))
    assert "continuing after step" in again.stdout
    if more != ON_GPUS:
        assert losses(out) == pytest.approx(losses(alone), abs=1e-5)
