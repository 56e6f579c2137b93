"""Training and serving mean the same layers and compute the same of them."""

import gc
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.draft.config import DraftShape
from common.draft.export import export_draft, serving_layer_ids
from common.draft.model import Eagle3Draft, initialize
from common.errors import UserError
from common.serving import parity
from common.serving.checkpoint import check_draft
from common.states.files import hidden_file, read_hidden
from common.states.folder import open_hidden
from common.verifier import engine
from common.verifier.config import load_verifier
from common.verifier.tensors import read_tensors
from tests.conftest import last_line, must, script, write_jsonl


@pytest.fixture(scope="module")
def served(tiny_llama, tmp_path_factory):
    """03's float32 states of a prompt, and a random draft's parts. (Of the embedded verifier: the
    evaluation in the whole pipeline, tests/test_scripts.py.)"""
    folder = tmp_path_factory.mktemp("served")
    ids = torch.randint(2, 512, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"id": "p", "input_ids": ids, "loss_mask": [0] * 8 + [1] * (len(ids) - 8)}]
    write_jsonl(folder / "prepared" / "tokenized_data.jsonl", rows)
    must(
        script("03_extract_hidden_states.py", "--model-path", tiny_llama, "--dtype", "float32",
               "--prepared-data", folder / "prepared", "--output-dir", folder / "hidden",
               "--max-seq-len", 512)
    )  # fmt: skip
    return {"folder": folder, "model": load_verifier(str(tiny_llama)), "ids": ids}


def export(served, folder, **norms):
    """A random draft, its norms' weights too, in 04's export."""
    model = served["model"]
    draft = Eagle3Draft(
        DraftShape(256, 512, 4, 2, 64, 1e5, 1e-5, 3, 400, model.vocab_size, **norms)
    )
    torch.manual_seed(0)
    head = read_tensors(model, ("lm_head",))["lm_head"].float()
    initialize(draft, head[100:500])
    for p in draft.parameters():
        if p.dim() == 1:
            p.data.uniform_(0.5, 1.5)
    t2d = torch.zeros(model.vocab_size, dtype=torch.bool)
    t2d[100:500] = True
    folder.mkdir()
    d2t = torch.full((400,), 100)
    weights = {name: p.detach() for name, p in draft.named_parameters()}
    aux, depths, dtype = [2, 4, 5], 3, torch.float32
    export_draft(folder, draft.shape, weights, model, aux, depths, d2t, t2d, dtype)
    return folder


def changed(folder, **keys):
    """Change the checkpoint's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def compared(served, folder, trained=None) -> parity.Parity:
    """The evaluation's comparison of vLLM with 03's rows and with the code that trained the draft
    (of `trained`, by default the same folder)."""
    check_draft(folder, served["model"])
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
    try:
        return parity.check_parity(
            llm,
            parity.StoredSample(served["ids"], hidden_TLH[:, :-1]),
            trained or folder,
            served["model"],
        )
    finally:
        engine.stop_engine(llm)
        del llm
        gc.collect()


@pytest.mark.parametrize(
    "norms",
    [
        dict(),
        dict(norm_before_residual=False, norm_before_fc=True, norm_output=True),
        dict(fc_norm=True),
    ],
)
def test_a_served_draft_computes_what_training_does_from_the_stored_states(served, tmp_path, norms):
    found = compared(served, export(served, tmp_path / "d", **norms))
    assert found.fed_states_relative_error < 1e-4
    assert found.made_states_relative_error is not None
    assert len(found.made_states_relative_error) == 3
    assert max(found.made_states_relative_error) < 1e-4


@pytest.mark.parametrize("shift", [-1, 1])
def test_ids_off_by_one_are_noticed(served, tmp_path, shift):
    """(Acceptance would hardly move.)"""
    draft = export(served, tmp_path / "d")
    ids = json.loads((draft / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    changed(draft, eagle_aux_hidden_state_layer_ids=[i + shift for i in ids])
    with pytest.raises(UserError, match="feeds the draft other states than it was trained on"):
        compared(served, draft)


def test_another_architecture_in_the_server_is_noticed(served, tmp_path):
    """A checkpoint that says otherwise than it was trained: where the residual is taken."""
    draft = export(served, tmp_path / "d")
    other = shutil.copytree(draft, tmp_path / "other")
    changed(other, norm_before_residual=False)
    with pytest.raises(UserError, match="computes other states than in training"):
        compared(served, other, trained=draft)


def test_a_draft_of_other_layers_is_refused_before_anything_loads(served, tmp_path):
    draft = export(served, tmp_path / "d")
    changed(draft, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    with pytest.raises(UserError, match=r"asks for ids \[2, 4, 5\]"):
        parity.stored_sample(served["folder"] / "hidden", draft, served["model"], 512)


def test_the_shortest_sample_is_compared(served, tmp_path):
    """A server computes a long prompt in several passes, of which the check sees one."""
    sample = parity.stored_sample(
        served["folder"] / "hidden", export(served, tmp_path / "d"), served["model"], 512
    )
    lengths = open_hidden(served["folder"] / "hidden").lengths.values()
    assert len(sample.ids) == len(sample.aux_TAH) == min(n for n in lengths if n >= 16)


def test_right_drafts_are_accepted_and_change_no_answer(tiny_llama, tiny_prepared, tmp_path):
    """A verifier whose next token depends on the last one almost alone, and a draft that passes the
    last token's embedding on to the verifier's own head, of most tokens."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 400
    tensors["lm_head.weight"] *= 6
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    known = load_verifier(str(model))
    target_D = torch.tensor([i for i in range(known.vocab_size) if i % 16])
    H, D = known.hidden_size, len(target_D)
    draft = Eagle3Draft(DraftShape(H, 64, 4, 4, 64, 1e4, 1e-6, 3, D, known.vocab_size))
    initialize(draft, tensors["lm_head.weight"][target_D].float())
    weights = {name: p.detach() for name, p in draft.named_parameters()}
    layer, eye = "layers.0.", torch.eye(H)
    for name in ("fc", f"{layer}hidden_norm", f"{layer}mlp.down_proj"):
        weights[f"{name}.weight"].zero_()
    for name, scale in (("q_proj", 2), ("k_proj", 2), ("v_proj", 1)):
        weights[f"{layer}self_attn.{name}.weight"].copy_(torch.cat([scale * eye, 0 * eye], 1))
    weights[f"{layer}self_attn.o_proj.weight"].copy_(eye)
    t2d = torch.zeros(known.vocab_size, dtype=torch.bool)
    t2d[target_D] = True
    folder, out = tmp_path / "draft", tmp_path / "evaluation"
    folder.mkdir()
    d2t = target_D - torch.arange(D)
    export_draft(folder, draft.shape, weights, known, [2, 4, 5], 3, d2t, t2d, torch.float32)
    line = last_line(must(
        script("tools/evaluate_draft.py", "--model-path", model, "--draft", folder, "--prompts",
               tiny_prepared / "tokenized_data.jsonl", "--max-samples", 12, "--max-seq-len", 256,
               "--max-new-tokens", 24, "--dtype", "float32", "--output-dir", out,
               "--engine-args", '{"enforce_eager": true}')
    ))  # fmt: skip
    result = json.loads((out / "result.json").read_text())
    assert result["acceptance_length"] > 2.5
    positions = result["acceptance_by_position"]
    assert result["acceptance_length"] == pytest.approx(1 + sum(positions), abs=1e-6)
    assert result["identical_share"] == 1
    looping = result["looping_prompts"]
    assert result["looping_share"] == len(looping) / 12
    assert f"; {len(looping)} of 12 answers loop, " in line
    assert result["acceptance_length_without_looping"] is None or len(looping) < 12


@pytest.mark.quick
def test_serving_ids_are_ours_plus_one():
    assert serving_layer_ids([2, 30, 58]) == [3, 31, 59]


def test_a_draft_without_ids_is_refused(served, tmp_path):
    changed(export(served, tmp_path / "d"), eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(UserError, match="no eagle_aux_hidden_state_layer_ids"):
        check_draft(tmp_path / "d", served["model"])


@pytest.mark.parametrize("name", ["d2t", "lm_head.weight"])
def test_a_draft_that_a_server_would_read_as_zeros_is_refused(served, tmp_path, name):
    folder = export(served, tmp_path / "d")
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"has no {name} of"):
        check_draft(folder, served["model"])


@pytest.mark.quick
def test_exported_names_are_those_vllm_reads(served, tmp_path):
    from safetensors import safe_open

    with safe_open(export(served, tmp_path / "d") / "model.safetensors", "pt") as f:
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
