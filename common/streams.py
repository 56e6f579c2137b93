"""Where lines are printed, and where libraries' output goes while an engine runs.

The log holds our lines only. Libraries print banners, bars and warnings in many ways: Python's
streams, their own handlers, C++, worker processes. So while vLLM runs, file descriptors 1 and 2,
to which all of these write, and which processes inherit, lead to a file in memory; our lines go
to where 1 and 2 led before. What was captured is shown only if the engine fails.
"""

import contextlib
import faulthandler
import fcntl
import os
import sys
from collections.abc import Iterator
from typing import TextIO

SHOWN_BYTES = 1 << 16  # of what libraries have printed last
KEPT_BYTES = 1 << 20

_ours: dict[int, TextIO] = {}  # 1 and 2 as they were; never closed, for a bar may still hold them
_captured: int | None = None  # the file in memory, while libraries are captured


def stdout() -> TextIO:
    """The stream of our own lines."""
    return sys.stdout if _captured is None else _ours[1]


def stderr() -> TextIO:
    """The stream of our own errors and bars."""
    return sys.stderr if _captured is None else _ours[2]


def print_now(text: str, stream: TextIO) -> None:
    """Print one line now, if it can be: a log whose reader is gone (`| tee` after a hang-up) or
    whose disk is full must not end a run that has hours of work in memory."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        pass
    except RuntimeError:  # a signal's handler, while this very stream is written: past its buffer
        with contextlib.suppress(OSError):
            os.write(stream.fileno(), f"{text}\n".encode())


def flush() -> None:
    for stream in sys.stdout, sys.stderr:
        with contextlib.suppress(OSError):
            stream.flush()


@contextlib.contextmanager
def libraries_captured() -> Iterator[None]:
    """Keep what libraries print, in this process and in those it starts, out of the log.

    Not where VLLM_LOGGING_LEVEL asks for more than errors (see progress.quiet_libraries).
    """
    global _captured
    if os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper() not in ("ERROR", "CRITICAL"):
        yield
        return
    flush()
    for number, stream in (1, sys.stdout), (2, sys.stderr):
        _ours[number] = open(  # noqa: SIM115 (see _ours)
            os.dup(number), "w", encoding=stream.encoding, errors="backslashreplace"
        )
    _captured = os.memfd_create("libraries")
    fcntl.fcntl(_captured, fcntl.F_SETFL, os.O_APPEND)
    for number in 1, 2:
        os.dup2(_captured, number)
    faulthandler.enable(_ours[2])  # an abort in C++ leaves no time to show what it said
    try:
        yield
    finally:
        flush()
        for number in 1, 2:
            os.dup2(_ours[number].fileno(), number)
        os.close(_captured)
        _captured = None


def captured_tail(size: int) -> bytes:
    """The last bytes that libraries have printed."""
    assert _captured is not None
    end = os.fstat(_captured).st_size
    return os.pread(_captured, size, max(0, end - size))


def trim_captured() -> None:
    """Bound the memory that a talkative library takes; call it now and then."""
    if _captured is not None and os.fstat(_captured).st_size > KEPT_BYTES:
        tail = captured_tail(SHOWN_BYTES)
        os.ftruncate(_captured, 0)
        os.write(_captured, tail)


def show_captured() -> None:
    """Print the last lines of libraries, bars left out, where they are captured."""
    if _captured is None:
        return
    flush()
    text = captured_tail(SHOWN_BYTES).decode(errors="replace")
    lines = [line.rstrip() for line in text.split("\n") if "\r" not in line.rstrip("\r")]
    for line in filter(None, lines):
        print_now(line, stderr())
