"""Damaged files that a resume reads, names that are taken, and disks that fill up, in process."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from common.data.rendering import recorded_day
from common.data.sources import local_files
from common.draft.config import DraftShape
from common.draft.export import export_draft
from common.draft.model import Eagle3Draft
from common.errors import UserError, os_error_text
from common.manifest import Output, Stage
from common.regeneration.responses import FILE, Responses, read_responses
from common.regeneration.turns import Answer, Conversation
from common.serving.acceptance import DraftMeasurement
from common.serving.generation import Decoded, Run
from common.states.files import StatesFormat
from common.states.journal import LENGTHS, PLAN, Entry, Journal, finished_batches, read_plan
from common.tensor_files import file_checksum
from common.training.metrics import Metrics, keep_metrics
from common.training.state import check_files
from common.verifier.config import load_verifier
from tests.conftest import extract_args, fails, script, train_args

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "line",
    ["5", "[1]", "null", "{}", '{"id": 5, "finish_reason": "stop"}',
     '{"id": "b", "finish_reason": 7}', '{"id": "b", "finish_reason": "stop", "final": 1}',
     '{"id": "b", "finish_reason": "stop", "messages": 1}',
     '{"id": "b", "finish_reason": "stop", "joined": [["b", "many", "stop"]]}',
     '{"id": "b", "finish_reason": "stop", "loss_mask": 3}'],
)  # fmt: skip
def test_a_damaged_answer_is_named(tmp_path, line):
    path = tmp_path / FILE
    good = json.dumps({"id": "a", "finish_reason": "stop", "loss_mask": [0, 1, 1]}) + "\n"
    path.write_text(good)
    assert read_responses(path, True)[0]["a"].tokens == 2
    path.write_text(good + line + "\n")
    with pytest.raises(UserError, match=f"the line after byte {len(good)} is damaged .*delete"):
        read_responses(path, True)


@pytest.mark.parametrize("line", [b"\xff\xfe", b"7", b"[" * 9000, b'{"loss": 1}', b'{"step": "x"}'])
def test_damaged_metrics_block_no_resume(tmp_path, capsys, line):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 1, "loss": 2.0}', b'{"step": 2, "loss": 1.0}', b'{"step": 2, "epoch": 1}']
    path.write_bytes(b"\n".join([good[0], line, *good[1:], b'{"step": 3, "loss": 1.0}', b""]))
    keep_metrics(path, 2, 2)
    assert path.read_bytes().splitlines() == good
    assert capsys.readouterr().out.count("unreadable lines are dropped: 1") == 1
    keep_metrics(path, 2, 0)
    assert path.read_bytes().splitlines() == good[:2]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [("counters", {}), ("counters", {"drafts": 0, "accepted": 0, "position_0": 0}),
     ("counters", {"drafts": 4, "accepted": 1}), ("counters", None), ("answers", []),
     ("answers", {"b": {"ids": [], "passes": 1, "passes_tokens": 1}}),
     ("answers", {"a": {"x": 1}}), ("checked", {"x": 1}), ("seconds", None)],
)  # fmt: skip
def test_a_damaged_measurement_is_measured_again(tmp_path, key, value):
    path, text = tmp_path / "with_draft.json", "is damaged; delete it, and the draft is measured"
    counters = {"drafts": 4.0, "accepted": 1.0, "position_0": 1.0}
    found = DraftMeasurement(Run({"a": Decoded([3, 4], 1, 1)}, 2, 0.5), counters, None)
    found.write(path)
    assert DraftMeasurement.read(path, {"a"}, 1) == found
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    for damaged in (path.read_text(), "{}", "[]", "{"):
        path.write_text(damaged)
        with pytest.raises(UserError, match=text):
            DraftMeasurement.read(path, {"a"}, 1)


@pytest.mark.parametrize("best", [{}, {"acceptance_length": "x"}, {"acceptance_length": None}])
def test_a_best_epoch_without_its_acceptance_length(tmp_path, best):
    path = tmp_path / "step_3"
    path.mkdir()
    for name in ("weights.safetensors", "moments-0.safetensors"):
        (path / name).write_text(name)
    sums = {p.name: file_checksum(p) for p in path.iterdir()}
    numbers = {"step": 3, "epoch": 1, "acceptance_length": 1.5}
    state = {"step": 3, "measured": 3, "seconds": 1.0, "best": numbers, "checksums": sums}
    (path / "state.json").write_text(json.dumps(state))
    check_files(path, 9)
    state["best"] = {"step": 3, "epoch": 1} | best
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"state.json lacks its .*acceptance length"):
        check_files(path, 9)


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [({"0": 0, "1": 2}, [[0, 1]]), ({"0": 5, "1": -2}, [[0, 1]]), ({"-1": 5, "1": 2}, [[-1, 1]]),
     ({"0": 5, "1": 2}, [[0, 0]]), ({}, [])],
)  # fmt: skip
def test_a_damaged_plan_is_refused(tmp_path, lengths, batches):
    (tmp_path / LENGTHS).write_text(json.dumps(lengths))
    (tmp_path / PLAN).write_text(json.dumps({"units": batches}))
    with pytest.raises(UserError, match="missing or damaged; --overwrite"):
        read_plan(tmp_path)


def test_a_changed_length_is_noticed_before_the_load(tiny_stages, tmp_path):
    out = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], out)
    lengths = json.loads((out / LENGTHS).read_text())
    lengths["3"] += 1
    (out / LENGTHS).write_text(json.dumps(lengths))
    result = script("03_extract_hidden_states.py", *extract_args(tiny_stages, out, "--dry-run"))
    fails(result, f"{LENGTHS}: is damaged, ", f"jsonl:4 has not {lengths['3']} tokens")


@pytest.mark.parametrize("rows", ["x", [1], -1])
def test_damaged_rows_per_step_are_not_taken(tiny_stages, tmp_path, rows):
    out = tmp_path / "draft"
    out.mkdir()
    found = {"stage": "train", "settings": {"rows_per_step": rows}, "inputs": {}}
    (out / "data_config.json").write_text(json.dumps(found))
    result = script("04_train.py", *train_args(tiny_stages, out, "--dry-run"))
    fails(result, f"was made with rows_per_step = {json.dumps(rows)}, asked for 1")


@pytest.mark.parametrize("day", ["2021-03-04", "2021-13-04", "x", 7, None, [1]])
def test_a_damaged_day_is_not_taken(tmp_path, day):
    found = {"stage": "prepare", "settings": {"date": day}, "inputs": {}}
    (tmp_path / "data_config.json").write_text(json.dumps(found))
    assert recorded_day(tmp_path) == (day if day == "2021-03-04" else None)


@pytest.mark.parametrize("flag", ["--max-new-tokens=1", "--num-speculative-tokens=129"])
def test_what_no_draft_could_be_measured_with_is_a_wrong_flag(flag):
    result = script("tools/evaluate_draft.py", flag)
    assert (result.returncode, "is not a whole number" in result.stderr) == (2, True)


# ---------------------------------------------------------------- names that are taken


@pytest.mark.parametrize(
    ("stage", "name", "kind"),
    [("train", "state", "file"), ("train", "model.safetensors", "folder"),
     ("train", "metrics.jsonl", "folder"), ("extract", "rows_0-999", "file"),
     ("extract", "journal.jsonl", "folder"), ("vocab", "t2d.npy", "folder")],
)  # fmt: skip
def test_a_name_of_ours_that_is_something_else(tmp_path, stage, name, kind):
    path = tmp_path / name
    path.touch() if kind == "file" else path.mkdir()
    with pytest.raises(UserError, match=f"{name}: is a {kind}, where a .* is to be; move it"):
        Output(tmp_path, Stage(stage, {}, {}), False).earlier_run()


def test_a_folder_where_a_samples_file_is_to_be(tmp_path):
    (tmp_path / LENGTHS).write_text('{"0": 4}')
    (tmp_path / PLAN).write_text('{"units": [[0]]}')
    (tmp_path / "rows_0-999" / "hs_0.safetensors").mkdir(parents=True)
    with pytest.raises(UserError, match=r"hs_0.safetensors: is a folder.* move it"):
        finished_batches(tmp_path, read_plan(tmp_path), StatesFormat(4, 8, "float32"))


def test_a_device_is_no_file_of_rows():
    with pytest.raises(UserError, match="/dev/null: is no regular file"):
        local_files(Path("/dev/null"))


# ---------------------------------------------------------------- disks that fill up


def fill(disk) -> None:
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as f:
        while True:
            f.write(bytes(4096))


@pytest.mark.parametrize("name", [FILE, "journal.jsonl", "metrics.jsonl"])
def test_a_line_that_finds_no_space_names_its_file(small_disk, name):
    def lines():
        for n in range(10_000):
            yield f"{n} ".rjust(4000)

    def write():
        if name == FILE:
            output = Output(small_disk, Stage("regenerate", {}, {}), False)
            with contextlib.closing(Responses(output, False)) as responses:
                for n, text in enumerate(lines()):
                    responses.add(Conversation(text, 0, []), Answer(text, [1], [2], "", "", "stop"))
                    if n == 0:
                        fill(small_disk)
        elif name == "journal.jsonl":
            with Journal(small_disk, {}) as journal:
                fill(small_disk)
                for n, text in enumerate(lines()):
                    journal.add(Entry(n, 1.0, {}, {n: text}))
        else:
            metrics = Metrics(small_disk, 0, 0, False)
            fill(small_disk)
            try:
                for text in lines():
                    metrics.note({"step": 1, "text": text})
            finally:
                with contextlib.suppress(OSError):
                    metrics.close()

    with pytest.raises(OSError, match="No space left") as e:
        write()
    assert os_error_text(e.value).startswith(f"{small_disk / name}: No space left on device; free")


@pytest.mark.parametrize("left", [0, 8192, 32768])
def test_a_checkpoint_on_a_full_disk(tiny_llama, small_disk, left):
    """Whichever of its files, or of what speculators copies beside them, does not fit."""
    verifier = load_verifier(str(tiny_llama))
    shape = DraftShape(256, 8, 2, 2, 4, 1e4, 1e-6, 3, 8, verifier.vocab_size)
    weights = {name: p.detach() for name, p in Eagle3Draft(shape).named_parameters()}
    maps = torch.zeros(8, dtype=torch.int64), torch.zeros(verifier.vocab_size, dtype=torch.bool)
    folder = small_disk / "draft"
    folder.mkdir()
    reserve = small_disk / "reserve"
    reserve.write_bytes(bytes(left))
    fill(small_disk)
    reserve.unlink()
    with pytest.raises((OSError, UserError)) as e:
        export_draft(folder, shape, weights, verifier, [2, 4, 5], 3, *maps, torch.float32)
    text = os_error_text(e.value) if isinstance(e.value, OSError) else str(e.value)
    assert text.startswith(f"{folder}: ")
    assert "free space" in text
    assert not list(folder.iterdir())
