"""Captured states against transformers, in any layout, and the row matching alone."""

import os
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.extraction import engine
from common.extraction.capture import CaptureError
from common.extraction.preflight import resolve_capture
from common.extraction.selfcheck import check_final_layer, check_received
from common.extraction.settings import ExtractSettings
from common.extraction.verifier_head import write_head
from common.extraction.writer import match_rows
from common.states.files import hidden_file, read_hidden
from common.tensor_files import file_checksum
from common.verifier.config import load_verifier
from common.verifier.decoder import find_decoder
from common.verifier.engine import start_engine, stop_engine
from tests.tiny_families import FAMILIES, transformers_states
from tests.tiny_models import make_rows

pytestmark = pytest.mark.quick

LAYERS = [2, 15, 27, 29]
TEXTS = [
    "The tide was out and the boats lay tilted in the mud.",
    "Bread needs flour, water, salt and time.",
    "How many legs do nine spiders have? " * 12,
    "A short one.",
    "She folded the letter twice, put it under the clock and went to look for her coat. " * 9,
]


def capture_of(path, **flags: Any) -> tuple[ExtractSettings, Any]:
    """03's settings for a verifier, and what it captures with them."""
    settings = ExtractSettings(
        **{
            "model_path": str(path), "prepared_data": "", "output_dir": "", "max_samples": None,
            "max_seq_len": 512, "tp_size": 1, "max_batch_tokens": 1024, "batch_size": 128,
            "gpu_memory_utilization": 0.5, "storage_dtype": "auto", "num_shards": 1,
            "shard_index": 0, "allow_missing": 0, "engine_args": {}, "load_timeout": 120,
            "verify": False, "dry_run": False, "overwrite": False, "trust_remote_code": False,
        } | flags
    )  # fmt: skip
    return settings, resolve_capture(settings, load_verifier(str(path)))


def run(llm: Any, batch: list, folder, **more: Any) -> list:
    """Capture one batch into the folder; vLLM's outputs."""
    outputs = engine.forward(llm, batch, **more)
    finished = engine.written(engine.rank0(llm, "capture_submit", 0, batch, str(folder)))
    (result,) = finished + engine.rank0(llm, "capture_finish")
    assert result.bad == {}
    assert result.checksums == {i: file_checksum(hidden_file(folder, i)) for i, _ in batch}
    return outputs


@pytest.fixture(scope="module")
def captured(smollm2, tokenizer, tmp_path_factory):
    """States of TEXTS by real vLLM in float32: {"together": folder, "alone": folder} and more."""
    samples = [(i, np.array(tokenizer.encode(t), np.int32)) for i, t in enumerate(TEXTS)]
    flags, capture = capture_of(smollm2, layers=LAYERS, dtype="float32")
    llm: Any = start_engine(engine.capture_engine_args(flags, capture, 512), {})
    llm.collective_rpc("ignore_signals")
    found = engine.find_layers(llm, capture.verifier)
    engine.start_capture(llm, capture, 1024, "float32")
    folder = tmp_path_factory.mktemp("captured")
    head = write_head(llm, capture.verifier, folder / "head.safetensors")
    engine.rank0(llm, "capture_check_layers", True)
    outputs = run(llm, samples[:4], folder / "together", prompt_logprobs=0)
    received = engine.rank0(llm, "capture_check_layers", False)
    run(llm, samples[4:], folder / "together")
    for one in samples:
        run(llm, [one], folder / "alone")
    run(llm, samples[::-1][1:], folder / "reversed")
    llm.collective_rpc("capture_stop")
    stop_engine(llm)
    logprobs = {
        i: [p[t].logprob for t, p in zip(ids.tolist()[1:], o.prompt_logprobs[1:], strict=True)]
        for (i, ids), o in zip(samples[:4], outputs, strict=True)
    }
    return {"folder": folder, "samples": samples, "received": received, "logprobs": logprobs,
            "head": head, "found": found}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gpt_oss", "called with hidden_states, positions, residual; returns hidden + residual;"),
        # vLLM runs it by transformers' own layers, on a batch of one
        ("olmo2", "position_ids, use_cache; returns hidden; embedding model.embed_tokens"),
        # the residual that its layers return is part of the hidden states already
        ("granitemoehybrid", "residual; returns hidden and 1 more; embedding"),
    ],
)
@patch.dict(os.environ)  # which vLLM's engine changes, and the fork server must start without
def test_families_that_call_their_layers_otherwise(family, said, tmp_path):
    """Layers before the last as transformers has them, within bfloat16, and no neighbour."""
    path = FAMILIES[family](tmp_path / "model")
    rows = make_rows(3)
    want, _ = transformers_states(path, rows)
    flags, capture = capture_of(path, layers=[0, 2, 4, 5], dtype="bfloat16")
    llm: Any = start_engine(engine.capture_engine_args(flags, capture, 512), {})
    try:
        found = engine.find_layers(llm, capture.verifier)
        engine.start_capture(llm, capture, 1024, "bfloat16")
        engine.rank0(llm, "capture_check_layers", True)
        batch = [(i, np.array(row["input_ids"], np.int32)) for i, row in enumerate(rows)]
        run(llm, batch, tmp_path)
        check_received(engine.rank0(llm, "capture_check_layers", False), [0, 2, 4, 5], 6)
        llm.collective_rpc("capture_stop")
    finally:
        stop_engine(llm)
    assert said in found
    ours_NLH = torch.cat([read_hidden(hidden_file(tmp_path, i))[0].float() for i, _ in batch])
    theirs_NLH = torch.cat(want)
    for at, layer in enumerate([0, 2, 4, 5]):
        error_NL = (ours_NLH[:, at, None] - theirs_NLH).norm(dim=-1) / theirs_NLH.norm(dim=-1)
        error_L = error_NL.median(0).values
        assert int(error_L.argmin()) == layer
        assert float(error_L[layer]) < min(0.1, float(error_L.sort().values[1]) / 2)


@pytest.mark.parametrize("layout", ["together", "alone", "reversed"])
def test_states_equal_transformers(captured, smollm2, layout):
    """All four layers within 1e-3 relative in float32; the last by a hook on the last layer."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    last = []
    reference.model.layers[-1].register_forward_hook(
        lambda _m, _a, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    for index, ids in captured["samples"][: 4 if layout == "reversed" else 5]:
        hidden_TLH, ids_T = read_hidden(hidden_file(captured["folder"] / layout, index))
        assert ids_T.tolist() == ids.tolist()
        with torch.no_grad():
            states = reference(ids_T[None], output_hidden_states=True).hidden_states
        want = [states[i + 1][0] for i in LAYERS[:-1]] + [last[-1].view(len(ids), -1)]
        for n, layer in enumerate(LAYERS):
            error = (hidden_TLH[:, n] - want[n]).norm() / want[n].norm()
            assert float(error) < 1e-3, f"layer {layer} of sample {index}: {error}"


def test_what_was_found_is_said_on_one_line(captured):
    assert captured["found"] == (
        "layers model.layers (LlamaDecoderLayer x 30), called with positions, hidden_states,"
        " residual; returns hidden + residual; embedding model.embed_tokens"
        " (VocabParallelEmbedding); final norm model.norm (RMSNorm)"
    )


def test_layers_are_what_the_next_receives(captured):
    check_received(captured["received"], LAYERS, 30)
    with pytest.raises(UserError, match="layer 15 as captured is not what layer 16"):
        check_received(captured["received"] | {15: 0.2}, LAYERS, 30)


def test_final_layer_reproduces_the_logprobs_and_the_one_before_does_not(captured, tmp_path):
    found = check_final_layer(
        captured["folder"] / "together", captured["logprobs"], captured["head"]
    )
    assert found.mean < 1e-4
    assert found.tokens == sum(len(ids) - 1 for _, ids in captured["samples"][:4])
    for index, _ in captured["samples"][:4]:
        hidden_TLH, ids_T = read_hidden(hidden_file(captured["folder"] / "together", index))
        write_sample(tmp_path, index, hidden_TLH[:, :-1], ids_T)  # ends at layer 27
    with pytest.raises(UserError, match="does not reproduce the verifier's log-probabilities"):
        check_final_layer(tmp_path, captured["logprobs"], captured["head"])


def write_sample(folder, index, hidden_TLH, ids_T):
    """Write a file as the writer does, from tensors."""
    from common.extraction.writer import CaptureBuffer, write_rows

    dtype = str(hidden_TLH.dtype).removeprefix("torch.")
    rows = CaptureBuffer.empty(tuple(hidden_TLH.shape), dtype, torch.device("cpu"), False)
    rows.states_NLH.copy_(hidden_TLH)
    write_rows(hidden_file(folder, index), rows, slice(0, len(ids_T)), ids_T.numpy())


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_rows_are_found_whatever_the_order(ids, rng):
    """Also with equal samples: each row run goes to one sample of those ids."""
    samples = [(i, np.array(x, np.int32)) for i, x in enumerate(ids)]
    order = list(samples)
    rng.shuffle(order)
    ids_N = np.concatenate([x for _, x in order])
    positions_N = np.concatenate([np.arange(len(x)) for _, x in order])
    found = match_rows(ids_N, positions_N, samples)
    assert len({*found.values()}) == len(samples)
    for index, tokens in samples:
        start = found[index]
        assert ids_N[start : start + len(tokens)].tolist() == tokens.tolist()
        assert positions_N[start] == 0


def test_a_missing_or_cut_sample_is_an_error():
    samples = [(0, np.array([5, 6, 7])), (9, np.array([8, 8]))]
    with pytest.raises(CaptureError, match=r"sample 0 .*cut into chunks"):
        match_rows(np.array([5, 6]), np.array([0, 1]), samples)


def test_unknown_model_lists_its_modules():
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    with pytest.raises(UserError, match="blocks"):
        find_decoder(model, 4)
