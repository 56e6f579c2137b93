"""Training and serving mean the same layers, and exactly those."""

import gc
import json
import shutil

import pytest
import torch

from common import engine, serving
from common.draft_shape import DraftShape
from common.eagle3 import Eagle3Draft, initialize
from common.export import export_draft, serving_layer_ids
from common.hidden_files import hidden_file, read_hidden
from common.verifier import load_verifier, read_tensors
from tests.conftest import must, script, write_jsonl


@pytest.fixture(scope="module")
def served(smollm2, tokenizer, tmp_path_factory):
    """A random draft in 04's export, and 03's float32 states of a prompt."""
    folder = tmp_path_factory.mktemp("served")
    ids = tokenizer.encode("Lighthouse keepers wound the clockwork that turned the lamp. " * 4)
    rows = [{"id": "p", "input_ids": ids, "loss_mask": [0] * 8 + [1] * (len(ids) - 8)}]
    write_jsonl(folder / "prepared" / "tokenized_data.jsonl", rows)
    must(
        script("03_extract_hidden_states.py", "--model-path", smollm2, "--dtype", "float32",
               "--prepared-data", folder / "prepared", "--output-dir", folder / "hidden",
               "--max-seq-len", 512)
    )  # fmt: skip
    model = load_verifier(str(smollm2))
    shape = DraftShape(576, 512, 9, 3, 64, 1e5, 1e-5, 3, 400, model.vocab_size)
    draft = Eagle3Draft(shape)
    torch.manual_seed(0)
    head = read_tensors(model, ("lm_head",))["lm_head"].float()
    initialize(draft, head[100:500])
    t2d = torch.zeros(model.vocab_size, dtype=torch.bool)
    t2d[100:500] = True
    (folder / "draft").mkdir()
    d2t = torch.full((400,), 100)
    weights = {name: p.detach() for name, p in draft.named_parameters()}
    aux, depths, dtype = [2, 15, 27], 3, torch.float32
    export_draft(folder / "draft", draft.shape, weights, model, aux, depths, d2t, t2d, dtype)
    return {"folder": folder, "model": model, "ids": ids}


def fed_error(served, ids_shift: int, folder) -> float:
    """Relative error between what vLLM feeds the draft and 03's rows, ids moved by a shift."""
    shutil.copytree(served["folder"] / "draft", folder)
    config = json.loads((folder / "config.json").read_text())
    ids = [i + ids_shift for i in config["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_aux_hidden_state_layer_ids"] = ids
    (folder / "config.json").write_text(json.dumps(config))
    serving.check_draft(folder, served["model"])
    args = engine.default_engine_args(served["model"], 1) | {
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "speculative_config": {
            "model": str(folder),
            "method": "eagle3",
            "num_speculative_tokens": 3,
        },
    }
    llm = engine.start_engine(args, {})
    llm.collective_rpc("ignore_signals")
    hidden_TLH, ids_T = read_hidden(hidden_file(served["folder"] / "hidden", 0))
    assert ids_T.tolist() == served["ids"]
    error = serving.fed_states_error(llm, served["ids"], hidden_TLH[:, :-1])
    engine.stop_engine(llm)
    del llm
    gc.collect()
    return error


def test_draft_is_fed_the_stored_states(served, tmp_path):
    assert fed_error(served, 0, tmp_path / "d") < 1e-4


@pytest.mark.parametrize("shift", [-1, 1])
def test_ids_off_by_one_are_noticed(served, tmp_path, shift):
    """The same test fails by orders of magnitude (acceptance would hardly move)."""
    assert fed_error(served, shift, tmp_path / "d") > 1e-2


def test_serving_ids_are_ours_plus_one():
    assert serving_layer_ids([2, 30, 58]) == [3, 31, 59]


def test_a_draft_without_ids_is_refused(served, tmp_path):
    shutil.copytree(served["folder"] / "draft", tmp_path / "d")
    path = tmp_path / "d" / "config.json"
    config = json.loads(path.read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    path.write_text(json.dumps(config))
    with pytest.raises(Exception, match="no eagle_aux_hidden_state_layer_ids"):
        serving.check_draft(tmp_path / "d", served["model"])


def test_exported_names_are_those_vllm_reads(served):
    from safetensors import safe_open

    with safe_open(served["folder"] / "draft" / "model.safetensors", "pt") as f:
        names = set(f.keys())
        assert f.get_tensor("d2t").tolist() == [100] * 400
    assert names == {
        "fc.weight", "lm_head.weight", "norm.weight", "d2t", "t2d",
        *(
            f"layers.0.{n}.weight"
            for n in (
                "hidden_norm", "input_layernorm", "post_attention_layernorm",
                "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
            )
        ),
    }  # fmt: skip
