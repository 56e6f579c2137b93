"""Bad input: one line naming file, line or sample; exit 1; nothing half-written."""

import json
import shutil

import pytest

from common.artifacts import atomic_file
from common.manifest import MANIFEST
from tests.conftest import (
    ENVIRONMENT,
    extract_args,
    fails,
    last_line,
    mounted,
    must,
    script,
    write_jsonl,
)

pytestmark = pytest.mark.quick

CHAT = {
    "id": "c",
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}],
}


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("", ["d.jsonl: holds no rows"]),
        (json.dumps(CHAT) + '\n{"id": 3,\n', ["d.jsonl:2: not JSON"]),
        ("[1, 2]\n", ["d.jsonl:1: expected an object"]),
        (
            json.dumps({"messages": CHAT["messages"][:1]}),
            ["d.jsonl: its rows are prompts without an answer"],
        ),
        (
            json.dumps({"messages": [{"role": "usr", "content": "x"}]}),
            ["d.jsonl:1: unknown role", "'usr'", "did you mean user"],
        ),
        (
            json.dumps({"input_ids": [1, 49152], "loss_mask": [0, 1]}),
            ["d.jsonl:1: id 49152 is outside the verifier's vocabulary of 49152"],
        ),
        (
            json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}),
            ["d.jsonl:1: 3 input_ids and 2 loss_mask values"],
        ),
        (
            json.dumps({"input_ids": [1, 2], "loss_mask": [0, 2]}),
            ["d.jsonl:1: loss_mask holds values other than 0 and 1"],
        ),
        (json.dumps({"input_ids": [1, 2], "loss_mask": [0, 0]}), ["not one usable sample"]),
    ],
)
def test_prepare(smollm2, tmp_path, content, texts):
    data = tmp_path / "d.jsonl"
    data.write_text(content)
    out = tmp_path / "out"
    result = script("01_prepare_data.py", "--model-path", smollm2, "--dataset", data,
                    "--output-dir", out)  # fmt: skip
    fails(result, *texts, folder=out)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "values that are not whole numbers"),
        ({"input_ids": [[1], 2], "loss_mask": [0, 1]}, "values that are not whole numbers"),
        ({"input_ids": [True, False], "loss_mask": [0, 1]}, "true and false"),
        ({"input_ids": [10**30, 2], "loss_mask": [0, 1]}, "not whole numbers"),
    ],
)
def test_odd_rows_are_named_or_skipped(smollm2, tmp_path, row, text):
    data = write_jsonl(tmp_path / "d.jsonl", [CHAT, row])
    args = ["--model-path", smollm2, "--dataset", data, "--output-dir", tmp_path / "out"]
    fails(script("01_prepare_data.py", *args), "d.jsonl:2", text, folder=tmp_path / "out")
    result = must(script("01_prepare_data.py", *args, "--skip-bad-rows"))
    assert "1 samples from 2 rows" in last_line(result)


def test_rows_that_the_template_cannot_tell_are_counted(smollm2, tmp_path):
    """They are conversations, so no flag is needed to go on without them."""
    user = {"role": "user", "content": "x"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    reasoned = {"role": "assistant", "content": "y", "reasoning_content": "because"}
    rows = [CHAT, {"messages": [{"role": "assistant", "content": "x"}]}]
    rows += [{"messages": [user, turn]} for turn in (call, reasoned)]
    data = write_jsonl(tmp_path / "d.jsonl", rows)
    args = ["--model-path", smollm2, "--dataset", data, "--output-dir", tmp_path / "out"]
    line = last_line(must(script("01_prepare_data.py", *args)))
    assert "1 samples from 4 rows" in line
    for reason in ("no prompt", "tool calls dropped", "reasoning dropped"):
        assert f"dropped: {reason}" in line


def test_overwrite_never_deletes_an_input_or_another_stage(tiny_stages, tmp_path):
    folder = tmp_path / "p"
    shutil.copytree(tiny_stages["prepared"], folder)
    args = ["--model-path", tiny_stages["model"], "--draft-vocab-size", 64, "--overwrite"]
    result = script("02_build_vocab_map.py", *args, "--prepared-data", folder,
                    "--output-dir", folder)  # fmt: skip
    fails(result, "holds the input")
    result = script("02_build_vocab_map.py", *args, "--prepared-data", tiny_stages["prepared"],
                    "--output-dir", folder)  # fmt: skip
    fails(result, "holds the data of stage 'prepare', this is 'vocab'")
    assert (folder / "tokenized_data.jsonl").exists()


@pytest.mark.parametrize("line", ["5", "null", '{"a": 1}', '{"unit": 99}', '{"unit": "x"}'])
def test_damaged_journal_lines_are_ignored(tiny_stages, tmp_path, line):
    """Units that the journal does not vouch for are planned again."""
    hidden = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], hidden)
    (hidden / "journal.jsonl").write_text(line + "\n")
    args = extract_args(tiny_stages, hidden, "--dry-run")
    result = must(script("03_extract_hidden_states.py", *args))
    assert "passes are done" not in result.stdout
    assert "dry run, every check passed" in last_line(result)


def test_prepare_counts_bad_rows_when_asked(smollm2, tmp_path):
    other = {"messages": [*CHAT["messages"], *CHAT["messages"]]}
    rows = [CHAT, {"messages": CHAT["messages"][:1]}, other, {"messages": [{"role": "x"}]}]
    data = write_jsonl(tmp_path / "d.jsonl", rows)
    out = tmp_path / "out"
    must(script("01_prepare_data.py", "--model-path", smollm2, "--dataset", data,
                "--output-dir", out, "--skip-bad-rows"))  # fmt: skip
    counts = json.loads((out / MANIFEST).read_text())["counts"]
    assert counts["samples"] == 2
    assert counts["dropped: no assistant turn"] == 1
    assert counts["dropped: unknown role"] == 1


def test_missing_model(tmp_path):
    result = script("02_build_vocab_map.py", "--model-path", tmp_path / "nowhere",
                    "--prepared-data", tmp_path, "--output-dir", tmp_path / "o")  # fmt: skip
    fails(result, "nowhere: no such folder")


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"input_ids": [1, 700], "loss_mask": [0, 1]}, ["jsonl:2: id 700 is outside"]),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, ["jsonl:2: 3 input_ids and 2"]),
        (
            {"input_ids": [5] * 300, "loss_mask": [1] * 300},
            ["jsonl:2: the sample has 300 tokens, over 256"],
        ),
    ],
)
def test_extract_checks_the_samples_before_loading(tiny_llama, tmp_path, row, texts):
    good = {"id": "a", "input_ids": [4, 5, 6], "loss_mask": [0, 1, 1]}
    write_jsonl(tmp_path / "p" / "tokenized_data.jsonl", [good, row])
    out = tmp_path / "o"
    result = script("03_extract_hidden_states.py", "--model-path", tiny_llama, "--prepared-data",
                    tmp_path / "p", "--output-dir", out, "--max-seq-len", 256)  # fmt: skip
    fails(result, *texts, folder=out)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--layers", 1, 9], "--layers 1 9: expected distinct layers from 0 to 7"),
        (["--tp-size", 3], "--tp-size 3: the verifier's 4 attention heads do not divide"),
        (["--max-seq-len", 100], "tokens, over 100"),
        (["--engine-args", '{"no_such_arg": 1}'], "no_such_arg"),
    ],
)
def test_extract_flags(tiny_llama, tiny_prepared, tmp_path, more, text):
    out = tmp_path / "o"
    result = script("03_extract_hidden_states.py", "--model-path", tiny_llama, "--prepared-data",
                    tiny_prepared, "--output-dir", out, *more)  # fmt: skip
    fails(result, text, folder=out)


def test_data_changed_after_preparing_is_noticed(tiny_llama, tiny_prepared, tmp_path):
    folder = tmp_path / "p"
    shutil.copytree(tiny_prepared, folder)
    with open(folder / "tokenized_data.jsonl", "a") as f:
        f.write(json.dumps({"id": "x", "input_ids": [3, 4], "loss_mask": [0, 1]}) + "\n")
    result = script("02_build_vocab_map.py", "--model-path", tiny_llama, "--prepared-data", folder,
                    "--output-dir", tmp_path / "o", "--draft-vocab-size", 64)  # fmt: skip
    fails(result, "was changed after 01 wrote it", folder=tmp_path / "o")


def test_a_disk_too_small_is_refused_by_the_plan(tiny_stages, small_disk):
    out = small_disk / "o"
    result = script("03_extract_hidden_states.py", *extract_args(tiny_stages, out))
    fails(result, "GB free; free space", folder=out)


def test_atomic_file_on_a_full_disk_leaves_nothing(small_disk):
    def write():
        with atomic_file(small_disk / "x") as f:
            f.write(b"0" * 400_000)

    with pytest.raises(OSError, match="No space left"):
        write()
    assert list(small_disk.iterdir()) == []


def test_output_folder_that_cannot_be_written(tiny_stages, tmp_path):
    """A file where the folder should be, and a folder on a read-only file system."""
    file = tmp_path / "file"
    file.write_text("x")
    args = ["--model-path", tiny_stages["model"], "--prepared-data", tiny_stages["prepared"]]
    result = script("02_build_vocab_map.py", *args, "--draft-vocab-size", 64, "--output-dir", file)
    fails(result, "is a file; --output-dir takes a folder")
    with mounted(tmp_path / "ro", "ro") as disk:
        result = script("02_build_vocab_map.py", *args, "--draft-vocab-size", 64,
                        "--output-dir", disk / "o")  # fmt: skip
        fails(result, "cannot write", "read-only")


def test_a_folder_without_its_plan_says_what_to_do(tiny_stages, tmp_path):
    hidden = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], hidden)
    (hidden / "plan.json").unlink()
    result = script("03_extract_hidden_states.py", *extract_args(tiny_stages, hidden))
    fails(result, "has no plan.json", "--overwrite makes it again")


def test_a_name_that_is_neither_a_file_nor_known_to_a_hub(smollm2, tmp_path):
    """A misspelt folder looks like a hub's name; here the hub is a closed port."""
    online = ENVIRONMENT | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    result = script("01_prepare_data.py", "--model-path", smollm2, "--dataset", "mydata/foo",
                    "--output-dir", tmp_path / "out", fresh=True,
                    env=online)  # fmt: skip
    fails(result, "mydata/foo: no such file, and the hub did not name", folder=tmp_path / "out")


def test_a_source_that_was_only_read_ahead_of_did_not_end(smollm2, tmp_path):
    sources = []
    for name, count, weight in (("a", 60, 3), ("b", 40, 1)):
        found = [{"prompt": f"{name}{n}", "response": "yes"} for n in range(count)]
        sources.append(f"{write_jsonl(tmp_path / f'{name}.jsonl', found)},weight={weight}")
    args = ["--model-path", smollm2, "--output-dir", tmp_path / "out", "--overwrite", "--dataset"]
    for wanted, said in ((40, False), (95, True)):
        result = must(script("01_prepare_data.py", *args, *sources, "--max-samples", wanted))
        assert ("a.jsonl: ended after 60 rows, under its weight" in result.stdout) == said
