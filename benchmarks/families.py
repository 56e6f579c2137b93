"""The stages on a tiny random verifier of every family, as a table.

Usage: python benchmarks/families.py [--jobs N] [--limit SECONDS] [--tp-size N] [--logs DIR]
           [NAME...]
       python benchmarks/families.py --table LINES.jsonl...
NAME is one of tests/tiny_families.py, default all. A name with `:transformers` runs in vLLM's
Transformers backend.

Per family: the verifier and its states in transformers in float32; 03 (its states against these,
its log-probability check); 02 and 04 (its first loss); the draft served, with parity. Every step
is a process of its own, and a family has a time limit. Prints one JSON line per family; --table
makes Markdown of such lines. What a stage refuses is quoted: its last line.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import ROOT, show, write_jsonl
from common.states.files import hidden_file, read_hidden
from tests.fork_server import ForkedProcess, server
from tests.tiny_families import FAMILIES, architecture, transformers_states
from tests.tiny_models import make_rows

ROWS = make_rows(16)
NOT_RUN = "not run"
FALLS_BACK = ["qwen3:transformers", "olmo2:transformers"]


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("names", nargs="*", default=[*FAMILIES, *FALLS_BACK])
    p.add_argument("--jobs", type=int, default=1, help="families at the same time")
    p.add_argument("--limit", type=float, default=900, help="seconds per family")
    p.add_argument("--tp-size", type=int, default=1)
    p.add_argument("--logs", type=Path, help="folder for models, logs and data")
    p.add_argument("--make", action="store_true", help="make NAME in --logs, and end")
    p.add_argument("--table", nargs="+", type=Path)
    a = p.parse_args()
    if a.table:
        print(table([json.loads(x) for file in a.table for x in file.read_text().splitlines()]))
    elif a.make:
        make(a.names[0], a.logs)
    else:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        folder = a.logs or Path(tempfile.mkdtemp())
        if not has_gpu():
            server()  # before threads ask for it
        with ThreadPoolExecutor(a.jobs) as pool:
            run = lambda name: show(**Family(name, folder / name, a).run())  # noqa: E731
            list(pool.map(run, a.names))


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


# ---------------------------------------------------------------- a family


class Stop(Exception):
    """A family ends here; the text says why."""


class Family:
    """One family through the stages; `found` is its line."""

    def __init__(self, name: str, folder: Path, a: argparse.Namespace):
        self.name, self.folder, self.tp_size = name, folder, a.tp_size
        self.deadline = time.monotonic() + a.limit
        self.started = time.monotonic()
        self.found: dict[str, Any] = {"family": name}

    def run(self) -> dict[str, Any]:
        try:
            self.stages()
        except Stop as e:
            self.found["ended"] = str(e)
        except Exception as e:  # of the comparison: the other families run all the same
            self.found["ended"] = f"{type(e).__name__}: {e}"
        return self.found | {"seconds": round(time.monotonic() - self.started)}

    def stages(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        model, prepared = self.folder / "model", self.folder / "prepared"
        vocab, hidden, draft = (self.folder / x for x in ("vocab", "hidden", "draft"))
        self.step("make", "-m", "benchmarks.families", self.name, "--make", "--logs", self.folder)
        self.found["class"] = architecture(model)
        write_jsonl(prepared / "tokenized_data.jsonl", ROWS)
        engine: list[Any] = ["--tp-size", self.tp_size, "--gpu-memory-utilization", 0.06]
        if self.name.endswith(":transformers"):
            engine += ["--engine-args", json.dumps({"model_impl": "transformers"})]
        data = ["--model-path", model, "--prepared-data", prepared]
        states = ["--hidden-states", hidden]
        want = torch.load(self.folder / "states.pt")
        n = want[0].shape[1]
        layers = ["--layers", 1, 3, n - 2, n - 1]
        log = self.step(
            "extract", "03_extract_hidden_states.py", *data, "--output-dir", hidden,
            *layers, "--max-seq-len", 256, "--max-batch-tokens", 512, *engine,
        )  # fmt: skip
        self.found |= extracted(log)
        self.found["states"] = states_error(hidden, want)
        self.step("vocab", "02_build_vocab_map.py", *data, "--output-dir", vocab,
                  "--draft-vocab-size", 256)  # fmt: skip
        self.step(
            "train", "04_train.py", *data, *states, *layers, "--vocab-map", vocab,
            "--output-dir", draft, "--epochs", 1, "--max-batch-tokens", 512,
            "--heldout-fraction", 0,
        )  # fmt: skip
        self.found["loss"] = first_loss(draft)
        self.step(
            "serve", "tools/evaluate_draft.py", "--model-path", model, "--draft", draft,
            "--prompts", prepared / "tokenized_data.jsonl", "--max-samples", 4, "--only-draft",
            "--max-seq-len", 256, "--max-new-tokens", 16, "--output-dir", self.folder / "served",
            *states, *engine,
        )  # fmt: skip
        self.found["served"] = served(self.folder / "served")

    def step(self, what: str, *command: Any) -> str:
        """Run a script in a process of its own; what it printed. Stop with its last line."""
        log = self.folder / f"{what}.log"
        args = [sys.executable, *map(str, command)]
        if command[0] != "-m":
            args[1] = str(ROOT / command[0])
        kind = subprocess.Popen if has_gpu() else ForkedProcess
        with open(log, "w") as out:
            process = kind(args, stdout=out, stderr=out, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(max(1, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Stop(f"{what}: not done within the time limit") from None
        text = log.read_text()
        if code:
            errors = [x for x in text.splitlines() if x.strip()]
            last = errors[-1].removeprefix("error: ") if errors else ""
            lacking = re.search(r"ModuleNotFoundError: (No module named \S+)", text)
            if lacking and "failed to be inspected" in last:
                raise Stop(f"{NOT_RUN} on this vLLM: its class asks for more: {lacking[1]}")
            raise Stop(f"{what}: status {code}: {last}" if code != 1 else f"{what}: {last}")
        return text


def extracted(log: str) -> dict[str, Any]:
    """What 03's log says of the layers and of its check."""
    calls = re.search(r"extract: (layers .*)", log)
    check = re.search(r"mean\s+\|difference\| ([\d.e-]+)", log)
    return {
        "calls": calls[1] if calls else None,
        "logprobs": float(check[1]) if check else None,
    }


def states_error(hidden: Path, want: list[torch.Tensor]) -> float:
    """Largest over the layers: median over tokens of |ours - transformers'| / |transformers'|."""
    layers = json.loads((hidden / "data_config.json").read_text())["layers"]
    ours = torch.cat([read_hidden(hidden_file(hidden, i))[0].float() for i in range(len(ROWS))])
    theirs = torch.cat(want)[:, layers]
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    return round(float(errors.median(0).values.max()), 4)


def first_loss(draft: Path) -> Any:
    lines = map(json.loads, (draft / "metrics.jsonl").read_text().splitlines())
    return next(line["loss"] for line in lines if "loss" in line)


def served(folder: Path) -> str:
    """Drafts accepted, and how far what enters the draft is from what 03 stored."""
    found = json.loads((folder / "with_draft.json").read_text())
    counters, parity = found["counters"], found["checked"]["fed_states_relative_error"]
    accepted, drafts = counters["accepted"], counters["drafts"]
    return f"served: {accepted:.0f} tokens of {drafts:.0f} drafts accepted, parity {parity:.1e}"


# ---------------------------------------------------------------- in a process of its own


def make(name: str, folder: Path) -> None:
    """Make the verifier and its states in transformers; exit with why vLLM or transformers cannot
    run it."""
    family = name.partition(":")[0]
    try:
        path = FAMILIES[family](folder / "model")
    except Exception as e:
        import transformers

        sys.exit(f"{NOT_RUN}: transformers {transformers.__version__} makes no {family}: {e}")
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    if architecture(path) not in ModelRegistry.get_supported_archs():
        sys.exit(f"{NOT_RUN} on this vLLM: {vllm.__version__} has no {architecture(path)}")
    torch.save(transformers_states(path, ROWS)[0], folder / "states.pt")


# ---------------------------------------------------------------- the table


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown of families' lines."""
    rows = ["| family | states | log-probabilities | first loss | draft served, or why not |",
            "|---|---|---|---|---|"]  # fmt: skip
    for x in lines:
        end = (x.get("ended") or x["served"]).replace(str(ROOT), "").replace("|", "/")
        end = re.sub(r"/\S*/(model|hidden)\b", r"\1", end)  # of this run's folders
        cells = [x.get(k) for k in ("states", "logprobs", "loss")]
        shown = [f"{c:.2g}" if isinstance(c, float) else "" if c is None else str(c) for c in cells]
        rows.append(f"| {x['family']} ({x.get('class', '?')}) | {' | '.join(shown)} | {end} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
