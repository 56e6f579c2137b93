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
    rows: list[Row],
    tokenizer: Callable[[], Any],
    vocab_size: int,
    longest: int,
    skip_bad_rows: bool = False,
) -> tuple[list[Prompt], int]:
    """Return (prompts, rows skipped).

    Chat rows are rendered with a generation prompt, an answer at their end dropped;
    tokenized rows give their ids before the first loss token. UserError, or a skip, for a
    row that cannot be used, whose prompt has more than `longest` tokens, or whose id was
    there before.
    """
    if longest < 1:
        raise UserError("--max-new-tokens leaves no room for a prompt within --max-seq-len")
    prompts: dict[str, Prompt] = {}
    skipped = 0
    for n, row in enumerate(rows):
        try:
            prompt = prompt_of(row, str(row.value.get("id", f"row-{n}")), tokenizer, vocab_size)
            if prompt.id in prompts:
                raise chat.RowError("id twice", repr(prompt.id))
            if len(prompt.input_ids) > longest:
                raise chat.RowError(
                    "prompt too long",
                    f"{len(prompt.input_ids)} tokens, over {longest} (--max-seq-len less"
                    " --max-new-tokens)",
                )
        except chat.RowError as e:
            if not skip_bad_rows:
                raise UserError(f"{row.where}: {e}") from None
            skipped += 1
            continue
        prompts[prompt.id] = prompt
    if not prompts:
        raise UserError(f"not one usable prompt in {len(rows)} rows")
    return list(prompts.values()), skipped


def prompt_of(row: Row, key: str, tokenizer: Callable[[], Any], vocab_size: int) -> Prompt:
    """The prompt of one row; RowError when there is none."""
    if "input_ids" in row.value:
        ids, mask = row.value["input_ids"], row.value.get("loss_mask") or []
        if not isinstance(ids, list) or not isinstance(mask, list):
            raise chat.RowError("input_ids or loss_mask is not a list")
        ids = ids[: mask.index(1)] if 1 in mask else ids
        if not ids:
            raise chat.RowError("no prompt", "no token before the answer")
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise chat.RowError("input_ids are not ids of the verifier")
        return Prompt(key, [], ids)
    messages = chat.messages_of(row.value)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise chat.RowError("no prompt", "only an answer")
    return Prompt(key, messages, chat.render(tokenizer(), messages, True, row.value.get("tools")))
