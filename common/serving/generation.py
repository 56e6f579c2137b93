"""Greedy decoding of prompts in vLLM, with a draft or without."""

import time
from dataclasses import dataclass, field
from typing import Any

from common.data.prompts import Prompt
from common.progress import Progress


@dataclass
class Decoded:
    """One prompt's greedy answer. `passes` counts the verifier's forward passes after the prefill,
    `passes_tokens` the tokens that they emitted."""

    ids: list[int] = field(default_factory=list)
    passes: int = 0
    passes_tokens: int = 0


@dataclass
class Run:
    """All prompts decoded: prompt id → its answer, the answers' tokens, the seconds they took."""

    answers: dict[str, Decoded]
    tokens: int
    seconds: float


def warm_up_decoding(llm: Any, prompts: list[Prompt]) -> None:
    """Answer the prompts in a few tokens, so that what compiles at its first use is not timed."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    llm.generate([{"prompt_token_ids": p.input_ids} for p in prompts], params, use_tqdm=False)


def generate(
    llm: Any,
    prompts: list[Prompt],
    end_ids: tuple[int, ...],
    max_new_tokens: int,
    concurrency: int,
    what: str,
) -> Run:
    """Decode all prompts greedily, `concurrency` of them at the same time (as the engine is set),
    noting how many tokens each of its steps emitted."""
    from vllm import SamplingParams

    bar = Progress(f"evaluate: {what}", len(prompts), "prompts", 0, concurrency)
    answers = {prompt.id: Decoded() for prompt in prompts}
    params = SamplingParams(
        max_tokens=max_new_tokens, temperature=0, stop_token_ids=list(end_ids), detokenize=False
    )
    for prompt in prompts:
        llm.llm_engine.add_request(prompt.id, {"prompt_token_ids": prompt.input_ids}, params)
    started = time.monotonic()
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            answer = answers[output.request_id]
            ids = list(output.outputs[0].token_ids)
            new = len(ids) - len(answer.ids)
            # The prefill's own token comes without a draft.
            if answer.ids and new:
                answer.passes += 1
                answer.passes_tokens += new
            answer.ids = ids
            if output.finished:
                bar.add(1)
    seconds = time.monotonic() - started
    bar.close()
    return Run(answers, sum(len(a.ids) for a in answers.values()), seconds)
