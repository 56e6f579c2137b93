"""Quantised copies of a verifier beside it: 03's states and self-check, and drafts of each served
by each. One NVIDIA GPU.

Usage: python benchmarks/quantized.py FOLDER SMOLLM2
           [--variants NAME...] [--answers N] [--jobs N]
Run again after a kill, it goes on: finished stages are skipped.

SMOLLM2 (tools/make_smollm2.py) is quantised here, by rounding to the nearest: fp8 weights (a scale
per output channel, activations per token) and int4 weights in groups of 32, both as
compressed-tensors stores them; `fp8-kv` is the verifier itself with an fp8 KV cache. kimi and
kimi-int4 are a tiny random Kimi-K2.5, its routed experts stored as the published checkpoint has
them. Prints JSON lines: per variant the relative difference of a token's states from the
unquantised verifier's (median, per layer) and 03's difference of log-probabilities; per pair of
draft and verifier the acceptance length.
"""

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import ROOT, must, show, write_jsonl
from common.states.files import hidden_file, read_hidden
from common.verifier.head import read_head_manifest
from tests.tiny_models import make_kimi_k25, make_rows

GROUP = 32
# What compressed-tensors calls the two formats, and what of a verifier they do not touch.
FP8_SCHEME = {
    "format": "float-quantized",
    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token",
                          "dynamic": True},
}  # fmt: skip
INT4_SCHEME = {
    "format": "pack-quantized",
    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": GROUP},
    "input_activations": None,
}  # fmt: skip
KIMI_IGNORES = ["re:.*self_attn.*", "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]  # fmt: skip
BASE = {"smollm2-fp8": "smollm2", "smollm2-int4": "smollm2", "smollm2-fp8-kv": "smollm2",
        "kimi-int4": "kimi"}  # fmt: skip
VARIANTS = ["smollm2", "smollm2-fp8", "smollm2-int4", "smollm2-fp8-kv", "kimi", "kimi-int4"]


# ---------------------------------------------------------------- checkpoints


def quantized_copy(source: Path, copy: Path, scheme: dict[str, Any], only: str) -> None:
    """Copy a verifier with its layers' matrices quantised, those whose names hold `only`."""
    shutil.copytree(source, copy)
    weights = load_file(source / "model.safetensors")
    quantize = to_fp8 if scheme is FP8_SCHEME else to_int4
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if ".layers." in name and only in name and name.endswith("_proj.weight"):
            stored |= quantize(name.removesuffix(".weight"), tensor)
        else:
            stored[name] = tensor
    save_file(stored, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    group = {k: scheme[k] for k in ("weights", "input_activations")} | {"targets": ["Linear"]}
    config.get("text_config", config)["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": scheme["format"],
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head", *(KIMI_IGNORES if only else [])],
    }
    (copy / "config.json").write_text(json.dumps(config, indent=1))


def to_fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
    return {
        f"{name}.weight": (weight.float() / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale,
    }


def to_int4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Eight values to an int32, the first in the lowest bits, stored with 8 added."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(2).clamp_min(1e-12) / 7).to(torch.bfloat16)
    value = (groups / scale.float()[..., None]).round().clamp(-8, 7).view(weight.shape)
    nibbles = (value.to(torch.int64) + 8).view(len(weight), -1, 8)
    packed = (nibbles << (4 * torch.arange(8))).sum(2)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return {
        f"{name}.weight_packed": packed.to(torch.int32),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }


def make_verifiers(folder: Path, smollm2: Path) -> dict[str, Path]:
    paths = {"smollm2": smollm2, "smollm2-fp8-kv": smollm2}
    paths |= {name: folder / name for name in VARIANTS if name not in paths}
    if not paths["kimi"].exists():
        make_kimi_k25(paths["kimi"])
    for name, scheme, only in (
        ("smollm2-fp8", FP8_SCHEME, ""),
        ("smollm2-int4", INT4_SCHEME, ""),
        ("kimi-int4", INT4_SCHEME, ".experts."),
    ):
        if not paths[name].exists():
            quantized_copy(paths[BASE[name]], paths[name], scheme, only)
    return paths


# ---------------------------------------------------------------- stages


class Run:
    """The stages in a folder; `paths`: variant → verifier."""

    def __init__(self, folder: Path, paths: dict[str, Path], answers: int):
        self.folder, self.paths, self.answers = folder, paths, answers

    def engine(self, name: str, memory: float, **more: Any) -> list[Any]:
        more |= {"kv_cache_dtype": "fp8"} if name == "smollm2-fp8-kv" else {}
        args = ["--engine-args", json.dumps(more)] if more else []
        return ["--gpu-memory-utilization", memory, *args]

    def script(self, log: str, name: str, *args: Any) -> str:
        return must(self.folder / f"{log}.log", ROOT / name, *args, cwd=ROOT)

    def layers(self, base: str) -> list[Any]:
        return ["--layers", *((2, 15, 27, 29) if base == "smollm2" else (1, 3, 4, 5))]

    def prepare(self, base: str) -> None:
        """Rows, 01 and 02 of an unquantised verifier, which all its copies share."""
        data = self.folder / f"{base}.jsonl"
        model = ["--model-path", self.paths[base]]
        if base == "smollm2":
            out = self.folder / "responses"
            self.script(
                "regenerate", "tools/regenerate_responses.py", *model, "--prompts",
                ROOT / "configs/prompts/train.jsonl", "--max-samples", self.answers,
                "--max-new-tokens", 256, "--max-seq-len", 1024, "--batch-size", 256,
                "--output-dir", out, *self.engine(base, 0.4),
            )  # fmt: skip
            data = out / "responses.jsonl"
        else:
            write_jsonl(data, make_rows(64))
        prepared = self.folder / f"{base}-prepared"
        self.script(f"{base}-01", "01_prepare_data.py", *model, "--dataset", data, "--max-seq-len",
                    1024, "--output-dir", prepared,
                    *(["--keep-unfinished"] if base == "smollm2" else []))  # fmt: skip
        size = 8192 if base == "smollm2" else 256
        self.script(f"{base}-02", "02_build_vocab_map.py", *model, "--prepared-data", prepared,
                    "--output-dir", self.folder / f"{base}-vocab", "--draft-vocab-size",
                    size)  # fmt: skip

    def extract(self, name: str) -> None:
        base = BASE.get(name, name)
        out = self.folder / f"{name}-hidden"
        self.script(
            f"{name}-03", "03_extract_hidden_states.py", "--model-path", self.paths[name],
            "--prepared-data", self.folder / f"{base}-prepared", "--max-seq-len", 1024,
            "--output-dir", out, *self.layers(base), *self.engine(name, 0.3),
        )  # fmt: skip
        head = read_head_manifest(out)
        found = self.differences(name, base)
        show(verifier=name, states_from_unquantised=found,
             logprob_difference=head and head.logprob_difference)  # fmt: skip

    def differences(self, name: str, base: str) -> list[float]:
        """Median over tokens of |states - unquantised| / |unquantised|, per layer."""
        errors = []
        for index in range(64):
            ours, theirs = (
                read_hidden(hidden_file(self.folder / f"{x}-hidden", index))[0].float()
                for x in (name, base)
            )
            errors.append((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1))
        return [round(x, 4) for x in torch.cat(errors).median(dim=0).values.tolist()]

    def train(self, name: str) -> None:
        base = BASE.get(name, name)
        shape = {"intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 9,
                 "head_dim": 64, "rope_theta": 1e5, "rms_norm_eps": 1e-5}  # fmt: skip
        if base == "kimi":
            shape |= {"intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
        self.script(
            f"{name}-04", "04_train.py", "--prepared-data", self.folder / f"{base}-prepared",
            "--vocab-map", self.folder / f"{base}-vocab", "--hidden-states",
            self.folder / f"{name}-hidden", "--output-dir", self.folder / f"{name}-draft",
            *self.layers(base), "--epochs", 6, "--max-batch-tokens", 2048,
            "--draft-shape", json.dumps(shape),
        )  # fmt: skip

    def serve(self, pair: tuple[str, str]) -> None:
        """A draft of one variant, served by another."""
        draft, verifier = pair
        base = BASE.get(draft, draft)
        prompts = ROOT / "configs/prompts/heldout.jsonl"
        if base == "kimi":
            prompts = self.folder / "kimi.jsonl"
        out = self.folder / f"{draft}-by-{verifier}"
        copy = ["--quantized-copy"] if self.paths[draft] != self.paths[verifier] else []
        self.script(
            out.name, "tools/evaluate_draft.py", "--model-path", self.paths[verifier], "--draft",
            self.folder / f"{draft}-draft", "--prompts", prompts, "--max-samples", 120,
            "--max-new-tokens", 128, "--max-seq-len", 1024, "--batch-size", 120, "--only-draft",
            # a fixed cache: several engines start at once, and none may measure the memory
            "--output-dir", out, *self.engine(verifier, 0.1, kv_cache_memory_bytes=4 << 30), *copy,
        )  # fmt: skip
        counters = json.loads((out / "with_draft.json").read_text())["counters"]
        length = 1 + counters["accepted"] / counters["drafts"]
        show(draft=draft, served_by=verifier, acceptance_length=round(length, 3),
             drafts=counters["drafts"])  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path)
    p.add_argument("smollm2", type=Path)
    p.add_argument("--variants", nargs="+", default=VARIANTS)
    p.add_argument("--answers", type=int, default=1000)
    p.add_argument("--jobs", type=int, default=5, help="drafts trained or served at the same time")
    a = p.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    run = Run(a.folder, make_verifiers(a.folder, a.smollm2), a.answers)
    for base in ("smollm2", "kimi"):
        if base in a.variants:
            run.prepare(base)
    for name in a.variants:  # alone: vLLM measures a GPU's memory as it starts
        run.extract(name)
    pairs = [(x, x) for x in a.variants]
    pairs += [p for x in a.variants if (y := BASE.get(x)) for p in ((x, y), (y, x))]
    with ThreadPoolExecutor(a.jobs) as pool:
        list(pool.map(run.train, a.variants))
        list(pool.map(run.serve, pairs))


if __name__ == "__main__":
    main()
