"""Parts of benchmarks/extraction.sh: random verifiers of two shapes, data, plain prefill, disk.

    model KIND DIR     a random-weight checkpoint (llama8b, kimi8), made on the GPU
    data DIR           1000 samples of 100 to 2048 tokens, 503,619 in all, as 01 writes them
    plain MODEL DATA   the limit: vLLM's eager prefill of the same samples, nothing captured
    disk DIR           write rate of a disk: as many threads as 03 uses, 29 MB files, fsync
    touch DIR          the same, to use a virtual machine's memory once: the first use is slow
    report DIR NAME    one line of a finished hidden-states folder: tok/s from the first batch to
                       the last file, as 03 says it; `run_s` is the process's, loading included

Each prints one JSON line.
"""

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import show, write_jsonl
from common.artifacts import atomic_file
from common.data.samples import FILE, read_samples

LLAMA8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
# Kimi-K2.5's layers, fewer of them and of their experts.
KIMI8: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 48,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "rope_theta": 50000.0,
}
COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
KINDS = {"llama8b": LLAMA8B, "kimi8": KIMI8}


def layer_shapes(c: dict, layer: int) -> dict[str, list[int]]:
    """Names and shapes of one decoder layer's tensors."""
    H, heads = c["hidden_size"], c["num_attention_heads"]
    shapes = {"input_layernorm": [H], "post_attention_layernorm": [H]}

    def mlp(name: str, inner: int) -> None:
        shapes[f"{name}.gate_proj"] = shapes[f"{name}.up_proj"] = [inner, H]
        shapes[f"{name}.down_proj"] = [H, inner]

    if "kv_lora_rank" not in c:
        kv = c["num_key_value_heads"] * H // heads
        shapes |= {"self_attn.q_proj": [H, H], "self_attn.o_proj": [H, H]}
        shapes |= {"self_attn.k_proj": [kv, H], "self_attn.v_proj": [kv, H]}
        mlp("mlp", c["intermediate_size"])
        return shapes
    latent, rope, nope = c["kv_lora_rank"], c["qk_rope_head_dim"], c["qk_nope_head_dim"]
    shapes |= {
        "self_attn.q_a_proj": [c["q_lora_rank"], H],
        "self_attn.q_a_layernorm": [c["q_lora_rank"]],
        "self_attn.q_b_proj": [heads * (nope + rope), c["q_lora_rank"]],
        "self_attn.kv_a_proj_with_mqa": [latent + rope, H],
        "self_attn.kv_a_layernorm": [latent],
        "self_attn.kv_b_proj": [heads * (nope + c["v_head_dim"]), latent],
        "self_attn.o_proj": [H, heads * c["v_head_dim"]],
    }
    if layer < c["first_k_dense_replace"]:
        mlp("mlp", c["intermediate_size"])
        return shapes
    shapes["mlp.gate"] = [c["n_routed_experts"], H]
    for expert in range(c["n_routed_experts"]):
        mlp(f"mlp.experts.{expert}", c["moe_intermediate_size"])
    mlp("mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
    return shapes


def make_model(kind: str, folder: Path, device: str) -> None:
    """Write a checkpoint, one file per layer, weights of standard deviation 0.02."""
    import torch
    from safetensors.torch import save_file

    c = COMMON | KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c, indent=1))
    torch.manual_seed(0)
    where: dict[str, str] = {}
    total = 0

    def tensor(shape: list[int]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02).cpu()

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total
        save_file(tensors, folder / name)
        where.update(dict.fromkeys(tensors, name))
        total += sum(t.nbytes for t in tensors.values())

    V, H = c["vocab_size"], c["hidden_size"]
    save("outer.safetensors", {
        "model.embed_tokens.weight": tensor([V, H]),
        "model.norm.weight": tensor([H]),
        "lm_head.weight": tensor([V, H]),
    })  # fmt: skip

    def save_layer(layer: int) -> None:
        prefix = f"model.layers.{layer}."
        shapes = layer_shapes(c, layer)
        tensors = {f"{prefix}{n}.weight": tensor(s) for n, s in shapes.items()}
        if "mlp.gate" in shapes:
            bias = torch.zeros(c["n_routed_experts"])
            tensors[prefix + "mlp.gate.e_score_correction_bias"] = bias
        save(f"layer-{layer}.safetensors", tensors)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save_layer, range(c["num_hidden_layers"])))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def sample_ids() -> list[list[int]]:
    """1000 samples of 100 to 2048 random ids, 503,619 in all."""
    rng = random.Random(0)
    lengths = [min(2048, max(100, int(rng.lognormvariate(6.0, 0.65)))) for _ in range(1000)]
    return [[rng.randrange(10, 100_000) for _ in range(n)] for n in lengths]


def mask_of(length: int) -> list[int]:
    """72 % of a sample carries loss, at its end, as in chat data."""
    prompt = round(0.28 * length)
    return [0] * prompt + [1] * (length - prompt)


def make_data(folder: Path) -> None:
    samples = enumerate(sample_ids())
    write_jsonl(
        folder / FILE,
        ({"id": f"s{n}", "input_ids": ids, "loss_mask": mask_of(len(ids))} for n, ids in samples),
    )


def plain(model: str, data: Path, batch_tokens: int, utilization: float, tp_size: int) -> dict:
    """tok/s of vLLM's own eager prefill, all samples submitted together; the better of two."""
    from common.verifier import engine

    engine.prepare_environment(tp_size)
    from vllm import LLM, SamplingParams

    rows = [s.input_ids.tolist() for s in read_samples(data)]
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=2304,
        max_num_batched_tokens=batch_tokens,
        enable_prefix_caching=False,
        gpu_memory_utilization=utilization,
        tensor_parallel_size=tp_size,
    )
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    prompts: Any = [{"prompt_token_ids": ids} for ids in rows]
    llm.generate(prompts[:64], params, use_tqdm=False)
    seconds = []
    for _ in range(2):
        started = time.monotonic()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.monotonic() - started)
    tokens = sum(map(len, rows))
    return {
        "what": "plain prefill",
        "tokens": tokens,
        "seconds": [round(s, 2) for s in seconds],
        "tok_s": round(tokens / min(seconds)),
    }


def disk(folder: Path, gigabytes: int) -> dict:
    """Write rate of atomic, fsynced files by as many threads as 03 has."""
    from common.extraction.writer import WRITERS

    data = os.urandom(29_000_000)
    count = gigabytes * 10**9 // len(data)

    def write(n: int) -> None:
        with atomic_file(folder / f"rate-{n}") as f:
            f.write(data)

    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(count)))
    seconds = time.monotonic() - started
    for path in folder.glob("rate-*"):
        path.unlink()
    rate = count * len(data) / 1e9 / seconds
    return {
        "threads": WRITERS,
        "seconds": round(seconds, 2),
        "GB_s": round(rate, 2),
    }


def report(folder: Path, name: str) -> dict:
    """Rates of a finished hidden-states folder, from its manifest."""
    found = json.loads((folder / "data_config.json").read_text())
    seconds, tokens = found["extract_seconds"], found["total_tokens"]
    return {
        "what": name,
        "tokens": tokens,
        "seconds": seconds,
        "tok_s": round(tokens / seconds),
        "GB_s": round(found["bytes"] / 1e9 / seconds, 2),
        "batches": found["counts"]["forward_passes"],
        "run_s": found["elapsed_seconds"],
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = p.add_subparsers(dest="part", required=True)
    model = parts.add_parser("model")
    model.add_argument("kind", choices=list(KINDS))
    model.add_argument("dir", type=Path)
    model.add_argument("--device", default="cuda")
    parts.add_parser("data").add_argument("dir", type=Path)
    prefill = parts.add_parser("plain")
    prefill.add_argument("model")
    prefill.add_argument("data", type=Path)
    prefill.add_argument("--max-batch-tokens", type=int, default=8192)
    prefill.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    prefill.add_argument("--tp-size", type=int, default=1)
    for name in ("disk", "touch"):
        rate = parts.add_parser(name)
        rate.add_argument("dir", type=Path)
        rate.add_argument("--gigabytes", type=int, default=12)
    finished = parts.add_parser("report")
    finished.add_argument("dir", type=Path)
    finished.add_argument("name")
    a = p.parse_args()
    started = time.monotonic()
    found: dict = {}
    if a.part == "model":
        make_model(a.kind, a.dir, a.device)
    elif a.part == "data":
        make_data(a.dir)
    elif a.part == "plain":
        found = plain(a.model, a.data, a.max_batch_tokens, a.gpu_memory_utilization, a.tp_size)
    elif a.part == "report":
        found = report(a.dir, a.name)
    else:
        found = disk(a.dir, a.gigabytes)
    show(**({"what": a.part} | found), total_s=round(time.monotonic() - started, 1))


if __name__ == "__main__":
    main()
