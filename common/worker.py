"""The worker extension of every vLLM engine here (`worker_extension_cls`).

One class for all: vLLM adds it to its worker class for the life of the process, and a
second engine with another extension of the same methods would be refused.
"""

import signal

import torch

from common import vml
from common.extraction.capture import CaptureMethods
from common.serving.worker_hooks import ServingMethods
from common.verifier.loaded_head import HeadMethods

vml.choose_kernels()  # vLLM imports this first, then loads the model and makes its rotary table


class WorkerExtension(CaptureMethods, HeadMethods, ServingMethods):
    """Worker methods, called on all ranks by collective_rpc.

    A shell sends Ctrl-C, and often SIGTERM, to the process group. Workers that react
    die before the main process has finished its step and take the engine with them.
    """

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
