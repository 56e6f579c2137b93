"""Whether vLLM can serve a draft checkpoint for a verifier, checked before anything loads."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.artifacts import read_json, write_json
from common.data.prompts import Prompt
from common.draft.checkpoint import (
    AUX_IDS,
    NOT_TRAINED,
    DraftCheckpoint,
    check_values,
    expected_sizes,
    read_checkpoint,
)
from common.errors import UserError
from common.verifier.config import Verifier


@dataclass(frozen=True)
class ServedDraft:
    """A checkpoint that vLLM can serve.

    aux_ids: the layers whose states it is fed, as a server counts them; remark: where they are
    not its config.json's own, or not where every server reads them.
    """

    checkpoint: DraftCheckpoint
    aux_ids: list[int]
    remark: str | None


def check_draft(folder: Path, verifier: Verifier, aux_ids: list[int] | None = None) -> ServedDraft:
    """UserError unless the checkpoint is complete, finite and of this verifier's shape.

    Args:
        aux_ids: as a server counts them, of a draft whose config.json has none for every server.
    """
    found = read_checkpoint(folder)
    for key, ours in (("hidden_size", verifier.hidden_size), ("vocab_size", verifier.vocab_size)):
        if found.config[key] != ours:
            raise UserError(
                f"{folder}/config.json: {key} is {found.config[key]}, {verifier.path} has {ours};"
                " only drafts of the verifier's own size are served here"
            )
    served = choose_aux_ids(found, verifier, aux_ids)
    check_head(found)
    if found.family in ("llama", "qwen3") and not found.config.get("quantization_config"):
        check_tensors(found)
    check_values(found)
    return served


def choose_aux_ids(
    found: DraftCheckpoint, verifier: Verifier, given: list[int] | None
) -> ServedDraft:
    """The layers that the draft is fed; UserError where these are not as many as it takes, or the
    verifier has no such layers."""
    file, n = found.folder / "config.json", verifier.num_layers
    if given and found.top_ids and given != found.aux_ids:
        raise UserError(f"--aux-ids {given}: {file} has its own, {found.aux_ids}, for every server")
    ids, remark = given or found.aux_ids, None
    where = f"--aux-ids {ids}" if given else f"{file}: aux layer ids {ids}"
    if not ids:
        ids = [2, n // 2, n - 3]
        remark = f"has no {AUX_IDS}; a server takes {ids} then (--aux-ids tells others)"
        where = f"{file}: {remark}"
    elif not found.top_ids and not given:
        remark = f"has {AUX_IDS} {ids} under eagle_config alone, where not every server reads them"
    if not all(0 <= i <= n for i in ids):
        raise UserError(f"{where}: {verifier.path} has {n} layers, which a server calls 0 to {n}")
    if ids != sorted(set(ids)):
        raise UserError(f"{where}: must be ascending, a server sorts them and takes each once")
    nested = (found.config.get("eagle_config") or {}).get(AUX_IDS) or [0, 0, 0]
    takes = found.config.get("num_aux_hidden_states") or len(nested)
    width, H = found.places["fc.weight"].shape[-1], found.config["hidden_size"]
    if not len(ids) == takes == width / H:
        raise UserError(
            f"{where}: are {len(ids)} layers, a server gives this draft the states of {takes}, and"
            f" its fc.weight takes {width / H:g}; the three must be the same"
        )
    return ServedDraft(found, ids, remark)


def check_head(found: DraftCheckpoint) -> None:
    """UserError where a server would fill a head or map that is not there with zeros, silently, or
    does not load the map that is there."""
    shapes = {name: place.shape for name, place in found.places.items()}
    rows, H, whole = found.tokens, found.config["hidden_size"], found.config["vocab_size"]
    shared = rows == whole and "lm_head.weight" not in shapes  # the verifier's
    if not shared and shapes.get("lm_head.weight") != [rows, H]:
        raise UserError(f"{found.folder}: has no lm_head.weight of {rows} tokens; is it complete?")
    if rows < whole and shapes.get("d2t") != [rows]:
        raise UserError(f"{found.folder}: has no d2t of {rows} tokens; is it complete?")
    if rows == whole and "d2t" in shapes:
        raise UserError(
            f"{found.folder}: has a d2t although its vocabulary is the verifier's; vLLM loads none"
            " then: delete d2t and t2d from its weights, if d2t is all zeros"
        )
    if shapes.get("embed_tokens.weight", [whole, H]) != [whole, H]:
        raise UserError(
            f"{found.folder}: its embed_tokens.weight is {shapes['embed_tokens.weight']},"
            f" config.json asks for {[whole, H]}"
        )


def check_tensors(found: DraftCheckpoint) -> None:
    """UserError unless the layer's tensors are those of config.json: a server starts one that is
    not there at random, and ends at one that it does not know."""
    shape = found.shape()
    expected = expected_sizes(shape)
    projections = {"q_proj": shape.query_size, "k_proj": shape.key_size, "v_proj": shape.key_size}
    if found.config.get("attention_bias"):
        expected |= {f"layers.0.self_attn.{k}.bias": [n] for k, n in projections.items()}
    if found.family == "qwen3":
        norms = ("q_norm", "k_norm")
        expected |= {f"layers.0.self_attn.{k}.weight": [shape.head_dim] for k in norms}
    head = "lm_head.weight"  # checked
    for name in sorted((found.places.keys() | expected.keys()) - {*NOT_TRAINED, head}):
        size = found.places[name].shape if name in found.places else "missing"
        if size != expected.get(name) and "inv_freq" not in name:
            raise UserError(
                f"{found.folder}: {name} is {size}, by config.json it is"
                f" {expected.get(name, 'not there')}; are both of one draft?"
            )


def check_positions(
    draft: ServedDraft, verifier: Verifier, prompts: list[Prompt], new_tokens: int
) -> None:
    """UserError where prompt and answer are longer than what the draft takes: a server drafts
    nothing then, for any prompt of the batch.

    Args:
        new_tokens: of an answer, with those drafted behind it.
    """
    longest = max(prompts, key=lambda p: len(p.input_ids))
    need, most = len(longest.input_ids) + new_tokens, draft.checkpoint.positions
    if most and most < min(need, verifier.max_positions or need):
        raise UserError(
            f"{draft.checkpoint.folder}/config.json: max_position_embeddings allows {most} tokens,"
            f" prompt {longest.id!r} and its answer take up to {need}, and a server drafts nothing"
            f" beyond; lower --max-new-tokens or leave such prompts out, or raise the key if the"
            " draft was trained on longer samples"
        )


@contextlib.contextmanager
def served_folder(draft: ServedDraft, out: Path) -> Iterator[Path]:
    """The draft's folder for vLLM: its own, or one below `out` whose config.json has the ids where
    every server reads them."""
    found = draft.checkpoint
    if found.top_ids:
        yield found.folder
        return
    folder = out / ".draft.partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        for file in (*found.files, *found.folder.glob("*.index.json")):
            (folder / file.name).symlink_to(file.resolve())
        config = read_json(found.folder / "config.json") | {AUX_IDS: draft.aux_ids}
        write_json(folder / "config.json", config)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
