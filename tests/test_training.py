"""The course of a training run: its epochs, states and starting point."""

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.artifacts import REPORT
from common.checkpoint import latest_state
from common.hidden_files import hidden_file, read_hidden
from common.hidden_folder import open_hidden
from common.loading import RowReader
from common.packing import count_work
from common.samples import read_samples
from common.training_log import HeldOut
from tests.conftest import extract_args, last_line, must, script, train_args


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
            "--save-every", 2, "--tensorboard")  # fmt: skip
    must(script("04_train.py", *train_args(tiny_stages, out, *more)))
    held = [x for x in metrics(out) if "acceptance_length" in x]
    return out, more, [x["acceptance_length"] for x in held], [x["step"] for x in held]


def test_the_best_epoch_is_served_and_the_newest_states_kept(judged):
    out, _, lengths, ends = judged
    best = lengths.index(max(lengths))
    heldout = json.loads((out / REPORT).read_text())["heldout"]
    assert (heldout["epoch"], heldout["acceptance_length"]) == (best, max(lengths))
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


def test_patience_ends_after_whole_epochs(judged, tiny_stages, tmp_path):
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


@pytest.mark.parametrize("lost", ["the checkpoint", "the newest state"])
def test_a_resume_knows_the_best_epoch(judged, tiny_stages, tmp_path, lost):
    out, more, _, _ = judged
    copy = tmp_path / "draft"
    shutil.copytree(out, copy)
    report = json.loads((copy / REPORT).read_text())
    (copy / REPORT).write_text(json.dumps(report | {"status": "in_progress"}))
    (copy / "model.safetensors").unlink()
    if lost == "the newest state":
        newest = latest_state(copy / "state")
        assert newest is not None
        shutil.rmtree(newest)
    must(script("04_train.py", *train_args(tiny_stages, copy, *more)))
    assert weights(copy) == weights(out)


def test_a_stop_is_heard_when_every_step_saves(tiny_stages, tmp_path):
    from tests.test_scripts import killed

    out = tmp_path / "draft"
    args = train_args(tiny_stages, out, "--save-every", 1, "--epochs", 40)

    def begun() -> bool:
        return (out / "state").is_dir() and any((out / "state").glob("step_[3-9]*"))

    result = killed("04_train.py", args, begun, signal.SIGTERM)
    assert result.returncode == 143
    assert "saved; run again to continue" in last_line(result)


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
    for change, tensor, error in [
        ({"rope_parameters": scaled}, {}, "its rotary embedding is scaled"),
        ({}, {"layers.0.self_attn.q_proj.bias": torch.zeros(4)}, "q_proj.bias is [4]"),
        ({}, {"fc.weight": torch.zeros(4, 4)}, "fc.weight is [4, 4]"),
    ]:
        changed = config | {"transformer_layer_config": layer | change}
        (start / "config.json").write_text(json.dumps(changed))
        save_file(tensors | tensor, start / "model.safetensors")
        out = tmp_path / "kept"
        out.mkdir(exist_ok=True)
        wrong = script("04_train.py", *train_args(tiny_stages, out, "--init-from", start))
        assert wrong.returncode == 1
        assert error in last_line(wrong)
        assert not list(out.iterdir())


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
    assert torch.equal(row.last(torch.bfloat16), want[row.teacher_U, -1])
    assert row.ids_T[:n].tolist() == [*samples[5].input_ids, *samples[3].input_ids]
    with pytest.raises(ValueError, match="in a row of 512"):
        reader.read(list(range(12)), buffer)


def test_nothing_held_out_serves_the_last_step():
    held = HeldOut(None, None, None, [], patience=3)  # type: ignore[arg-type]
    assert held.measure(4, 0) is None
    assert not held.stale(9)
    assert held.counters() == {"best": None, "measured": 0}
