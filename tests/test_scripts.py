"""The scripts as a user runs them: the whole chain, kills and resumes, tensor parallelism."""

import contextlib
import json
import os
import signal
import subprocess

import pytest

from common.artifacts import REPORT
from tests.conftest import (
    extract_args,
    files_of,
    killed,
    last_line,
    must,
    script,
    train_args,
    write_jsonl,
)

SCRIPTS = [
    "01_prepare_data.py",
    "02_build_vocab_map.py",
    "03_extract_hidden_states.py",
    "04_train.py",
    "tools/regenerate_responses.py",
    "tools/evaluate_draft.py",
]


@pytest.fixture
def no_heavy_imports(tmp_path):
    """An environment in which importing torch, vllm, transformers or datasets fails."""
    for name in ("torch", "vllm", "transformers", "datasets", "speculators"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_and_wrong_flags_answer_before_any_heavy_import(name, no_heavy_imports):
    assert "usage:" in must(script(name, "--help", env=no_heavy_imports)).stdout
    wrong = script(name, "--model-pth", "x", env=no_heavy_imports)
    assert wrong.returncode == 2
    assert last_line(wrong) == "error: unknown flag --model-pth; did you mean --model-path?"


def test_misspelt_prepared_data_names_the_flag(no_heavy_imports):
    result = script("03_extract_hidden_states.py", "--prepard-data", "x", env=no_heavy_imports)
    assert result.returncode == 2
    assert last_line(result) == "error: unknown flag --prepard-data; did you mean --prepared-data?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "extract: {max_batch_tokns: 4}",
            "unknown key extract.max_batch_tokns; did you mean max_b",
        ),
        ("extrct: {}", "unknown section extrct; did you mean extract"),
        ("extract: {tp_size: many}", "extract.tp_size: 'many' is not a whole number"),
        ("extract: {dry_run: 1}", "extract.dry_run: expected true or false"),
        ("common: {layers: 3}", "common.layers: expected a list"),
        ("common: [", "not YAML"),
        ("a: " + "[" * 3000, "not YAML: it is nested too deeply"),
        ("extract: {tp_size: 1, tp_size: 2}", "not YAML: tp_size is there twice"),
        ("extract: {tp_size: {a: 1}}", "extract.tp_size: expected one value"),
        ("common: {layers: [[1]]}", "common.layers: expected one value"),
        ("common: {layers: []}", "common.layers: the list is empty"),
        ("extract: {config: x}", "unknown key extract.config"),
        ("common: {seed: 1}", "missing key model_path; --model-path is required"),
    ],
)
def test_yaml_mistakes(tmp_path, text, message):
    config = tmp_path / "c.yaml"
    config.write_text(text)
    result = script("03_extract_hidden_states.py", "--config", config)
    assert result.returncode == 2
    assert message in last_line(result)
    assert str(config) in last_line(result)


def test_command_line_wins_over_yaml(tmp_path, tiny_llama, tiny_prepared):
    config = tmp_path / "c.yaml"
    config.write_text(f"common: {{model_path: {tiny_llama}}}\nextract: {{max_batch_tokens: 300}}")
    args = ["--config", config, "--prepared-data", tiny_prepared, "--output-dir", tmp_path / "o"]
    out = must(script("03_extract_hidden_states.py", *args, "--dry-run")).stdout
    assert "at most 300 tokens" in out
    args += ["--max-batch-tokens", 400, "--dry-run"]
    assert "at most 400 tokens" in must(script("03_extract_hidden_states.py", *args)).stdout
    assert not (tmp_path / "o").exists()


def test_whole_chain_and_skipping(tiny_stages, tmp_path):
    """02, 03 and 04 on the tiny verifier end with a checkpoint, and run again do nothing."""
    out = tmp_path / "draft"
    first = must(script("04_train.py", *train_args(tiny_stages, out)))
    assert "held-out acceptance length" in last_line(first)
    assert {"config.json", "model.safetensors", "metrics.jsonl", "curves.png", REPORT} <= {
        p.name for p in out.iterdir()
    }
    lines = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [x for x in lines if "loss" in x]
    assert [x["step"] for x in steps] == list(range(1, len(steps) + 1))
    assert all(len(x["loss_by_depth"]) == 3 for x in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    again = must(script("04_train.py", *train_args(tiny_stages, out)))
    assert "is complete" in last_line(again)
    other = script("04_train.py", *train_args(tiny_stages, out, "--lr", 0.5))
    assert other.returncode == 1
    assert "was made with lr = 0.001, asked for 0.5" in last_line(other)


def test_evaluation_serves_the_draft_both_ways(tiny_stages, tmp_path):
    """With and without the draft in real vLLM, fed the stored states, then skipped."""
    draft, out = tmp_path / "draft", tmp_path / "evaluation"
    must(script("04_train.py", *train_args(tiny_stages, draft)))
    prompts = tiny_stages["prepared"] / "tokenized_data.jsonl"
    args = [
        "--model-path", tiny_stages["model"], "--draft", draft, "--prompts", prompts,
        "--max-samples", 12, "--max-seq-len", 256, "--max-new-tokens", 24,
        "--hidden-states", tiny_stages["hidden"], "--output-dir", out,
        "--engine-args", '{"enforce_eager": true}',
    ]  # fmt: skip
    half = out / "with_draft.json"
    killed("tools/evaluate_draft.py", args, half.exists, signal.SIGKILL)
    continued = must(script("tools/evaluate_draft.py", *args))
    assert "measured by an earlier run" in continued.stdout
    assert "acceptance length" in last_line(continued)
    assert not half.exists()
    result = json.loads((out / "result.json").read_text())
    low, high = result["interval_95"]
    assert low <= result["acceptance_length"] <= high
    assert len(result["acceptance_by_position"]) == 3
    assert result["fed_states_relative_error"] < 0.03
    assert max(result["made_states_relative_error"]) < 0.03
    assert "is complete" in last_line(must(script("tools/evaluate_draft.py", *args)))
    (draft / "model.safetensors").write_bytes(b"")
    broken = script("tools/evaluate_draft.py", *args)
    assert broken.returncode == 1
    assert "not a whole safetensors file" in last_line(broken)


def test_extraction_that_is_asked_to_stop_resumes_to_the_same_bytes(tiny_stages, tmp_path):
    """SIGTERM: the step is finished and saved, exit 143 (SIGKILL: tests/test_faults.py)."""
    out = tmp_path / "hidden"

    def two_units_done():
        path = out / "journal.jsonl"
        return path.exists() and path.read_bytes().count(b"\n") >= 2

    args = extract_args(tiny_stages, out)
    result = killed("03_extract_hidden_states.py", args, two_units_done, signal.SIGTERM)
    assert result.returncode in (143, 0)  # 0: it was in the last unit
    if result.returncode:
        assert "run again to continue" in last_line(result)
    must(script("03_extract_hidden_states.py", *args))
    assert files_of(out) == files_of(tiny_stages["hidden"])
    mine, theirs = (json.loads((p / REPORT).read_text()) for p in (out, tiny_stages["hidden"]))
    assert mine["content_sha256"] == theirs["content_sha256"]


def test_disk_that_fills_up_while_extracting(tiny_stages, tmp_path):
    """One line with the remedy; after space is freed the same command ends the same."""
    mount = tmp_path / "disk"
    mount.mkdir()
    size = sum(len(b) for b in files_of(tiny_stages["hidden"]).values()) + 3_000_000
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)], capture_output=True
    )
    if made.returncode:
        pytest.skip("needs the right to mount a small tmpfs (run as root)")
    try:
        out, filler = mount / "hidden", mount / "filler"

        def filled_up():
            path = out / "journal.jsonl"
            if not (path.exists() and path.read_bytes().count(b"\n")):
                return False
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
                while True:
                    f.write(b"0" * 4096)
            return True

        args = extract_args(tiny_stages, out, "--max-batch-tokens", 256)
        result = killed("03_extract_hidden_states.py", args, filled_up, 0)
        assert result.returncode == 1
        assert "No space left on device; free space" in last_line(result)
        assert "Traceback" not in result.stderr
        filler.unlink()
        must(script("03_extract_hidden_states.py", *args))
        whole = tmp_path / "whole"
        args = extract_args(tiny_stages, whole, "--max-batch-tokens", 256)
        must(script("03_extract_hidden_states.py", *args))
        assert files_of(out) == files_of(whole)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_truncated_file_is_made_again_by_a_resume(tiny_stages, tmp_path):
    """Files cut short or deleted (a disk fault, a hand) are found and their units run again."""
    import shutil

    out = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], out)
    victim = out / "rows_0-999" / "hs_7.safetensors"
    victim.write_bytes(victim.read_bytes()[:-100])
    (out / "rows_0-999" / "hs_20.safetensors").unlink()
    must(script("03_extract_hidden_states.py", *extract_args(tiny_stages, out)))
    assert files_of(out) == files_of(tiny_stages["hidden"])


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_training_resumes_to_the_same_bits(tiny_stages, tmp_path, sig):
    whole = tmp_path / "whole"
    more = ("--save-every", 3, "--epochs", 6)
    must(script("04_train.py", *train_args(tiny_stages, whole, *more)))
    out = tmp_path / "killed"

    def some_steps_done():
        path = out / "metrics.jsonl"
        return path.exists() and path.read_bytes().count(b"\n") >= 8

    args = train_args(tiny_stages, out, *more)
    result = killed("04_train.py", args, some_steps_done, sig)
    assert result.returncode == (-9 if sig == signal.SIGKILL else 143)
    again = must(script("04_train.py", *args))
    assert "continuing after step" in again.stdout
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()

    def curve(folder):
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(x["step"], x.get("loss"), x.get("heldout_accuracy")) for x in lines]

    assert curve(out) == curve(whole)


def test_the_original_failing_command(tiny_llama, tiny_prepared, tmp_path):
    """--data-path with the file itself, --batch-size 2000, no config: the budget bounds it."""
    result = must(
        script("03_extract_hidden_states.py", "--model-path", tiny_llama,
               "--data-path", tiny_prepared / "tokenized_data.jsonl", "--output-dir",
               tmp_path / "o", "--tp-size", 1, "--max-seq-len", 2047, "--batch-size", 2000,
               "--max-batch-tokens", 2048)
    )  # fmt: skip
    assert "at most 2048 tokens" in result.stdout
    units = (tmp_path / "o" / "journal.jsonl").read_text().splitlines()
    assert len(units) > 1


def test_regenerated_answers_are_exact_and_never_asked_twice(smollm2, tokenizer, tmp_path):
    """Kill it half way; the answers kept stay, and ids decode to the text."""
    prompts = [
        {"id": f"p{n}", "messages": [{"role": "user", "content": f"Count to {n + 2}."}]}
        for n in range(24)
    ]
    data = write_jsonl(tmp_path / "prompts.jsonl", prompts)
    out = tmp_path / "responses"
    args = [
        "--model-path", smollm2, "--prompts", data, "--output-dir", out, "--batch-size", 4,
        "--max-new-tokens", 24, "--max-seq-len", 256, "--engine-args", '{"enforce_eager": true}',
    ]  # fmt: skip
    answers = out / "responses.jsonl"

    def some_answers():
        return answers.exists() and answers.read_bytes().count(b"\n") >= 5

    killed("tools/regenerate_responses.py", args, some_answers, signal.SIGKILL)
    before = answers.read_text()
    must(script("tools/regenerate_responses.py", *args))
    text = answers.read_text()
    assert text.startswith("".join(before.splitlines(keepends=True)[:5]))
    rows = [json.loads(x) for x in text.splitlines()]
    assert {r["id"] for r in rows} == {f"p{n}" for n in range(24)}
    assert len(rows) == 24
    for row in rows:
        prompt, answer = row["messages"][:-1], row["messages"][-1]["content"]
        n = row["loss_mask"].index(1)
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert row["input_ids"][:n] == list(ids)
        assert tokenizer.decode(row["input_ids"][n:], skip_special_tokens=True) == answer
        assert (row["input_ids"][-1] == 2) == (row["finish_reason"] == "stop")
