"""The scripts as a user runs them: the whole chain, kills and resumes, tensor parallelism."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys

import pytest

from common.manifest import MANIFEST
from tests.conftest import (
    ENVIRONMENT,
    ROOT,
    ended,
    extract_args,
    fails,
    files_of,
    killed,
    last_line,
    lines_of,
    mounted,
    must,
    script,
    script_after,
    started,
    train_args,
    wait_until,
    write_jsonl,
)
from tests.test_logs import not_ours

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
    return ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}


@pytest.mark.quick
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_and_wrong_flags_answer_before_any_heavy_import(name, no_heavy_imports):
    assert "usage:" in must(script(name, "--help", fresh=True, env=no_heavy_imports)).stdout
    wrong = script(name, "--model-pth", "x", fresh=True, env=no_heavy_imports)
    assert wrong.returncode == 2
    assert last_line(wrong) == "error: unknown flag --model-pth; did you mean --model-path?"


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
@pytest.mark.parametrize("name", SCRIPTS)
def test_shipped_settings_are_flags_of_today(config, name, tmp_path):
    """Everything in the YAML is known, and what is missing is a file."""
    inputs = {"01": ["--dataset"], "02": ["--prepared-data"], "03": ["--prepared-data"],
              "04": ["--prepared-data", "--vocab-map", "--hidden-states"],
              "re": ["--prompts"], "ev": ["--prompts", "--draft"]}  # fmt: skip
    args = [x for flag in inputs[name.split("/")[-1][:2]] for x in (flag, tmp_path / "nowhere")]
    result = script(name, "--config", config, "--model-path", tmp_path / "nowhere", *args,
                    "--output-dir", tmp_path / "o", "--dry-run")  # fmt: skip
    fails(result, "nowhere")
    assert not (tmp_path / "o").exists()


def test_the_pipeline_runs_whole_and_then_skips_everything(smollm2, tmp_path):
    config = tmp_path / "small.yaml"
    prompts = [
        {"id": f"p{n}", "messages": [{"role": "user", "content": f"Count to {n}."}]}
        for n in range(2, 14)
    ]
    heldout = [{"id": "q", "messages": [{"role": "user", "content": "Name a fruit."}]}]
    eager = "engine_args: {enforce_eager: true}"
    config.write_text(f"""
common: {{model_path: {smollm2}, max_seq_len: 256}}
regenerate: {{max_new_tokens: 24, {eager}}}
prepare: {{keep_unfinished: true}}
vocab: {{draft_vocab_size: 256}}
train:
  epochs: 1
  max_batch_tokens: 256
  draft_shape:
    {{intermediate_size: 64, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 32}}
evaluate: {{max_new_tokens: 16, {eager}}}
""")
    env = {
        **ENVIRONMENT, "CONFIG": str(config), "RUN": str(tmp_path / "run"), "PY": sys.executable,
        "PROMPTS": str(write_jsonl(tmp_path / "prompts.jsonl", prompts)),
        "EVAL_PROMPTS": str(write_jsonl(tmp_path / "heldout.jsonl", heldout)),
    }  # fmt: skip

    def run() -> str:
        result = must(
            subprocess.run([ROOT / "run_pipeline.sh"], env=env, capture_output=True, text=True)
        )
        assert not_ours(result.stdout + result.stderr) == []
        return result.stdout

    assert "acceptance length" in run().splitlines()[-1]
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"]
    times = {p: p.stat().st_mtime_ns for p in files}
    assert run().count("is complete (--overwrite makes it again)") == 6
    assert times == {p: p.stat().st_mtime_ns for p in files}


def test_a_pipeline_that_is_ended_ends_its_stage(tmp_path):
    """And waits for it: a stage saves first, and ends with its own status."""
    stage = tmp_path / "python"
    stage.write_text(f"""#!/bin/bash
trap 'touch {tmp_path}/saved; exit 143' TERM
echo $$ >> {tmp_path}/begun
while :; do sleep 0.1; done
""")
    stage.chmod(0o755)
    env = {**ENVIRONMENT, "PY": str(stage), "RUN": str(tmp_path / "run"), "CONFIG": "none.yaml"}
    run = subprocess.Popen([ROOT / "run_pipeline.sh"], env=env, text=True)
    wait_until(run, lambda: lines_of(tmp_path / "begun") == 1)
    run.terminate()
    assert run.wait(30) == 143
    assert (tmp_path / "saved").exists()
    assert lines_of(tmp_path / "begun") == 1  # no other stage followed


def test_misspelt_prepared_data_names_the_flag(no_heavy_imports):
    result = script(
        "03_extract_hidden_states.py", "--prepard-data", "x", fresh=True, env=no_heavy_imports
    )
    assert result.returncode == 2
    assert last_line(result) == "error: unknown flag --prepard-data; did you mean --prepared-data?"


@pytest.mark.quick
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


@pytest.mark.quick
def test_whole_chain_and_skipping(tiny_stages, tmp_path):
    """02, 03 and 04 on the tiny verifier end with a checkpoint, and run again do nothing."""
    out = tmp_path / "draft"
    first = must(script("04_train.py", *train_args(tiny_stages, out)))
    assert "held-out acceptance length" in last_line(first)
    assert {"config.json", "model.safetensors", "metrics.jsonl", "curves.png", MANIFEST} <= {
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
    killed("tools/evaluate_draft.py", args, (out / ".lock").exists, signal.SIGKILL)
    # the process that had begun to load is gone, and holds the folder no more
    result = killed("tools/evaluate_draft.py", args, half.exists, signal.SIGTERM)
    assert result.returncode == 143
    continued = must(script("tools/evaluate_draft.py", *args))
    assert "the draft is measured already" in continued.stdout
    assert "acceptance length" in last_line(continued)
    assert not_ours(continued.stdout + continued.stderr) == []
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
    assert "not a complete safetensors file" in last_line(broken)


def test_a_signal_while_the_verifier_loads_ends_at_once(tiny_stages, tmp_path):
    process = started("03_extract_hidden_states.py", *extract_args(tiny_stages, tmp_path / "o"))
    assert process.stdout is not None
    assert any("in vLLM ..." in line for line in process.stdout)  # reads no further
    process.send_signal(signal.SIGTERM)
    result = ended(process, 30)
    assert result.returncode == 143
    assert (
        last_line(result)
        == "error: interrupted: SIGTERM; run the same command again to continue from what is saved"
    )


def test_disk_that_fills_up_while_extracting(tiny_stages, tmp_path):
    """One line with the remedy; after space is freed the same command ends the same."""
    size = sum(len(b) for b in files_of(tiny_stages["hidden"]).values()) + 3_000_000
    with mounted(tmp_path / "disk", f"size={size}") as disk:
        out, filler = disk / "hidden", disk / "filler"

        def filled_up():
            if not lines_of(out / "journal.jsonl"):
                return False
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
                while True:
                    f.write(b"0" * 4096)
            return True

        args = extract_args(tiny_stages, out, "--max-batch-tokens", 256)
        result = killed("03_extract_hidden_states.py", args, filled_up, 0)
        fails(result, "No space left on device; free space")
        filler.unlink()
        must(script("03_extract_hidden_states.py", *args))
        whole = tmp_path / "whole"
        args = extract_args(tiny_stages, whole, "--max-batch-tokens", 256)
        must(script("03_extract_hidden_states.py", *args))
        assert files_of(out) == files_of(whole)


@pytest.mark.quick
def test_a_truncated_file_is_made_again_by_a_resume(tiny_stages, tmp_path):
    """Files cut short or deleted (a disk fault, a hand) are found and their units run again."""
    out = tmp_path / "hidden"
    shutil.copytree(tiny_stages["hidden"], out)
    victim = out / "rows_0-999" / "hs_7.safetensors"
    victim.write_bytes(victim.read_bytes()[:-100])
    (out / "rows_0-999" / "hs_20.safetensors").unlink()
    must(script("03_extract_hidden_states.py", *extract_args(tiny_stages, out)))
    assert files_of(out) == files_of(tiny_stages["hidden"])


TWO_THREADS = "import torch; torch.set_num_threads(2)"
SIX_EPOCHS = ("--save-every", 3, "--epochs", 6)


@pytest.fixture(scope="module")
def six_epochs(tiny_stages, tmp_path_factory):
    """The unbroken run, on two threads."""
    out = tmp_path_factory.mktemp("six") / "draft"
    args = train_args(tiny_stages, out, *SIX_EPOCHS)
    must(script_after(TWO_THREADS, "04_train.py", *args))
    return out


@pytest.mark.parametrize(
    "sig",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.quick), signal.SIGTERM, signal.SIGINT],
)
def test_training_resumes_to_the_same_bits(tiny_stages, six_epochs, tmp_path, sig):
    whole, out = six_epochs, tmp_path / "killed"
    args = train_args(tiny_stages, out, *SIX_EPOCHS)
    metrics = out / "metrics.jsonl"
    result = killed("04_train.py", args, lambda: lines_of(metrics) >= 8, sig, TWO_THREADS)
    assert result.returncode == (-9 if sig == signal.SIGKILL else 128 + sig)
    again = must(script_after(TWO_THREADS, "04_train.py", *args))
    assert "continuing after step" in again.stdout
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()

    def curve(folder):
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(x["step"], x.get("loss"), x.get("heldout_accuracy")) for x in lines]

    assert curve(out) == curve(whole)


def test_a_batch_size_of_2000_is_bounded_by_the_token_budget(tiny_llama, tiny_prepared, tmp_path):
    """Also: --data-path with the file itself, no config."""
    result = must(
        script("03_extract_hidden_states.py", "--model-path", tiny_llama,
               "--data-path", tiny_prepared / "tokenized_data.jsonl", "--output-dir",
               tmp_path / "o", "--tp-size", 1, "--max-seq-len", 2047, "--batch-size", 2000,
               "--max-batch-tokens", 2048)
    )  # fmt: skip
    assert "at most 2048 tokens" in result.stdout
    lengths = json.loads((tmp_path / "o" / "sample_lengths.json").read_text())
    units = [json.loads(x) for x in (tmp_path / "o" / "journal.jsonl").read_text().splitlines()]
    assert len(units) > 1
    assert max(sum(lengths[i] for i in unit["checksums"]) for unit in units) <= 2048
