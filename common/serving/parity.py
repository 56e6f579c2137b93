"""Parity, served against trained: whether a draft inside vLLM gets the hidden states that 03
stored, and computes from them what the code that trained it computes.

Shape suffixes: T tokens of a prompt, A aux layers, H hidden size, V vocabulary, K drafted tokens.
"""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.draft.checkpoint import load_draft
from common.draft.export import serving_layer_ids
from common.draft.linear_products import LinearProducts
from common.draft.model import ttt_states
from common.draft.packed_row import make_row
from common.errors import UserError
from common.serving.checkpoint import ServedDraft
from common.states.files import read_hidden
from common.states.folder import HiddenFolder
from common.verifier.head import HEAD_FILE, read_head_manifest
from common.verifier.logits import read_head

if TYPE_CHECKING:
    from common.draft.model import Eagle3Draft

# Relative differences. In bfloat16 right states differ by 3e-3 to 1.6e-2, by the batch's layout
# and between eager and compiled graphs; layer ids off by one by 0.1 and more.
MAX_AUX_ERROR = 0.05
MAX_DRAFT_ERROR = 0.1
# Tokens of the samples compared, and behind them, drafted, at most.
MIN_TOKENS, MAX_TOKENS, MAX_DRAFTED = 16, 2048, 16


@dataclass(frozen=True)
class StoredSample:
    """A sample of 03's folder: its token ids [T] and aux states [T, A, H] float32."""

    ids: list[int]
    aux_TAH: torch.Tensor


@dataclass(frozen=True)
class StoredStates:
    """The samples compared, and the folder that holds the verifier's head if 03 has noted it."""

    samples: list[StoredSample]
    head_folder: Path

    def embedding(self) -> torch.Tensor | None:
        """The verifier's, [V, H], as it computes with it; None where 03 has not noted it."""
        head = read_head_manifest(self.head_folder)
        return read_head(self.head_folder / HEAD_FILE, head.facts).embed_VH if head else None


@dataclass(frozen=True)
class Served:
    """What the draft inside vLLM got and computed for a prompt.

    aux_TAH: the aux states that entered it; passes: (token ids, states after the output norm
    [., H]) of its forward passes, the first over the prompt, then one drafted token each.
    """

    aux_TAH: torch.Tensor
    passes: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Parity:
    """Relative differences, by the keys that result.json has for them.

    fed_states: of the draft's input; made_states: of its output, at each depth, or None and why
    these were not compared.
    """

    fed_states_relative_error: float
    made_states_relative_error: list[float] | None = None
    made_states_not_compared: str | None = None


def stored_states(
    hidden: HiddenFolder, draft: ServedDraft, max_seq_len: int, budget: int
) -> StoredStates:
    """Two samples of 03's folder to compare serving with: the shortest, and the longest that vLLM
    computes in one pass (a fault may show only at later positions).

    Args:
        budget: vLLM's tokens of one pass.

    UserError, before anything is loaded, when the draft asks for other layers.
    """
    aux, window = hidden.layers[:-1], draft.checkpoint.config.get("sliding_window")
    if draft.aux_ids != serving_layer_ids(aux):
        raise UserError(
            f"{draft.checkpoint.folder}/config.json: asks for ids {draft.aux_ids}; {hidden.path}"
            f" holds layers {aux}, served as {serving_layer_ids(aux)}"
        )
    # what is drafted after it has to fit into the draft's positions as well
    positions = (draft.checkpoint.positions or max_seq_len + MAX_DRAFTED) - MAX_DRAFTED
    most = min(max_seq_len - 1, budget, MAX_TOKENS, window or budget, positions)
    fit = sorted((n, i) for i, n in hidden.lengths.items() if MIN_TOKENS <= n <= most)
    if not fit:
        raise UserError(
            f"{hidden.path}: no sample of {MIN_TOKENS} to {most} tokens to check parity with"
        )
    found = []
    for _, index in dict.fromkeys((fit[0], fit[-1])):
        hidden_TLH, ids_T = read_hidden(hidden.file(index))
        found.append(StoredSample(ids_T.tolist(), hidden_TLH[:, :-1].float()))
    return StoredStates(found, hidden.head_folder)


def serve_once(llm: Any, sample: StoredSample) -> Served:
    """Run a prompt; UserError where the draft gets other than A layers' states."""
    from vllm import SamplingParams

    llm.collective_rpc("record_draft")
    llm.generate(
        [{"prompt_token_ids": sample.ids}],
        SamplingParams(max_tokens=1, temperature=0, detokenize=False),
        use_tqdm=False,
    )
    aux, passes = next(r for r in llm.collective_rpc("recorded_draft") if r is not None)
    T, A, H = sample.aux_TAH.shape
    rows = [x for x in aux if x.shape[0] >= T and x.shape[1] == A * H]
    if not rows:
        raise UserError(
            f"vLLM fed the draft states of {[tuple(x.shape) for x in aux]}, expected"
            f" [{T}, {A * H}]: it serves other aux layers than the draft was trained on"
        )
    first = next((n for n, (ids, _) in enumerate(passes) if len(ids) >= T), len(passes))
    return Served(rows[0][:T].view(T, A, H), passes[first:])


def relative_error(states: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Norm of the difference over that of the expected states, along the last dimension."""
    states, expected = states.double(), expected.double()
    return (states - expected).norm(dim=-1) / expected.norm(dim=-1)


def aux_state_error(served: Served, sample: StoredSample) -> float:
    """How far the states that vLLM feeds the draft are from the stored ones.

    Returns:
        The relative difference of a token's states: the median over tokens (a mixture of
        experts sends a few elsewhere), the worst layer.
    """
    error_TA = relative_error(served.aux_TAH, sample.aux_TAH)
    return float(error_TA.median(dim=0).values.max())


def draft_state_errors(
    served: Served, draft: "Eagle3Draft", embed_VH: torch.Tensor, first_id: int
) -> list[float]:
    """How far the draft's states inside vLLM, after its output norm, are from what training
    computes of the same inputs in float32.

    Args:
        first_id: the prompt's first token, which the draft inside vLLM does not see.

    Returns:
        The relative difference of a row at each depth: the median over the prompt's, then of
        each drafted token's one.
    """
    T, A, H = served.aux_TAH.shape
    K = len(served.passes)
    ids = [first_id, *served.passes[0][0][:T].tolist()]
    ids += [int(tokens[0]) for tokens, _ in served.passes[1:]]
    states_TLH = torch.zeros(T + K, A + 1, H)
    states_TLH[:T, :A] = served.aux_TAH
    every_T = torch.ones(T + K, dtype=torch.bool)
    used, places_T = torch.tensor(ids).unique(return_inverse=True)
    row = make_row(states_TLH, None, places_T, every_T, [T + K], K, "next")
    found = []
    with torch.no_grad():
        trained = ttt_states(draft, LinearProducts(torch.float32), embed_VH[used].float(), row)
        for depth, (_, states) in enumerate(served.passes):
            # row t of the prompt; a drafted token continues its last
            rows, there = (slice(T), states[:T]) if depth == 0 else (slice(T - 1, T), states[:1])
            error = relative_error(there, draft.norm(trained[depth][rows]))
            found.append(float(error.median()))
    return found


def check_parity(
    llm: Any, stored: StoredStates, draft: ServedDraft, quantized_copy: bool = False
) -> Parity:
    """Compare the draft inside vLLM with the code that trained it, the worst of the samples;
    UserError where they differ.

    Args:
        llm: an engine with the draft.
        quantized_copy: of the verifier that the states are of, whose own states differ from them.
    """
    found, folder = draft.checkpoint, draft.checkpoint.folder
    served = [serve_once(llm, sample) for sample in stored.samples]
    aux_error = max(map(aux_state_error, served, stored.samples))
    if not (quantized_copy and isfinite(aux_error)) and not aux_error < MAX_AUX_ERROR:
        raise UserError(
            f"vLLM feeds the draft other states than it was trained on (relative difference"
            f" {aux_error:.3f}, allowed {MAX_AUX_ERROR})"
        )
    graph = "vLLM runs it as one graph"
    why = found.unlike or (None if all(one.passes for one in served) else graph)
    if why:
        return Parity(aux_error, made_states_not_compared=why)
    trained, own_VH = load_draft(found)
    embed_VH = stored.embedding() if own_VH is None else own_VH
    if embed_VH is None:
        why = f"{stored.head_folder} has no {HEAD_FILE}, 03's command adds it"
        return Parity(aux_error, made_states_not_compared=why)
    by_sample = [
        draft_state_errors(one, trained, embed_VH, sample.ids[0])
        for one, sample in zip(served, stored.samples, strict=True)
    ]
    errors = [max(depth) for depth in zip(*by_sample, strict=True)]
    if not max(errors) < MAX_DRAFT_ERROR:
        raise UserError(
            f"the draft inside vLLM computes other states than in training (relative difference per"
            f" depth {[round(x, 3) for x in errors]}, allowed {MAX_DRAFT_ERROR}); are {folder}'s"
            " config.json and weights of one draft?"
        )
    return Parity(aux_error, errors)
