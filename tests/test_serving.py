"""Training and serving mean the same layers and compute the same of them."""

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.data.prompts import Prompt
from common.draft.checkpoint import read_checkpoint
from common.draft.config import DraftShape
from common.draft.export import export_draft, serving_layer_ids
from common.draft.model import Eagle3Draft, initialize
from common.errors import UserError
from common.manifest import MANIFEST
from common.serving import parity
from common.serving.checkpoint import check_draft, check_positions, served_folder
from common.states.folder import open_hidden
from common.verifier import engine
from common.verifier.config import load_verifier
from tests.conftest import fails, last_line, must, script, train_args, write_jsonl


@pytest.fixture(scope="module")
def served(tiny_llama, tmp_path_factory):
    """03's float32 states of two prompts, and a random draft's parts. (Of the embedded verifier:
    the evaluation in the whole pipeline, tests/test_scripts.py.)"""
    folder = tmp_path_factory.mktemp("served")
    random = torch.Generator().manual_seed(0)
    rows = []
    for n in (60, 400):
        ids = torch.randint(2, 512, (n,), generator=random).tolist()
        rows.append({"id": f"p{n}", "input_ids": ids, "loss_mask": [0] * 8 + [1] * (n - 8)})
    write_jsonl(folder / "prepared" / "tokenized_data.jsonl", rows)
    must(
        script("03_extract_hidden_states.py", "--model-path", tiny_llama, "--dtype", "float32",
               "--prepared-data", folder / "prepared", "--output-dir", folder / "hidden",
               "--max-seq-len", 512)
    )  # fmt: skip
    return {"folder": folder, "model": load_verifier(str(tiny_llama))}


def export(served, folder, tokens=slice(100, 500), **norms):
    """A random draft of these tokens, its norms' weights too, in 04's export."""
    model, D = served["model"], tokens.stop - tokens.start
    draft = Eagle3Draft(DraftShape(256, 512, 4, 2, 64, 1e5, 1e-5, 3, D, model.vocab_size, **norms))
    torch.manual_seed(0)
    head = load_file(Path(model.path) / "model.safetensors")["lm_head.weight"].float()
    initialize(draft, head[tokens])
    for p in draft.parameters():
        if p.dim() == 1:
            p.data.uniform_(0.5, 1.5)
    t2d = torch.zeros(model.vocab_size, dtype=torch.bool)
    t2d[tokens] = True
    folder.mkdir()
    d2t = torch.full((D,), tokens.start)
    weights = {name: p.detach() for name, p in draft.named_parameters()}
    aux, depths, dtype = [2, 4, 5], 3, torch.float32
    export_draft(folder, draft.shape, weights, model, aux, depths, d2t, t2d, dtype)
    return folder


def changed(folder, **keys):
    """Change the checkpoint's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def states_of(served, draft, budget=2048):
    """The samples that the evaluation compares."""
    return parity.stored_states(open_hidden(served["folder"] / "hidden"), draft, 512, budget)


def compared(served, folder, trained=None) -> parity.Parity:
    """The evaluation's comparison of vLLM with 03's rows and with the code that trained the draft
    (of `trained`, by default the same folder)."""
    model = served["model"]
    draft = check_draft(folder, model)
    by = check_draft(trained, model) if trained else draft
    stored = states_of(served, by)
    with served_folder(draft, folder.parent) as there:
        args = engine.default_engine_args(model, 1) | {
            "dtype": "float32",
            "max_model_len": 512,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "speculative_config": {
                "model": str(there),
                "method": "eagle3",
                "num_speculative_tokens": 3,
            },
        }
        llm = engine.start_engine(args, {})
    llm.collective_rpc("ignore_signals")
    try:
        return parity.check_parity(llm, stored, by)
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
    other = shutil.copytree(draft, tmp_path / "other")
    ids = json.loads((draft / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    changed(other, eagle_aux_hidden_state_layer_ids=[i + shift for i in ids])
    with pytest.raises(UserError, match="feeds the draft other states than it was trained on"):
        compared(served, other, trained=draft)


def test_another_architecture_in_the_server_is_noticed(served, tmp_path):
    """A checkpoint that says otherwise than it was trained: where the residual is taken."""
    draft = export(served, tmp_path / "d")
    other = shutil.copytree(draft, tmp_path / "other")
    changed(other, norm_before_residual=False)
    with pytest.raises(UserError, match="computes other states than in training"):
        compared(served, other, trained=draft)


@pytest.mark.quick
def test_a_draft_of_other_layers_is_refused_before_anything_loads(served, tmp_path):
    draft = export(served, tmp_path / "d")
    changed(draft, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    with pytest.raises(UserError, match=r"asks for ids \[2, 4, 5\]"):
        states_of(served, check_draft(draft, served["model"]))


@pytest.mark.quick
def test_a_short_and_a_long_sample_are_compared(served, tmp_path):
    """A server computes a prompt over its budget in several passes, of which the check sees one;
    over its draft's positions it drafts nothing."""
    draft = check_draft(export(served, tmp_path / "d"), served["model"])
    assert [len(s.ids) for s in states_of(served, draft).samples] == [60, 400]
    assert [len(s.aux_TAH) for s in states_of(served, draft, budget=399).samples] == [60]
    layer = json.loads((tmp_path / "d" / "config.json").read_text())["transformer_layer_config"]
    changed(tmp_path / "d", transformer_layer_config=layer | {"max_position_embeddings": 128})
    draft = check_draft(tmp_path / "d", served["model"])
    assert [len(s.ids) for s in states_of(served, draft).samples] == [60]


def plain(folder, tensors=None, config=None, nested=False):
    """Rewrite an export as trainers elsewhere save drafts: a flat config.json, `midlayer`."""
    found = json.loads((folder / "config.json").read_text())
    layer, ids = found["transformer_layer_config"], found["eagle_aux_hidden_state_layer_ids"]
    keys = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    flat = layer | {key: found[key] for key in keys} | {"architectures": ["LlamaForCausalLMEagle3"]}
    where = {"eagle_aux_hidden_state_layer_ids": ids}
    flat |= {"eagle_config": where} if nested else where
    (folder / "config.json").write_text(json.dumps(flat | (config or {})))
    weights = load_file(folder / "model.safetensors") | (tensors or {})
    weights = {k.replace("layers.0.", "midlayer."): v for k, v in weights.items() if v is not None}
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_draft_from_elsewhere_is_served_and_compared(served, tmp_path):
    """Ids under eagle_config, the whole vocabulary, its head the verifier's, its embedding its own,
    no t2d; parity computes with that embedding."""
    own = torch.randn(512, 256, generator=torch.Generator().manual_seed(3)) * 0.06
    tensors = {"lm_head.weight": None, "embed_tokens.weight": own}
    folder = plain(export(served, tmp_path / "d", slice(0, 512)), tensors, nested=True)
    draft = check_draft(folder, served["model"])
    assert draft.aux_ids == [3, 5, 6]
    assert "under eagle_config alone" in str(draft.remark)
    found = compared(served, folder)
    assert found.fed_states_relative_error < 1e-4
    assert found.made_states_relative_error is not None
    assert max(found.made_states_relative_error) < 1e-4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


@pytest.mark.quick
def test_layers_that_a_draft_does_not_say(served, tmp_path):
    """Those a server takes, or those of --aux-ids."""
    folder = plain(
        export(served, tmp_path / "d"), config={"eagle_aux_hidden_state_layer_ids": None}
    )
    draft = check_draft(folder, served["model"])
    assert draft.aux_ids == [2, 4, 5]
    assert "a server takes [2, 4, 5] then" in str(draft.remark)
    draft = check_draft(folder, served["model"], [3, 5, 6])
    assert draft.aux_ids == [3, 5, 6]
    with served_folder(draft, tmp_path) as there:
        assert read_checkpoint(there).aux_ids == [3, 5, 6]
        assert read_checkpoint(there).digest() == draft.checkpoint.digest()
    changed(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    with pytest.raises(UserError, match="has its own"):
        check_draft(folder, served["model"], [3, 5, 6])


OFFSETS = torch.full((400,), 100)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tensors", "config", "error"),
    [
        ({"norm.weight": torch.full((256,), torch.inf)}, {}, "norm.weight has values that are not"),
        ({"d2t": OFFSETS + 13}, {}, r"d2t sends the draft's token 399 to 512, .* 512 tokens"),
        ({"d2t": OFFSETS - torch.arange(400) // 2}, {}, "d2t sends 400 tokens to 201 of"),
        ({"d2t": OFFSETS - 1}, {}, "d2t and t2d are of different tokens"),
        ({"midlayer.hidden_norm.weight": None}, {}, "hidden_norm.weight is missing"),
        ({"midlayer.extra.weight": torch.ones(1)}, {}, r"extra.weight is \[1\], by config.json it"),
        ({"embed_tokens.weight": torch.ones(2, 2)}, {}, r"embed_tokens.weight is \[2, 2\]"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [3, 5, 12]}, "8 layers, which a server calls 0"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [5, 3, 6]}, "must be ascending"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [3, 4, 5, 6]}, "are 4 layers, a server gives"),
        ({}, {"eagle_aux_hidden_state_layer_ids": "3"}, "expected layer ids"),
        ({}, {"hidden_size": 128}, r"hidden_size is 128, .* has 256"),
        ({}, {"architectures": None}, "has no architectures"),
        ({"fc.weight": None}, {}, "has no fc.weight"),
    ],
)  # fmt: skip
def test_drafts_from_elsewhere_that_no_server_would_doubt(served, tmp_path, tensors, config, error):
    folder = plain(export(served, tmp_path / "d"))
    check_draft(folder, served["model"])
    weights = load_file(folder / "model.safetensors") | tensors
    weights = {k: v for k, v in weights.items() if v is not None}
    save_file(weights, folder / "model.safetensors")
    changed(folder, **config)
    with pytest.raises(UserError, match=error):
        check_draft(folder, served["model"])


@pytest.mark.quick
def test_files_that_a_draft_comes_in(served, tmp_path):
    """Several safetensors files are one draft; pickles are named and not read."""
    folder = plain(export(served, tmp_path / "d"))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds pytorch_model\.bin, a pickle"):
        check_draft(folder, served["model"])
    names = {k: f"model-{1 + (k == 'fc.weight')}.safetensors" for k in weights}
    for file in set(names.values()):
        save_file({k: v for k, v in weights.items() if names[k] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert check_draft(folder, served["model"]).checkpoint.weights().keys() == {
        k.replace("midlayer", "layers.0") for k in weights
    }
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-2.safetensors.*not there"):
        check_draft(folder, served["model"])


@pytest.mark.quick
def test_a_whole_vocabulary_has_no_map(served, tmp_path):
    """vLLM loads none then, and would say so after the verifier's load."""
    folder = export(served, tmp_path / "d", slice(0, 512))
    check_draft(folder, served["model"])
    weights = load_file(folder / "model.safetensors")
    assert not {"d2t", "t2d"} & weights.keys()
    save_file(weights | {"d2t": torch.zeros(512, dtype=torch.int64)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="has a d2t although its vocabulary is the verifier's"):
        check_draft(folder, served["model"])


@pytest.mark.quick
def test_fewer_positions_than_prompt_and_answer(served, tmp_path):
    model, folder = served["model"], plain(export(served, tmp_path / "d"))
    prompts = [Prompt("short", [], [5] * 9), Prompt("long", [], [5] * 50)]
    changed(folder, max_position_embeddings=80)
    check_positions(check_draft(folder, model), model, prompts, 30)
    with pytest.raises(UserError, match=r"allows 80 tokens, prompt 'long' .* up to 81"):
        check_positions(check_draft(folder, model), model, prompts, 31)
    changed(folder, rope_parameters={"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0})
    check_positions(check_draft(folder, model), model, prompts, 31)
    changed(folder, max_position_embeddings=None, rope_parameters=None)
    with pytest.raises(UserError, match="allows 2048 tokens"):  # transformers' default
        check_positions(check_draft(folder, model), replace(model, max_positions=0), prompts, 2000)


# ---------------------------------------------------------------- the same verifier


@pytest.fixture(scope="module")
def trained(tiny_stages, tmp_path_factory):
    """A draft by 04."""
    out = tmp_path_factory.mktemp("trained") / "draft"
    must(script("04_train.py", *train_args(tiny_stages, out, "--epochs", 1)))
    return out


@pytest.fixture(scope="module")
def fine_tuned(tiny_llama, tmp_path_factory):
    """The verifier's copy with other values in one projection: config, embedding, head and final
    norm are the same."""
    model = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_llama, model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] *= 1.1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


def evaluation(stages, draft, out, *more):
    return script(
        "tools/evaluate_draft.py", "--model-path", stages["model"], "--draft", draft, "--prompts",
        stages["prepared"] / "tokenized_data.jsonl", "--max-samples", 4, "--max-seq-len", 256,
        "--max-new-tokens", 16, "--output-dir", out, "--engine-args", '{"enforce_eager": true}',
        *more,
    )  # fmt: skip


@pytest.mark.quick
def test_another_verifier_of_the_same_shape_is_refused(trained, fine_tuned, tiny_stages, tmp_path):
    known = must(evaluation(tiny_stages, trained, tmp_path / "e", "--dry-run"))
    assert "note" not in known.stdout
    stages = tiny_stages | {"model": fine_tuned}
    result = evaluation(stages, trained, tmp_path / "e", "--dry-run")
    fails(result, f"{trained}: verifier_weights", str(fine_tuned), "--quantized-copy")
    alone = shutil.copytree(trained, tmp_path / "alone")
    (alone / MANIFEST).unlink()
    unknown = must(evaluation(stages, alone, tmp_path / "e", "--dry-run"))
    assert "no manifest says which verifier it was trained on" in unknown.stdout
    states = ("--hidden-states", tiny_stages["hidden"], "--dry-run")
    result = evaluation(stages, alone, tmp_path / "e", *states)
    fails(result, f"{tiny_stages['hidden']}: verifier_weights", folder=tmp_path / "e")


@pytest.mark.quick
def test_a_draft_made_before_weights_were_recorded(trained, tiny_stages, tmp_path):
    old = shutil.copytree(trained, tmp_path / "old")
    manifest = json.loads((old / MANIFEST).read_text())
    del manifest["trained_on"]
    (old / MANIFEST).write_text(json.dumps(manifest))
    result = must(evaluation(tiny_stages, old, tmp_path / "e", "--dry-run"))
    assert "its manifest does not say which verifier" in result.stdout


@pytest.mark.quick
def test_a_copy_needs_the_same_layers_and_tokenizer(trained, fine_tuned, tiny_stages, tmp_path):
    model = shutil.copytree(fine_tuned, tmp_path / "model")
    more = ("--quantized-copy", "--dry-run")
    stages = tiny_stages | {"model": model}
    must(evaluation(stages, trained, tmp_path / "e", *more))
    (model / "tokenizer_config.json").write_text("{}")
    fails(evaluation(stages, trained, tmp_path / "e", *more), "tokenizer", "copy them from")
    (model / "tokenizer_config.json").unlink()
    deeper = shutil.copytree(trained, tmp_path / "deeper")
    manifest = json.loads((deeper / MANIFEST).read_text())
    manifest["settings"]["layers"][-1] = 11
    (deeper / MANIFEST).write_text(json.dumps(manifest))
    fails(evaluation(stages, deeper, tmp_path / "e", *more), "num_layers 12", "has 8")


def test_a_quantised_copy_is_measured_and_recorded(trained, fine_tuned, tiny_stages, tmp_path):
    """Parity says how far its states are, and still compares what the draft makes of them."""
    stages, out = tiny_stages | {"model": fine_tuned}, tmp_path / "e"
    more = ("--quantized-copy", "--hidden-states", tiny_stages["hidden"])
    must(evaluation(stages, trained, out, *more))
    assert "a quantised copy of the draft's" in (out / "table.txt").read_text()
    result = json.loads((out / "result.json").read_text())
    assert result["quantized_copy"] is True
    assert max(result["made_states_relative_error"]) < 0.03
    assert json.loads((out / MANIFEST).read_text())["settings"]["quantized_copy"] is True


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
    prompts = (tiny_prepared / "tokenized_data.jsonl").read_text().splitlines()[:12]
    long = {"id": "long", "input_ids": [5] * 233}
    data = write_jsonl(tmp_path / "p.jsonl", [long, *map(json.loads, prompts)])
    args = ["--model-path", model, "--draft", folder, "--prompts", data, "--max-seq-len", 256,
            "--max-new-tokens", 24, "--dtype", "float32", "--output-dir", out,
            "--engine-args", '{"enforce_eager": true}']  # fmt: skip
    refused = script("tools/evaluate_draft.py", *args, "--dry-run")
    fails(refused, "p.jsonl:1: prompt too long: 233 tokens, over 232", "--skip-bad-rows")
    done = must(script("tools/evaluate_draft.py", *args, "--skip-bad-rows"))
    line = last_line(done)
    assert "over 12 prompts (1 skipped)" in line
    result = json.loads((out / "result.json").read_text())
    assert result["acceptance_length"] > 2.5
    positions = result["acceptance_by_position"]
    assert result["acceptance_length"] == pytest.approx(1 + sum(positions), abs=1e-6)
    assert result["identical_share"] == 1
    looping = result["looping_prompts"]
    assert result["looping_share"] == len(looping) / 12
    assert f"; {len(looping)} of 12 answers loop, " in line
    assert (result["acceptance_length_without_looping"] is None) == (len(looping) == 12)


@pytest.mark.quick
def test_serving_ids_are_ours_plus_one():
    assert serving_layer_ids([2, 30, 58]) == [3, 31, 59]


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
