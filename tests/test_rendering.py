"""Where answers end that config.json does not tell, the day that prompts say, and the names of
reasoning."""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from common.data.conversations import REASONING, RowError, messages_of
from common.data.encoding import RowEncoder
from common.data.rendering import Rendering, check_servers_day, rendering_of
from common.data.settings import PrepareSettings
from common.data.sources import Row
from common.errors import UserError
from common.verifier.config import load_verifier
from tests.conftest import fails, last_line, must, script, write_jsonl
from tests.templates import CASES, CHATML
from tests.test_chat import loss_texts, template_of, turns

pytestmark = pytest.mark.quick

DATED = "{{ 'Today is ' + strftime_now('%d %b %Y') + '. ' }}" + CHATML.source
TODAY = datetime.date.today().isoformat()
TALK = {"messages": turns(("Hi", "Hello!"))}


def settings_of(model: Path, out: Path, **more) -> PrepareSettings:
    values: dict[str, Any] = {f.name: None for f in dataclasses.fields(PrepareSettings)}
    values |= {"model_path": str(model), "output_dir": str(out), "template_args": {}}
    values |= {"overwrite": False, "trust_remote_code": False, "max_seq_len": 512, "long": "cut"}
    return PrepareSettings(**values | more)


def rendering(model: Path, out: Path, row: dict = TALK, answers=(), **more) -> Rendering:
    verifier = load_verifier(str(model))
    return rendering_of(settings_of(model, out, **more), verifier, [Row("r", row)], answers)


def encoded(model: Path, found: Rendering, row: dict) -> tuple[list[int], list[int], dict]:
    """The one sample that 01 makes of a row: ids, mask, and what is counted."""
    verifier = dataclasses.replace(load_verifier(str(model)), end_ids=found.end_ids)
    settings = settings_of(model, model, date=found.date)
    made = RowEncoder(settings, verifier).encode(Row("r", row))
    (line,) = made.lines
    sample = json.loads(line.text)
    return sample["input_ids"], sample["loss_mask"], made.counts


# ---------------------------------------------------------------- where answers end


@pytest.mark.parametrize(
    ("eos", "said", "served"),
    [
        ("<|im_end|>", "the tokenizer's end token <|im_end|> (id 2) is not among", True),
        (
            {
                "__type": "AddedToken",
                "content": "<|im_end|>",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            },
            "the tokenizer's end token <|im_end|> (id 2)",
            True,
        ),  # as transformers 4 saves it
        ("<|endoftext|>", "the chat template ends answers with <|im_end|> (id 2)", False),
    ],
)
def test_an_end_token_that_config_lacks_ends_answers(
    verifier_folder, tmp_path, capsys, eos, said, served
):
    """The tokenizer's, at which a server stops too, or the template's alone; the line break that
    the template writes behind it carries no loss."""
    model = verifier_folder(eos, [0], CHATML.source)
    found = rendering(model, tmp_path / "o")
    assert said in capsys.readouterr().out
    assert (found.end_ids, found.not_served) == ((0, 2), () if served else (2,))
    ids, mask, counts = encoded(model, found, TALK)
    own = found.template().tokenizer
    assert own.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "Hello!<|im_end|>"
    assert ids[-1] == 2
    assert not any("note" in key for key in counts)


def test_end_tokens_that_config_lists_are_not_spoken_of(smollm2, tmp_path, capsys):
    found = rendering(smollm2, tmp_path / "o")
    assert (found.end_ids, found.not_served, found.settings) == ((2,), (), {})
    assert capsys.readouterr().out == ""


def test_tokenized_rows_need_no_template_to_end(verifier_folder, tmp_path, capsys):
    """Nor do they carry loss behind an end-of-turn token, until the next answer."""
    model = verifier_folder("<|im_end|>", 0, "{{ unknown() }}")
    ids = [5, 6, 2, 7, 8, 9, 10, 2, 7]
    row = {"input_ids": ids, "loss_mask": [0, 1, 1, 1, 0, 0, 1, 1, 0]}
    found = rendering(model, tmp_path / "o", row)
    assert "the tokenizer's end token" in capsys.readouterr().out
    same, mask, counts = encoded(model, found, row)
    assert (same, mask) == (ids, [0, 1, 1, 0, 0, 0, 1, 1, 0])
    assert counts["note: tokenized rows with loss after an end-of-turn token"] == 1


# ---------------------------------------------------------------- the day


def write_day(folder: Path, **settings) -> Path:
    folder.mkdir()
    (folder / "data_config.json").write_text(json.dumps({"settings": settings}))
    return folder


def test_the_day_is_the_flags_the_folders_the_answers_or_today(verifier_folder, tmp_path, capsys):
    model = verifier_folder("<|im_end|>", 2, DATED)
    begun = write_day(tmp_path / "begun", date="2024-02-29")
    answers = [write_day(tmp_path / "answers", date="2025-05-05") / "responses.jsonl"]
    new = tmp_path / "new"
    assert rendering(model, new).settings == {"date": TODAY}
    assert rendering(model, begun).settings == {"date": "2024-02-29"}
    assert rendering(model, begun, overwrite=True).settings == {"date": TODAY}
    assert rendering(model, new, answers=answers).settings == {"date": "2025-05-05"}
    assert capsys.readouterr().out == ""
    given = rendering(model, new, answers=answers, date="2030-01-02")
    assert given.settings == {"date": "2030-01-02"}
    said = capsys.readouterr().out
    assert "prompts say 2030-01-02" in said
    assert "answers 2025-05-05 (--date 2025-05-05 makes them alike)" in said
    ids, _, _ = encoded(model, given, TALK)
    assert given.template().tokenizer.decode(ids).startswith("Today is 02 Jan 2030. ")


def test_a_day_that_no_prompt_says_is_not_recorded(smollm2, verifier_folder, tmp_path, capsys):
    """Of a template without one; of one that is told another; of rows that are not rendered."""
    model = verifier_folder("<|im_end|>", 2, DATED)
    told = "{% if not day %}{% set day = strftime_now('%Y') %}{% endif %}{{ day }}" + CHATML.source
    other = verifier_folder("<|im_end|>", 2, told)
    out = tmp_path / "o"
    assert rendering(smollm2, out).settings == {}
    assert rendering(other, out).settings == {"date": TODAY}
    assert rendering(other, out, template_args={"day": "Monday"}).settings == {}
    assert rendering(model, out, {"input_ids": [1, 2], "loss_mask": [0, 1]}).settings == {}
    assert capsys.readouterr().out == ""
    assert rendering(smollm2, out, date="2030-01-02").settings == {}
    assert "--date has no effect" in capsys.readouterr().out


def test_a_server_renders_its_own_day(verifier_folder, tmp_path, capsys):
    model = verifier_folder("<|im_end|>", 2, DATED)
    begun = rendering(model, write_day(tmp_path / "begun", date="2024-02-29"))
    check_servers_day(rendering(model, tmp_path / "new"), None)
    assert capsys.readouterr().out == ""
    check_servers_day(begun, None)
    assert f"its own day ({TODAY}); prompts so far say 2024-02-29" in capsys.readouterr().out
    with pytest.raises(UserError, match="leave out --date, or --endpoint"):
        check_servers_day(begun, "2024-02-29")


def test_01_continues_on_the_first_day_and_tells_another_apart(verifier_folder, tmp_path):
    model = verifier_folder("<|im_end|>", 2, DATED)
    data, out = write_jsonl(tmp_path / "d.jsonl", [TALK]), tmp_path / "out"
    args = ["--model-path", model, "--dataset", data, "--output-dir", out]
    must(script("01_prepare_data.py", *args, "--date", "2024-02-29"))
    assert json.loads((out / "data_config.json").read_text())["settings"]["date"] == "2024-02-29"
    assert "is complete" in last_line(must(script("01_prepare_data.py", *args)))
    result = script("01_prepare_data.py", *args, "--date", "2024-03-01")
    fails(result, 'was made with date = "2024-02-29", asked for "2024-03-01"')
    wrong = script("01_prepare_data.py", *args, "--date", "2024-02-30")
    assert wrong.returncode == 2
    assert "'2024-02-30' is not a day as YYYY-MM-DD" in last_line(wrong)


# ---------------------------------------------------------------- names of reasoning


@pytest.mark.parametrize("shown", REASONING)
def test_reasoning_is_shown_whatever_row_and_template_call_it(tokenizer, shown):
    thinks = f"(('<think>' + m.{shown} + '</think>') if m.{shown} else '') + m.content"
    for case in (CHATML, CASES["marked"]):
        source = case.source.replace("m.content", thinks)
        template = template_of(dataclasses.replace(case, source=source), tokenizer)
        for called in ("reasoning_content", "thinking", "thought"):
            row = {"messages": turns(("Sum?", "Two."))}
            row["messages"][1][called] = "1 and 1"
            (text,) = loss_texts(template, template.encode(messages_of(row)))
            assert text == "<think>1 and 1</think>Two.<|im_end|>"


# ---------------------------------------------------------------- finished turns


def test_a_finished_turn_that_begins_otherwise_makes_no_sample(tokenizer):
    """What stands before finished turns alone, no server sends to have one answered."""
    source = """{% for m in messages %}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}\
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
    template = template_of(dataclasses.replace(CHATML, source=source), tokenizer)
    with pytest.raises(RowError, match="finished turns begin otherwise than the generation"):
        template.encode(turns(("Hi", "Hello!")))


@pytest.mark.quick
def test_reasoning_in_parts_is_joined_and_other_values_are_refused():
    def turns(value):
        return [{"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "thinking": value}]  # fmt: skip

    parts = [{"type": "text", "text": "x"}, {"text": "y"}]
    assert messages_of({"messages": turns(parts)})[1][REASONING[0]] == "xy"
    for value in (5, ["a"], {"a": 1}, True):
        with pytest.raises(RowError, match="reasoning that is no text"):
            messages_of({"messages": turns(value)})


@pytest.mark.quick
def test_a_day_is_written_as_one():
    from argparse import ArgumentTypeError

    from common.cli import iso_date

    assert iso_date("2026-01-31") == "2026-01-31"
    for text in ("2026-W01-1", "20260131", "2026-02-30", "today"):
        with pytest.raises(ArgumentTypeError):
            iso_date(text)
