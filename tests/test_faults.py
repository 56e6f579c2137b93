"""Stage 3 when something fails: a sample, a pass, a worker, the engine."""

import contextlib
import json
import signal
import time

import psutil
import pytest
from safetensors.torch import load_file, save_file

from common.extraction.batching import make_batches
from common.manifest import MANIFEST
from common.verifier.head import HEAD_FILE
from tests.conftest import (
    ended,
    extract_args,
    fails,
    files_of,
    killed,
    last_line,
    lines_of,
    must,
    script,
    script_after,
    started,
    train_args,
    wait_until,
    write_jsonl,
)
from tests.tiny_models import make_llama, make_rows

ODD = 450  # a token that two samples hold
ZERO = 451


@pytest.fixture(scope="module")
def nan_llama(tmp_path_factory):
    """A verifier to which the token ODD is NaN, and the token ZERO nothing."""
    nan = make_llama(tmp_path_factory.mktemp("verifier") / "nan")
    weights = load_file(nan / "model.safetensors")
    weights["model.embed_tokens.weight"][ODD] = float("nan")
    weights["model.embed_tokens.weight"][ZERO] = 0
    save_file(weights, nan / "model.safetensors", metadata={"format": "pt"})
    return nan


@pytest.fixture(scope="module", params=["first pass", "later pass"])
def odd(request, tmp_path_factory, nan_llama) -> dict:
    """Samples of which two of one pass hold a token of their own, a sound verifier with what it
    gives of them, and a verifier to which that token is NaN."""
    folder = tmp_path_factory.mktemp("odd")
    rows = make_rows(24, vocab_size=400)
    units = make_batches({i: len(row["input_ids"]) for i, row in enumerate(rows)}, 256)
    later = next(u for u in units[3:] if len(u) > 2)
    where = sorted(units[0][:2] if request.param == "first pass" else later[:2])
    assert len(where) == 2
    for i in where:
        rows[i]["input_ids"][1] = ODD
    write_jsonl(folder / "prepared" / "tokenized_data.jsonl", rows)
    sound = make_llama(folder / "sound")
    stages = {"prepared": folder / "prepared", "model": sound, "nan": nan_llama, "where": where}
    must(script("03_extract_hidden_states.py", *args_of(stages, folder / "whole")))
    return stages | {"whole": files_of(folder / "whole")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny_llama) -> dict:
    """Sound samples, a sound verifier, and what an unbroken run gives."""
    folder = tmp_path_factory.mktemp("plain")
    write_jsonl(folder / "prepared" / "tokenized_data.jsonl", make_rows(24))
    stages = {"prepared": folder / "prepared", "model": tiny_llama}
    must(script("03_extract_hidden_states.py", *args_of(stages, folder / "whole")))
    return stages | {"whole": files_of(folder / "whole")}


def args_of(stages, out, *more):
    return extract_args(stages, out, "--max-batch-tokens", 256, *more)


def without(files: dict, indices: list[int]) -> dict:
    """Without these samples and the head, in which the NaN verifier's has the NaN."""
    names = (HEAD_FILE, *(f"hs_{i}.safetensors" for i in indices))
    return {name: data for name, data in files.items() if not name.endswith(names)}


def test_samples_with_nan_are_skipped_and_the_rest_is_whole(odd, tmp_path):
    """Exit 1 naming the first; again by --allow-missing, exit 0; 04 trains on what there is."""
    out = tmp_path / "hidden"
    stages = odd | {"model": odd["nan"], "hidden": out}
    for _ in range(2):  # the second run tries them again, with the same end
        result = script("03_extract_hidden_states.py", *args_of(stages, out))
        assert result.returncode == 1
        first = f"2 of 24 samples have no hidden states, the first on line {odd['where'][0] + 1}"
        assert first in last_line(result)
        assert "NaN or Inf" in last_line(result)
        assert without(files_of(out), []) == without(odd["whole"], odd["where"])
        assert json.loads((out / MANIFEST).read_text())["status"] == "in_progress"
    accepted = args_of(stages, out, "--allow-missing", 2)
    result = must(script("03_extract_hidden_states.py", *accepted))
    assert "2 samples are missing, as allowed" in last_line(result)
    assert "in vLLM" not in result.stdout  # nothing was loaded for it
    report = json.loads((out / MANIFEST).read_text())
    assert report["num_samples"] == 22
    assert list(report["missing"]) == [str(i) for i in odd["where"]]
    assert "is complete" in last_line(must(script("03_extract_hidden_states.py", *accepted)))
    verified = must(script("03_extract_hidden_states.py", *args_of(stages, out, "--verify")))
    assert "2 samples are missing, as allowed" in last_line(verified)
    vocab = tmp_path / "vocab"
    must(script("02_build_vocab_map.py", "--model-path", odd["nan"], "--prepared-data",
                odd["prepared"], "--output-dir", vocab, "--draft-vocab-size", 256))  # fmt: skip
    args = train_args(stages | {"vocab": vocab}, tmp_path / "draft", "--heldout-fraction", 0,
                      "--epochs", 1)  # fmt: skip
    assert "train: 22 samples" in must(script("04_train.py", *args)).stdout


@pytest.mark.quick
def test_bad_samples_among_the_longest_are_skipped(nan_llama, tmp_path):
    """Passes go longest first, so these fill the first ones; the probe looks further. One of
    another kind is told by its own fault: its first token's states are zeros."""
    rows = make_rows(16, vocab_size=400)
    for row in rows[:4]:
        row["input_ids"] = [5, ODD] + [7] * 254
        row["loss_mask"] = [0] * 8 + [1] * 248
    rows[9]["input_ids"][0] = ZERO
    write_jsonl(tmp_path / "prepared" / "tokenized_data.jsonl", rows)
    stages = {"model": nan_llama, "prepared": tmp_path / "prepared"}
    args = args_of(stages, tmp_path / "o", "--allow-missing", 5)
    result = must(script("03_extract_hidden_states.py", *args))
    assert "5 samples are missing" in last_line(result)
    text = "(line 10) is skipped: its hidden states hold a row of zeros (token 0, layer 2)"
    assert text in result.stdout
    assert result.stdout.count("is skipped: its hidden states hold NaN or Inf (token ") == 4


def test_single_tokens_are_extracted_without_a_probe(plain, tmp_path):
    """Also where they alone are left to a resume."""
    rows = [{"id": f"s{n}", "input_ids": [n + 3], "loss_mask": [1]} for n in range(300)]
    write_jsonl(tmp_path / "prepared" / "tokenized_data.jsonl", rows)
    stages = plain | {"prepared": tmp_path / "prepared"}
    args = args_of(stages, tmp_path / "o", "--max-seq-len", 100_000)
    result = must(script("03_extract_hidden_states.py", *args))
    assert "every sample left is a single token" in result.stdout
    before = files_of(tmp_path / "o")
    assert len(before) == 301  # and the head
    (tmp_path / "o" / "rows_0-999" / "hs_7.safetensors").unlink()
    must(script("03_extract_hidden_states.py", *args))
    assert files_of(tmp_path / "o") == before


# A fault inside vLLM's forward pass, whenever the odd token is in it.
FAULT = f"""
import common.extraction.capture
hook = common.extraction.capture.CaptureMethods._on_embedding
def faulty(self, module, args, output):
    if bool((args[0] == {ODD}).any()):
        raise RuntimeError("an illegal memory access, say")
    hook(self, module, args, output)
common.extraction.capture.CaptureMethods._on_embedding = faulty
"""
# vLLM's queue of two batches, which it uses on GPUs, on a CPU.
QUEUE = """
import vllm.config.vllm
vllm.config.vllm.VllmConfig.max_concurrent_batches = property(lambda self: 2)
import common.extraction.runner
init = common.extraction.runner.Runner.__init__
def checked(self, *args):
    init(self, *args)
    assert self._queue is not None
common.extraction.runner.Runner.__init__ = checked
"""


@pytest.mark.parametrize("prelude", [FAULT, QUEUE + FAULT], ids=["one pass", "two passes"])
def test_a_pass_that_fails_costs_its_faulty_samples(odd, tmp_path, prelude):
    """It runs again, then sample by sample; those that fail alone too are left out."""
    out = tmp_path / "hidden"
    result = script_after(prelude, "03_extract_hidden_states.py", *args_of(odd, out))
    assert result.returncode == 1, result.stderr[-2000:]
    assert f"the first on line {odd['where'][0] + 1}" in last_line(result)
    assert "an illegal memory access, say" in last_line(result)
    assert without(files_of(out), []) == without(odd["whole"], odd["where"])
    must(script("03_extract_hidden_states.py", *args_of(odd, out)))  # sound: none is missing
    assert files_of(out) == odd["whole"]


def test_two_passes_in_flight_give_the_same_bytes(plain, tmp_path):
    args = args_of(plain, tmp_path / "hidden")
    must(script_after(QUEUE, "03_extract_hidden_states.py", *args))
    assert files_of(tmp_path / "hidden") == plain["whole"]


def test_a_broken_verifier_ends_the_run_before_any_data(plain, tmp_path):
    model = make_llama(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"][:] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "hidden"
    result = script("03_extract_hidden_states.py", *args_of(plain | {"model": model}, out))
    assert result.returncode == 1
    assert "Are the verifier's weights right?" in last_line(result)
    assert not list(out.glob("[!.]*"))


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_worker_that_dies_ends_the_run_clearly(plain, tmp_path):
    """TP=2, one worker killed; nothing is left running, and the same command finishes."""
    out = tmp_path / "hidden"
    args = args_of(plain, out, "--tp-size", 2, "--batch-size", 1)
    process = started("03_extract_hidden_states.py", *args)
    # the batches take a second: the workers are known before the first of them
    wait_until(process, (out / ".lock").exists)
    workers: list[psutil.Process] = []

    def both() -> bool:
        children = psutil.Process(process.pid).children(recursive=True)
        workers[:] = [child for child in children if "VLLM::Worker" in child.name()]
        return len(workers) == 2

    wait_until(process, both)
    wait_until(process, lambda: lines_of(out / "journal.jsonl") >= 3)
    workers[1].kill()
    killed_at = time.monotonic()
    fails(ended(process, 60), "vLLM's engine died", "run the same command again")
    assert time.monotonic() - killed_at < 30
    deadline = time.monotonic() + 5  # vLLM kills the other worker and does not wait for its end
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline, "a worker is left running"
        time.sleep(0.1)
    assert 3 <= lines_of(out / "journal.jsonl") < 24
    must(script("03_extract_hidden_states.py", *args))
    must(script("03_extract_hidden_states.py", *args, "--verify"))


def test_an_engine_that_does_not_come_up_is_given_up(plain, tmp_path):
    began = time.monotonic()
    out = tmp_path / "hidden"
    args = args_of(plain, out, "--load-timeout", 0.01)
    result = script("03_extract_hidden_states.py", *args, fresh=True)  # slow to import vLLM
    assert result.returncode == 1
    assert "did not come up" in last_line(result)
    assert "--load-timeout" in last_line(result)
    assert time.monotonic() - began < 60
    assert not list(out.glob("[!.]*"))


def test_given_up_workers_are_ended():
    code = (
        "import subprocess; from common.verifier.engine import end_workers; p = subprocess.Popen("
    )
    code += "['sleep', '60']); end_workers(); print(p.wait(5))"
    assert ended(started("-c", code)).stdout.strip() == "-9"


def test_a_run_that_is_ended_at_any_moment_resumes_to_the_same_bytes(plain, tmp_path):
    """By SIGKILL, which loses the pass under way at most, and by the signals that let it finish.
    Once in a fresh interpreter: the order of sets is another in it. (benchmarks/kill_resume.py: 20
    random moments.)"""
    whole, out = tmp_path / "whole", tmp_path / "hidden"
    more = ("--batch-size", 1)  # 24 passes
    must(script("03_extract_hidden_states.py", *args_of(plain, whole, *more), fresh=True))
    args, journal = args_of(plain, out, *more), out / "journal.jsonl"
    for sig, until in (
        (signal.SIGKILL, 1), (signal.SIGTERM, 6), (signal.SIGKILL, 12), (signal.SIGINT, 17),
        (signal.SIGKILL, 23),
    ):  # fmt: skip
        ready = lambda at=until: lines_of(journal) >= at  # noqa: E731
        result = killed("03_extract_hidden_states.py", args, ready, sig)
        assert until <= lines_of(journal) <= 24
        assert json.loads((out / MANIFEST).read_text())["status"] == "in_progress"
        if sig == signal.SIGKILL:
            assert result.returncode == -sig
            # however early it was removed, and as a kill within the write leaves the journal
            (out / ".probe" / "left").mkdir(parents=True, exist_ok=True)
            with open(journal, "a") as f:
                f.write('{"unit": 5, "chec')
        else:
            assert result.returncode == 128 + sig
            assert "run the same command again to continue" in last_line(result)
            assert lines_of(journal) < 24
    must(script("03_extract_hidden_states.py", *args))
    assert not (out / ".probe").exists()
    assert not list(out.rglob("*.partial"))
    assert files_of(out) == files_of(whole)
    mine, theirs = (json.loads((p / MANIFEST).read_text()) for p in (out, whole))
    assert mine["content_sha256"] == theirs["content_sha256"]
