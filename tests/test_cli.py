"""Flags and YAML values that no run could use, refused where they are parsed; broken links."""

import json
import subprocess
import sys

import pytest

from common import cli
from common.artifacts import check_apart
from common.errors import UserError
from tests.conftest import ENVIRONMENT, ROOT

pytestmark = pytest.mark.quick


@pytest.fixture
def parsed(monkeypatch, capsys):
    """Parse a command line; returns the flags, or the last line of the refusal."""

    def parse(*args: object):
        monkeypatch.setattr(sys, "argv", ["x.py", *map(str, args)])
        p = cli.Parser("prepare", None)
        p.add_common("--model-path", "--template-args", "--max-samples", "--load-timeout")
        try:
            return p.parse()
        except SystemExit as e:
            line = capsys.readouterr().err.splitlines()[-1]
            return line if e.code == 2 else f"exit status {e.code}"

    return parse


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{day: 2021-03-04}", "day is a date; put it in quotes"),
        ("{a: [{when: 2021-03-04 05:06:07}]}", "when is a datetime; put it in quotes"),
        ("{a: {b: {7: x}}}", "the key 7 is no text; put it in quotes"),
        ("{a: {true: x}}", "the key True is no text; put it in quotes"),
        ("{a: [.inf]}", "a is inf, which JSON does not have"),
        ("{a: !!set {b}}", "a is a set; put it in quotes"),
        ("&me {a: [*me]}", "is nested too deeply"),
        ("{tools: []}", "tools is no variable of the template's own"),
    ],
)
def test_a_mapping_that_a_manifest_would_not_give_back(parsed, tmp_path, value, message):
    config = tmp_path / "c.yaml"
    config.write_text(f"prepare:\n  template_args: {value}\n")
    assert parsed("--config", config) == f"error: {config}: prepare.template_args: {message}"


@pytest.mark.parametrize("value", ['{"a": NaN}', '{"a": [-Infinity]}', '{"a": 1e999}'])
def test_numbers_that_json_does_not_have(parsed, value):
    assert "which JSON does not have" in parsed("--template-args", value)


def test_a_mapping_is_taken_as_it_is(parsed, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("prepare: {template_args: {a: 1e-5, b: {c: [null, 2, true, '2021-03-04']}}}")
    found = parsed("--config", config).template_args
    assert found == {"a": 1e-5, "b": {"c": [None, 2, True, "2021-03-04"]}}
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('common: {model_path: "a\\0b"}', "common.model_path: holds a NUL character"),
        ("prepare: {max_samples: 2021-13-41}", "not YAML: month must be in 1..12"),
        (f"prepare: {{max_samples: {'9' * 5000}}}", "not YAML: Exceeds the limit"),
    ],
)
def test_values_that_python_cannot_read(parsed, tmp_path, text, message):
    config = tmp_path / "c.yaml"
    config.write_text(text)
    assert f"{config}: {message}" in parsed("--config", config)


@pytest.mark.parametrize("text", ["٣", "1_0", "-1", "9" * 30, str(sys.maxsize + 1), "9" * 9000])
def test_whole_numbers_are_of_ascii_digits(parsed, text):
    line = parsed(f"--max-samples={text}")
    assert "is not a whole number" in line
    assert len(line) < 150


@pytest.mark.parametrize("text", ["٣", "1_0", "9" * 9000])
def test_numbers_are_of_ascii_digits(parsed, text):
    line = parsed(f"--load-timeout={text}")
    assert "is not a number from" in line
    assert len(line) < 150


def test_an_empty_config_is_a_wrong_flag(parsed):
    assert parsed("--config", "") == "error: argument --config: is empty"


def test_a_wrong_flag_on_a_full_disk_is_still_a_wrong_flag():
    with open("/dev/full", "w") as full:
        command = [sys.executable, str(ROOT / "01_prepare_data.py"), "--bogus"]
        assert subprocess.run(command, stderr=full, env=ENVIRONMENT).returncode == 2


def test_an_output_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name, what in (("loop", "a broken link"), ("gone", "a broken link"), ("file", "a file")):
        for out in (tmp_path / name, tmp_path / name / "below"):
            with pytest.raises(UserError, match=f"{name}: is {what}; --output-dir takes a folder"):
                check_apart(out, tmp_path)
    check_apart(tmp_path / "new", tmp_path / "loop", tmp_path / "gone")
