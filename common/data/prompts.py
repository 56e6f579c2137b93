"""Prompts to be answered: chat rows or tokenized rows → the ids the server would get."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.data.chat_template import Template
from common.data.conversations import RowError, messages_of, tools_of
from common.data.samples import conversation_id, conversation_name
from common.data.sources import Row
from common.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """A prompt to be answered.

    messages: empty for a row that came as token ids.
    input_ids: what a server is sent for the messages.
    later: the groups of turns that follow, each of them after another answer.
    tools: the row's, for the template.
    """

    id: str
    messages: list[dict[str, Any]]
    input_ids: list[int]
    later: tuple[list[dict[str, Any]], ...] = ()
    tools: list | None = None


def load_prompts(
    rows: list[Row],
    template: Callable[[], Template],
    vocab_size: int,
    longest: int,
    skip_bad_rows: bool = False,
    all_turns: bool = False,
) -> tuple[list[Prompt], int]:
    """Return (prompts, rows skipped).

    Chat rows are rendered with a generation prompt, an answer at their end dropped, or with
    `all_turns` every answer; tokenized rows give their ids before the first loss token.
    UserError, or a skip, for a row that cannot be used, whose prompt has more than `longest`
    tokens, or whose id was there before; a prompt without an id that was there is skipped.
    """
    if longest < 1:
        raise UserError("--max-new-tokens leaves no room for a prompt within --max-seq-len")
    prompts: dict[str, Prompt] = {}
    skipped = 0
    for row in rows:
        try:
            prompt = prompt_of(row, template, vocab_size, all_turns)
            if prompt.id in prompts and row.value.get("id") is None:
                skipped += 1  # the same prompt again
                continue
            if prompt.id in prompts:
                raise RowError("id twice", repr(prompt.id))
            if len(prompt.input_ids) > longest:
                raise RowError(
                    "prompt too long",
                    f"{len(prompt.input_ids)} tokens, over {longest} (--max-seq-len less"
                    " --max-new-tokens)",
                )
        except RowError as e:
            if not skip_bad_rows:
                raise UserError(
                    f"{row.where}: {e}; fix or remove the row, or pass --skip-bad-rows"
                ) from None
            skipped += 1
            continue
        prompts[prompt.id] = prompt
    if not prompts:
        raise UserError(f"not one usable prompt in {len(rows)} rows")
    return list(prompts.values()), skipped


def prompt_of(
    row: Row, template: Callable[[], Template], vocab_size: int, all_turns: bool
) -> Prompt:
    """The prompt of one row, named by its id or else its content; RowError when there is none."""
    key = row.value.get("id")
    if "input_ids" in row.value:
        ids, mask = row.value["input_ids"], row.value.get("loss_mask") or []
        if not isinstance(ids, list) or not isinstance(mask, list):
            raise RowError("input_ids or loss_mask is not a list")
        ids = ids[: mask.index(1)] if 1 in mask else ids
        if not ids:
            raise RowError("no prompt", "no token before the answer")
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise RowError("input_ids are not ids of the verifier")
        return Prompt(conversation_name(ids) if key is None else conversation_id(key), [], ids)
    messages = messages_of(row.value, row.form)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise RowError("no prompt", "only an answer")
    name = conversation_name(messages) if key is None else conversation_id(key)
    later: tuple[list[dict[str, Any]], ...] = ()
    if all_turns:
        messages, *rest = groups_between_answers(messages)
        later = tuple(rest)
    tools = tools_of(row.value)
    return Prompt(name, messages, template().prompt_ids(messages, tools), later, tools)


def groups_between_answers(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The turns before and between the answers, in groups; the answers are dropped."""
    if any(m["role"] == "tool" for m in messages):
        raise RowError("tool results", "another answer may make other calls; leave out --all-turns")
    groups: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            groups[-1].append(message)
        elif groups[-1]:
            groups.append([])
    return groups
