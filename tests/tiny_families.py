"""Tiny random verifiers of many decoder families, for benchmarks/families.py and the tests.

Each is what transformers makes of a small config; those whose published form differs are in
tests/tiny_models.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny_models import ARCHITECTURES, COMMON, VOCAB, set_routing

# No padding: its embedding would be zero, and some layers leave it so.
BASE = COMMON | {"num_key_value_heads": 2, "head_dim": 64, "pad_token_id": None}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 1}
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_heads": 2,
    "num_hidden_layers": 1, "depth": 1, "image_size": 28, "patch_size": 14,
}  # fmt: skip
LLAMA4 = {
    "model_type": "llama4_text", "intermediate_size_mlp": 512, "num_local_experts": 4,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 256,
}  # fmt: skip
MROPE = {
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10],
    "mrope_interleaved": True,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"] * 3
OWN_SIZES = {
    "vocab_size": VOCAB, "initializer_range": 0.06, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False, "n_embd": 256, "n_layer": 6, "n_head": 4, "n_positions": 2048,
}  # fmt: skip

# Changes to BASE; a config with text_config or n_embd stands for itself.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama4_text": LLAMA4,
    "llama4": {
        "model_type": "llama4",
        "vision_config": VISION | {
            "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
        },
        "text_config": BASE | LLAMA4,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_experts": 8, **EXPERTS,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "num_experts": 8, **EXPERTS, **LINEAR,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **LINEAR},
    "qwen3_vl": {
        "model_type": "qwen3_vl", "tie_word_embeddings": False,
        "vision_config": VISION | {"out_hidden_size": 256, "deepstack_visual_indexes": [0]},
        "text_config": BASE | {"model_type": "qwen3_vl_text", "rope_parameters": MROPE},
    },
    "gemma2": {
        "model_type": "gemma2", "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 64, "sliding_window": 256,
    },
    "gemma3_text": {
        "model_type": "gemma3_text", "tie_word_embeddings": True, "query_pre_attn_scalar": 64,
        "sliding_window": 256, "layer_types": KINDS,
    },
    "gemma3": {
        "model_type": "gemma3", "mm_tokens_per_image": 4,
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "text_config": BASE | {
            "model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window": 256,
            "query_pre_attn_scalar": 64, "layer_types": KINDS,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral3": {
        "model_type": "mistral3",
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 32},
        "text_config": BASE | {"model_type": "mistral"},
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "phi3": {"model_type": "phi3"},
    "glm4": {"model_type": "glm4"},
    "glm4_moe": {
        "model_type": "glm4_moe", "n_routed_experts": 8, **EXPERTS, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "minimax_m2": {
        "model_type": "minimax_m2", "rotary_dim": 32, "num_local_experts": 8,
        "num_experts_per_tok": 2, "intermediate_size": 256,
        # as published, and asked for by vLLM
        "scoring_func": "sigmoid", "use_routing_bias": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 256, "sliding_window": 256, "layer_types": KINDS,
    },
    "granite": {
        "model_type": "granite", "logits_scaling": 4.0, "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5, "attention_multiplier": 0.125,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 256, "layer_types": ["mamba", "attention"] * 3, **MAMBA,
        "logits_scaling": 4.0, "embedding_multiplier": 6.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.125, "position_embedding_type": "rope",
    },
    "nemotron": {"model_type": "nemotron"},
    "nemotron_h": {  # without experts, whose kernel vLLM has for GPUs only
        "model_type": "nemotron_h", "layer_norm_epsilon": 1e-5, "mamba_num_heads": 8,
        "hybrid_override_pattern": "M*-M*-", "layers_block_type": None, "mamba_head_dim": 64,
        "ssm_state_size": 16, "n_groups": 2,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": 256, "layer_types": KINDS},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "cohere": {"model_type": "cohere", "logit_scale": 0.25, "tie_word_embeddings": True},
    "cohere2": {
        "model_type": "cohere2", "logit_scale": 0.25, "tie_word_embeddings": True,
        "sliding_window": 256, "layer_types": KINDS,
    },
    "exaone4": {"model_type": "exaone4", "sliding_window": 256, "layer_types": KINDS},
    "seed_oss": {"model_type": "seed_oss"},
    "smollm3": {"model_type": "smollm3"},
    "apertus": {"model_type": "apertus"},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": None},
    "stablelm": {"model_type": "stablelm"},
    "lfm2": {
        "model_type": "lfm2", "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 3,
    },
    "falcon_h1": {"model_type": "falcon_h1", **MAMBA, "mamba_d_ssm": 512},
    "phi": {"model_type": "phi"},
    "gpt2": OWN_SIZES | {"model_type": "gpt2"},
}  # fmt: skip


def make_family(name: str, path: Path) -> Path:
    """Save the family's random verifier in bfloat16, with norms that matter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if name in ARCHITECTURES:
        return ARCHITECTURES[name](path)
    config = CONFIGS[name]
    torch.manual_seed(0)
    alone = "text_config" in config or "n_embd" in config
    made = AutoConfig.for_model(**(config if alone else BASE | config))
    kind = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    model = kind.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith(("norm.weight", "norm_f.weight", "ln_f.weight")):
                tensor.uniform_(0.5, 1.5)
            if key.endswith("norm.bias"):
                tensor.uniform_(-0.5, 0.5)
        if "num_experts_per_tok" in config.get("text_config", config):
            set_routing(model)
    model.to(torch.bfloat16).save_pretrained(path)
    # transformers 5 writes what vLLM's own config class of an older one does not read
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


FAMILIES: dict[str, Callable[[Path], Path]] = {
    name: lambda path, name=name: make_family(name, path)  # type: ignore[misc]
    for name in (*ARCHITECTURES, *CONFIGS)
}


def architecture(path: Path) -> str:
    return json.loads((path / "config.json").read_text())["architectures"][0]


def transformers_states(path: Path, rows: list[dict]) -> tuple[list[Any], list[Any]]:
    """Each row's states after every layer [T, n, H] in transformers in float32, by hooks (its own
    last hidden_states are after the final norm), and its log-probabilities [T, V]."""
    import torch
    import torch.nn.functional as F

    model = transformers_model(path).eval()
    seen: list[torch.Tensor] = []
    for layer in decoder_layers(model, path):
        layer.register_forward_hook(
            lambda _m, _a, out: seen.append((out[0] if isinstance(out, tuple) else out).clone())
        )
    states, logprobs = [], []
    for row in rows:
        seen.clear()
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        states.append(torch.stack([s.view(ids.shape[1], -1) for s in seen], dim=1))
        logprobs.append(F.log_softmax(logits, -1))
    return states, logprobs


def decoder_layers(model: Any, path: Path) -> Any:
    """The text model's layers: the first list of as many modules as config.json says."""
    from torch import nn

    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config") or config
    count = text.get("num_hidden_layers") or text.get("n_layer") or len(text["layers_block_type"])
    return next(
        m
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) == count and "vision" not in name
    )


def transformers_model(path: Path) -> Any:
    """The verifier in transformers in float32; of Kimi's wrapper the DeepSeek-V3 inside. By its
    plain attention: the other leaves out Gemma's soft cap."""
    import torch
    from safetensors.torch import load_file
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
    )

    config = json.loads((path / "config.json").read_text())
    if config["model_type"] != "kimi_k25":
        kind = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
        return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    weights = load_file(path / "model.safetensors")
    inner = {name.removeprefix("language_model."): tensor for name, tensor in weights.items()}
    text = DeepseekV3Config(**config["text_config"] | {"model_type": "deepseek_v3"})
    return DeepseekV3ForCausalLM.from_pretrained(
        None, config=text, state_dict=inner, dtype=torch.float32
    )
