"""Starting and ending real vLLM in this process, the same way for every tool.

Runs with vLLM 0.26 (CUDA) and 0.32 (CPU); written for 0.33, which has not been tried.
`prepare_environment` must run before vllm is imported.
"""

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import streams
from common.errors import UserError, again, finish, one_line, report_error
from common.progress import duration, heartbeat
from common.verifier.config import Verifier

if TYPE_CHECKING:
    from vllm import LLM

ROOT = str(Path(__file__).resolve().parent.parent.parent)
CPU_KV_CACHE_GIB = "2"
LOAD_TIMEOUT = 7200.0  # seconds; a 1T model takes 22 minutes


def prepare_environment(tp_size: int) -> None:
    """Set what vLLM reads from the environment. But for VLLM_ENABLE_V1_MULTIPROCESSING, on
    which determinism rests, a variable that the user has set is left alone."""
    # The engine core stays in this process: one planned batch then runs as one step,
    # in the same layout every time, and start-up saves a process (at TP=1).
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # A forked worker can hang once this process has used torch's threads.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_CACHE_GIB)
    if tp_size > 1:
        # vLLM-CPU asserts on NUMA nodes unless each rank's cores are named.
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // tp_size)
        bound = [cores[r * share : (r + 1) * share] or cores[-1:] for r in range(tp_size)]
        bind = "|".join(",".join(map(str, rank)) for rank in bound)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", bind)
    # Spawned workers import the worker extension by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def default_engine_args(verifier: Verifier, tp_size: int) -> dict[str, Any]:
    """Arguments of vllm.LLM that every use here shares."""
    args: dict[str, Any] = {
        "model": verifier.path,
        "tensor_parallel_size": tp_size,
        "enable_prefix_caching": False,  # cached tokens would have no hidden states
        "seed": 0,
        "worker_extension_cls": "common.worker.WorkerExtension",
    }
    if "text_config" in verifier.config:  # a multimodal wrapper: text only
        args["language_model_only"] = True
    if tp_size > 1 or verifier.config.get("model_type") == "kimi_k25":
        # At any TP the mp executor keeps the core in process; Kimi's class does not load
        # in vLLM's own process on CPU (a Triton dispatcher scan fails).
        args["distributed_executor_backend"] = "mp"
    return args


@contextlib.contextmanager
def running(
    args: dict[str, Any], extra: dict[str, Any], what: str, timeout: float
) -> "Iterator[LLM]":
    """A vLLM engine, ended on every way out, before the last line is printed."""
    with streams.libraries_captured():
        try:
            llm = start_engine(args, extra, what, timeout)
            try:
                llm.collective_rpc("ignore_signals")
                yield llm
                llm.collective_rpc("restore_signals")
            finally:
                stop_engine(llm)
        except Exception as e:
            if not isinstance(e, UserError) or e.__cause__ is not None:  # a library's fault
                streams.show_captured()
            raise


@dataclass(frozen=True)
class EngineSettings:
    """The flags of an engine that decodes.

    max_seq_len: tokens of prompt and answer together; batch_size: answers at the same time;
    gpu_memory_utilization: of a GPU's memory, 0 to 1; engine_args: further arguments of vllm.LLM;
    load_timeout: minutes.
    """

    tp_size: int
    max_seq_len: int
    batch_size: int
    dtype: str
    gpu_memory_utilization: float
    trust_remote_code: bool
    engine_args: dict[str, Any]
    load_timeout: float


def generating(
    settings: EngineSettings, verifier: Verifier, what: str, **more: Any
) -> "contextlib.AbstractContextManager[LLM]":
    """An engine that decodes token ids to token ids, with its counters on; see running.
    `more`: arguments of vllm.LLM that no flag sets."""
    prepare_environment(settings.tp_size)
    longest = min(settings.max_seq_len, verifier.max_positions or settings.max_seq_len)
    engine_args = default_engine_args(verifier, settings.tp_size) | {
        "dtype": settings.dtype,
        "max_model_len": longest,
        "max_num_seqs": settings.batch_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "trust_remote_code": settings.trust_remote_code,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    }
    return running(engine_args | more, settings.engine_args, what, settings.load_timeout * 60)


def start_engine(
    args: dict[str, Any], extra: dict[str, Any], what: str = "vLLM", timeout: float = LOAD_TIMEOUT
) -> "LLM":
    """Build vllm.LLM; UserError with vLLM's own reason when it does not come up.

    After `timeout` seconds the process ends with status 1: nothing can interrupt a load that
    hangs in a library.
    """

    def give_up() -> None:
        streams.show_captured()
        report_error(
            f"vLLM did not come up on {args['model']} within {duration(timeout)}; see the log above"
            " (VLLM_LOGGING_LEVEL=INFO shows more), or raise --load-timeout"
        )
        end_workers()
        finish(1)

    with heartbeat(f"{what}: loading {args['model']} in vLLM", timeout, give_up):
        from vllm import LLM

        try:
            return LLM(**(args | extra))
        except TypeError as e:
            raise UserError(f"vLLM refused an argument: {e}; see --engine-args") from e
        except Exception as e:  # any fault of loading, in the words of vLLM
            raise UserError(f"vLLM did not start on {args['model']}: {one_line(e, 400)}") from e


def stop_engine(llm: "LLM") -> None:
    """Shut the engine and its workers down, so that nothing of them prints after us."""
    with contextlib.suppress(AttributeError):
        llm.llm_engine.engine_core.shutdown()
    gc.collect()


def engine_died(reason: str) -> UserError:
    """The error for an engine that cannot continue in this process."""
    return UserError(
        f"vLLM's engine died ({reason}); what is finished is saved, {again()} to continue"
    )


def failed(llm: "LLM") -> bool:
    """Whether vLLM has noticed that one of its workers died."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor  # type: ignore[attr-defined]
    return bool(getattr(executor, "is_failed", False))


def end_workers() -> None:
    """Kill the processes that this one has started, and theirs."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
