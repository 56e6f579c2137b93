"""Stage 3 on every family of verifier, by real vLLM at TP=1 and 2, against transformers.

The verifiers are tiny and random, in bfloat16 (tests/tiny_models.py); the reference is
transformers in float32 on the CPU with the same weights. A mixture of experts sends a few
tokens elsewhere in bfloat16, so states are judged by the median over tokens.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from common.states.files import hidden_file, read_hidden
from common.verifier.config import load_verifier
from common.verifier.head import HEAD_FILE
from tests.conftest import must, script, write_jsonl
from tests.tiny_families import transformers_states
from tests.tiny_models import ARCHITECTURES, make_rows

ROWS = make_rows(16)
STATES_GATE = 0.05  # relative error of a token's states, median over tokens
LOGPROB_GATE = 0.1  # mean |difference|, the self-check's own
ORDER_GATE = 0.05  # relative difference of a token's states in two batch layouts, median


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def made(request, tmp_path_factory) -> dict[str, Any]:
    """A verifier, its data by script 01, and what transformers computes of them:
    `want`, a sample's states after every layer [T, n, H], and `logprobs` [T, V]."""
    folder = tmp_path_factory.mktemp(request.param)
    path = ARCHITECTURES[request.param](folder / "model")
    data = write_jsonl(folder / "rows.jsonl", ROWS)
    must(script("01_prepare_data.py", "--model-path", path, "--dataset", data,
                "--output-dir", folder / "prepared"))  # fmt: skip
    model = load_verifier(str(path))
    n = model.num_layers
    want, logprobs = transformers_states(path, ROWS)
    return {"name": request.param, "folder": folder, "model": model, "layers": [1, 3, n - 2, n - 1],
            "want": want, "logprobs": logprobs}  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def run(request, made) -> dict[str, Any]:
    """What script 03 made at this TP: its log and `states`, a sample's [T, 4, H]."""
    log, states = extract(made, request.param, "--max-batch-tokens", 512)
    return made | {"tp": request.param, "log": log, "states": states}


def extract(made, tp: int, *more: object) -> tuple[str, list[torch.Tensor]]:
    if torch.cuda.is_available() and torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    out = made["folder"] / "-".join(map(str, ["hidden", tp, *more]))
    result = must(
        script("03_extract_hidden_states.py", "--model-path", made["model"].path,
               "--prepared-data", made["folder"] / "prepared", "--output-dir", out,
               "--layers", *made["layers"], "--tp-size", tp, "--max-seq-len", 256,
               "--gpu-memory-utilization", 0.3, *more)
    )  # fmt: skip
    states = []
    for index, row in enumerate(ROWS):
        hidden_TLH, ids_T = read_hidden(hidden_file(out, index))
        assert ids_T.tolist() == row["input_ids"]
        assert hidden_TLH.dtype == torch.bfloat16
        states.append(hidden_TLH.float())
    return result.stdout + result.stderr, states


def median_error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Median over all samples' tokens of |ours - theirs| / |theirs|; lists of [T, H]."""
    a, b = torch.cat(ours), torch.cat(theirs)
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())


def logprob_difference(run, position: int) -> float:
    """Mean |difference| of log_softmax(lm_head(norm(h))) of a stored layer from transformers."""
    weights = load_file(Path(run["model"].path) / "model.safetensors")
    inner = "language_model." if run["name"] == "kimi_k25" else ""
    norm_H = weights[f"{inner}model.norm.weight"].float()
    head_VH = weights[f"{inner}lm_head.weight"].float()
    differences = []
    for hidden_TLH, want_TV in zip(run["states"], run["logprobs"], strict=True):
        x_TH = F.rms_norm(hidden_TLH[:, position], norm_H.shape, norm_H, run["model"].rms_norm_eps)
        differences.append((F.log_softmax(x_TH @ head_VH.T, -1) - want_TV).abs().flatten())
    return float(torch.cat(differences).mean())


def test_the_head_is_the_checkpoints_on_any_number_of_ranks(run):
    weights = load_file(Path(run["model"].path) / "model.safetensors")
    inner = "language_model." if run["name"] == "kimi_k25" else ""
    head = load_file(run["folder"] / f"hidden-{run['tp']}---max-batch-tokens-512" / HEAD_FILE)
    for ours, theirs in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
        assert torch.equal(head[ours], weights[f"{inner}{theirs}.weight"])
    assert torch.equal(head["norm"], weights[f"{inner}model.norm.weight"].float())


def test_the_self_check_of_03_passes(run):
    """03 ends well, and says that its last layer reproduces the verifier's own
    log-probabilities and that its other layers are what the next layer receives."""
    assert "the final layer reproduces the verifier's log-probabilities" in run["log"]
    assert f"layers {run['layers'][:-1]} are what the next layer receives" in run["log"]


def test_each_stored_layer_is_that_layer_of_transformers(run):
    """All samples, layer by layer; either neighbour of the layer would fail the gate."""
    for position, layer in enumerate(run["layers"]):
        stored = [x_TLH[:, position] for x_TLH in run["states"]]
        want = {
            i: [w_TNH[:, i] for w_TNH in run["want"]]
            for i in (layer - 1, layer, layer + 1)
            if i < run["model"].num_layers
        }
        error = {i: median_error(stored, states) for i, states in want.items()}
        cosine = F.cosine_similarity(torch.cat(stored), torch.cat(want[layer]), dim=-1).median()
        shown = ", ".join(f"{i}: {e:.4f}" for i, e in error.items())
        print(f"{run['name']} tp{run['tp']} layer {layer}: cosine {cosine:.6f}, error {shown}")
        assert error.pop(layer) < STATES_GATE
        assert min(error.values()) > 4 * STATES_GATE, "a neighbouring layer would pass as well"


def test_the_last_layer_gives_transformers_log_probabilities(run):
    """04's targets, lm_head(norm(h)), are the verifier's; of the layer before they are not."""
    last, before = logprob_difference(run, -1), logprob_difference(run, -2)
    print(f"{run['name']} tp{run['tp']} log-probabilities: last {last:.4f}, before {before:.4f}")
    assert last < LOGPROB_GATE
    assert last < before / 10


@pytest.mark.parametrize("run", [1], indirect=True, ids=["tp1"])
@pytest.mark.parametrize("made", ["llama", "deepseek_v3"], indirect=True)
def test_another_batch_order_gives_the_same_states(run):
    """A second run, with the samples in other forward passes, agrees within bfloat16's noise."""
    log, states = extract(run, 1, "--max-batch-tokens", 300, "--batch-size", 3)
    assert forward_passes(log) > forward_passes(run["log"])
    other = median_error(
        [x_TLH.flatten(0, 1) for x_TLH in states],
        [x_TLH.flatten(0, 1) for x_TLH in run["states"]],
    )
    same = sum(torch.equal(a, b) for a, b in zip(states, run["states"], strict=True))
    print(f"{run['name']} another batch order: {other:.5f}, {same} of {len(ROWS)} samples equal")
    assert other < ORDER_GATE


def forward_passes(log: str) -> int:
    """How many passes 03's log says that it ran."""
    return int(log.split(" forward pass")[0].split()[-1])
