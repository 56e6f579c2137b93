"""Stages 3 and 4 on one and on several GPUs of a box: same numbers, how fast, and what a killed
rank costs. Prints a JSON line per measurement.

    python benchmarks/many_gpus.py FAST DISK --sizes 1 2 4 8

FAST: a RAM disk for the verifier, of Kimi-K2.5's shape with eight layers and random weights, and
the states (30 GB per size, two of them at a time); DISK: drafts. --parts in any number of calls on
one machine, extract first. To try it on CPUs: --verifier, --data, --layers and --draft-shape of a
tiny one.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

from benchmarks.extraction import make_data, make_model, report
from benchmarks.processes import ROOT, must, show, start, wait_until
from common.states.files import hidden_file, read_hidden
from common.states.journal import read_entries

# the shape of AQ-MedAI/Kimi-K2-Instruct-eagle3, as in configs/kimi-k2.5.yaml
KIMI_DRAFT = (
    '{"intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 64,'
    ' "head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6}'
)
COMPARED = 20  # samples whose states are compared


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("fast", type=Path)
    p.add_argument("disk", type=Path)
    p.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    p.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    p.add_argument("--verifier", type=Path)
    p.add_argument("--data", type=Path)
    p.add_argument("--layers", nargs=4, default=["2", "4", "5", "7"])
    p.add_argument("--draft-shape", default=KIMI_DRAFT)
    p.add_argument("--draft-vocab-size", type=int, default=32000)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--max-batch-tokens", type=int, default=8192)
    a = p.parse_args()
    # NVLink multicast, which this turns on, is not to be had on every machine
    os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    a.disk.mkdir(parents=True, exist_ok=True)
    if a.verifier is None:
        a.verifier = a.fast / "kimi8"
        if not (a.verifier / "model.safetensors.index.json").exists():
            make_model("kimi8", a.verifier, "cuda")
    if a.data is None:
        a.data = a.fast / "data"
        make_data(a.data)
    if max(a.sizes) == 1 and {"kill-extract", "kill-train"} & set(a.parts):
        p.error("kill-extract and kill-train kill one rank of several: --sizes needs one over 1")
    for part in a.parts:
        PARTS[part](a)


# ---------------------------------------------------------------- stage 3


def extraction(a: argparse.Namespace, size: int, out: Path, *more: str) -> list[Any]:
    return [
        ROOT / "03_extract_hidden_states.py", "--model-path", a.verifier, "--prepared-data", a.data,
        "--output-dir", out, "--layers", *a.layers, "--tp-size", size,
        "--gpu-memory-utilization", 0.85, "--max-batch-tokens", a.max_batch_tokens, *more,
    ]  # fmt: skip


def states_folder(a: argparse.Namespace, size: int) -> Path:
    return a.fast / f"hidden{size}"


def extract(a: argparse.Namespace) -> None:
    """Rates at every size, and states against those of the first."""
    for size in a.sizes:
        out = states_folder(a, size)
        text = must(a.disk / f"extract{size}.log", *extraction(a, size, out, "--overwrite"))
        checks = [x.strip() for x in text.splitlines() if "self-check" in x or " loaded in " in x]
        show(**(report(out, f"extract, TP={size}") | {"log": checks}))
        if size != a.sizes[0]:
            show(what=f"states, TP={size}", **difference(states_folder(a, a.sizes[0]), out))
            shutil.rmtree(out)


def difference(one: Path, other: Path) -> dict[str, float]:
    """Relative error of a token's states, over tokens and layers."""
    errors = []
    for index in range(COMPARED):
        x, y = (read_hidden(hidden_file(f, index))[0].float() for f in (one, other))
        errors.append(((y - x).norm(dim=-1) / x.norm(dim=-1)).flatten())
    found = torch.cat(errors)
    return {
        "median": round(float(found.median()), 5),
        "largest": round(float(found.max()), 5),
        "equal_share": round(float((found == 0).float().mean()), 3),
    }


# ---------------------------------------------------------------- stage 4


def training(a: argparse.Namespace, size: int, out: Path, *more: Any) -> list[Any]:
    """04 on `size` GPUs; every size takes the same number of rows per step."""
    vocab = a.fast / "map"
    if not (vocab / "data_config.json").exists():
        must(
            a.disk / "vocab.log", ROOT / "02_build_vocab_map.py", "--model-path", a.verifier,
            "--prepared-data", a.data, "--output-dir", vocab,
            "--draft-vocab-size", a.draft_vocab_size,
        )  # fmt: skip
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", size] if size > 1 else []
    return [
        *launch, ROOT / "04_train.py", "--model-path", a.verifier, "--prepared-data", a.data,
        "--vocab-map", vocab, "--hidden-states", states_folder(a, a.sizes[0]), "--output-dir", out,
        "--layers", *a.layers, "--draft-shape", a.draft_shape, "--lr", 1e-4,
        "--heldout-fraction", 0, "--epochs", a.epochs, "--max-batch-tokens", a.max_batch_tokens,
        "--rows-per-step", max(a.sizes), *more,
    ]  # fmt: skip


def metrics(out: Path) -> list[dict]:
    path = out / "metrics.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def train(a: argparse.Namespace) -> None:
    """Rates at every size, and the losses against those of the first."""
    first: list[float] = []
    alone = 0.0
    for size in a.sizes:
        out = a.disk / f"draft{size}"
        command = training(a, size, out, "--save-every", 10**6, "--overwrite")
        must(a.disk / f"train{size}.log", *command)
        steps = [x for x in metrics(out) if "loss" in x]
        losses = [x["loss"] for x in steps]
        # the first steps wait for the files' first reading
        rate = sorted(x["tokens_per_second"] for x in steps)[len(steps) // 2]
        first, alone = first or losses, alone or rate / a.sizes[0]
        show(
            what=f"train, {size} GPUs",
            tok_s=round(rate),
            efficiency=round(rate / alone / size, 3),
            steps=len(steps),
            losses=[losses[0], losses[-1]],
            largest_difference=round(
                max(abs(x - y) for x, y in zip(first, losses, strict=True)), 5
            ),
            memory_gb=steps[-1].get("memory_gb"),
        )
        shutil.rmtree(out)


# ---------------------------------------------------------------- a killed rank


def kill_extract(a: argparse.Namespace) -> None:
    """SIGKILL of the last rank's process while batches run, then the same command again."""
    out = a.fast / "killed"
    shutil.rmtree(out, ignore_errors=True)

    def well_under_way() -> bool:
        return len(read_entries(out)) > 20

    killed("extract", a, extraction(a, max(a.sizes), out), well_under_way, "VLLM::Worker")
    shutil.rmtree(out)


def kill_train(a: argparse.Namespace) -> None:
    """The same in stage 4, once a state is saved."""
    draft = a.disk / "killed"
    shutil.rmtree(draft, ignore_errors=True)
    command = training(a, max(a.sizes), draft, "--save-every", 20)

    def saved() -> bool:
        return bool(list((draft / "state").glob("step_*")))

    killed("train", a, command, saved, "04_train.py")
    shutil.rmtree(draft)


def killed(
    what: str, a: argparse.Namespace, command: list[Any], ready: Callable[[], bool], rank: str
) -> None:
    """Kill the last process whose name or command line holds `rank` once `ready`; show how the
    others end, and that the same command then resumes."""
    log = a.disk / f"kill-{what}.log"
    process = start(log, *command)
    if not wait_until(ready, process, 0.01) or process.poll() is not None:
        sys.exit(f"{log}: ended before it could be killed\n{log.read_text()[-2000:]}")
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [p for p in children if rank in p.name() or rank in " ".join(p.cmdline())]
    os.kill(ranks[-1].pid, signal.SIGKILL)
    killed_at = time.monotonic()
    code = process.wait()
    seconds = time.monotonic() - killed_at
    errors = [x for x in log.read_text().splitlines() if x.startswith("error:") or "SIGKILL" in x]
    must(a.disk / f"resume-{what}.log", *command)
    show(
        what=f"{what}: the last of {len(ranks)} ranks killed",
        status=code,
        seconds=round(seconds, 1),
        said=errors[-1:],
        resumed=True,
    )


PARTS = {
    "extract": extract, "train": train, "kill-extract": kill_extract, "kill-train": kill_train
}  # fmt: skip


if __name__ == "__main__":
    main()
