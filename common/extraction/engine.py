"""The vLLM engine of 03: its arguments, and one forward pass in it.

What starts and ends engines is common/verifier/engine.py.
"""

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, one_line
from common.extraction.batching import BATCHES_IN_FLIGHT, MAX_SAMPLES_PER_BATCH
from common.extraction.settings import ExtractSettings
from common.extraction.work import Capture, SampleIds
from common.verifier.config import Verifier
from common.verifier.engine import default_engine_args, engine_died
from common.verifier.layer_calls import LOOK_IDS, LOOK_TOKENS

if TYPE_CHECKING:
    from common.extraction.capture import Submitted
    from common.extraction.writer import WrittenBatch

SHORTEST = LOOK_TOKENS  # tokens that an engine here takes, however short the samples


def capture_engine_args(
    settings: ExtractSettings, capture: Capture, longest: int
) -> dict[str, Any]:
    """Arguments of vllm.LLM for capturing hidden states: eager, no cache reuse, no tokenizer.

    `longest`: tokens of the longest sample.
    """
    longest = max(longest, SHORTEST) + 1  # the one token that a request must generate
    budget = max(settings.max_batch_tokens, longest)
    executor = settings.engine_args.get("distributed_executor_backend")
    return default_engine_args(capture.verifier, settings.tp_size) | {
        "enforce_eager": True,  # hooks fire in eager mode only
        "skip_tokenizer_init": True,
        "dtype": capture.verifier_dtype,
        "max_model_len": longest,
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(
            min(settings.batch_size, MAX_SAMPLES_PER_BATCH) * BATCHES_IN_FLIGHT, budget
        ),
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "trust_remote_code": settings.trust_remote_code,
        # A batch is launched while the one before computes (runner.py, Runner). With Ray vLLM has
        # such a queue in some versions only; on CPUs it turns this off.
        "async_scheduling": executor in (None, "mp", "uni"),
    }


def require_kv_cache(llm: Any, batches: list[list[int]], lengths: dict[int, int]) -> None:
    """UserError unless the KV cache holds the batches in vLLM's queue at once, so that each runs
    as one step."""
    cache = llm.llm_engine.vllm_config.cache_config
    size, blocks = int(cache.block_size or 0), int(cache.num_gpu_blocks or 0)
    if not size or not blocks:
        return
    # a sample and the one token it must generate, rounded up to blocks; one block is vLLM's own
    largest = max(sum(-(-(lengths[i] + 1) // size) for i in batch) for batch in batches)
    queue = BATCHES_IN_FLIGHT if llm.llm_engine.vllm_config.scheduler_config.async_scheduling else 1
    needed = largest * queue + 1
    if needed > blocks:
        raise UserError(
            f"vLLM's KV cache holds {blocks * size} tokens, {queue} forward passes need"
            f" {needed * size}; raise --gpu-memory-utilization (on a CPU VLLM_CPU_KVCACHE_SPACE,"
            " in GiB) or lower --max-batch-tokens"
        )


# ---------------------------------------------------------------- one forward pass


def rank0(llm: Any, method: str, *args: Any) -> Any:
    """Call a capture method on all workers; the answer of the rank that captures."""
    return captured_answer(llm.collective_rpc(method, args=args))


def captured_answer(answers: list) -> Any:
    """The answer of the rank that captures, the only one that gives any."""
    return next(r for r in answers if r is not None)


def find_layers(llm: Any, verifier: Verifier) -> str:
    """Find in a short forward pass how the loaded verifier calls its layers; returns it in words.
    UserError where that cannot be told."""
    llm.collective_rpc("capture_look", args=(verifier.num_layers,))
    try:
        forward(llm, list(enumerate(LOOK_IDS)))
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        raise UserError(
            f"vLLM's first forward pass of {verifier.path} fails: {one_line(e)} in"
            f" {Path(at.filename).name}, line {at.lineno}; nothing was written"
        ) from e
    found = rank0(llm, "capture_found", verifier.hidden_size)
    if found.refusal is not None:
        raise UserError(f"{found.refusal}; nothing was written")
    return found.description


def start_capture(llm: Any, capture: Capture, tokens: int, dtype: str) -> None:
    """Hook the layers, with buffers for forward passes of up to `tokens` tokens in `dtype`."""
    shape = (tokens, capture.form.hidden_size)
    rank0(llm, "capture_start", capture.layers, shape, dtype)


def forward(llm: Any, samples: list[SampleIds], **sampling: Any) -> list:
    """One forward pass over the samples; vLLM's outputs."""
    return llm.generate(
        [{"prompt_token_ids": ids.tolist()} for _, ids in samples],
        one_token(**sampling),
        use_tqdm=False,
    )


def one_token(**sampling: Any) -> Any:
    """Sampling parameters of a prefill: the one token that vLLM insists on."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0, detokenize=False, **sampling)


def written(submitted: "Submitted") -> "list[WrittenBatch]":
    """The batches finished since the last submission; UserError unless this one ran as planned, in
    one forward pass."""
    if submitted.passes != 1:
        raise UserError(
            f"vLLM ran {submitted.passes} forward passes for a planned one, so the result would"
            " depend on chance; raise --gpu-memory-utilization or lower --max-batch-tokens"
        )
    return submitted.finished


def reset_engine(llm: Any, reason: str) -> "list[WrittenBatch]":
    """After a failed batch, make the engine ready for the next; returns the writers' results of
    the batches before.

    UserError where that cannot be: a dead engine, or several ranks. When one rank fails, the
    others have continued with the batch, and their collective operations would pair with those of
    the next one.
    """
    ranks = llm.llm_engine.vllm_config.parallel_config.world_size
    if ranks > 1:
        raise engine_died(f"or one of its {ranks} ranks failed in a batch: {reason}; see the log")
    try:
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        if engine.engine_core.engine_core.batch_queue is not None:
            engine.engine_core.engine_core.batch_queue.clear()
        return rank0(llm, "capture_drop")
    except Exception as second:
        raise engine_died(reason) from second
