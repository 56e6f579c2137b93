"""The verifier's head beside the states: as the loaded verifier computes with it, whatever the
family and the ranks, and all that 04 needs of the verifier."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.verifier.head import HEAD_FILE, HEAD_MANIFEST
from common.verifier.loaded_head import effective_norm
from common.verifier.logits import rms_norm
from tests.conftest import extract_args, fails, files_of, last_line, must, script, train_args
from tests.tiny_models import make_rows, save_random


def test_the_file_holds_the_checkpoints_tensors(tiny_stages):
    weights = load_file(tiny_stages["model"] / "model.safetensors")
    head = load_file(tiny_stages["hidden"] / HEAD_FILE)
    assert torch.equal(head["embed_tokens"], weights["model.embed_tokens.weight"])
    assert torch.equal(head["lm_head"], weights["lm_head.weight"])
    assert torch.equal(head["norm"], weights["model.norm.weight"].float())


def test_training_opens_no_file_of_the_verifier(tiny_stages, tmp_path):
    """Without --model-path, beside no verifier and in another place: the same draft to the bit."""
    moved = {name: tmp_path / name for name in ("prepared", "vocab", "hidden")}
    for name, folder in moved.items():
        shutil.copytree(tiny_stages[name], folder)
    gone = tmp_path / "elsewhere"
    args = train_args(tiny_stages | moved, tmp_path / "draft")
    at = args.index("--model-path")
    must(script("04_train.py", *args[:at], *args[at + 2 :]))
    must(script("04_train.py", *train_args(tiny_stages, tmp_path / "beside")))
    assert files_of(tmp_path / "draft") == files_of(tmp_path / "beside")
    args[at + 1] = gone
    text = must(script("04_train.py", *args)).stdout
    assert f"--model-path {gone} is not here, nor needed" in text
    assert "is complete" in text
    gone.mkdir()
    fails(script("04_train.py", *args), "has no config.json")


def test_a_folder_of_an_earlier_version_gets_its_head_without_extracting(tiny_stages, tmp_path):
    out = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], out)
    before = files_of(out)
    manifest = (out / "data_config.json").read_bytes()
    for name in (HEAD_FILE, HEAD_MANIFEST):
        (out / name).unlink()
    train = train_args(tiny_stages | {"hidden": out}, tmp_path / "draft", "--dry-run")
    result = script("04_train.py", *train)
    fails(result, HEAD_FILE, "python 03_extract_hidden_states.py", folder=tmp_path / "draft")
    result = must(script("03_extract_hidden_states.py", *extract_args(tiny_stages, out)))
    assert "complete, now with the verifier's head" in last_line(result)
    assert files_of(out) == before
    assert (out / "data_config.json").read_bytes() == manifest
    assert "every check passed" in must(script("04_train.py", *train)).stdout


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / HEAD_FILE).unlink(), "verifier_head.safetensors: missing"),
        (lambda f: (f / HEAD_MANIFEST).write_text("{}"), "verifier_head.json: is damaged"),
        (lambda f: (f / HEAD_FILE).write_bytes((f / HEAD_FILE).read_bytes()[:-9]), "its header"),
        (lambda f: edit(f, verifier_weights="0" * 64), "verifier_weights 000000000000"),
        (lambda f: edit(f, end_ids=None), "end_ids is None); delete it and run 03's command"),
        (lambda f: edit(f, config={"hidden_size": "x"}), "verifier_head.json: is damaged"),
        (lambda f: edit(f, facts={"dtype": "int8", "tied": False, "norm_eps": 1e-6}), "int8"),
        (lambda f: flip(f / HEAD_FILE), "its bytes are not those written; delete"),
    ],
    ids=[
        "no file",
        "no manifest",
        "cut",
        "of another verifier",
        "no ends",
        "no config",
        "int8",
        "flipped",
    ],
)
@pytest.mark.quick
def test_a_head_that_is_not_the_states_own_is_refused(tiny_stages, tmp_path, damage, text):
    out = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], out)
    damage(out)
    args = train_args(tiny_stages | {"hidden": out}, tmp_path / "draft")
    fails(script("04_train.py", *args), text, folder=tmp_path / "draft")


def edit(folder, **changes):
    path = folder / HEAD_MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1000] ^= 64
    path.write_bytes(data)


# A verifier whose norm is 1 + w, embedding scaled and logits capped; one whose logits are scaled.
FAMILIES = {
    "gemma2": (
        {"tie_word_embeddings": True, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 64,
         "attn_logit_softcapping": 50.0, "sliding_window": 4096},
        {"tied": True, "soft_cap": 5.0, "logit_scale": 1.0, "embedding_scale": 16.0},
    ),
    "granite": (
        {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
         "attention_multiplier": 0.1},
        {"tied": False, "soft_cap": None, "logit_scale": 0.25, "embedding_scale": 3.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_caps_and_norms_of_other_families(family, tmp_path):
    config, facts = FAMILIES[family]
    model = tmp_path / "verifier"
    save_random({"model_type": family, "num_key_value_heads": 2, "head_dim": 64, **config}, model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = torch.linspace(-0.4, 0.9, 256).to(torch.bfloat16)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    prepared, out = tmp_path / "prepared", tmp_path / "hidden"
    prepared.mkdir()
    rows = "".join(json.dumps(r) + "\n" for r in make_rows(4))
    (prepared / "tokenized_data.jsonl").write_text(rows)
    args = ["--model-path", model, "--prepared-data", prepared, "--output-dir", out]
    args += ["--dtype", "float32", "--layers", 1, 2, 3, 5]
    must(script("03_extract_hidden_states.py", *args))
    found = json.loads((out / HEAD_MANIFEST).read_text())
    assert found["facts"] | facts == found["facts"]
    assert found["logprob_difference"] < 1e-4  # a cap or scale left out gives over 0.1
    norm = load_file(out / HEAD_FILE)["norm"]
    assert torch.equal(norm, weights["model.norm.weight"].float() + (family == "gemma2"))


def test_a_heads_bias_is_applied_in_the_transformers_backend(tiny_stages, tmp_path):
    model, out = tmp_path / "verifier", tmp_path / "hidden"
    shutil.copytree(tiny_stages["model"], model)
    weights = load_file(model / "model.safetensors")
    bias = torch.linspace(-4, 4, len(weights["lm_head.weight"])).to(torch.bfloat16)
    tensors = weights | {"lm_head.bias": bias}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    args = ["--model-path", model, "--prepared-data", tiny_stages["prepared"], "--output-dir", out]
    args += ["--max-samples", 4, "--engine-args", '{"model_impl": "transformers"}']
    must(script("03_extract_hidden_states.py", *args))
    assert torch.equal(load_file(out / HEAD_FILE)["lm_head_bias"], bias)
    # left out, the difference is over 1
    assert json.loads((out / HEAD_MANIFEST).read_text())["logprob_difference"] < 0.01


@pytest.mark.quick
def test_the_norms_factor_is_the_one_that_gives_its_output():
    class Norm(torch.nn.Module):
        def __init__(self, add: float, eps: float, bias: bool = False):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(32) - 0.3)
            self.add, self.eps, self.used = add, eps, eps
            self.bias = torch.nn.Parameter(torch.rand(32)) if bias else None

        def forward(self, x):
            return rms_norm(x, self.weight + self.add, self.used)

    for add in (0.0, 1.0):
        norm = Norm(add, 1e-5)
        with torch.no_grad():
            factor, eps = effective_norm(norm, torch.bfloat16)
        assert torch.equal(factor, norm.weight.detach() + add)
        assert eps == 1e-5
    other = Norm(0.0, 1e-5)
    other.used = 1e-2  # an eps that is not what it says
    cases = ((Norm(2.0, 1e-5), "neither"), (other, "neither"), (Norm(0, 1, True), "bias"))
    for norm, text in cases:
        with torch.no_grad(), pytest.raises(LookupError, match=text):
            effective_norm(norm, torch.float32)
