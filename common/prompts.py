"""Prompts to be answered: chat rows or tokenized rows → the ids the server would get."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import chat
from common.cli import UserError
from common.rows import Row


@dataclass(frozen=True)
class Prompt:
    """`messages` is empty for a row that came as token ids."""

    id: str
    messages: list[dict[str, Any]]
    input_ids: list[int]


def load_prompts(
    rows: list[Row], tokenizer: Callable[[], Any], vocab_size: int, longest: int
) -> list[Prompt]:
    """Render chat rows with a generation prompt; take `input_ids` of tokenized rows.

    Answers at the end of a conversation are dropped, and so are the answer tokens (loss
    mask) of a tokenized row. UserError for a row that cannot be used, or whose prompt has
    more than `longest` tokens, or whose id occurs twice.
    """
    prompts: dict[str, Prompt] = {}
    for n, row in enumerate(rows):
        messages: list[dict[str, Any]] = []
        if "input_ids" in row.value:
            ids = row.value["input_ids"]
            mask = row.value.get("loss_mask") or []
            ids = ids[: mask.index(1)] if 1 in mask else ids
            if not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
                raise UserError(f"{row.where}: input_ids are not ids of the verifier")
        else:
            try:
                messages = chat.messages_of(row.value)
                while messages and messages[-1]["role"] == "assistant":
                    messages.pop()
                if not messages:
                    raise chat.RowError("no prompt", "only an answer")
                ids = chat.render(tokenizer(), messages, True, row.value.get("tools"))
            except chat.RowError as e:
                raise UserError(f"{row.where}: {e}") from None
        if len(ids) > longest:
            raise UserError(
                f"{row.where}: {len(ids)} prompt tokens leave no room for --max-new-tokens within"
                f" --max-seq-len (at most {longest}); raise --max-seq-len or shorten the prompt"
            )
        key = str(row.value.get("id", n))
        if key in prompts:
            raise UserError(f"{row.where}: the id {key!r} occurs twice")
        prompts[key] = Prompt(key, messages, ids)
    return list(prompts.values())
