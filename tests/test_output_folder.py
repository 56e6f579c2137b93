"""What a run may do to its output folder, and odd surroundings: nothing is lost by a mistake."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from common.manifest import MANIFEST
from common.states.folder import shard_folder
from tests.conftest import (
    ENVIRONMENT,
    ROOT,
    extract_args,
    files_of,
    last_line,
    must,
    script,
    train_args,
    write_jsonl,
)


def everything(folder) -> dict:
    """Every file below a folder but the lock, by relative path."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.mark.parametrize("where", ["the model", "its parent"])
def test_the_verifiers_folder_is_no_output_folder(tiny_stages, tmp_path, where):
    """--overwrite would delete the weights."""
    model = tmp_path / "models" / "verifier"
    shutil.copytree(tiny_stages["model"], model)
    out = model if where == "the model" else model.parent
    before = everything(model)
    stages = tiny_stages | {"model": model}
    calls = [
        ("02_build_vocab_map.py", ["--model-path", model, "--prepared-data", stages["prepared"],
                                   "--output-dir", out, "--draft-vocab-size", 64]),
        ("03_extract_hidden_states.py", extract_args(stages, out)),
        ("04_train.py", train_args(stages, out)),
    ]  # fmt: skip
    for name, args in calls:
        for more in ([], ["--overwrite"], ["--dry-run"]):
            result = script(name, *args, *more)
            assert result.returncode == 1, name
            assert "holds the input" in last_line(result)
    assert everything(model) == before


def test_foreign_files_are_left_alone(tiny_stages, random_rows, tmp_path):
    """Beside them a run may write; --overwrite refuses to delete them, by its dry run already."""
    out = tmp_path / "drafts"
    (out / "v1").mkdir(parents=True)
    (out / "v1" / "model.safetensors").write_text("months")
    data = write_jsonl(tmp_path / "rows.jsonl", random_rows)
    model = ["--model-path", tiny_stages["model"]]
    calls = {
        "01_prepare_data.py": [*model, "--dataset", data, "--output-dir", out],
        "02_build_vocab_map.py": [*model, "--prepared-data", tiny_stages["prepared"],
                                  "--output-dir", out, "--draft-vocab-size", 64],
        "03_extract_hidden_states.py": extract_args(tiny_stages, out),
        "04_train.py": train_args(tiny_stages, out, "--epochs", 1),
    }  # fmt: skip
    for name, args in calls.items():
        for more in (["--overwrite"], ["--overwrite", "--dry-run"]):
            result = script(name, *args, *more)
            assert result.returncode == 1, name
            assert "would delete v1, which none of these scripts wrote" in last_line(result)
        must(script(name, *args))
        assert (out / "v1" / "model.safetensors").read_text() == "months", name
        for path in out.iterdir():  # the next stage finds the foreign folder alone
            if path.name != "v1":
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_overwrite_keeps_the_old_folder_until_the_verifier_is_up(tiny_stages, tmp_path):
    """A wrong --engine-args key, which only vLLM knows, costs no finished folder."""
    out = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], out)
    before = everything(out)
    args = extract_args(tiny_stages, out, "--overwrite")
    result = script("03_extract_hidden_states.py", *args, "--engine-args", '{"no_such": 1}')
    assert result.returncode == 1
    assert "no_such" in last_line(result)
    assert everything(out) == before
    must(script("03_extract_hidden_states.py", *args, "--layers", 1, 2, 3, 7))
    assert json.loads((out / MANIFEST).read_text())["layers"] == [1, 2, 3, 7]
    must(script("03_extract_hidden_states.py", *args))
    assert files_of(out) == files_of(tiny_stages["hidden"])


def test_a_folder_of_shards_takes_no_unsharded_run(tiny_stages, tmp_path):
    shutil.copytree(tiny_stages["hidden"], shard_folder(tmp_path / "hidden", 0, 2))
    result = script("03_extract_hidden_states.py", *extract_args(tiny_stages, tmp_path / "hidden"))
    assert result.returncode == 1
    assert "holds shard-0-of-2; pass --num-shards" in last_line(result)


def test_an_empty_path_is_a_wrong_flag(tiny_stages):
    result = script("03_extract_hidden_states.py", *extract_args(tiny_stages, ""))
    assert result.returncode == 2
    assert "--output-dir: is empty" in last_line(result)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_narrow_terminal_does_not_fail_a_run(tiny_stages, tmp_path, encoding):
    out = tmp_path / "o日t"
    args = ["--model-path", tiny_stages["model"], "--prepared-data", tiny_stages["prepared"],
            "--output-dir", out, "--draft-vocab-size", 64]  # fmt: skip
    env = {**ENVIRONMENT, "PYTHONIOENCODING": encoding}
    for text in ("tokens cover", "is complete"):
        result = must(script("02_build_vocab_map.py", *args, fresh=True, env=env))
        assert text in last_line(result)
        assert "o\\u65e5t" in last_line(result)


def test_a_log_that_cannot_be_written_ends_no_run(tiny_stages, tmp_path):
    """Its reader is gone (`| tee` after a hang-up), or its disk is full."""
    args = [sys.executable, ROOT / "02_build_vocab_map.py", "--model-path", tiny_stages["model"],
            "--prepared-data", tiny_stages["prepared"], "--draft-vocab-size", 256,
            "--output-dir"]  # fmt: skip
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") as full, open(write, "w") as unread:
        for name, stream in ("unread", unread), ("full", full):
            command = list(map(str, [*args, tmp_path / name]))
            subprocess.run(command, stdout=stream, stderr=stream, env=ENVIRONMENT, check=True)
            assert (tmp_path / name / "d2t.npy").exists()


def test_what_a_kill_leaves_of_the_self_check_may_be_overwritten(tiny_stages, tmp_path):
    out = tmp_path / "hidden"
    (out / ".probe").mkdir(parents=True)
    must(script("03_extract_hidden_states.py", *extract_args(tiny_stages, out), "--overwrite",
                "--dry-run"))  # fmt: skip


def test_closed_streams_do_not_fail_a_run(tiny_stages, tmp_path):
    args = extract_args(tiny_stages, tmp_path / "o", "--dry-run")
    command = " ".join(map(str, [sys.executable, "03_extract_hidden_states.py", *args]))
    result = subprocess.run(
        ["bash", "-c", f"exec {command} 0<&- 1>&- 2>&-"], cwd=ROOT, env=ENVIRONMENT
    )
    assert result.returncode == 0


def test_blank_lines_end_a_file_but_do_not_part_it(tiny_stages, tmp_path):
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    text = (tiny_stages["prepared"] / "tokenized_data.jsonl").read_text()
    stages = tiny_stages | {"prepared": prepared}
    (prepared / "tokenized_data.jsonl").write_text(text + "\n  \n")
    args = extract_args(stages, tmp_path / "o", "--dry-run")
    assert "40 samples" in must(script("03_extract_hidden_states.py", *args)).stdout
    (prepared / "tokenized_data.jsonl").write_text(text.replace("\n", "\n\n", 1))
    result = script("03_extract_hidden_states.py", *args)
    assert result.returncode == 1
    assert "tokenized_data.jsonl:2: a blank line among the samples" in last_line(result)


def test_data_without_a_report_are_not_replaced_and_lost_products_are_made_again(
    smollm2, tiny_stages, tmp_path
):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    data, out = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    prepare = ["--model-path", smollm2, "--dataset", data, "--output-dir", out]
    maps = ["--model-path", tiny_stages["model"], "--prepared-data", tiny_stages["prepared"],
            "--output-dir", tmp_path / "map", "--draft-vocab-size", 64]  # fmt: skip
    for name, args, product in [
        ("01_prepare_data.py", prepare, out / "tokenized_data.jsonl"),
        ("02_build_vocab_map.py", maps, tmp_path / "map" / "t2d.npy"),
    ]:
        product.parent.mkdir()
        product.write_text("by hand")
        result = script(name, *args)
        assert result.returncode == 1
        assert f"holds {product.name} without a {MANIFEST}" in last_line(result)
        assert product.read_text() == "by hand"
        must(script(name, *args, "--overwrite"))
        made = product.read_bytes()
        assert "is complete" in last_line(must(script(name, *args)))
        product.unlink()
        must(script(name, *args))
        assert product.read_bytes() == made
