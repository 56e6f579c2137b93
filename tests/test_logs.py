"""Logs hold this project's lines only, whatever libraries print, unless an engine fails."""

import os
import pty
import re
import subprocess
import sys
import termios

from tests.conftest import ROOT, ended, extract_args, must, script, started

OURS = re.compile(r"(regenerate|prepare|vocab|extract|self-check|train|evaluate): |  \w")
EAGER = ("--engine-args", '{"enforce_eager": true}')


def not_ours(text: str) -> list[str]:
    """The lines of a log that no script of ours has printed."""
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    return [line for line in lines if line and not OURS.match(line)]


def on_a_terminal(*command: object) -> str:
    """What a command prints that runs well on a terminal of its own."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 120))
    process = subprocess.Popen(list(map(str, command)), stdout=follower, stderr=follower, cwd=ROOT)
    os.close(follower)
    text = b""
    try:
        while data := os.read(leader, 1 << 16):
            text += data
    except OSError:  # EIO: the other side is closed
        pass
    assert process.wait() == 0, text.decode()
    os.close(leader)
    return text.decode()


def test_runs_in_vllm_log_our_lines_only(tiny_stages, tmp_path):
    """On a terminal, and with worker processes; see tests/test_scripts.py for complete runs."""
    prompts = tiny_stages["prepared"] / "tokenized_data.jsonl"
    chosen = ["--model-path", tiny_stages["model"], "--prompts", prompts, "--max-samples", 6,
              "--max-seq-len", 256, "--max-new-tokens", 8, *EAGER]  # fmt: skip
    text = on_a_terminal(
        sys.executable, "tools/regenerate_responses.py", *chosen, "--output-dir", tmp_path / "r"
    )
    assert "100%" in text  # our own bar
    assert not_ours(text) == []
    args = extract_args(tiny_stages, tmp_path / "h", "--tp-size", 2)
    result = must(script("03_extract_hidden_states.py", *args))
    assert not_ours(result.stdout + result.stderr) == []


PRINTS = """
import os, subprocess, sys
from common import errors, progress, streams
from common.verifier import engine

class Engine:
    def collective_rpc(self, name):
        pass

def start(*_):
    os.write(1, b"banner of a library in C\\n")
    print("banner in Python", file=sys.stderr)
    subprocess.run(["sh", "-c", "echo a worker; echo its error >&2"], check=True)
    sys.stderr.write("bar 1%\\rbar 100%\\n")
    progress.log("regenerate: ours")
    if "fails" in sys.argv:
        raise errors.UserError("vLLM did not start") from ValueError()
    if "refuses" in sys.argv:
        raise errors.UserError("no prompts")
    return Engine()

def main():
    progress.quiet_libraries()
    engine.start_engine, engine.stop_engine = start, lambda llm: None
    with engine.running({}, {}, "x", 1):
        pass
    progress.log("regenerate: the result")

errors.run(main)
"""


def printed(how: str, **env: str) -> tuple[list[str], list[str]]:
    result = subprocess.run(
        [sys.executable, "-c", PRINTS, how],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | env,
    )  # fmt: skip
    return result.stdout.splitlines(), result.stderr.splitlines()


def test_what_libraries_print_is_shown_where_their_engine_fails():
    assert printed("works") == (["regenerate: ours", "regenerate: the result"], [])
    assert printed("refuses") == (["regenerate: ours"], ["error: no prompts"])
    out, err = printed("fails")
    assert out == ["regenerate: ours"]
    assert err[-1] == "error: vLLM did not start"
    assert sorted(err[:-1]) == sorted(
        ["banner of a library in C", "banner in Python", "a worker", "its error"]
    )


def test_a_logging_level_shows_all_that_libraries_print():
    out, err = printed("works", VLLM_LOGGING_LEVEL="INFO")
    assert {"banner of a library in C", "a worker", "regenerate: the result"} <= set(out)
    assert {"banner in Python", "its error"} <= set(err)


def test_what_libraries_print_is_kept_in_bounded_memory():
    code = (
        "import os\nfrom common import streams\n"
        "with streams.libraries_captured():\n"
        "    for n in range(300):\n"
        "        os.write(1, (b'%06d' % n).ljust(9999) + b'\\n')\n"
        "        streams.trim_captured()\n"
        "    assert os.fstat(streams._captured).st_size < streams.KEPT_BYTES + 20_000\n"
        "    streams.show_captured()\n"
    )
    result = must(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    )
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "000299"


REENTERS = """
import io
from common import streams

class Interrupted(io.FileIO):
    within = False

    def write(self, data):
        if not self.within:
            self.within = True
            streams.print_now("from a signal's handler", out)
        return super().write(data)

out = io.TextIOWrapper(io.BufferedWriter(Interrupted(1, "w", closefd=False)))
streams.print_now("from the loop", out)
"""


def test_a_signal_within_a_print_ends_nothing():
    """Its handler prints to the stream that is being written."""
    result = must(ended(started("-c", REENTERS)))
    assert result.stdout.splitlines() == ["from a signal's handler", "from the loop"]
