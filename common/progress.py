"""Progress a person can read in a terminal or in a nohup log, and polite interruption."""

import contextlib
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator

from common import streams
from common.errors import report_error

LOG_EVERY_SECONDS = 10.0
SAME_REQUEST_SECONDS = 1.0


def quiet_libraries() -> None:
    """Keep library chatter out of the log; call before importing torch, vllm, transformers.

    Errors still show. A variable the user has set is left alone.
    """
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_VERBOSITY": "error",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "LOGURU_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)
    if os.environ["PYTHONWARNINGS"] == "ignore":
        warnings.simplefilter("ignore")
    logging.captureWarnings(True)
    # vllm warns before it has read its own level
    for name in ("py.warnings", "vllm", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


def log(text: str) -> None:
    """Print one line now, also when stdout is a file."""
    streams.print_now(text, streams.stdout())


def duration(seconds: float) -> str:
    """Seconds as `1h02m`, `3m20s` or `12s`."""
    s = round(seconds)
    if s >= 3600:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 60}m{s % 60:02d}s" if s >= 60 else f"{s}s"


class Progress:
    """A tqdm bar on a terminal; otherwise a plain line every 10 s with rate and ETA.

    `done` counts from `initial` (work found finished by an earlier run); the rate is
    of this run alone. Where `concurrency` things run together, the first finish late, so the
    ETA waits for that many.
    """

    def __init__(self, what: str, total: int, unit: str, initial: int = 0, concurrency: int = 0):
        self.what, self.total, self.unit, self.concurrency = what, total, unit, concurrency
        self.done = self.initial = initial
        self.start = self.last = time.monotonic()
        self.bar = None
        stream = streams.stderr()
        if stream.isatty():
            from tqdm import tqdm

            self.bar = tqdm(
                total=total or None,
                initial=initial,
                desc=what,
                unit=unit,
                unit_scale=True,
                file=stream,
            )

    def add(self, n: int, note: str = "") -> None:
        self.done += n
        streams.trim_captured()
        if self.bar is not None:
            with contextlib.suppress(OSError):  # the terminal is gone, see streams.print_now
                self.bar.set_postfix_str(note, refresh=False)
                self.bar.update(n)
            return
        now = time.monotonic()
        if now - self.last >= LOG_EVERY_SECONDS:
            self.last = now
            log(self.line(now - self.start, note))

    def line(self, elapsed: float, note: str = "") -> str:
        done = self.done - self.initial
        rate = done / max(elapsed, 1e-9)
        eta = duration((self.total - self.done) / rate) if done > self.concurrency else "?"
        if not self.total:  # not known ahead
            return f"{self.what}: {self.done} {self.unit} {rate:.0f} {self.unit}/s"
        return (
            f"{self.what}: {self.done}/{self.total} {self.unit}"
            f" ({100 * self.done / self.total:.1f}%)"
            f" {rate:.{0 if rate >= 10 else 1}f} {self.unit}/s ETA {eta}"
            f"{'  ' + note if note else ''}"
        )

    def close(self) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.close()


@contextlib.contextmanager
def heartbeat(text: str, limit: float, too_long: Callable[[], None]) -> Iterator[None]:
    """Log the start of something long, and every minute that it still runs; call `too_long`, from
    another thread, if it takes over `limit` seconds."""
    log(f"{text} ...")
    started = time.monotonic()
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(min(60, max(0.0, started + limit - time.monotonic()))):
            if time.monotonic() - started >= limit:
                too_long()
                return
            log(f"{text}: {duration(time.monotonic() - started)} so far")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Stopper:
    """Turns SIGTERM and SIGINT into a flag that a loop reads between two steps.

    Any later signal ends the process at once, but not one that comes together with the first: a
    job's signals come by its group, by Slurm and by torchrun, each process more than once.
    """

    def __init__(self) -> None:
        self.code = 0
        self.first = 0.0
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, self._note)

    def _note(self, sig: int, _frame: object) -> None:
        if self.code and time.monotonic() < self.first + SAME_REQUEST_SECONDS:
            return
        if self.code:
            report_error("interrupted again; the step was not finished")
            os._exit(self.code)
        self.code, self.first = 128 + sig, time.monotonic()
        name = signal.Signals(sig).name
        log(f"{name}: finishing the current step; once more to stop at once")
