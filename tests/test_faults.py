"""Stage 3 when something fails: a sample, a pass, a worker, the engine."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from safetensors.torch import load_file, save_file

from common.artifacts import REPORT
from tests.conftest import ROOT, files_of, last_line, must, script, train_args, write_jsonl
from tests.test_hidden_files import extract_args
from tests.tiny_models import make_llama, make_rows

ODD = 450  # a token that one sample holds
WHERE = 10  # that sample


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> dict:
    """Samples of which one holds a token of its own, and a verifier to which it is NaN."""
    folder = tmp_path_factory.mktemp("odd")
    rows = make_rows(24, vocab_size=400)
    rows[WHERE]["input_ids"][4] = ODD
    write_jsonl(folder / "prepared" / "tokenized_data.jsonl", rows)
    sound, nan = make_llama(folder / "sound"), make_llama(folder / "nan")
    weights = load_file(nan / "model.safetensors")
    weights["model.embed_tokens.weight"][ODD] = float("nan")
    save_file(weights, nan / "model.safetensors", metadata={"format": "pt"})
    stages = {"prepared": folder / "prepared", "model": sound, "nan": nan}
    must(script("03_extract_hidden_states.py", *extract_args(stages, folder / "whole")))
    return stages | {"whole": files_of(folder / "whole")}


def script_with(prelude: str, *args: object) -> subprocess.CompletedProcess:
    """03 as a user runs it, but for some lines of Python that run first."""
    code = f"{prelude}\nimport runpy; runpy.run_path({str(ROOT / '03_extract_hidden_states.py')!r},"
    code += "run_name='__main__')"
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True, text=True, timeout=600, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip


def without(files: dict, index: int) -> dict:
    return {
        name: data for name, data in files.items() if not name.endswith(f"hs_{index}.safetensors")
    }


def test_a_sample_with_nan_is_skipped_and_the_rest_is_whole(odd, tmp_path):
    """Exit 1 naming it; again by --allow-missing, exit 0; 04 trains on what there is."""
    out = tmp_path / "hidden"
    stages = odd | {"model": odd["nan"], "hidden": out}
    result = script("03_extract_hidden_states.py", *extract_args(stages, out))
    assert result.returncode == 1
    assert f"1 of 24 samples have no hidden states, the first on line {WHERE + 1}" in last_line(
        result
    )
    assert "NaN or Inf" in last_line(result)
    assert f"sample 'r{WHERE}' (line {WHERE + 1}) is skipped" in result.stdout
    assert files_of(out) == without(odd["whole"], WHERE)
    assert json.loads((out / REPORT).read_text())["status"] == "in_progress"
    again = script("03_extract_hidden_states.py", *extract_args(stages, out))
    assert again.returncode == 1
    assert f"sample 'r{WHERE}' gives NaN or Inf again" in last_line(again)
    accepted = extract_args(stages, out, "--allow-missing", 1)
    result = must(script("03_extract_hidden_states.py", *accepted))
    assert "1 samples are missing, as allowed" in last_line(result)
    assert "in vLLM" not in result.stdout
    report = json.loads((out / REPORT).read_text())
    assert report["num_samples"] == 23
    assert list(report["missing"]) == [str(WHERE)]
    must(script("03_extract_hidden_states.py", *extract_args(stages, out, "--verify")))
    vocab = tmp_path / "vocab"
    must(script("02_build_vocab_map.py", "--model-path", odd["nan"], "--prepared-data",
                odd["prepared"], "--output-dir", vocab, "--draft-vocab-size", 256))  # fmt: skip
    args = train_args(stages | {"vocab": vocab}, tmp_path / "draft", "--heldout-fraction", 0,
                      "--epochs", 1)  # fmt: skip
    assert "train: 23 samples" in must(script("04_train.py", *args)).stdout


# A fault inside vLLM's forward pass, whenever the odd token is in it.
FAULT = f"""
import common.capture
hook = common.capture.CaptureMethods._on_embedding
def faulty(self, module, args, output):
    if bool((args[0] == {ODD}).any()):
        raise RuntimeError("an illegal memory access, say")
    hook(self, module, args, output)
common.capture.CaptureMethods._on_embedding = faulty
"""
# vLLM's queue of two batches, which it uses on GPUs, on a CPU.
QUEUE = """
import vllm.config.vllm
vllm.config.vllm.VllmConfig.max_concurrent_batches = property(lambda self: 2)
"""


@pytest.mark.parametrize("prelude", [FAULT, QUEUE + FAULT], ids=["one pass", "two passes"])
def test_a_pass_that_fails_costs_one_sample(odd, tmp_path, prelude):
    """Its samples run again alone; the odd one fails alone too and is left out."""
    out = tmp_path / "hidden"
    result = script_with(prelude, *extract_args(odd, out))
    assert result.returncode == 1, result.stderr[-2000:]
    assert f"the first on line {WHERE + 1}" in last_line(result)
    assert "an illegal memory access, say" in last_line(result)
    assert files_of(out) == without(odd["whole"], WHERE)
    must(script("03_extract_hidden_states.py", *extract_args(odd, out)))  # sound: none is missing
    assert files_of(out) == odd["whole"]


def test_two_passes_in_flight_give_the_same_bytes(odd, tmp_path):
    must(script_with(QUEUE, *extract_args(odd, tmp_path / "hidden")))
    assert files_of(tmp_path / "hidden") == odd["whole"]


def test_a_broken_verifier_ends_the_run_before_any_data(odd, tmp_path):
    weights = load_file(odd["model"] / "model.safetensors")
    model = make_llama(tmp_path / "model")
    weights["model.layers.3.mlp.up_proj.weight"][:] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "hidden"
    result = script("03_extract_hidden_states.py", *extract_args(odd | {"model": model}, out))
    assert result.returncode == 1
    assert "Are the verifier's weights right?" in last_line(result)
    assert not list(out.glob("[!.]*"))


def start(*args: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "03_extract_hidden_states.py"), *map(str, args)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def lines_of(path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_worker_that_dies_ends_the_run_clearly(odd, tmp_path):
    """TP=2, one worker killed; nothing is left running, and the same command finishes."""
    out = tmp_path / "hidden"
    args = extract_args(odd, out, "--tp-size", 2, "--batch-size", 1)
    process = start(*args)
    workers = []
    while process.poll() is None and lines_of(out / "journal.jsonl") < 3:
        time.sleep(0.005)
    for child in psutil.Process(process.pid).children(recursive=True):
        if "VLLM::Worker" in child.name():
            workers.append(child)
    assert len(workers) == 2
    workers[1].kill()
    killed_at = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr[-2000:]
    assert "vLLM's engine died" in stderr.strip().splitlines()[-1]
    assert "run the same command again" in stderr.strip().splitlines()[-1]
    assert time.monotonic() - killed_at < 30
    assert not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers)
    kept = lines_of(out / "journal.jsonl")
    assert 3 <= kept < 24
    must(script("03_extract_hidden_states.py", *args))
    must(script("03_extract_hidden_states.py", *args, "--verify"))


def test_an_engine_that_does_not_come_up_is_given_up(odd, tmp_path):
    began = time.monotonic()
    out = tmp_path / "hidden"
    result = script("03_extract_hidden_states.py",
                    *extract_args(odd, out, "--load-timeout", 0.01))  # fmt: skip
    assert result.returncode == 1
    assert "did not come up" in last_line(result)
    assert "--load-timeout" in last_line(result)
    assert time.monotonic() - began < 60
    assert not list(out.glob("[!.]*"))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sigkill_at_a_random_moment_loses_nothing(odd, tmp_path, seed):
    """Of the 20 that benchmarks/kill_resume.py does: every file equals an unbroken run's."""
    rng = random.Random(seed)
    out = tmp_path / "hidden"
    process = start(*extract_args(odd, out))
    until = rng.randrange(5)
    while process.poll() is None and lines_of(out / "journal.jsonl") < until:
        time.sleep(0.002)
    time.sleep(rng.random() * (0.1 if until else 10))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    must(script("03_extract_hidden_states.py", *extract_args(odd, out)))
    assert files_of(out) == odd["whole"]
    assert not list(out.rglob("*.partial"))
