"""Stage 1: the forms of its input, its limits, its processes."""

import gzip
import json
import os
import shutil
import time
from pathlib import Path

import psutil
import pytest

from common.data.conversations import FORMS, RowError, form_of, messages_of, tools_of
from common.data.samples import read_samples
from common.data.sources import parse_sources, read_rows
from common.errors import UserError
from tests.conftest import (
    ended,
    last_line,
    must,
    script,
    started,
    wait_until,
    write_jsonl,
)

SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("messages", {"messages": TALK}),
        ("messages", {"messages": [TALK[0], {"role": "model", "content": [{"text": "Hello!"}]}]}),
        ("conversations", {"conversations": SHARED}),
        ("alpaca", {"instruction": "Hi", "input": "", "output": "Hello!"}),
        ("alpaca", {"instruction": "Hi", "response": "Hello!"}),
        ("pair", {"prompt": "Hi", "response": "Hello!"}),
        ("pair", {"prompt": TALK[:1], "completion": TALK[1:]}),
    ],
)  # fmt: skip
def test_forms_of_one_conversation(form, row):
    assert form_of(row) == form
    assert form in FORMS
    assert messages_of(row) == TALK
    assert messages_of(row, form) == TALK


@pytest.mark.quick
def test_what_stands_beside_a_conversation():
    call = {"name": "add", "arguments": '{"a": 1}'}
    row = {
        "system": "Be brief.",
        "tools": '[{"type": "function"}]',
        "conversations": [
            {"from": "human", "value": "1+1?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "2"},
            {"role": "assistant", "content": "Two.", "reasoning": "so", "tool_calls": None},
        ],
    }
    system, _, called, tool, answer = messages_of(row)
    assert system == {"role": "system", "content": "Be brief."}
    assert called["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert tool == {"role": "tool", "content": "2"}
    assert answer == {"role": "assistant", "content": "Two.", "reasoning_content": "so"}
    assert tools_of(row) == [{"type": "function"}]
    assert messages_of({"instruction": "Add", "input": "1, 1", "output": "2"})[0] == {
        "role": "user",
        "content": "Add\n\n1, 1",
    }


@pytest.mark.quick
@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role: turn 0 has role 'na"),
        ({"messages": [{"role": "user"}]}, "turn 0 has no text content"),
        ({"messages": []}, "empty conversation"),
        ({"messages": "Hi"}, "messages is not a list"),
        ({"text": "x"}, "needs messages, conversations, .* has text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "without a name"),
        ({"messages": TALK, "tools": "{"}, "tools: not JSON"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
    ],
)
def test_rows_that_are_no_conversation(row, text):
    with pytest.raises(RowError, match=text) as e:
        [messages_of(row), tools_of(row)]
    assert e.value.malformed


def rows_of(*texts, max_samples=None):
    return [r.value["n"] for r in read_rows(parse_sources(list(map(str, texts)), max_samples))]


@pytest.mark.quick
def test_files_folders_and_packings(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"n": n} for n in range(5)]
    plain = write_jsonl(tmp_path / "a" / "1.jsonl", rows)
    (tmp_path / "a" / "2.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    packed = pyarrow.compress(plain.read_bytes(), codec="zstd", asbytes=True)
    (tmp_path / "a" / "3.jsonl.zst").write_bytes(packed)
    (tmp_path / "a" / "4.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a" / "5.parquet")
    (tmp_path / "a" / "notes.txt").write_text("not data")
    assert rows_of(tmp_path / "a") == list(range(5)) * 5
    for name in ("2.jsonl.gz", "3.jsonl.zst"):
        path = tmp_path / "a" / name
        path.write_bytes(path.read_bytes()[:-6])
        with pytest.raises(UserError, match=f"{name}.*(unpacked|fix)"):
            rows_of(path)


@pytest.mark.quick
def test_sources_mix_by_weight(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"n": n} for n in range(100)])
    b = write_jsonl(tmp_path / "b.jsonl", [{"n": 1000 + n} for n in range(4)])
    mixed = rows_of(f"{a},weight=3", f"{b},weight=1", max_samples=8)
    assert sorted(mixed[:8]) == [*range(6), 1000, 1001]
    assert sorted(mixed) == [*range(100), *range(1000, 1004)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x.jsonl", "x.jsonl: no such file"),
        ("a.jsonl,wieght=2", "unknown option 'wieght=2'; did you mean weight"),
        ("a.jsonl,weight=-1", "weight is a number over 0"),
        ("a.jsonl,form=chat", "form is one of messages"),
        ("a.jsonl,weight=1", "weights share out --max-samples"),
        ("a.jsonl,split=test", "split is for hub data sets only"),
        (".", "no .jsonl, .json, .parquet in this folder"),
    ],
)
def test_sources_that_are_none(tmp_path, monkeypatch, text, error):
    monkeypatch.chdir(tmp_path)
    if text.startswith("a"):
        write_jsonl(tmp_path / "a.jsonl", [{"n": 1}])
    with pytest.raises(UserError, match=error):
        parse_sources([text], None)


# ---------------------------------------------------------------- the script


def prepare(smollm2, data: Path, out: Path, *more):
    args = ["--model-path", smollm2, "--dataset", data, "--output-dir", out, *more]
    return must(script("01_prepare_data.py", *args))


def samples(out: Path) -> list[dict]:
    return [json.loads(x) for x in (out / "tokenized_data.jsonl").read_text().splitlines()]


def talk(n: int, words: int = 30) -> dict:
    """Three turns of about `words` tokens."""
    turn = f"number {n} " + "word " * (words - 4)
    pair = [{"role": "user", "content": turn}, {"role": "assistant", "content": turn}]
    return {"messages": pair * 3}


@pytest.mark.quick
def test_long_samples_are_cut_dropped_or_split(smollm2, tmp_path):
    data = write_jsonl(tmp_path / "d.jsonl", [talk(0), talk(1, 8)])
    sizes = {}
    for long in ("cut", "drop", "split"):
        out = tmp_path / long
        result = prepare(smollm2, data, out, "--max-seq-len", 150, "--long", long)
        assert f"long: {long} 1" in last_line(result)
        found = samples(out)
        assert all(any(s["loss_mask"]) and len(s["input_ids"]) <= 150 for s in found)
        sizes[long] = [len(s["input_ids"]) for s in found]
    whole = samples_of_all(smollm2, data, tmp_path)
    assert sizes["cut"] == [150, len(whole[1]["input_ids"])]
    assert sizes["drop"] == sizes["cut"][1:]
    parts = samples(tmp_path / "split")[:-1]
    assert [i for s in parts for i in s["input_ids"]] == whole[0]["input_ids"]
    name = whole[0]["id"]
    assert [s["id"] for s in parts] == [f"{name}##{k}" for k in range(len(parts))]


def samples_of_all(smollm2, data, tmp_path):
    prepare(smollm2, data, tmp_path / "whole")
    return samples(tmp_path / "whole")


def test_names_follow_the_content_and_the_same_sample_is_taken_once(smollm2, tmp_path):
    """So that the held-out split stays as it is when data grow or move."""
    first = write_jsonl(tmp_path / "a.jsonl", [talk(n) for n in range(3)])
    grown = write_jsonl(tmp_path / "b.jsonl", [talk(n) for n in (7, 1, 0, 2, 1)])
    prepare(smollm2, first, tmp_path / "a")
    result = prepare(smollm2, grown, tmp_path / "b")
    assert "dropped: the same as an earlier sample 1" in last_line(result)
    names = {tuple(s["input_ids"]): s["id"] for s in samples(tmp_path / "a")}
    again = {tuple(s["input_ids"]): s["id"] for s in samples(tmp_path / "b")}
    assert len(again) == 4
    assert names.items() <= again.items()


def test_an_id_does_not_part_or_join_conversations(smollm2, tmp_path):
    """ "##" is between a conversation and the number of its sample: of the regeneration's answers,
    not of a data set's ids."""
    rows = [
        {"id": f"set##{n}", "messages": [
            {"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(3)
    ]  # fmt: skip
    rows.append(rows[0] | {"id": "ours##1", "finish_reason": "stop"})
    rows[3]["messages"] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "!"}]
    out = tmp_path / "out"
    must(script("01_prepare_data.py", "--model-path", smollm2, "--dataset",
                write_jsonl(tmp_path / "x.jsonl", rows), "--output-dir", out))  # fmt: skip
    found = [s.conversation for s in read_samples(out)]
    assert found == ["set#0", "set#1", "set#2", "ours"]


@pytest.mark.quick
def test_answers_that_the_length_limit_cut_are_left_out(smollm2, tmp_path):
    row = {"input_ids": [1, 5, 6, 7], "loss_mask": [0, 0, 1, 1]}
    data = write_jsonl(
        tmp_path / "d.jsonl",
        [row | {"id": "a", "finish_reason": "length"}, row | {"id": "b", "finish_reason": "stop"}],
    )
    result = prepare(smollm2, data, tmp_path / "a")
    assert "dropped: answer cut by the length limit 1" in last_line(result)
    assert [s["id"] for s in samples(tmp_path / "a")] == ["b"]
    prepare(smollm2, data, tmp_path / "b", "--keep-unfinished")
    assert [s["id"] for s in samples(tmp_path / "b")] == ["a"]


@pytest.mark.quick
def test_a_person_sees_the_mask(smollm2, tmp_path):
    data = write_jsonl(tmp_path / "d.jsonl", [{"id": "x", "messages": TALK}])
    result = prepare(smollm2, data, tmp_path / "out", "--show", 5)
    assert "--- x: " in result.stdout
    assert "<|im_start|>assistant\n«Hello!<|im_end|>»" in result.stdout
    assert not (tmp_path / "out").exists()


def test_every_number_of_processes_makes_the_same_file(smollm2, tmp_path):
    data = write_jsonl(tmp_path / "d.jsonl", [talk(n % 1400, 12) for n in range(1500)])
    found = []
    for workers in (1, 3):
        out = tmp_path / str(workers)
        result = prepare(smollm2, data, out, "--workers", workers, "--max-samples", 1350)
        assert "1350 samples from 1350 rows" in last_line(result)
        found.append((out / "tokenized_data.jsonl").read_bytes())
    assert found[0] == found[1]


def test_prompts_without_answers_are_told_where_to_go(smollm2, tmp_path):
    data = write_jsonl(tmp_path / "d.jsonl", [{"messages": TALK[:1]}])
    args = ["--model-path", smollm2, "--dataset", data, "--output-dir", tmp_path / "out"]
    result = script("01_prepare_data.py", *args)
    assert result.returncode == 1
    assert "with tools/regenerate_responses.py" in last_line(result)
    assert not (tmp_path / "out" / "tokenized_data.jsonl").exists()


def test_a_map_of_several_sets(smollm2, tmp_path):
    """Each with a weight; a map of both goes with either set."""
    for name, numbers in (("a", range(3)), ("b", range(5, 30))):
        data = write_jsonl(tmp_path / f"{name}.jsonl", [talk(n) for n in numbers])
        prepare(smollm2, data, tmp_path / name)
    args = ["--model-path", smollm2, "--draft-vocab-size", 64, "--output-dir", tmp_path / "map"]
    sets = [f"{tmp_path / name},weight={weight}" for name, weight in (("a", 2), ("b", 1))]
    result = must(script("02_build_vocab_map.py", *args, "--prepared-data", *sets))
    assert (
        "weighted loss tokens (other sizes: 8000: 100.00%, 16000: 100.00%, 32000: 100.00%);"
        in last_line(result)
    )
    assert (tmp_path / "map" / "coverage.png").stat().st_size > 1000
    report = json.loads((tmp_path / "map" / "data_config.json").read_text())
    made = [
        json.loads((tmp_path / name / "data_config.json").read_text())["content_sha256"]
        for name in ("a", "b")
    ]
    assert report["inputs"]["prepared"] == made
    bad = script("02_build_vocab_map.py", *args, "--prepared-data", sets[0], tmp_path / "b")
    assert bad.returncode == 1
    assert "give all of them a weight, or none" in last_line(bad)


def test_workers_end_with_a_main_process_that_was_killed(smollm2, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"{n} " * 300},
                          {"role": "assistant", "content": f"{n} " * 300}]}
            for n in range(20_000)]  # fmt: skip
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    process = started("01_prepare_data.py", "--model-path", smollm2, "--dataset", data,
                      "--output-dir", tmp_path / "o", "--workers", 2)  # fmt: skip

    def children() -> list[psutil.Process]:
        return psutil.Process(process.pid).children(recursive=True)

    wait_until(process, lambda: len(children()) == 4)  # forkserver, tracker, two workers
    others = children()
    time.sleep(3)
    assert process.poll() is None
    process.kill()
    ended(process)
    assert not psutil.wait_procs(others, timeout=20)[1]


def test_folders_are_read_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "data"
    (folder / ".git").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", [{"n": 1, "messages": None}])
    write_jsonl(folder / ".git" / "b.jsonl", [{"n": 2}])
    assert rows_of(folder) == [1]
    (row,) = read_rows(parse_sources([str(folder)], None))
    assert "messages" not in row.value  # a null key is none
    (folder / "c.jsonl").symlink_to(folder / "gone.jsonl")
    with pytest.raises(UserError, match=r"c\.jsonl: a broken link"):
        rows_of(folder)


@pytest.mark.parametrize("reason", ["content_filter", "error"])
def test_answers_that_the_server_ended_are_dropped(smollm2, tmp_path, reason):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
    good = [messages[0], {"role": "assistant", "content": "b"}]
    rows = [{"messages": messages, "finish_reason": reason}, {"messages": good}]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    result = must(script("01_prepare_data.py", "--model-path", smollm2, "--dataset", data,
                         "--output-dir", tmp_path / "o"))  # fmt: skip
    assert "1 samples from 2 rows" in last_line(result)
    assert f"dropped: finish_reason {reason} 1" in last_line(result)


@pytest.mark.quick
def test_data_of_another_tokenizer_are_refused(smollm2, tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = write_jsonl(tmp_path / "rows.jsonl", [{"messages": messages}])
    out = tmp_path / "prepared"
    must(script("01_prepare_data.py", "--model-path", smollm2, "--dataset", data,
                "--output-dir", out))  # fmt: skip
    other = tmp_path / "model"
    shutil.copytree(smollm2, other, copy_function=os.link)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").unlink()
    (other / "tokenizer.json").write_text(tokenizer + " ")
    calls = {"02_build_vocab_map.py": ["--draft-vocab-size", "64"],
             "03_extract_hidden_states.py": ["--dry-run"]}  # fmt: skip
    for name, more in calls.items():
        args = ["--prepared-data", out, "--output-dir", tmp_path / name[:2], *more]
        must(script(name, "--model-path", smollm2, *args))
        result = script(name, "--model-path", other, *args, "--overwrite")
        assert result.returncode == 1
        assert "tokenizer" in last_line(result)
        assert "does not match" in last_line(result)
