"""What every vLLM worker of this project is mixed with (`worker_extension_cls`)."""

import signal
from typing import Any

import torch


class QuietWorker:
    """Worker methods, called on all ranks by collective_rpc.

    A shell sends Ctrl-C, and often SIGTERM, to the whole process group. Workers that react
    die before the main process has finished its step and take the engine with them.
    """

    rank: int  # vLLM's worker has both
    model_runner: Any

    def ignore_signals(self) -> None:
        """Leave SIGINT and SIGTERM to the main process (not in its own process, at TP=1)."""
        self._handlers = {}
        if torch.multiprocessing.parent_process() is not None:
            for sig in (signal.SIGINT, signal.SIGTERM):
                self._handlers[sig] = signal.signal(sig, signal.SIG_IGN)

    def restore_signals(self) -> None:
        """React again, so that the engine can end the worker."""
        for sig, handler in self._handlers.items():
            signal.signal(sig, handler)
