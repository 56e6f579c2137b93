"""The course of a training run: its epochs, states and starting point."""

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.data.samples import read_samples
from common.manifest import MANIFEST
from common.states.files import hidden_file, read_hidden
from common.states.folder import open_hidden
from common.training.loader import RowReader
from common.training.packing import count_work, split_samples
from common.training.state import latest_state
from common.training.step import schedule
from tests.conftest import (
    ended,
    extract_args,
    fails,
    files_of,
    killed,
    last_line,
    lines_of,
    must,
    script,
    script_after,
    started,
    train_args,
)


def metrics(folder) -> list[dict]:
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def judged(tiny_stages, tmp_path_factory):
    """Five epochs whose held-out measure has its best early: the data are random, so it is noise.

    Returns (folder, arguments, acceptance length of each epoch, step after each).
    """
    out = tmp_path_factory.mktemp("judged") / "draft"
    more = ("--epochs", 5, "--heldout-fraction", 0.3, "--lr", 0.01, "--keep-states", 2,
            "--save-every", 2, "--tensorboard", "--compute-dtype", "float32",
            "--device", "cpu", "--seed", 4)  # fmt: skip
    must(script("04_train.py", *train_args(tiny_stages, out, *more)))
    held = [x for x in metrics(out) if "acceptance_length" in x]
    return out, more, [x["acceptance_length"] for x in held], [x["step"] for x in held]


def test_the_best_epoch_is_served_and_the_newest_states_kept(judged):
    out, _, lengths, ends = judged
    best = lengths.index(max(lengths))
    heldout = json.loads((out / MANIFEST).read_text())["heldout"]
    assert (heldout["epoch"], heldout["acceptance_length"]) == (best + 1, max(lengths))
    # every second step but the last, which the draft itself follows
    last = (ends[-1] - 1) // 2 * 2
    states = {p.name for p in (out / "state").iterdir()}
    assert states == {f"step_{last - 2}", f"step_{last}"}
    assert list((out / "tensorboard").iterdir())
    assert ends[best] <= last
    newest = load_file(out / "state" / f"step_{last}" / "weights.safetensors")
    saved = "best/fc.weight" if ends[best] < last else "fc.weight"
    served = load_file(out / "model.safetensors")["fc.weight"]
    assert torch.equal(served, newest[saved].to(served.dtype))


def test_patience_ends_after_complete_epochs(judged, tiny_stages, tmp_path):
    _, more, lengths, ends = judged
    patience = 1
    stale = next(
        (e for e in range(len(lengths)) if e - lengths.index(max(lengths[: e + 1])) >= patience),
        len(lengths) - 1,
    )
    assert stale < len(lengths) - 1
    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, *more, "--patience", patience)
    must(script("04_train.py", *args))
    seen = [x["acceptance_length"] for x in metrics(out) if "acceptance_length" in x]
    assert seen == lengths[: stale + 1]
    assert max(x["step"] for x in metrics(out)) == ends[stale]
    assert "is complete" in last_line(must(script("04_train.py", *args)))


@pytest.mark.quick
@pytest.mark.parametrize("lost", ["the checkpoint", "the newest state"])
def test_a_resume_knows_the_best_epoch(judged, tiny_stages, tmp_path, lost):
    out, more, _, _ = judged
    copy = tmp_path / "draft"
    shutil.copytree(out, copy)
    report = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps(report | {"status": "in_progress"}))
    (copy / "model.safetensors").unlink()
    if lost == "the newest state":
        newest = latest_state(copy / "state")
        assert newest is not None
        shutil.rmtree(newest)
    must(script("04_train.py", *train_args(tiny_stages, copy, *more)))
    assert weights(copy) == weights(out)


def test_a_stop_in_the_last_step_saves_before_anything_is_measured(tiny_stages, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "draft"
    more = ("--max-samples", 3, "--epochs", 1, "--heldout-fraction", 0.4)
    must(script("04_train.py", *train_args(tiny_stages, whole, *more)))
    assert len(metrics(whole)) == 1
    args = train_args(tiny_stages, out, *more)
    prelude = """
import os, signal
from common import progress
class Stopper(progress.Stopper):
    def __init__(self):
        super().__init__()
        os.kill(os.getpid(), signal.SIGTERM)
progress.Stopper = Stopper
"""
    result = script_after(prelude, "04_train.py", *args)
    assert result.returncode == 143
    assert "state after step 1 saved; run the same command again to continue" in last_line(result)
    assert "continuing after step 1 of 1" in must(script("04_train.py", *args)).stdout
    assert weights(out) == weights(whole)
    assert (
        json.loads((out / MANIFEST).read_text())["heldout"]
        == json.loads((whole / MANIFEST).read_text())["heldout"]
    )


def test_a_stop_is_heard_when_every_step_saves(tiny_stages, tmp_path):
    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, "--save-every", 1, "--epochs", 40)

    def begun() -> bool:
        return (out / "state").is_dir() and any((out / "state").glob("step_[3-9]*"))

    result = killed("04_train.py", args, begun, signal.SIGTERM)
    assert result.returncode == 143
    assert "saved; run the same command again to continue" in last_line(result)


def test_heldout_rows_may_be_longer_than_training_rows(tiny_stages, tmp_path):
    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, "--heldout-fraction", 0.85, "--epochs", 1)
    must(script("04_train.py", *args, "--max-batch-tokens", 4096))
    assert "acceptance_length" in metrics(out)[-1]


def test_an_initial_draft_of_another_map_gives_its_rows(judged, tiny_stages, tmp_path):
    """Its d2t permuted with its head: the same rows by token, so the same first loss."""
    start = tmp_path / "published"
    shutil.copytree(judged[0], start, ignore=shutil.ignore_patterns("state", "tensorboard"))
    tensors = load_file(start / "model.safetensors")
    D = len(tensors["d2t"])
    order = torch.randperm(D, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(D) + tensors["d2t"]
    tensors |= {
        "d2t": targets[order] - torch.arange(D),
        "lm_head.weight": tensors["lm_head.weight"][order],
    }
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    save_file(tensors, start / "model.safetensors")
    first = []
    for name, folder in (("as it is", judged[0]), ("permuted", start)):
        out = tmp_path / name
        args = train_args(tiny_stages, out, "--init-from", folder, "--epochs", 1)
        result = must(script("04_train.py", *args))
        assert f"with {D} rows of its head" in result.stdout
        first.append(metrics(out)[0]["loss"])
    assert first[0] == first[1]
    assert first[0] < metrics(judged[0])[0]["loss"]
    wrong = script("04_train.py", *train_args(tiny_stages, tmp_path / "o", "--init-from", start,
                                              "--norm-output"))  # fmt: skip
    assert wrong.returncode == 1
    assert "its norm_output is False; pass --no-norm-output" in last_line(wrong)
    config = json.loads((start / "config.json").read_text())
    layer = config["transformer_layer_config"]
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
    aux_ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}
    theta = {"rope_parameters": {"rope_theta": 5e5}}
    for of_layer, of_draft, tensor, error in [
        ({"rope_parameters": scaled}, {}, {}, "its rotary embedding is scaled"),
        ({}, {}, {"layers.0.self_attn.q_proj.bias": torch.zeros(4)}, "q_proj.bias is [4]"),
        ({}, {}, {"fc.weight": torch.zeros(4, 4)}, "fc.weight is [4, 4]"),
        ({"vocab_size": 5000}, {}, {}, "it is of another verifier"),
        (theta, {}, {}, "its rope_theta is 500000.0, this draft's"),
        ({}, aux_ids, {}, "a server calls [1, 2, 9]"),
    ]:
        changed = config | {"transformer_layer_config": layer | of_layer} | of_draft
        (start / "config.json").write_text(json.dumps(changed))
        save_file(tensors | tensor, start / "model.safetensors")
        out = tmp_path / "kept"
        out.mkdir(exist_ok=True)
        wrong = script("04_train.py", *train_args(tiny_stages, out, "--init-from", start))
        assert wrong.returncode == 1
        assert error in last_line(wrong)
        assert not list(out.iterdir())


def test_an_initial_draft_from_elsewhere(judged, tiny_stages, tmp_path):
    """Without a head (the verifier's), with an embedding (left out), its layers under eagle_config:
    as the same of its own; what cannot be is refused by the dry run."""
    start = tmp_path / "elsewhere"
    start.mkdir()
    found = json.loads((judged[0] / "config.json").read_text())
    layer = found["transformer_layer_config"]
    flat = layer | {k: v for k, v in found.items() if "norm" in k} | {"draft_vocab_size": 512}
    flat |= {"architectures": ["LlamaForCausalLMEagle3"]}
    weights = load_file(judged[0] / "model.safetensors")
    weights = {k.replace("layers.0.", "midlayer."): v for k, v in weights.items()}
    del weights["lm_head.weight"], weights["d2t"], weights["t2d"]
    weights["embed_tokens.weight"] = torch.ones(512, 256)

    def run(out, ids, tensors, *more):
        nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} if ids else {}
        (start / "config.json").write_text(json.dumps(flat | nested))
        save_file(weights | tensors, start / "model.safetensors")
        return script("04_train.py", *train_args(tiny_stages, out, "--init-from", start, *more))

    out = tmp_path / "draft"
    text = must(run(out, None, {}, "--epochs", 1)).stdout
    assert "with 0 rows of its head" in text
    for remark in ("does not say its layers", "has no head of its own", "has its own embed_tokens"):
        assert f"train: note: {start} {remark}" in text
    # 03's layers as a server counts them, and as 03 does
    for told in ([3, 5, 6], [2, 4, 5]):
        assert "does not say" not in must(run(tmp_path / "o", told, {}, "--dry-run")).stdout
    nan = {"fc.weight": weights["fc.weight"] * torch.nan}
    for ids, tensors, error in [
        ([1, 3, 4], {}, "a server calls [1, 3, 4]"),
        (None, nan, "fc.weight has values that are not"),
        (None, {"midlayer.self_attn.q_norm.weight": torch.ones(4)}, "q_norm.weight is [4]"),
    ]:  # fmt: skip
        fails(run(tmp_path / "o", ids, tensors, "--dry-run"), error, folder=tmp_path / "o")
    flat["draft_vocab_size"] = 400
    fails(run(tmp_path / "o", None, {}, "--dry-run"), "lm_head.weight is missing")


@pytest.mark.quick
def test_a_step_is_counted_as_it_is_packed(tiny_stages):
    """What the loss of a step is divided by, without its rows."""
    hidden = open_hidden(tiny_stages["hidden"])
    samples = {s.index: s for s in read_samples(tiny_stages["prepared"], only=hidden.lengths)}
    chosen = list(samples)[:9]
    for rule in ("answer", "next"):
        tokens = sum(len(samples[i].input_ids) for i in chosen)
        reader = RowReader(hidden, samples, 3, rule, tokens, False)
        row = reader.read(chosen)
        work = count_work([samples[i] for i in chosen], 3, rule)
        assert work.losses == [one.real for one in row.losses]


@pytest.mark.quick
@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_rows_are_read_into_a_used_buffer(tiny_stages, tmp_path, storage):
    """The states of the files, then zeros; float8 ones as their scales say."""
    folder = tiny_stages["hidden"]
    if storage == "fp8":
        folder = tmp_path / "hidden"
        must(script("03_extract_hidden_states.py",
                    *extract_args(tiny_stages, folder, "--storage-dtype", storage)))  # fmt: skip
    hidden = open_hidden(folder)
    samples = {s.index: s for s in read_samples(tiny_stages["prepared"])}
    reader = RowReader(hidden, samples, 3, "answer", 500, pin=False)
    buffer = reader.buffer()
    reader.read([0, 1, 2], buffer)
    row = reader.read([5, 3], buffer)
    assert len(row.ids_T) == 512
    want = torch.cat([read_hidden(hidden_file(folder, i))[0] for i in (5, 3)])
    n = len(want)
    aux = row.aux(torch.bfloat16)
    assert torch.equal(aux[:n], want[:, :-1].flatten(1))
    assert not aux[n:].any()
    assert torch.equal(row.last(torch.bfloat16), want[row.target_U, -1])
    assert row.ids_T[:n].tolist() == [*samples[5].input_ids, *samples[3].input_ids]
    with pytest.raises(ValueError, match="in a row of 512"):
        reader.read(list(range(12)), buffer)


@pytest.mark.quick
@pytest.mark.parametrize("held", [0, 1], ids=["trained", "held out"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda x_TLH: x_TLH[1, 2, 9].fill_(float("nan")), "hold NaN or Inf (token 1, layer 5)"),
        (lambda x_TLH: x_TLH[1, 2].zero_(), "hold a row of zeros (token 1, layer 5)"),
        (lambda x_TLH: x_TLH.copy_(x_TLH[:1].clone()), "are the same at all "),
    ],
    ids=["NaN", "zeros", "alike"],
)
def test_a_file_that_teaches_nothing_ends_the_run(tiny_stages, tmp_path, fault, text, held):
    """It is named, whether trained on or held out: neither a checkpoint nor a state is written."""
    hidden, out = tmp_path / "hidden", tmp_path / "draft"
    shutil.copytree(tiny_stages["hidden"], hidden)
    samples = {s.index: s for s in read_samples(tiny_stages["prepared"])}
    path = hidden_file(hidden, min(split_samples(samples, 0.1, "answer")[held]))
    tensors = load_file(path)
    fault(tensors["hidden_states"])
    save_file(tensors, path)
    args = train_args(tiny_stages | {"hidden": hidden}, out, "--epochs", 1)
    result = script("04_train.py", *args)
    fails(result, f"{path}: its hidden states {text}", "; delete it and run 03 again")
    assert not list(out.rglob("*.safetensors"))


def test_patience_needs_something_to_measure(tiny_stages, tmp_path):
    args = train_args(tiny_stages, tmp_path / "d", "--heldout-fraction", 0, "--patience", 1)
    fails(script("04_train.py", *args), "--patience: no sample is held out")


def test_an_overwrite_that_is_killed_early_keeps_the_old_draft(judged, tiny_stages, tmp_path):
    """Also when everything is loaded already."""
    out = tmp_path / "draft"
    shutil.copytree(judged[0], out)
    before = files_of(out)
    args = train_args(tiny_stages, out, "--overwrite")
    prelude = (
        "import os, signal, common.training.setup as setup\n"
        "set_up = setup.set_up\n"
        "setup.set_up = lambda *a: (set_up(*a), os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    assert script_after(prelude, "04_train.py", *args).returncode == -signal.SIGKILL
    assert files_of(out) == before
    assert (out / MANIFEST).read_bytes() == (judged[0] / MANIFEST).read_bytes()


def test_a_state_without_a_manifest_is_not_resumed(judged, tiny_stages, tmp_path):
    """Nothing tells what it is of."""
    out = tmp_path / "draft"
    shutil.copytree(judged[0] / "state", out / "state")
    result = script("04_train.py", *train_args(tiny_stages, out))
    fails(result, f"holds state without a {MANIFEST}")


def changed_json(path, **more) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.mark.parametrize(
    "harm",
    [
        "a flipped bit",
        "optimizer state of another run",
        "a step",
        "no seconds",
        "a best without step",
    ],
)
def test_a_damaged_state_is_refused_by_the_dry_run(judged, tiny_stages, tmp_path, harm):
    out, more, _, _ = judged
    copy = tmp_path / "draft"
    shutil.copytree(out, copy)
    changed_json(copy / MANIFEST, status="in_progress")
    (copy / "model.safetensors").unlink()
    newest = latest_state(copy / "state")
    assert newest is not None
    if harm == "a flipped bit":
        with open(newest / "weights.safetensors", "r+b") as f:
            f.seek(-1000, 2)
            byte = f.read(1)[0]
            f.seek(-1000, 2)
            f.write(bytes([byte ^ 1]))
    elif harm == "optimizer state of another run":
        older = min(p for p in (copy / "state").iterdir() if p != newest)
        shutil.copy(older / "moments-0.safetensors", newest)
    elif harm == "a step":
        changed_json(newest / "state.json", step=1)
    elif harm == "no seconds":
        changed_json(newest / "state.json", seconds="x")
    else:
        changed_json(newest / "state.json", best={})
    result = script("04_train.py", *train_args(tiny_stages, copy, *more, "--dry-run"))
    fails(result, f"{newest}: the state is damaged")


def test_the_checkpoint_may_be_read_by_a_server(judged):
    """As every file of ours, whatever safetensors' own manner is."""
    modes = {(judged[0] / n).stat().st_mode for n in ("config.json", "model.safetensors", MANIFEST)}
    assert len(modes) == 1


def test_a_signal_that_comes_twice_at_once_is_one(tmp_path):
    """As torchrun passes one on that the whole group has had; a later one ends the process."""
    code = (
        "import os, signal, time\n"
        "from common.progress import Stopper\n"
        "stopper = Stopper()\n"
        "for _ in range(3): os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(stopper.code, flush=True)\n"
        "time.sleep(1.2)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('not reached')\n"
    )
    run = ended(started("-c", code))
    assert run.returncode == 143
    assert run.stdout.splitlines()[-1] == "143"
    assert "interrupted again" in run.stderr


@pytest.mark.quick
def test_the_learning_rate_warms_up_and_falls():
    factors = [schedule(n, 100, 0.1) for n in range(100)]
    assert factors[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[55] == pytest.approx(0.5)
    assert 0 < factors[-1] < 0.001
    assert schedule(0, 1, 0.05) == 1


@pytest.mark.quick
def test_nothing_held_out_serves_the_last_step(tiny_stages, tmp_path):
    """A run that was killed before it, too."""
    more = ("--heldout-fraction", 0, "--save-every", 2, "--compute-dtype", "float32")
    whole, out = tmp_path / "whole", tmp_path / "draft"
    must(script("04_train.py", *train_args(tiny_stages, whole, *more)))
    args = train_args(tiny_stages, out, *more)
    killed("04_train.py", args, lambda: lines_of(out / "metrics.jsonl") > 3, signal.SIGKILL)
    assert "continuing after step" in must(script("04_train.py", *args)).stdout
    assert weights(out) == weights(whole)
    assert json.loads((out / MANIFEST).read_text())["heldout"] is None
    assert not any("acceptance_length" in x for x in metrics(out))
