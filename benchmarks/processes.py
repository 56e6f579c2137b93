"""What several benchmarks do: run a script into a log, wait for it, serve, print a JSON line.

Commands are what follows `python`: ROOT / a script, or -m and a module.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SERVER_LIMIT = 300  # seconds until a server must answer


def show(**found: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(found), flush=True)


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


def start(log: Path, *command: Any, **options: Any) -> subprocess.Popen[bytes]:
    """A Python process that prints into `log`; options are Popen's."""
    with open(log, "w") as out:
        return subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=out, stderr=out, **options
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until it ends; what it printed, or exit with its last lines if it failed."""
    code = process.wait()
    text = log.read_text()
    if code:
        sys.exit(f"{log}: status {code}\n" + "\n".join(text.splitlines()[-8:]))
    return text


def must(log: Path, *command: Any, **options: Any) -> str:
    """Run a script to its end; what it printed, or exit with its last lines if it failed."""
    return finish(start(log, *command, **options), log)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], every: float) -> bool:
    """Ask `ready` every so many seconds until it is or the process has ended; whether it is."""
    while not ready():
        if process.poll() is not None:
            return False
        time.sleep(every)
    return True


@contextlib.contextmanager
def served(log: Path, *command: Any) -> Iterator[str]:
    """Start an OpenAI-compatible server on a free port of this machine; its address, once it
    answers. Its process group ends with the `with`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + SERVER_LIMIT

    def answers() -> bool:
        if time.monotonic() > deadline:
            sys.exit(f"error: {log}: the server has not answered in {SERVER_LIMIT} s")
        with contextlib.suppress(OSError):
            no_proxy.open(f"{address}/v1/models", timeout=5).close()
            return True
        return False

    at = ("--host", "127.0.0.1", "--port", port)
    server = start(log, *command, *at, start_new_session=True)
    try:
        if not wait_until(answers, server, 0.5):
            sys.exit(f"error: {log}: the server ended")
        yield address
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(30)
