"""What is told of a verifier from config.json and its files' headers: names, norms, stored heads.

The folders hold a config.json and a few small tensors; nothing is loaded.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.errors import UserError
from common.extraction.preflight import resolve_capture
from common.extraction.settings import ExtractSettings
from common.verifier.config import load_verifier
from common.verifier.files import weight_map
from common.verifier.fingerprint import fingerprint
from common.verifier.tensors import find_modules
from common.verifier.weights import check_stored, check_weights
from tests.conftest import last_line, script, write_jsonl

pytestmark = pytest.mark.quick

V, H, N = 48, 8, 7
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": V, "hidden_size": H, "num_hidden_layers": N,
    "num_attention_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "max_position_embeddings": 256, "eos_token_id": 1, "dtype": "bfloat16",
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in keys}


def table(rows: int = V) -> torch.Tensor:
    return torch.zeros(rows, H, dtype=torch.bfloat16)


def named(embedding="model.embed_tokens", norm="model.norm", head: str | None = "lm_head",
          layer=f"model.layers.{N - 1}.mlp.up_proj") -> Tensors:  # fmt: skip
    made = {f"{embedding}.weight": table(), f"{norm}.weight": torch.ones(H, dtype=torch.bfloat16)}
    return made | {f"{name}.weight": table() for name in (head, layer) if name}


def write(folder: Path, config: dict[str, Any], tensors: Tensors | None = None) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(named() if tensors is None else tensors, folder / "model.safetensors")
    return str(folder)


# ---------------------------------------------------------------- names of tensors


@pytest.mark.parametrize(
    ("embedding", "norm", "head"),
    [
        ("model.embed_tokens", "model.norm", "lm_head"),
        ("model.language_model.embed_tokens", "model.language_model.norm", "lm_head"),
        ("lm.model.embed_tokens", "lm.model.norm", "lm.lm_head"),
        ("model.text_model.embed_tokens", "model.text_model.norm", "lm_head"),
        ("language_model.model.tok_embeddings", "language_model.model.norm", "output"),
        ("backbone.embeddings", "backbone.norm_f", "lm_head"),
        ("transformer.wte", "transformer.ln_f", "lm_head"),
        ("model.word_embeddings", "model.norm", "lm_head"),
        ("gpt.embed_in", "gpt.final_layer_norm", "embed_out"),
        ("model.embed_tokens", "model.embedding_norm", "lm_head"),
        ("embed", "norm", "head"),
    ],
)  # fmt: skip
def test_the_text_models_tensors_are_found(tmp_path, embedding, norm, head):
    """Beside a vision tower's, of other shapes, and those inside layers."""
    inside = f"{embedding.rpartition('.')[0]}.".lstrip(".")
    tensors = named(embedding, norm, head, f"{inside}layers.{N - 1}.mlp.up_proj")
    tower = ("vit.norm", "vit.embeddings", "vit.head", "vit.blocks.5.norm", "merger.embed_tokens",
             "mtp.norm", "model.layers.7.embed_tokens", f"{inside}layers.1.norm")  # fmt: skip
    tensors |= {f"{name}.weight": torch.zeros(3, 5) for name in tower}
    verifier = load_verifier(
        write(tmp_path / "m", CONFIG | {"num_nextn_predict_layers": 1}, tensors)
    )
    found = find_modules(verifier, weight_map(verifier.path))
    assert found == {"embed_tokens": embedding, "lm_head": head, "norm": norm}
    check_weights(verifier)
    check_stored(verifier, dry_run=True)
    fingerprint(verifier)  # does not fail


def test_of_two_language_models_the_one_with_the_layers_of_config_json(tmp_path):
    one = named(
        "talker.model.embed_tokens", "talker.model.norm", "talker.lm_head", "talker.model.a"
    )
    tensors = one | named("thinker.model.embed_tokens", "thinker.model.norm", "thinker.lm_head",
                          f"thinker.model.layers.{N - 1}.mlp.up_proj")  # fmt: skip
    verifier = load_verifier(write(tmp_path / "m", CONFIG, tensors))
    found = find_modules(verifier, weight_map(verifier.path))
    assert [name.split(".")[0] for name in found.values()] == ["thinker"] * 3


def test_tensors_of_unknown_names_are_left_to_the_loaded_verifier(tmp_path):
    verifier = load_verifier(
        write(tmp_path / "m", CONFIG, named("m.vocabulary", "m.last", "m.out"))
    )
    check_weights(verifier)
    check_stored(verifier, dry_run=False)
    fingerprint(verifier)  # does not fail
    odd = load_verifier(write(tmp_path / "o", CONFIG, named(head="model.ff_out")))
    check_weights(odd)  # [V, H] under another name may be the head


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("path", ["text_config", "llm_config", "language_config",
                                  "thinker_config.text_config"])  # fmt: skip
def test_a_wrappers_language_model_is_read(tmp_path, path):
    """Not the wrapper's own hidden size, layers and vocabulary."""
    config: dict[str, Any] = CONFIG
    for key in reversed(path.split(".")):
        config = {key: config, "hidden_size": 99, "num_hidden_layers": 1, "vocab_size": 9}
    verifier = load_verifier(write(tmp_path / "m", config))
    assert (verifier.num_layers, verifier.hidden_size, verifier.vocab_size) == (N, H, V)


def test_a_wrappers_dtype_and_tie_count_as_in_vllm(tmp_path):
    text = CONFIG | {"dtype": "float32"}
    wrapper = {"text_config": text, "dtype": "bfloat16", "tie_word_embeddings": True}
    verifier = load_verifier(write(tmp_path / "m", wrapper, named(head=None)))
    check_weights(verifier)
    assert find_modules(verifier, weight_map(verifier.path))["lm_head"] == "model.embed_tokens"
    assert resolve_capture(settings(verifier.path), verifier).verifier_dtype == "bfloat16"
    untied = load_verifier(write(tmp_path / "m", wrapper | {"tie_word_embeddings": False},
                                 named(head=None)))  # fmt: skip
    with pytest.raises(UserError, match=r"no output head .*tie_word_embeddings is false"):
        check_weights(untied)


@pytest.mark.parametrize(
    ("family", "key"),
    [("nemotron_h", "layer_norm_epsilon"), ("lfm2", "norm_eps"), ("mimo_v2", "layernorm_epsilon")],
)
def test_an_rmsnorms_eps_under_another_name_is_read(tmp_path, family, key):
    config = without(CONFIG, "rms_norm_eps") | {"model_type": family, key: 0.25}
    assert load_verifier(write(tmp_path / "m", config)).rms_norm_eps == 0.25


def test_layers_and_vocabulary_under_other_names_are_read(tmp_path):
    config = without(CONFIG, "num_hidden_layers")
    for more in ({"layers_block_type": ["mamba", "attention"] * 5}, {"num_layers": 10}):
        assert load_verifier(write(tmp_path / "m", config | more)).num_layers == 10
    config = without(CONFIG, "vocab_size") | {"padded_vocab_size": 64}
    assert load_verifier(write(tmp_path / "m", config)).vocab_size == 64


def test_what_a_file_leaves_to_its_familys_defaults_is_filled_in(tmp_path):
    """As in Gemma 3's published config.json; what the file says stays."""
    text = {"model_type": "gemma3_text", "hidden_size": H, "num_hidden_layers": N}
    verifier = load_verifier(write(tmp_path / "m", {"model_type": "gemma3", "text_config": text}))
    assert (verifier.vocab_size, verifier.rms_norm_eps) == (262208, 1e-6)
    assert (verifier.hidden_size, verifier.num_layers) == (H, N)
    assert verifier.text["num_attention_heads"] == 8


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (without(CONFIG, "rms_norm_eps") | {"model_type": "cohere", "layer_norm_eps": 1e-5},
         "model_type cohere ends in a LayerNorm (layer_norm_eps)"),
        (CONFIG | {"model_type": "phimoe"}, "model_type phimoe ends in a LayerNorm"),
        (without(CONFIG, "rms_norm_eps") | {"model_type": "dbrx"}, "dbrx ends in a LayerNorm,"),
        (without(CONFIG, "rms_norm_eps") | {"model_type": "odd", "ln_eps": 1e-5},
         "no rms_norm_eps (ln_eps), and model_type odd is not known to end in an RMSNorm"),
        (without(CONFIG, "rms_norm_eps") | {"model_type": "odd"},
         "no rms_norm_eps, and model_type odd is not known"),
        ({"model_type": "gpt_bigcode", "n_embd": 8, "n_layer": 7, "vocab_size": 48},
         "no num_hidden_layers, hidden_size (n_layer, n_embd: not read here); model_type gpt_big"),
        (without(CONFIG, "vocab_size", "model_type"), "has no vocab_size; add it"),
        ({"llm_config": 3}, "llm_config is no JSON object"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_verifier_is_refused_by_name(tmp_path, config, text):
    with pytest.raises(UserError) as error:
        load_verifier(write(tmp_path / "m", config))
    assert text in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "m" / "config.json"))


def test_coheres_rmsnorm_is_accepted(tmp_path):
    config = CONFIG | {"model_type": "cohere2_moe", "layer_norm_eps": None}
    assert load_verifier(write(tmp_path / "m", config)).rms_norm_eps == 1e-5


def test_a_small_verifier_gets_four_layers_or_is_refused_by_its_size(tmp_path):
    chosen = {}
    for n in range(3, 9):
        config = CONFIG | {"num_hidden_layers": n}
        chosen[n] = load_verifier(write(tmp_path / "m", config)).default_layers()
    assert chosen == {3: [0, 1, 2], 4: [0, 1, 2, 3], 5: [0, 1, 2, 4], 6: [1, 2, 3, 5],
                      7: [2, 3, 4, 6], 8: [2, 4, 5, 7]}  # fmt: skip
    verifier = load_verifier(write(tmp_path / "m", CONFIG | {"num_hidden_layers": 3}))
    with pytest.raises(UserError) as error:
        resolve_capture(settings(verifier.path), verifier)
    assert "has 3 decoder layers" in str(error.value)
    assert "--layers" not in str(error.value)


def settings(path: str) -> ExtractSettings:
    values = {"model_path": path, "layers": None, "dtype": "auto", "storage_dtype": "auto"}
    fields = ExtractSettings.__dataclass_fields__
    return ExtractSettings(**{name: values.get(name) for name in fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, 32),
        ({"model_type": "mistral", "sliding_window": 256}, None),  # all positions
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, None),
        ({"model_type": "gemma2", "sliding_window": 32}, None),  # in every other layer
        ({"sliding_window": 32, "layer_types": ["sliding_attention"] * N}, 32),
        ({"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}, None),
    ],
)
def test_a_window_over_every_layer_is_seen(tmp_path, more, window):
    assert load_verifier(write(tmp_path / "m", CONFIG | more)).window == window


# ---------------------------------------------------------------- stored heads


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape).to(torch.float8_e4m3fn)


STORED: list[tuple[Tensors, tuple[str, ...]]] = [
    ({"lm_head.weight": fp8(V, H), "lm_head.weight_scale": torch.ones(V, 1)},
     ("output head", "lm_head.weight in float8_e4m3fn [48, 8]", "with lm_head.weight_scale")),
    ({"lm_head.weight": fp8(V, H), "lm_head.weight_scale_inv": torch.ones(1)},
     ("lm_head.weight_scale_inv",)),
    ({"lm_head.weight": fp8(V, H)}, ("lm_head.weight in float8_e4m3fn",)),
    ({"model.embed_tokens.weight": fp8(V, H), "model.embed_tokens.scales": torch.ones(V)},
     ("embedding", "model.embed_tokens.weight in float8_e4m3fn")),
    ({"lm_head.weight": torch.zeros(V, H, dtype=torch.int8), "lm_head.SCB": torch.ones(V)},
     ("lm_head.weight in int8", "lm_head.SCB")),
    ({"lm_head.weight": torch.zeros(V, H // 2, dtype=torch.uint8),
      "lm_head.weight_scale_2": torch.ones(1)}, ("lm_head.weight in uint8 [48, 4]",)),
    ({"lm_head.qweight": torch.zeros(H // 8, V, dtype=torch.int32),
      "lm_head.g_idx": torch.zeros(H, dtype=torch.int32)}, ("as lm_head.g_idx", "lm_head.qweight")),
    ({"lm_head.weight_packed": torch.zeros(V, 1, dtype=torch.int32)},
     ("as lm_head.weight_packed in int32",)),
    ({"lm_head.weight": torch.zeros(V * H // 2, 1, dtype=torch.uint8),
      "lm_head.weight.absmax": torch.ones(4)}, ("lm_head.weight in uint8",)),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "texts"), STORED)
def test_a_quantised_table_is_refused_by_tensor_dtype_and_file(tmp_path, tensors, texts):
    base = named()
    if "lm_head.weight" not in tensors and any(k.startswith("lm_head") for k in tensors):
        del base["lm_head.weight"]
    verifier = load_verifier(write(tmp_path / "m", CONFIG, base | tensors))
    check_weights(verifier)
    with pytest.raises(UserError) as error:
        check_stored(verifier, dry_run=True)
    assert all(text in str(error.value) for text in (*texts, f"{tmp_path}/m/model.safetensors: "))


def test_names_in_the_index_tell_a_quantised_head_where_the_files_are_elsewhere(tmp_path):
    path = tmp_path / "m"
    for name, refused in [("lm_head.weight_scale", True), ("model.layers.0.mlp.x.scale", False)]:
        write(path, CONFIG)
        where = dict.fromkeys([*named(), name], "model-00001.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        (path / "model.safetensors").unlink()
        verifier = load_verifier(str(path))
        assert check_weights(verifier).absent == ["model-00001.safetensors"]
        if refused:
            with pytest.raises(UserError, match=r"lm_head.weight with lm_head.weight_scale"):
                check_stored(verifier, dry_run=True)
        else:
            check_stored(verifier, dry_run=True)


def test_quantised_layers_under_a_plain_head_are_accepted(tmp_path):
    """The key projection too, whose shape is not checked then."""
    layer = "model.layers.6.self_attn"
    tensors = named() | {
        f"{layer}.k_proj.weight": fp8(8, 8),
        f"{layer}.k_proj.weight_scale": table(1),
    }
    verifier = load_verifier(write(tmp_path / "m", CONFIG, tensors))
    check_weights(verifier)
    check_stored(verifier, dry_run=True)


def test_a_norms_bias_is_a_layernorms(tmp_path):
    tensors = named() | {"model.norm.bias": torch.zeros(H), "model.layers.0.norm.bias": table(1)}
    verifier = load_verifier(write(tmp_path / "m", CONFIG, tensors))
    with pytest.raises(UserError, match=r"model.safetensors: model.norm.bias is a LayerNorm's"):
        check_weights(verifier)


# ---------------------------------------------------------------- files


def test_several_files_without_an_index_are_one_verifier(tmp_path):
    path = write(tmp_path / "m", CONFIG)
    (tmp_path / "m" / "model.safetensors").unlink()
    for n, (name, tensor) in enumerate(named().items()):
        save_file({name: tensor}, tmp_path / "m" / f"model-{n}.safetensors")
    verifier = load_verifier(path)
    assert check_weights(verifier).files == 4
    fingerprint(verifier)  # does not fail


def test_more_rows_than_the_vocabulary_are_refused(tmp_path):
    verifier = load_verifier(write(tmp_path / "m", CONFIG, named() | {"lm_head.weight": table(64)}))
    with pytest.raises(
        UserError, match=r"lm_head.weight is \[64, 8\], config.json asks for \[48, 8"
    ):
        check_weights(verifier)


@pytest.mark.parametrize("name", ["tiny.gguf", "pytorch_model.bin"])
def test_weights_in_another_form_are_named(tmp_path, name):
    path = write(tmp_path / "m", CONFIG)
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / name)
    with pytest.raises(UserError, match=f"has no model.safetensors but {name}; save"):
        weight_map(path)


# ---------------------------------------------------------------- every script


def test_every_script_says_the_same(tmp_path):
    """A norm that config.json tells; a head that the files' headers tell to 03."""
    row = {"id": "a", "input_ids": [3, 4, 5, 1], "loss_mask": [0, 1, 1, 1]}
    rows = write_jsonl(tmp_path / "prepared" / "tokenized_data.jsonl", [row])
    config = without(CONFIG, "rms_norm_eps") | {"model_type": "cohere2", "layer_norm_eps": 1e-5}
    layer_norm = write(tmp_path / "norm", config)
    quantised = write(tmp_path / "head", CONFIG, named() | STORED[0][0])

    def said(name: str, model: str, *more: object) -> str:
        result = script(name, "--model-path", model, *more, "--output-dir", tmp_path / "o")
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        return last_line(result)

    data = ("--prepared-data", rows.parent)
    lines = {
        said("01_prepare_data.py", layer_norm, "--dataset", rows),
        said("02_build_vocab_map.py", layer_norm, *data),
        said("03_extract_hidden_states.py", layer_norm, *data),
        said("03_extract_hidden_states.py", layer_norm, *data, "--dry-run"),
    }
    assert len(lines) == 1
    assert "cohere2 ends in a LayerNorm (layer_norm_eps)" in lines.pop()
    lines = {
        said("03_extract_hidden_states.py", quantised, *data),
        said("03_extract_hidden_states.py", quantised, *data, "--dry-run"),
    }
    assert len(lines) == 1
    assert "lm_head.weight in float8_e4m3fn" in lines.pop()


def test_a_heads_bias_is_refused_but_in_the_transformers_backend(tmp_path):
    tensors = named() | {"lm_head.bias": torch.zeros(V)}
    verifier = load_verifier(write(tmp_path / "m", CONFIG, tensors))
    with pytest.raises(UserError, match=r"lm_head\.bias is not applied by vLLM's own classes"):
        check_weights(verifier)
    check_weights(verifier, "transformers")
