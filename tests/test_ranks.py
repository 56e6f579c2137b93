"""Training on several processes: the same run as on one, and any number can go on with it."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import ROOT, must, script, train_args

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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_ranks_train_as_one(tiny_stages, alone, tmp_path, optimizer):
    if optimizer != "adamw":
        alone = tmp_path / "alone"
        more = ("--optimizer", optimizer)
        one = train_args(tiny_stages, alone, *SETTINGS, *more, "--rows-per-step", 2)
        must(script("04_train.py", *one))
    out = tmp_path / "two"
    run = two_ranks(train_args(tiny_stages, out, *SETTINGS, "--optimizer", optimizer))
    output, errors = run.communicate(timeout=300)
    assert run.returncode == 0, output + errors
    assert output.count("train: held-out acceptance length") == 1
    # Muon orthogonalizes in bfloat16, which makes a last bit of the gradient a larger one
    near = 1e-5 if optimizer == "adamw" else 1e-4
    assert losses(out) == pytest.approx(losses(alone), abs=near)


def test_one_process_goes_on_where_two_were_stopped(tiny_stages, alone, tmp_path):
    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, *SETTINGS)
    run = two_ranks(args)
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    output, errors = run.communicate(timeout=300)
    assert run.returncode != 0
    assert "saved; run again to continue" in errors, output + errors
    again = must(script("04_train.py", *args))  # two rows a step, as it was begun
    assert "continuing after step" in again.stdout
    assert losses(out) == pytest.approx(losses(alone), abs=1e-5)


def test_a_killed_rank_ends_the_run_clearly(tiny_stages, alone, tmp_path):
    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, *SETTINGS, "--save-every", 2)
    run = two_ranks(args)
    deadline = time.monotonic() + 240
    while not list((out / "state").glob("step_*")):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ranks = [p for p in psutil.Process(run.pid).children() if "04_train.py" in p.cmdline()]
    ranks[1].kill()
    killed = time.monotonic()
    _, errors = run.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert run.returncode != 0
    assert "has lost another rank" in errors
    assert "common/training.py" not in errors  # no traceback of ours
    again = must(script("04_train.py", *args))
    assert "continuing after step" in again.stdout
    assert losses(out) == pytest.approx(losses(alone), abs=1e-5)
