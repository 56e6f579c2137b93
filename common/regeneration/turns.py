"""Conversations being answered by the verifier, one turn after the other, and their file.

responses.jsonl has a line an answered turn: id, input_ids and loss_mask (where the exact ids are
known), messages with the answer, finish_reason. When all is answered, turns that go on from the
one before to the token are joined to one line.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.artifacts import atomic_file, decode_json
from common.data.chat_template import END_THINK, THINK
from common.data.conversations import CUT
from common.data.prompts import Prompt
from common.data.samples import SEPARATOR
from common.errors import UserError, again


@dataclass(frozen=True)
class Answer:
    """What came back for a question.

    prompt_ids, ids: exact token ids, None where a server does not tell them.
    final: why no turn can follow it, if so.
    """

    key: str
    prompt_ids: list[int] | None
    ids: list[int] | None
    text: str
    reasoning: str
    finish_reason: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    final: str = ""


@dataclass(frozen=True)
class Refusal:
    """A question that is not answered, why (to be counted), and this one's own reason."""

    key: str
    reason: str
    detail: str


@dataclass
class Conversation:
    """`messages` so far, the groups of turns `later` to be asked, each after the answer to the
    one before; `input_ids` for one that came as token ids (no messages)."""

    id: str
    number: int  # among all, for the seeds
    messages: list[dict[str, Any]]
    later: list[list[dict[str, Any]]] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    tools: list | None = None
    turn: int = 0
    turns: int = 1

    @property
    def key(self) -> str:
        """Name of the turn that is asked now."""
        return self.turn_names()[self.turn]

    def turn_names(self) -> list[str]:
        """Names of all its turns."""
        if self.turns == 1:
            return [self.id]
        return [f"{self.id}{SEPARATOR}{turn}" for turn in range(self.turns)]

    def take(self, done: "Done") -> bool:
        """Go on from an answered turn; returns whether there is another to ask."""
        if not self.later or done.final:
            return False
        self.messages = done.messages + self.later.pop(0)
        self.turn += 1
        return True


def conversations(prompts: list[Prompt], answers_per_prompt: int) -> list[Conversation]:
    """Every conversation to be answered."""
    found: list[Conversation] = []
    for prompt in prompts:
        for k in range(answers_per_prompt):
            key = f"{prompt.id}{SEPARATOR}{k}" if answers_per_prompt > 1 else prompt.id
            found.append(
                Conversation(
                    key,
                    len(found),
                    list(prompt.messages),
                    [list(group) for group in prompt.later],
                    prompt.input_ids,
                    prompt.tools,
                    turns=1 + len(prompt.later),
                )
            )
    names = Counter(name for one in found for name in one.turn_names())
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice:
        raise UserError(f"the id {twice!r} would name two answers; give one of the prompts another")
    return found


def line_of(asked: Conversation, answer: Answer) -> dict[str, Any]:
    """The line of an answered turn. `final` says why the turns after it are not asked."""
    line: dict[str, Any] = {"id": asked.key, "finish_reason": answer.finish_reason}
    if answer.ids is not None and answer.prompt_ids is not None:
        line["input_ids"] = answer.prompt_ids + answer.ids
        line["loss_mask"] = [0] * len(answer.prompt_ids) + [1] * len(answer.ids)
    if asked.messages:
        said: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            said["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            said["tool_calls"] = answer.tool_calls
        # for 01, where it has no ids: this answer is the verifier's, those before are context
        line["messages"] = [*map(without_loss, asked.messages), said]
        if asked.tools:
            line["tools"] = asked.tools
    final = "answer cut by the length limit" if answer.finish_reason == CUT else answer.final
    if asked.later and final:
        line["final"] = final
    return line


def without_loss(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "weight": 0} if message["role"] == "assistant" else message


def split_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, the rest) of what a verifier has said after its prompt."""
    if END_THINK not in text:
        return "", text
    reasoning, rest = text.split(END_THINK, 1)
    return reasoning.strip().removeprefix(THINK).strip(), rest.lstrip("\n")


@dataclass(frozen=True)
class Done:
    """An answered turn, as the file has it; its messages only where a turn may follow."""

    messages: list[dict[str, Any]]
    tokens: int
    finish_reason: str
    final: str = ""


def read_answers(path: Path, all_turns: bool) -> dict[str, Done]:
    """The turns already answered; cuts off a last line that a kill left unfinished."""
    done: dict[str, Done] = {}
    if not path.exists():
        return done
    good = 0
    with open(path, "rb") as f:
        for line in f:
            if not line.endswith(b"\n"):
                break
            try:
                row = decode_json(line)
                messages = row.get("messages", []) if all_turns else []
                for key, tokens, reason in row.get("joined") or [turn_summary(row)]:
                    done[key] = Done(messages, tokens, reason, row.get("final", ""))
            except (ValueError, TypeError, KeyError) as e:
                raise UserError(
                    f"{path}: the line after byte {good} is damaged ({e}); delete that line (its"
                    f" prompt is asked again) and {again()}"
                ) from None
            good += len(line)
    with open(path, "r+b") as f:
        f.truncate(good)
    return done


def turn_summary(row: dict[str, Any]) -> list[Any]:
    """(name, answer tokens, finish_reason) of a turn's line."""
    return [row["id"], sum(row.get("loss_mask", [])), row["finish_reason"]]


def join_turns(path: Path, names: list[list[str]]) -> None:
    """Write the file anew, the turns of a conversation joined to one line where each prompt goes
    on from the answer before, to the token. Such a line tells of its turns under `joined`.

    Args:
        names: of each conversation's turns.
    """
    places: dict[str, int] = {}
    with open(path, "rb") as source:
        while line := source.readline():
            places[json.loads(line)["id"]] = source.tell() - len(line)
        with atomic_file(path, "w") as f:
            for keys in names:
                rows = []
                for key in keys:
                    if key in places:
                        source.seek(places[key])
                        rows.append(json.loads(source.readline()))
                for row in joined(rows):
                    f.write(json.dumps(row) + "\n")


def joined(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one conversation, one that goes on from the row before in its place; an answer cut
    by the length limit keeps its own row, for 01 to drop."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        last = kept[-1] if kept else {}
        before, ids = last.get("input_ids", []), row.get("input_ids", [])
        goes_on = before and ids and ids[: len(before)] == before
        if goes_on and CUT not in (last["finish_reason"], row["finish_reason"]):
            kept[-1] = {
                **row,
                "loss_mask": last["loss_mask"] + row["loss_mask"][len(before) :],
                "joined": [*last.get("joined", [turn_summary(last)]), turn_summary(row)],
            }
        else:
            kept.append(row)
    return kept
