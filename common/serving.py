"""A draft inside vLLM: what it accepts, and whether it is fed the states it was trained on."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.artifacts import read_json, read_report
from common.cli import UserError
from common.export import serving_layer_ids
from common.progress import Progress
from common.prompts import Prompt
from common.verifier import Verifier, safetensors_header

if TYPE_CHECKING:
    import torch


def check_draft(folder: Path, verifier: Verifier) -> None:
    """UserError unless the checkpoint is whole and of this verifier's shape."""
    config = read_json(folder / "config.json")
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"{folder}: has no model.safetensors; run 04_train.py to its end")
    header = safetensors_header(folder / "model.safetensors")
    layer = config.get("transformer_layer_config", config)
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
    if header["fc.weight"]["shape"][1] != len(ids) * verifier.hidden_size:
        raise UserError(f"{folder}: fc.weight does not fit {len(ids)} aux layers")


# ---------------------------------------------------------------- generation


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
    what: str,
) -> Run:
    """Decode all prompts greedily, noting how many tokens each engine step emitted."""
    from vllm import SamplingParams

    bar = Progress(f"evaluate: {what}", len(prompts), "prompts")
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


# ---------------------------------------------------------------- what the draft is fed


class ServingExtension:
    """Worker methods that record what enters the draft's `fc`; rank 0 answers."""

    model_runner: Any
    rank: int

    def fed_start(self) -> None:
        model = draft_model(self.model_runner)
        self._fed: list[torch.Tensor] = []

        def hook(_module, args) -> None:
            self._fed.append(args[0].detach().float().cpu().clone())

        # norm_before_fc and fc_norm come before fc: look at what they get.
        inner = model.model
        target = getattr(inner, "input_norm", None) or inner.fc
        self._handle = target.register_forward_pre_hook(hook)

    def fed_stop(self) -> "list[torch.Tensor] | None":
        self._handle.remove()
        fed, self._fed = self._fed, []
        return fed if self.rank == 0 else None


def draft_model(model_runner: Any) -> Any:
    """The draft inside vLLM's model runner (V1: `drafter`, V2: `speculator`)."""
    for name in ("drafter", "speculator"):
        model = getattr(getattr(model_runner, name, None), "model", None)
        if model is not None:
            return model
    raise RuntimeError(f"no draft in {type(model_runner).__name__}")


def fed_states_error(llm: Any, ids: list[int], aux_TAH: "torch.Tensor") -> float:
    """Relative difference between what vLLM feeds the draft on a prompt and stored rows.

    Args:
        ids: a sample's tokens.
        aux_TAH: its stored aux states, [T, A*H].
    """
    from vllm import SamplingParams

    llm.collective_rpc("fed_start")
    llm.generate(
        [{"prompt_token_ids": ids}],
        SamplingParams(max_tokens=1, temperature=0, detokenize=False),
        use_tqdm=False,
    )
    fed = next(r for r in llm.collective_rpc("fed_stop") if r is not None)
    T = len(ids)
    rows = [x for x in fed if x.shape[0] >= T and x.shape[1] == aux_TAH.shape[1]]
    if not rows:
        raise UserError(
            f"vLLM fed the draft {[tuple(x.shape) for x in fed]}, expected"
            f" [{T}, {aux_TAH.shape[1]}]: it serves other aux layers than the draft was trained on"
        )
    theirs, ours = rows[0][:T].double(), aux_TAH.double()
    return float((theirs - ours).norm() / ours.norm())


def check_fed_states(llm: Any, hidden_states: Path, max_seq_len: int) -> float:
    """Compare serving with 03's files on one sample; UserError when the layers differ."""
    from common.hidden_files import hidden_file, read_hidden

    report = read_report(hidden_states, "extract")
    lengths = read_json(hidden_states / "sample_lengths.json")
    index = next((int(i) for i, n in lengths.items() if 16 <= n < max_seq_len), None)
    if index is None:
        raise UserError(f"{hidden_states}: no sample of 16 to {max_seq_len} tokens to check with")
    hidden_TLH, ids_T = read_hidden(hidden_file(hidden_states, index))
    error = fed_states_error(llm, ids_T.tolist(), hidden_TLH[:, :-1].flatten(1).float())
    # In bfloat16 two batch layouts differ by under 1e-2; a layer off by one by 2e-2 and more.
    if not error < 0.02:
        aux = report["settings"]["layers"][:-1]
        raise UserError(
            f"vLLM feeds the draft other states than {hidden_states} holds (relative difference"
            f" {error:.3f}): its config must ask for ids {serving_layer_ids(aux)}"
        )
    return error
