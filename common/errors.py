"""The errors that users see, and how every script ends: its last line is its result or its error.

Imported before torch, vllm or transformers, so that ``--help`` and a wrong flag answer at once.
"""

import difflib
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from common import streams


class UserError(Exception):
    """A mistake or fault the user can act on; its text is one line with the remedy."""


class Interrupted(BaseException):
    """Raised after SIGTERM or SIGINT; `code` is the exit status. Not an Exception, so that no
    handler of a library's faults takes it for one."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


def nearest(word: str, known: list[str]) -> str:
    """Return `; did you mean X?` for the most similar known word, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def finish(status: int) -> NoReturn:
    """Flush both streams and leave, with nothing printed by library threads after us."""
    streams.flush()
    os._exit(status)


def run(main: Callable[[], None]) -> NoReturn:
    """Run a script's main and end with its result or a one-line error as the last line.

    Exit status: 0 done, 1 a fault (UserError, I/O error, anything unexpected),
    2 a wrong flag, 130 / 143 after SIGINT / SIGTERM.
    """
    signal.signal(signal.SIGTERM, _terminated)
    open_streams()
    try:
        main()
    except SystemExit as e:  # a wrong flag or --help
        finish(e.code if isinstance(e.code, int) else 1)
    except Interrupted as e:
        report_error(f"interrupted: {e}")
        finish(e.code)
    except KeyboardInterrupt:
        report_error(f"interrupted; {again()} to continue from what is saved")
        finish(130)
    except UserError as e:
        report_error(str(e))
        finish(1)
    except ModuleNotFoundError as e:
        report_error(f"the package {e.name} is not installed; use the environment of the README")
        finish(1)
    except OSError as e:
        report_error(os_error_text(e))
        finish(1)
    except Exception as e:  # a bug or a library's fault: show all of it, then one line
        if type(e).__name__ == "OutOfMemoryError":
            report_error(
                f"out of GPU memory; end what else is on the GPU (nvidia-smi), then {again()};"
                " where nothing is, --max-batch-tokens and --batch-size ask for too much"
            )
            finish(1)
        traceback.print_exc()
        report_error(one_line(e, 500))
        finish(1)
    finish(0)


def open_streams() -> None:
    """Make printing safe: a closed stream swallows, a narrow encoding escapes; neither may end
    a run, or make one that succeeded look failed."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w" if name != "stdin" else "r"))  # noqa: SIM115
        elif name != "stdin" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _terminated(_signal: int, _frame: object) -> None:
    """SIGTERM while nothing can be saved (checks, loading); a Stopper replaces this."""
    raise Interrupted(143, f"SIGTERM; {again()} to continue from what is saved")


def one_line(e: BaseException, most: int = 300) -> str:
    """An exception's type and the beginning of its text, on one line."""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:most]}"


def again() -> str:
    """How to resume a run that has ended early; the same with --overwrite would start over."""
    without = ", without --overwrite," if "--overwrite" in sys.argv else ""
    return f"run the same command again{without}"


def report_error(text: str) -> None:
    streams.print_now(f"error: {' '.join(text.split())}", streams.stderr())


def os_error_text(e: OSError) -> str:
    """One line for an I/O error, with what to do about it."""
    remedy = {
        errno.ENOSPC: f"free space or choose another --output-dir, then {again()}",
        errno.EDQUOT: f"the disk quota is used up; free space, then {again()}",
        errno.EACCES: "check the folder's permissions or choose another --output-dir",
        errno.EROFS: "the file system is read-only; choose another --output-dir",
    }.get(e.errno or 0, "")
    name = e.filename2 or e.filename  # of two, the second is written
    return f"{f'{name}: ' if name else ''}{e.strerror or e}{'; ' + remedy if remedy else ''}"
