"""A draft inside vLLM: what it accepts, and whether it is fed the states it was trained on."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.artifacts import must_match, read_json
from common.cli import UserError
from common.export import serving_layer_ids
from common.progress import Progress
from common.prompts import Prompt
from common.verifier import Verifier, fingerprint, safetensors_header

if TYPE_CHECKING:
    import torch


def check_draft(folder: Path, verifier: Verifier) -> None:
    """UserError unless the checkpoint is whole and of this verifier's shape."""
    config = read_json(folder / "config.json")
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"{folder}: has no model.safetensors; run 04_train.py to its end")
    header = safetensors_header(folder / "model.safetensors")
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


class ServingMethods:
    """Worker methods that record what enters the draft's `fc`; rank 0 answers."""

    rank: int  # vLLM's worker has both
    model_runner: Any

    def fed_start(self) -> None:
        inner = draft_model(self.model_runner).model
        # norm_before_fc (one) and fc_norm (a layer each) come before fc: look at what they get.
        norms = getattr(inner, "fc_norm", None)
        targets = list(norms) if norms else [getattr(inner, "input_norm", None) or inner.fc]
        self._fed: list[list[torch.Tensor]] = [[] for _ in targets]

        def watch(target: Any, seen: "list[torch.Tensor]") -> Any:
            return target.register_forward_pre_hook(
                lambda _module, args: seen.append(args[0].detach().float().cpu().clone())
            )

        self._handles = [watch(t, seen) for t, seen in zip(targets, self._fed, strict=True)]

    def fed_stop(self) -> "list[torch.Tensor] | None":
        import torch

        for handle in self._handles:
            handle.remove()
        passes = [torch.cat(parts, -1) for parts in zip(*self._fed, strict=True)]
        return passes if self.rank == 0 else None


def draft_model(model_runner: Any) -> Any:
    """The draft inside vLLM's model runner (V1: `drafter`, V2: `speculator`)."""
    for name in ("drafter", "speculator"):
        model = getattr(getattr(model_runner, name, None), "model", None)
        if model is not None:
            return model
    raise RuntimeError(f"no draft in {type(model_runner).__name__}")


def stored_sample(
    folder: Path, draft: Path, verifier: Verifier, max_seq_len: int
) -> "tuple[list[int], torch.Tensor]":
    """A sample of 03's folder to compare serving with: (token ids, aux states [T, A, H]).

    UserError, before anything is loaded, when the folder is not of this verifier or the
    draft asks for other layers.
    """
    from common.hidden_files import read_hidden
    from common.hidden_folder import open_hidden

    hidden = open_hidden(folder)
    must_match(
        "verifier",
        folder,
        hidden.inputs.get("verifier"),
        Path(verifier.path),
        fingerprint(verifier),
        "pass the --hidden-states that the draft was trained on",
    )
    ids = read_json(draft / "config.json")["eagle_aux_hidden_state_layer_ids"]
    aux = hidden.settings["layers"][:-1]
    if ids != serving_layer_ids(aux):
        raise UserError(
            f"{draft}/config.json: asks for ids {ids}; {folder} holds layers {aux}, served as"
            f" {serving_layer_ids(aux)}"
        )
    index = next((i for i, n in hidden.lengths.items() if 16 <= n < max_seq_len), None)
    if index is None:
        raise UserError(f"{folder}: no sample of 16 to {max_seq_len} tokens to check with")
    hidden_TLH, ids_T = read_hidden(hidden.file(index))
    return ids_T.tolist(), hidden_TLH[:, :-1].float()


def fed_states_error(llm: Any, ids: list[int], aux_TAH: "torch.Tensor") -> float:
    """How far the states that vLLM feeds the draft on a prompt are from stored rows.

    Args:
        ids: a sample's tokens.
        aux_TAH: its stored aux states [T, A, H].

    Returns:
        The relative difference of a token's rows: the median over tokens (a mixture of
        experts sends a few elsewhere), the worst layer.
    """
    from vllm import SamplingParams

    llm.collective_rpc("fed_start")
    llm.generate(
        [{"prompt_token_ids": ids}],
        SamplingParams(max_tokens=1, temperature=0, detokenize=False),
        use_tqdm=False,
    )
    fed = next(r for r in llm.collective_rpc("fed_stop") if r is not None)
    T, A, H = aux_TAH.shape
    rows = [x for x in fed if x.shape[0] >= T and x.shape[1] == A * H]
    if not rows:
        raise UserError(
            f"vLLM fed the draft {[tuple(x.shape) for x in fed]}, expected [{T}, {A * H}]: it"
            " serves other aux layers than the draft was trained on"
        )
    theirs_TAH, ours_TAH = rows[0][:T].view(T, A, H).double(), aux_TAH.double()
    error_TA = (theirs_TAH - ours_TAH).norm(dim=-1) / ours_TAH.norm(dim=-1)
    return float(error_TA.median(dim=0).values.max())


# In bfloat16 right states differ by 3e-3 between batch layouts, and by 1.6e-2 (a random model
# on an H200) between eager and compiled graphs; ids off by one by 0.1 and more.
FED_GATE = 0.05


def check_fed_states(llm: Any, ids: list[int], aux_TAH: "torch.Tensor") -> float:
    """`fed_states_error`, which must be under the gate."""
    error = fed_states_error(llm, ids, aux_TAH)
    if not error < FED_GATE:
        raise UserError(
            f"vLLM feeds the draft other states than it was trained on (relative difference"
            f" {error:.3f}, allowed {FED_GATE})"
        )
    return error
