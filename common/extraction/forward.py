"""One forward pass of vLLM in this process, and what it takes to make the next one safe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.data.samples import Sample
from common.errors import UserError
from common.verifier.config import Verifier
from common.verifier.engine import engine_died


@dataclass(frozen=True)
class Work:
    """What a run extracts: `todo` lists (unit, indices of its samples still to do)."""

    model: Verifier
    layers: list[int]
    verifier_dtype: str
    storage_dtype: str
    max_batch_tokens: int
    samples: dict[int, Sample]
    todo: list[tuple[int, list[int]]]
    out: Path
    total_tokens: int  # of the folder, done and to do

    def batch(self, indices: list[int], longest: int | None = None) -> list:
        """(index, token ids int32 [T]) of samples, cut to `longest`."""
        return [(i, self.samples[i].input_ids[:longest]) for i in indices]


def rank0(llm: Any, method: str, *args: Any) -> Any:
    """Call a capture method on all workers; the answer of the rank that captures."""
    return captured_answer(llm.collective_rpc(method, args=args))


def captured_answer(answers: list) -> Any:
    """The answer of the rank that captures, the only one that gives any."""
    return next(r for r in answers if r is not None)


def forward(llm: Any, batch: list, **sampling: Any) -> list:
    """One forward pass over the batch."""
    return llm.generate(
        [{"prompt_token_ids": ids.tolist()} for _, ids in batch],
        one_token(**sampling),
        use_tqdm=False,
    )


def one_token(**sampling: Any) -> Any:
    """Sampling parameters of a prefill: the one token that vLLM insists on."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0, detokenize=False, **sampling)


def start_capture(llm: Any, work: Work, tokens: int, dtype: str) -> None:
    shape = (tokens, work.model.hidden_size)
    rank0(llm, "capture_start", work.layers, work.model.num_layers, shape, dtype)


def one_pass(passes: int) -> None:
    if passes != 1:
        raise UserError(
            f"vLLM ran {passes} forward passes for a planned one, so the result would depend on"
            " chance; raise --gpu-memory-utilization or lower --max-batch-tokens"
        )


def reset_engine(llm: Any, reason: str) -> list[dict]:
    """After a failed pass, make the engine ready for the next; returns the writers' results of
    the passes before.

    UserError where that cannot be: a dead engine, or several ranks. When one rank fails, the
    others have gone on with the pass, and their collective operations would pair with those of
    the next one.
    """
    ranks = llm.llm_engine.vllm_config.parallel_config.world_size
    if ranks > 1:
        raise engine_died(f"or one of its {ranks} ranks failed in a pass: {reason}; see the log")
    try:
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        if engine.engine_core.engine_core.batch_queue is not None:
            engine.engine_core.engine_core.batch_queue.clear()
        return rank0(llm, "capture_drop")
    except Exception as second:
        raise engine_died(reason) from second
