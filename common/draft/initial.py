"""Starting the training from a draft checkpoint, whatever vocabulary map it was made with."""

from pathlib import Path

import torch

from common.draft.checkpoint import (
    NORMS,
    NOT_TRAINED,
    DraftCheckpoint,
    check_values,
    expected_sizes,
    read_checkpoint,
)
from common.draft.config import SHAPE_KEYS, DraftShape
from common.draft.model import Eagle3Draft
from common.errors import UserError


def check_initial(folder: Path, shape: DraftShape, aux_ids: list[int]) -> DraftCheckpoint:
    """UserError unless the checkpoint is a draft of this very architecture, and of these layers,
    as a server counts them."""
    found = read_checkpoint(folder)
    config = found.config
    if found.unlike:
        raise UserError(
            f"--init-from {folder}: {found.unlike}, which is not trained here; start from another"
            " draft, or from none"
        )
    for key in NORMS:
        if config[key] != getattr(shape, key):
            flag = "--" + ("" if config[key] else "no-") + key.replace("_", "-")
            raise UserError(f"--init-from {folder}: its {key} is {config[key]}; pass {flag}")
    for key in (*SHAPE_KEYS, "vocab_size"):
        if key in config and config[key] != getattr(shape, key):
            raise UserError(
                f"--init-from {folder}: its {key} is {config[key]}, this draft's is"
                f" {getattr(shape, key)}; "
                + (
                    "it is of another verifier"
                    if key in ("vocab_size", "hidden_size")
                    else "see --draft-shape"
                )
            )
    check_layers(found, aux_ids)
    check_sizes(found, shape)
    check_values(found)
    return found


def initial_remarks(found: DraftCheckpoint) -> list[str]:
    """What a user should know of a checkpoint that passes check_initial."""
    remarks = []
    if not found.aux_ids:
        remarks.append("does not say its layers; they are taken to be those of the states")
    if "lm_head.weight" not in found.places:
        remarks.append("has no head of its own; the training starts with the verifier's")
    if "embed_tokens.weight" in found.places:
        remarks.append("has its own embed_tokens; they are left out, the verifier's are used")
    return remarks


def check_layers(found: DraftCheckpoint, aux_ids: list[int]) -> None:
    """UserError where the draft is of other layers. Ids under eagle_config alone may be of a
    trainer that counts as 03 does (SpecForge)."""
    same = [aux_ids] if found.top_ids else [aux_ids, [i - 1 for i in aux_ids]]
    if found.aux_ids and found.aux_ids not in same:
        raise UserError(
            f"--init-from {found.folder}: it was trained on the layers that a server calls"
            f" {found.aux_ids}, these states are of {aux_ids}; start from another draft, or run"
            " 03 with its --layers"
        )


def check_sizes(found: DraftCheckpoint, shape: DraftShape) -> None:
    """UserError unless the checkpoint's tensors are those of the shape; its head may be of another
    draft vocabulary, or not there where that is the verifier's."""
    sizes = {name: place.shape for name, place in found.places.items()}
    expected = expected_sizes(shape)
    rows = sizes.get("lm_head.weight", [found.tokens])[0]
    expected["lm_head.weight"] = [rows, shape.hidden_size]
    if "lm_head.weight" not in sizes and found.tokens == shape.vocab_size:
        del expected["lm_head.weight"]
    for name in sorted((sizes.keys() | expected.keys()) - set(NOT_TRAINED)):
        if sizes.get(name) != expected.get(name):
            raise UserError(
                f"--init-from {found.folder}: {name} is {sizes.get(name, 'missing')}, this draft's"
                f" is {expected.get(name, 'none')}; start from a draft of the same shape and flags"
            )
    if sizes.get("d2t", [rows]) != [rows] or ("d2t" not in sizes and rows != shape.vocab_size):
        raise UserError(
            f"--init-from {found.folder}: has no d2t of its lm_head's {rows} tokens, so nothing"
            " says which they are; start from another draft, or from none"
        )


@torch.no_grad()
def initialize_from(folder: Path, draft: Eagle3Draft, token_D: torch.Tensor) -> int:
    """Copy the weights of a checkpoint that passes check_initial into the draft.

    Head rows go by the token they stand for; a token that the checkpoint does not have
    keeps the row it was initialized with (the verifier's).

    Args:
        token_D: the verifier's token of each id of this draft's vocabulary.

    Returns:
        Number of head rows taken over.
    """
    found = read_checkpoint(folder).weights()
    head = found.pop("lm_head.weight", torch.zeros(0, draft.shape.hidden_size))
    d2t = found.get("d2t", torch.zeros(len(head), dtype=torch.int64))[: len(head)]
    row_of = {token: row for row, token in enumerate((torch.arange(len(head)) + d2t).tolist())}
    pairs = [(i, row_of[token]) for i, token in enumerate(token_D.tolist()) if token in row_of]
    ours, theirs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T
    parameters = dict(draft.named_parameters())
    for name, value in found.items():
        if name not in NOT_TRAINED:
            parameters[name].copy_(value)
    device = draft.lm_head.weight.device
    draft.lm_head.weight[ours.to(device)] = head[theirs].to(device, torch.float32)
    return len(pairs)
