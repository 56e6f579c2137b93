"""Tiny random verifiers for tests and for a first run on a new machine.

python -m tests.tiny_models FOLDER makes FOLDER/tiny-llama and FOLDER/rows.jsonl
(tokenized rows, a prompt and an answer each, that 01 passes through); with a second
argument, a name of ARCHITECTURES, FOLDER/tiny-NAME instead of the Llama.

Real vLLM loads each in about a second, on a CPU and on a GPU, at TP=1 and 2.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

VOCAB = 512

# Weights of 0.06 at 256 hidden units give log-probabilities that spread by about 1, and
# layers that each add as much as the stream holds: a layer off by one is seen at once.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def make_llama(path: Path, vocab_size: int = VOCAB) -> Path:
    """A random 8-layer Llama whose 4 heads divide by 2; real vLLM loads it in a second."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)  # type: ignore[arg-type]
    return path


def make_qwen3(path: Path) -> Path:
    """A random Qwen3: dense, with norms on queries and keys."""
    return save_random({"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 64}, path)


def make_qwen3_moe(path: Path) -> Path:
    """A random Qwen3-MoE: 8 experts, 2 a token, softmax routing."""
    config = {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    }
    return save_random(config, path)


def make_deepseek_v3(path: Path) -> Path:
    """A random DeepSeek-V3: MLA with YaRN, experts in groups after one dense layer."""
    return save_random(deepseek_v3_config(n_group=4, topk_group=2), path)


def make_kimi_k25(path: Path) -> Path:
    """A random Kimi-K2.5: DeepSeek-V3 layers in one group of experts, inside the multimodal
    wrapper. It has no vision weights: vLLM needs language_model_only to load it."""
    from safetensors.torch import load_file, save_file

    save_random(deepseek_v3_config(n_group=1, topk_group=1), path)
    weights = load_file(path / "model.safetensors")
    wrapped = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    save_file(wrapped, path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    rope = text.pop("rope_parameters")  # the published config has the older two keys
    text |= {
        "model_type": "kimi_k2",
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "image_token_id": VOCAB - 1,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
        },
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


ARCHITECTURES = {
    "llama": make_llama,
    "qwen3": make_qwen3,
    "qwen3_moe": make_qwen3_moe,
    "deepseek_v3": make_deepseek_v3,
    "kimi_k25": make_kimi_k25,
}


def deepseek_v3_config(n_group: int, topk_group: int) -> dict[str, Any]:
    """DeepSeek-V3's parts at toy size. vLLM's MLA takes no other head sizes than the published
    ones; on a CPU its rotary embedding is right with YaRN only."""
    return {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 256,
        "n_group": n_group,
        "topk_group": topk_group,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 0,
        # Published configs have both keys; without them vLLM routes by softmax, no bias.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


def save_random(config: dict[str, Any], path: Path) -> Path:
    """Save a random model (COMMON and `config`) in bfloat16, with norms and routing that matter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoConfig.for_model(**COMMON | config)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
        if "num_experts_per_tok" in config:
            set_routing(model)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def set_routing(model: Any) -> None:
    """Give tokens of a class (id modulo experts) two experts clearly ahead of the others.

    With random routers enough tokens lie near a tie, and go to another expert in bfloat16,
    to triple the states' error. The bias, where there is one, puts expert 0 among every
    token's two, so a verifier read without it is wrong everywhere.
    """
    import torch

    routers = [
        module
        for name, module in model.named_modules()
        if name.endswith((".gate", ".router", ".router.layer")) and hasattr(module, "weight")
    ]
    embedding_VH, experts = model.get_input_embeddings().weight, len(routers[0].weight)
    class_EH = torch.randint(0, 2, (experts, embedding_VH.shape[1])).float() * 2 - 1
    embedding_VH += 0.5 * class_EH[torch.arange(len(embedding_VH)) % experts]
    for router in routers:
        router.weight.copy_(0.05 * (class_EH + 0.6 * class_EH.roll(1, 0)))
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.uniform_(-0.1, 0.1)[0] += 1


def make_rows(count: int, vocab_size: int = VOCAB) -> list[dict]:
    """Tokenized rows: a prompt of 3 to 59 random ids, then an answer that ends with id 1."""
    rng = random.Random(0)
    rows = []
    for n in range(count):
        prompt, answer = rng.randrange(3, 60), rng.randrange(2, 120)
        ids = [rng.randrange(2, vocab_size) for _ in range(prompt + answer - 1)] + [1]
        rows.append({"id": f"r{n}", "input_ids": ids, "loss_mask": [0] * prompt + [1] * answer})
    return rows


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    arch = sys.argv[2] if len(sys.argv) > 2 else "llama"
    ARCHITECTURES[arch](folder / f"tiny-{arch}")
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in make_rows(200)))
