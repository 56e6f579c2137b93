"""Shared parts of the tests: the real embedded verifier, a tiny random one, the scripts."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, which every engine writes at its start
if "PYTEST_XDIST_WORKER" in os.environ:  # two of these share two cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where there are more threads than cores

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# A loaded machine is slow, not wrong; CI repeats its examples, a person's run explores.
settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import progress
from common.verifier import engine
from tests.fork_server import ForkedProcess
from tests.tiny_models import ARCHITECTURES, make_llama, make_rows

progress.quiet_libraries()
engine.prepare_environment(1)

# vLLM's own engine in this process sets LD_PRELOAD and more, which no script is to have.
ENVIRONMENT = dict(os.environ)
# Tests of these modules share what takes seconds to make, these two vLLM in pytest's own process.
TOGETHER = {f"test_{n}": n for n in ("chat", "faults", "ranks", "regenerate", "training")}
TOGETHER |= {"test_capture": "engine", "test_serving": "engine"}
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"


class Scheduling(LoadScopeScheduling):
    """What runs in one of pytest's workers: what shares fixtures, else the cases of a test."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        module = Path(path).stem
        if module == "test_architectures":  # by the verifier's family
            return max((f for f in ARCHITECTURES if f in name), key=len)
        return TOGETHER.get(module) or f"{module}::{name.split('[')[0]}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    config.option.loadscopereorder = False  # the long ones, as they are collected, do not end it
    return Scheduling(config, log)


def started(*command: object, fresh: bool = False) -> subprocess.Popen[str]:
    """Start Python on this, a script's path or `-c` and code first, with both streams caught:
    in a child of the fork server, or in a fresh interpreter."""
    return python(command, fresh=fresh)


def python(command: Iterable[object], fresh: bool = False, **kwargs) -> subprocess.Popen[str]:
    """subprocess.Popen for Python, in the project's folder, with both streams caught unless
    `kwargs` say otherwise."""
    kind = subprocess.Popen if fresh else ForkedProcess
    options: dict[str, Any] = {"cwd": ROOT, "env": ENVIRONMENT, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | kwargs
    return kind([sys.executable, *map(str, command)], **options)


def script(name: str, *args: object, fresh: bool = False, **kwargs) -> subprocess.CompletedProcess:
    """Run one of the project's scripts as a user does; returns the finished process. `fresh`: in
    an interpreter of its own, where the start itself is tested, or an environment at the start."""
    return ended(python([ROOT / name, *args], fresh, **kwargs), 600)


def after(prelude: str, name: str) -> list[object]:
    """Python's arguments to run one of the scripts after some lines of Python."""
    run = f"import runpy; runpy.run_path({str(ROOT / name)!r}, run_name='__main__')"
    return ["-c", f"{prelude}\n{run}"]


def script_after(prelude: str, name: str, *args: object) -> subprocess.CompletedProcess:
    """Run one of the scripts after some lines of Python, which put a fault into it, say."""
    return ended(started(*after(prelude, name), *args), 600)


def must(result: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """The process, which must have succeeded."""
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result


def wait_until(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """Return as soon as `ready` says so, which the process must live to see."""
    deadline = time.monotonic() + 240
    while not ready():
        assert process.poll() is None, "ended too early: " + process.communicate()[1][-2000:]
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError("not ready: " + process.communicate()[1][-2000:])
        time.sleep(0.002)


def ended(process: subprocess.Popen[str], seconds: float = 120) -> subprocess.CompletedProcess:
    """The process at its end, which must come within so many seconds."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError("did not end: " + process.communicate()[1][-2000:]) from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def killed(name, args, ready, sig, prelude: str = "") -> subprocess.CompletedProcess:
    """Run a script and send it a signal (0: none) as soon as `ready` says so."""
    process = started(*(after(prelude, name) if prelude else [ROOT / name]), *args)
    wait_until(process, ready)
    process.send_signal(sig)
    return ended(process)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def lines_of(path: Path) -> int:
    """How many whole lines a file has, that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def last_line(result: subprocess.CompletedProcess) -> str:
    """The last line as `command > log 2>&1; tail -1 log` shows it."""
    text = result.stderr if result.returncode else result.stdout
    return text.strip().splitlines()[-1]


def fails(result, *texts: str, folder=None) -> None:
    """Exit 1, the texts in the last line, no traceback, and the output folder without data."""
    assert result.returncode == 1, result.stdout + result.stderr
    for text in texts:
        assert text in last_line(result)
    assert last_line(result).startswith("error: ")
    assert "Traceback" not in result.stderr
    if folder is not None and folder.exists():
        assert [p.name for p in folder.rglob("*") if p.is_file() and p.name != ".lock"] == []


def write_jsonl(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """Every .safetensors below a folder, by relative path."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))
    }


def check_ids(tokenizer, row: dict) -> None:
    """Ids are the prompt as a server renders it, then the answer's own."""
    said = row["messages"][-1]["content"]
    asked = row["messages"][:-1]
    n = len(row["loss_mask"])
    while row["loss_mask"][n - 1]:
        n -= 1
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert row["input_ids"][:n] == list(ids)
    assert tokenizer.decode(row["input_ids"][n:], skip_special_tokens=True) == said
    assert (row["input_ids"][-1] == 2) == (row["finish_reason"] == "stop")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded verifier's folder, made on first use."""
    must(script("tools/make_smollm2.py", "--output-dir", SMOLLM2))
    return SMOLLM2


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    from common.data.rendering import load_tokenizer

    return load_tokenizer(str(smollm2), False)


@pytest.fixture
def verifier_folder(smollm2, tmp_path) -> Callable[[object, object, str], Path]:
    """Makes a copy of SmolLM2 with another end token of its tokenizer, other ids that config.json
    lists, and another chat template."""

    def make(eos: object, listed: object, template: str) -> Path:
        folder = tmp_path / f"verifier-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for name in ("tokenizer.json", "model.safetensors"):
            (folder / name).symlink_to(smollm2 / name)
        tokenizer = json.loads((smollm2 / "tokenizer_config.json").read_text())
        tokenizer |= {"eos_token": eos, "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        config = json.loads((smollm2 / "config.json").read_text()) | {"eos_token_id": listed}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A random 8-layer Llama (tests/tiny_models.py)."""
    return make_llama(tmp_path_factory.mktemp("verifier") / "tiny-llama")


@pytest.fixture(scope="session")
def random_rows() -> list[dict]:
    """Forty tokenized rows for the tiny verifier."""
    return make_rows(40)


@pytest.fixture(scope="session")
def tiny_prepared(tmp_path_factory, tiny_llama, random_rows) -> Path:
    """The tiny verifier's prepared data, by script 01."""
    folder = tmp_path_factory.mktemp("tiny")
    data = write_jsonl(folder / "rows.jsonl", random_rows)
    out = folder / "prepared"
    must(
        script("01_prepare_data.py", "--model-path", tiny_llama, "--dataset", data,
               "--output-dir", out)
    )  # fmt: skip
    return out


@pytest.fixture(scope="session")
def tiny_stages(tmp_path_factory, tiny_llama, tiny_prepared) -> dict[str, Path]:
    """The tiny verifier's stages 02 and 03, unbroken: {prepared, vocab, hidden, model}."""
    folder = tmp_path_factory.mktemp("stages")
    vocab, hidden = folder / "vocab", folder / "hidden"
    common = ("--model-path", tiny_llama, "--prepared-data", tiny_prepared)
    must(script("02_build_vocab_map.py", *common, "--output-dir", vocab,
                "--draft-vocab-size", 256))  # fmt: skip
    must(script("03_extract_hidden_states.py", *common, "--output-dir", hidden,
                "--max-seq-len", 256, "--max-batch-tokens", 512))  # fmt: skip
    return {"prepared": tiny_prepared, "vocab": vocab, "hidden": hidden, "model": tiny_llama}


def extract_args(stages: dict[str, Path], out: Path | str, *more: object) -> list[object]:
    """03's arguments for the tiny stages."""
    return [
        "--model-path", stages["model"], "--prepared-data", stages["prepared"],
        "--output-dir", out, "--max-seq-len", 256, "--max-batch-tokens", 512, *more,
    ]  # fmt: skip


def train_args(stages: dict[str, Path], out: Path, *more: object) -> list[object]:
    """04's arguments for the tiny stages."""
    return [
        "--model-path", stages["model"], "--prepared-data", stages["prepared"],
        "--vocab-map", stages["vocab"], "--hidden-states", stages["hidden"],
        "--output-dir", out, "--max-batch-tokens", 512, "--epochs", 2,
        "--heldout-fraction", 0.1, *more,
    ]  # fmt: skip


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own in memory; skips the test where the user may not mount."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("needs the right to mount a small tmpfs (run as root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 300 kB."""
    with mounted(tmp_path / "disk", "size=300k") as disk:
        yield disk
