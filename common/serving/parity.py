"""Whether a draft inside vLLM is the one that was trained: it is fed the states that 03 stored,
and makes of them what the code that trained it makes.

Shape suffixes: T tokens of a prompt, A aux layers, H hidden size, K drafted tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.artifacts import read_json
from common.draft.checkpoint import load_draft
from common.draft.export import serving_layer_ids
from common.errors import UserError
from common.manifest import must_match
from common.verifier.config import Verifier
from common.verifier.fingerprint import fingerprint
from common.verifier.tensors import read_tensors

if TYPE_CHECKING:
    import torch

    from common.draft.model import Eagle3Draft

# In bfloat16 right states differ by 3e-3 to 1.6e-2, by the batch's layout and between eager and
# compiled graphs; ids off by one by 0.1 and more.
FED_GATE = 0.05
MADE_GATE = 0.1


# ---------------------------------------------------------------- inside vLLM's workers


class ServingMethods:
    """Worker methods that record what goes through the draft; rank 0 answers."""

    rank: int  # vLLM's worker has both
    model_runner: Any

    def watch_draft(self) -> None:
        draft = draft_model(self.model_runner)
        inner = draft.model
        # norm_before_fc (one) and fc_norm (a layer each) come before fc: look at what they get.
        norms = getattr(inner, "fc_norm", None)
        targets = list(norms) if norms else [getattr(inner, "input_norm", None) or inner.fc]
        self._fed: list[list[torch.Tensor]] = [[] for _ in targets]
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []

        def made(_module: Any, args: Any, kwargs: Any, out: Any) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._made.append((ids.cpu().clone(), out[0].detach().float().cpu().clone()))

        def watch(target: Any, seen: "list[torch.Tensor]") -> Any:
            return target.register_forward_pre_hook(
                lambda _module, args: seen.append(args[0].detach().float().cpu().clone())
            )

        self._handles = [watch(t, seen) for t, seen in zip(targets, self._fed, strict=True)]
        self._handles.append(draft.register_forward_hook(made, with_kwargs=True))

    def seen_of_draft(self) -> "tuple[list[torch.Tensor], list] | None":
        """(what entered `fc`, a tensor a pass; (token ids, normed states) of each pass)."""
        import torch

        for handle in self._handles:
            handle.remove()
        passes = [torch.cat(parts, -1) for parts in zip(*self._fed, strict=True)]
        return (passes, self._made) if self.rank == 0 else None


def draft_model(model_runner: Any) -> Any:
    """The draft inside vLLM's model runner (V1: `drafter`, V2: `speculator`)."""
    for name in ("drafter", "speculator"):
        model = getattr(getattr(model_runner, name, None), "model", None)
        if model is not None:
            return model
    raise RuntimeError(f"no draft in {type(model_runner).__name__}")


# ---------------------------------------------------------------- the comparison


def stored_sample(
    folder: Path, draft: Path, verifier: Verifier, max_seq_len: int
) -> "tuple[list[int], torch.Tensor]":
    """A sample of 03's folder to compare serving with: (token ids, aux states [T, A, H]).

    UserError, before anything is loaded, when the folder is not of this verifier or the
    draft asks for other layers.
    """
    from common.states.files import read_hidden
    from common.states.folder import open_hidden

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
    # the shortest: vLLM computes it in one pass, whatever its budget of tokens
    fit = [(n, i) for i, n in hidden.lengths.items() if 16 <= n < max_seq_len]
    if not fit:
        raise UserError(f"{folder}: no sample of 16 to {max_seq_len} tokens to check with")
    index = min(fit)[1]
    hidden_TLH, ids_T = read_hidden(hidden.file(index))
    return ids_T.tolist(), hidden_TLH[:, :-1].float()


@dataclass(frozen=True)
class Served:
    """What the draft inside vLLM got and made for a prompt.

    fed_TAH: the aux states; passes: (token ids, states after the output norm [., H]) of its
    forward passes, the first over the prompt, then one drafted token each.
    """

    fed_TAH: "torch.Tensor"
    passes: "list[tuple[torch.Tensor, torch.Tensor]]"


def serve_once(llm: Any, ids: list[int], A: int, H: int) -> Served:
    """Run a prompt; UserError where the draft is fed other than A layers' states."""
    from vllm import SamplingParams

    llm.collective_rpc("watch_draft")
    llm.generate(
        [{"prompt_token_ids": ids}],
        SamplingParams(max_tokens=1, temperature=0, detokenize=False),
        use_tqdm=False,
    )
    fed, made = next(r for r in llm.collective_rpc("seen_of_draft") if r is not None)
    T = len(ids)
    rows = [x for x in fed if x.shape[0] >= T and x.shape[1] == A * H]
    if not rows:
        raise UserError(
            f"vLLM fed the draft {[tuple(x.shape) for x in fed]}, expected [{T}, {A * H}]: it"
            " serves other aux layers than the draft was trained on"
        )
    first = next((n for n, (tokens, _) in enumerate(made) if len(tokens) >= T), len(made))
    return Served(rows[0][:T].view(T, A, H), made[first:])


def fed_error(served: Served, aux_TAH: "torch.Tensor") -> float:
    """How far the states that vLLM feeds the draft are from the stored ones, [T, A, H].

    Returns:
        The relative difference of a token's rows: the median over tokens (a mixture of
        experts sends a few elsewhere), the worst layer.
    """
    theirs_TAH, ours_TAH = served.fed_TAH.double(), aux_TAH.double()
    error_TA = (theirs_TAH - ours_TAH).norm(dim=-1) / ours_TAH.norm(dim=-1)
    return float(error_TA.median(dim=0).values.max())


def made_errors(
    served: Served, draft: "Eagle3Draft", embed_VH: "torch.Tensor", first_id: int
) -> list[float]:
    """How far the states that the draft makes inside vLLM, after its output norm, are from what
    training computes of the same inputs in float32.

    Returns:
        The relative difference of a row at each depth: the median over the prompt's, then of
        each drafted token's one.
    """
    import torch

    from common.draft.linear_products import Products
    from common.draft.model import ttt_states
    from common.draft.packed_row import make_row

    T, A, H = served.fed_TAH.shape
    K = len(served.passes)
    ids = [first_id, *served.passes[0][0][:T].tolist()]
    ids += [int(tokens[0]) for tokens, _ in served.passes[1:]]
    states_TLH = torch.zeros(T + K, A + 1, H)
    states_TLH[:T, :A] = served.fed_TAH
    every_T = torch.ones(T + K, dtype=torch.bool)
    used, places_T = torch.tensor(ids).unique(return_inverse=True)
    row = make_row(states_TLH, None, places_T, every_T, [T + K], K, "next")
    with torch.no_grad():
        states = ttt_states(draft, Products(torch.float32), embed_VH[used].float(), row)
        found = []
        for depth, (_, theirs) in enumerate(served.passes):
            # row t of the prompt; a drafted token continues its last
            rows, there = (slice(T), theirs[:T]) if depth == 0 else (slice(T - 1, T), theirs[:1])
            mine = draft.norm(states[depth][rows]).double()
            error = (there.double() - mine).norm(dim=-1) / mine.norm(dim=-1)
            found.append(float(error.median()))
    return found


def check_served(
    llm: Any, ids: list[int], aux_TAH: "torch.Tensor", folder: Path, verifier: Verifier
) -> dict[str, Any]:
    """`fed_error` and `made_errors` of a sample, which must be under their gates."""
    served = serve_once(llm, ids, *aux_TAH.shape[1:])
    fed = fed_error(served, aux_TAH)
    if not fed < FED_GATE:
        raise UserError(
            f"vLLM feeds the draft other states than it was trained on (relative difference"
            f" {fed:.3f}, allowed {FED_GATE})"
        )
    draft = load_draft(folder)
    if draft is None or not served.passes:
        why = "its rotary embedding is scaled" if draft is None else "vLLM runs it as one graph"
        return {"fed_states_relative_error": fed, "made_states_not_compared": why}
    embed_VH = read_tensors(verifier, ("embed_tokens",))["embed_tokens"]
    made = made_errors(served, draft, embed_VH, ids[0])
    if not max(made) < MADE_GATE:
        raise UserError(
            f"the draft inside vLLM makes other states of its inputs than in training (relative"
            f" difference a depth {[round(x, 3) for x in made]}, allowed {MADE_GATE}); was"
            f" {folder} made by 04_train.py?"
        )
    return {"fed_states_relative_error": fed, "made_states_relative_error": made}
