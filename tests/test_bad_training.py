"""Bad input of 04: data that do not belong together, damaged files, odd values, full disks."""

import json
import shutil

import pytest

from common.manifest import MANIFEST
from tests.conftest import ENVIRONMENT, fails, last_line, must, script, train_args, write_jsonl

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("flag", ["--lr", "--clip", "--heldout-fraction", "--ttt-decay"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_numbers_out_of_range_are_wrong_flags(flag, value):
    result = script("04_train.py", f"{flag}={value}")
    assert result.returncode == 2
    assert f"argument {flag}: '{value}' is not a number from" in last_line(result)


def test_a_damaged_state_says_what_to_do(tiny_stages, tmp_path):
    out = tmp_path / "d"
    must(script("04_train.py", *train_args(tiny_stages, out, "--save-every", 1)))
    report = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps(report | {"status": "in_progress"}))
    state = next((out / "state").glob("step_*")) / "state.json"
    state.write_text("{}")
    result = script("04_train.py", *train_args(tiny_stages, out))
    fails(result, "the state is damaged", "delete that folder")


def test_full_disk_for_training(tiny_stages, small_disk):
    """The plan says that the state will not fit, before anything is trained."""
    out = small_disk / "draft"
    result = script("04_train.py", *train_args(tiny_stages, out))
    fails(result, "GB free; free space", folder=out)


def test_state_on_a_full_disk_leaves_the_older_one(small_disk):
    import torch

    from common.draft.config import DraftShape
    from common.draft.linear_products import LinearProducts
    from common.draft.model import Eagle3Draft
    from common.errors import UserError
    from common.training.state import latest_state, save_state
    from common.training.step import Trainer
    from tests.test_eagle3 import target

    def trainer(hidden):
        shape = DraftShape(hidden, 8, 2, 2, 4, 1e4, 1e-6, 3, 8, 16)
        return Trainer(Eagle3Draft(shape), target(), LinearProducts(torch.float32), [], 1.0)

    save_state(small_disk / "state", 1, trainer(8), {}, {}, 1)
    with pytest.raises(UserError, match=r"cannot write the state of step 2 .*free space"):
        save_state(small_disk / "state", 2, trainer(400), {}, {}, 1)
    assert latest_state(small_disk / "state") == small_disk / "state" / "step_1"
    assert not list(small_disk.rglob("*.partial"))


def test_map_of_another_data_set(tiny_stages, random_rows, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", random_rows[:20])
    model = ("--model-path", tiny_stages["model"])
    must(script("01_prepare_data.py", *model, "--dataset", data, "--output-dir", tmp_path / "p"))
    must(script("02_build_vocab_map.py", *model, "--prepared-data", tmp_path / "p",
                "--output-dir", tmp_path / "v", "--draft-vocab-size", 128))  # fmt: skip
    stages = tiny_stages | {"vocab": tmp_path / "v"}
    result = script("04_train.py", *train_args(stages, tmp_path / "d"))
    fails(result, str(tmp_path / "v"), str(tiny_stages["prepared"]), "does not match",
          folder=tmp_path / "d")  # fmt: skip


def test_same_data_made_twice_is_accepted(tiny_stages, random_rows, tmp_path):
    data = write_jsonl(tmp_path / "elsewhere.jsonl", random_rows)
    model = ("--model-path", tiny_stages["model"])
    must(script("01_prepare_data.py", *model, "--dataset", data, "--output-dir", tmp_path / "p"))
    stages = tiny_stages | {"prepared": tmp_path / "p"}
    must(script("04_train.py", *train_args(stages, tmp_path / "d", "--dry-run")))


def test_hidden_states_of_another_verifier(tiny_stages, tmp_path):
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(tiny_stages["model"], other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, other / "model.safetensors")
    result = script("04_train.py", *train_args(tiny_stages | {"model": other}, tmp_path / "d"))
    fails(result, "verifier", str(tiny_stages["hidden"]), str(other), folder=tmp_path / "d")


def test_hidden_states_of_other_layers(tiny_stages, tmp_path):
    more = ("--layers", 1, 2, 3, 7)
    result = script("04_train.py", *train_args(tiny_stages, tmp_path / "d", *more))
    fails(result, "holds layers [2, 4, 5, 7], expected [1, 2, 3, 7]", folder=tmp_path / "d")


def test_a_truncated_hidden_states_file(tiny_stages, tmp_path):
    hidden = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], hidden)
    path = hidden / "rows_0-999" / "hs_3.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    result = script("04_train.py", *train_args(tiny_stages | {"hidden": hidden}, tmp_path / "d"))
    fails(result, "hs_3.safetensors: not a complete safetensors file", folder=tmp_path / "d")
    path.unlink()
    result = script("04_train.py", *train_args(tiny_stages | {"hidden": hidden}, tmp_path / "d"))
    fails(result, "hs_3.safetensors: missing", folder=tmp_path / "d")


def test_unfinished_hidden_states(tiny_stages, tmp_path):
    hidden = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], hidden)
    report = json.loads((hidden / MANIFEST).read_text())
    (hidden / MANIFEST).write_text(json.dumps(report | {"status": "in_progress"}))
    result = script("04_train.py", *train_args(tiny_stages | {"hidden": hidden}, tmp_path / "d"))
    fails(result, "has not finished", folder=tmp_path / "d")


def test_a_broken_map(tiny_stages, tmp_path):
    vocab = tmp_path / "v"
    shutil.copytree(tiny_stages["vocab"], vocab)
    (vocab / "d2t.npy").write_bytes(b"not numpy")
    result = script("04_train.py", *train_args(tiny_stages | {"vocab": vocab}, tmp_path / "d"))
    fails(result, "d2t.npy: not a readable .npy", folder=tmp_path / "d")


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ('{"head_dimm": 64}', "unknown key head_dimm; did you mean head_dim?"),
        ('{"x": 1}', "unknown key x; known are hidden_size, "),
        ('{"intermediate_size": 1.5}', "intermediate_size must be a whole number of at least 1"),
        ('{"num_attention_heads": "4"}', "num_attention_heads must be a whole number"),
        ('{"num_attention_heads": true}', "num_attention_heads must be a whole number"),
        ('{"head_dim": null}', "head_dim must be a whole number of at least 1, is None"),
        ('{"rope_theta": null}', "rope_theta must be a number over 0, is None"),
        ('{"num_attention_heads": 6}', "hidden_size 256 is no multiple of num_attention_heads 6"),
    ],
)
def test_odd_draft_shapes(tiny_stages, tmp_path, shape, text):
    more = ("--draft-shape", shape)
    result = script("04_train.py", *train_args(tiny_stages, tmp_path / "d", *more))
    fails(result, "--draft-shape: " + text, folder=tmp_path / "d")


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("--draft-shape", '{"a":' * 3000 + "1" + "}" * 3000, "is nested too deeply"),
        ("--seed", str(2**64), "is not a whole number from 0 to 4294967295"),
        ("--seed", "-1", "is not a whole number from 0 to 4294967295"),
    ],
)
def test_odd_values_are_wrong_flags(flag, value, text):
    result = script("04_train.py", f"{flag}={value}")
    assert result.returncode == 2
    assert text in last_line(result)


@pytest.mark.parametrize("found", [{"WORLD_SIZE": "x"}, {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}])
def test_half_of_what_torchrun_sets(tiny_stages, tmp_path, found):
    env = ENVIRONMENT | found
    result = script("04_train.py", *train_args(tiny_stages, tmp_path / "d"), env=env)
    fails(result, "start several processes by torchrun", folder=tmp_path / "d")


def test_hidden_states_of_other_tokens(tiny_stages, tmp_path):
    """Of the right length: found by the dry run, not when their row is read."""
    hidden = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], hidden)
    path = next(hidden.rglob("hs_3.safetensors"))
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + json.loads(data[8:start])["token_ids"]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    args = train_args(tiny_stages | {"hidden": hidden}, tmp_path / "d", "--dry-run")
    text = "hs_3.safetensors: its token_ids are not the sample's; delete it and run 03 again"
    fails(script("04_train.py", *args), text, folder=tmp_path / "d")
