"""A process that has imported the heavy libraries and forks a child for each run of a script.

What a run costs is mostly imports: 10 to 15 s of torch, vLLM, transformers and speculators for a
second of work. A child of this server starts where the imports end, and is in all else a process
of its own: its streams, working folder, environment, arguments and signals are those it is given,
and `common` is imported afresh. What concerns the start itself belongs into a fresh interpreter.

The server runs no torch kernel and no thread, which a fork would not take along. It reads what to
run from a socket: four descriptors a run, of the run's own socket and the three streams. The child
reads the rest from its socket; the server writes the exit status there.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# With what vLLM imports when an engine starts; the project's own modules are not among them.
MODULES = (
    "torch",
    "torch._dynamo.backends.inductor",
    "torch._inductor.compile_fx",
    "torch.optim",
    "torch.distributed.optim",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "vllm",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.llm",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.spec_decode.eagle",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.llama_eagle3",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.pool.flash_maxsim",
    "sympy.combinatorics",
    "speculators.models.eagle3",
    "datasets",
    "safetensors.torch",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "PIL.PngImagePlugin",
    "openai",
    "pyarrow.parquet",
    "tqdm.auto",
    "yaml",
)
# Without these OpenBLAS and Arrow start threads as they are imported.
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Read by the interpreter or a library as it starts: a child cannot be given another value.
READ_AT_START = ("PYTHON", "LD_PRELOAD", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "HF_")
PR_SET_PDEATHSIG = 1


# ---------------------------------------------------------------- the server


def serve(control: socket.socket) -> None:
    """Fork a child for every request, and tell its exit status, until the client is gone."""
    watch = selectors.DefaultSelector()
    watch.register(control, selectors.EVENT_READ)
    server = os.getpid()
    while True:
        for key, _ in watch.select():
            if key.fileobj is not control:
                pid, run = key.data
                watch.unregister(key.fileobj)
                os.close(key.fd)
                tell_status(pid, run)
                continue
            data, fds, _, _ = socket.recv_fds(control, 1, 4)
            if not data:
                return  # and the children end with this process
            pid = os.fork()
            if not pid:
                run_child(server, fds)
            for fd in fds[1:]:
                os.close(fd)
            watch.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, fds[0]))


def tell_status(pid: int, run: int) -> None:
    """Reap a child that has ended, and write its status for the client, who may be gone."""
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError), socket.socket(fileno=run) as s:
        s.sendall(json.dumps({"status": status}).encode() + b"\n")


def run_child(server: int, fds: list[int]) -> None:
    """Become the process that the client asks for, run its script and end as Python would."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with socket.socket(fileno=fds[0]) as run:
        run.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
        asked = json.loads(run.makefile().readline())
    for number, fd in enumerate(fds[1:]):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (
        open(n, mode, buffering, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        for n, mode, buffering, old in (
            (0, "r", -1, sys.stdin), (1, "w", -1, sys.stdout), (2, "w", 1, sys.stderr)
        )
    )  # fmt: skip
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    end(lambda: run_python(asked["args"]))


def run_python(args: list[str]) -> None:
    """What `python SCRIPT ...`, `python -c CODE ...` or `python -m MODULE ...` runs."""
    if args[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *args[2:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(args[1], "<string>", "exec"), main.__dict__)
    elif args[0] == "-m":
        sys.argv, sys.path[0] = args[1:], os.getcwd()
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = args, os.path.dirname(os.path.realpath(args[0]))
        runpy.run_path(args[0], run_name="__main__")


def end(run: Any) -> None:
    """Run it, and end the process with the status and the words that Python would use."""
    status = 0
    try:
        run()
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        if status and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in sys.stdout, sys.stderr:
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status & 0xFF)


def find_out_once() -> None:
    """What torch.compile asks of the machine, partly by other processes, and then remembers."""
    from torch._inductor import codecache, cpu_vec_isa
    from torch._inductor.codegen import common

    cpu_vec_isa.pick_vec_isa()
    codecache.CacheBase.get_system()
    codecache.torch_key()
    common.init_backend_registration()


def main(control: int) -> None:
    os.environ["MPLBACKEND"] = "Agg"
    for name in MODULES:
        importlib.import_module(name)
    find_out_once()
    count = len(os.listdir("/proc/self/task"))
    if count > 1:
        sys.exit(f"an import has started {count - 1} threads, which no child would have")
    gc.collect()
    # Else the first collection in each child would copy every page; vLLM unfreezes as it ends.
    gc.freeze()
    gc.unfreeze = lambda: None
    with socket.socket(fileno=control) as s:
        s.sendall(b"+")
        serve(s)
    os._exit(0)


# ---------------------------------------------------------------- the client


class ForkServer:
    """A running server; it ends with this process at the latest."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.control, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, str(Path(__file__).resolve()), str(fd)]
            self.process = subprocess.Popen(
                command, env=self.environment | NO_THREADS, pass_fds=[fd], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        assert self.control.recv(1), f"the fork server ended: status {self.process.wait()}"
        atexit.register(self.stop)

    def stop(self) -> None:
        self.control.close()
        self.process.wait()

    def check(self, env: Mapping[str, str]) -> None:
        """A variable that was read when the server started must still have that value."""
        for name in self.environment.keys() | env.keys():
            if name.startswith(READ_AT_START):
                assert env.get(name) == self.environment.get(name), f"{name}: needs fresh=True"


@functools.cache
def server() -> ForkServer:
    """This process's server, started at its first use."""
    return ForkServer()


class ForkedProcess(subprocess.Popen[str]):
    """subprocess.Popen([sys.executable, *args]), by the fork server.

    The process is not a child of this one: only its start and the wait for its end differ.
    """

    def _execute_child(
        self, args: Sequence[str], _executable: Any, _preexec_fn: Any, _close_fds: Any,
        _pass_fds: Any, cwd: Any, env: Any, _startupinfo: Any, _creationflags: Any, _shell: Any,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        *_rest: Any,
    ) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        server().check(environment)
        asked = {"args": args[1:], "cwd": str(cwd or os.getcwd()), "env": environment}
        run, theirs = socket.socketpair()
        with theirs:
            streams = [
                own if own != -1 else n for n, own in enumerate((p2cread, c2pwrite, errwrite))
            ]
            socket.send_fds(server().control, [b"+"], [theirs.fileno(), *streams])
        run.sendall(json.dumps(asked).encode() + b"\n")
        self._run, self._answers = run, run.makefile()
        self.pid = json.loads(self._answers.readline())["pid"]
        self._child_created = True
        for fd, other in ((p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread)):
            if other != -1:  # else it is the caller's own
                os.close(fd)

    def _internal_poll(self, *_args: Any, **_kwargs: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """(pid, status) as os.waitpid has it; (0, 0) while the process runs."""
        ready, _, _ = select.select([self._run], [], [], 0 if flags else None)
        if not ready:
            return 0, 0
        line = self._answers.readline()
        assert line, "the fork server has ended"
        return self.pid, json.loads(line)["status"]


if __name__ == "__main__":
    main(int(sys.argv[1]))
