"""A draft inside vLLM: whether it can be served, and what is accepted of it."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.artifacts import read_json
from common.data.prompts import Prompt
from common.errors import UserError
from common.progress import Progress
from common.tensor_files import read_header
from common.verifier.config import Verifier


def check_draft(folder: Path, verifier: Verifier) -> None:
    """UserError unless the checkpoint is whole and of this verifier's shape."""
    config = read_json(folder / "config.json")
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"{folder}: has no model.safetensors; run 04_train.py to its end")
    header = read_header(folder / "model.safetensors")
    layer = config.get("transformer_layer_config", config)
    if not isinstance(layer, dict) or "fc.weight" not in header:
        raise UserError(f"{folder}: is not an EAGLE-3 draft (no fc.weight, or a damaged config)")
    for key, ours in (("hidden_size", verifier.hidden_size), ("vocab_size", verifier.vocab_size)):
        if layer.get(key) != ours:
            raise UserError(
                f"{folder}: was made for a verifier with {key} {layer.get(key)},"
                f" {verifier.path} has {ours}"
            )
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        raise UserError(
            f"{folder}/config.json: has no eagle_aux_hidden_state_layer_ids; a server would"
            " silently take other layers than it was trained on"
        )
    if header["fc.weight"].shape[1] != len(ids) * verifier.hidden_size:
        raise UserError(f"{folder}: fc.weight does not fit {len(ids)} aux layers")
    missing = [k for k in ("num_attention_heads", "rms_norm_eps") if k not in layer]
    if missing:
        raise UserError(f"{folder}/config.json: has no {missing[0]}; is it whole?")
    # a server would take a head or map that is not there for zeros, without a word
    rows = config.get("draft_vocab_size") or verifier.vocab_size
    shapes = {name: place.shape for name, place in header.items()}
    if shapes.get("lm_head.weight") != [rows, verifier.hidden_size]:
        raise UserError(f"{folder}: has no lm_head.weight of {rows} tokens; is it whole?")
    if rows < verifier.vocab_size and shapes.get("d2t") != [rows]:
        raise UserError(f"{folder}: has no d2t of {rows} tokens; is it whole?")


# ---------------------------------------------------------------- generation


def warm_up(llm: Any, prompts: list[Prompt]) -> None:
    """Answer the prompts in a few tokens, so that what compiles at its first use is not timed."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    llm.generate([{"prompt_token_ids": p.input_ids} for p in prompts], params, use_tqdm=False)


@dataclass
class Answer:
    """One greedy answer. `passes` counts the verifier's forward passes after the prefill,
    `passes_tokens` the tokens that they emitted."""

    ids: list[int] = field(default_factory=list)
    passes: int = 0
    passes_tokens: int = 0


@dataclass
class Run:
    answers: dict[str, Answer]
    tokens: int
    seconds: float


def generate(
    llm: Any,
    prompts: list[Prompt],
    end_ids: tuple[int, ...],
    max_new_tokens: int,
    at_once: int,
    what: str,
) -> Run:
    """Decode all prompts greedily, `at_once` of them together as the engine is set, noting how
    many tokens each of its steps emitted."""
    from vllm import SamplingParams

    bar = Progress(f"evaluate: {what}", len(prompts), "prompts", at_once=at_once)
    answers = {prompt.id: Answer() for prompt in prompts}
    for prompt in prompts:
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=0,
            stop_token_ids=list(end_ids),
            detokenize=False,
        )
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


def spec_counters(llm: Any) -> dict[str, float]:
    """vLLM's own speculative-decoding counters so far."""
    out: dict[str, float] = {"drafts": 0, "accepted": 0}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            out["drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            out["accepted"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            for i, value in enumerate(metric.values):
                out[f"position_{i}"] = out.get(f"position_{i}", 0) + value
    return out
