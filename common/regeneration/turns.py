"""Conversations that the verifier answers, one turn after the other."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from common.data.chat_template import END_THINK, THINK
from common.data.prompts import Prompt
from common.data.samples import SEPARATOR
from common.errors import UserError


@dataclass(frozen=True)
class Answer:
    """What a backend returns for a turn.

    prompt_ids, ids: exact token ids, None where a server does not return them.
    final: why no turn can follow it, if so.
    """

    turn_name: str
    prompt_ids: list[int] | None
    ids: list[int] | None
    text: str
    reasoning: str
    finish_reason: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    final: str = ""


@dataclass(frozen=True)
class Refusal:
    """A turn that got no answer: the kind of reason, which is counted, and its own detail."""

    turn_name: str
    reason: str
    detail: str


@dataclass(frozen=True)
class AnsweredTurn:
    """An answered turn as the file has it; its messages only where a turn may follow."""

    messages: list[dict[str, Any]]
    tokens: int
    finish_reason: str
    final: str = ""


@dataclass
class Conversation:
    """A conversation and the turn that is to be answered next.

    messages: so far, empty for a prompt that came as token ids; input_ids: the first turn's
    prompt; later: the groups of messages that follow, each after the answer to the one before.
    """

    id: str
    number: int  # among all, for the seeds
    messages: list[dict[str, Any]]
    later: list[list[dict[str, Any]]] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    tools: list | None = None
    turn: int = 0
    turns: int = 1

    @property
    def turn_name(self) -> str:
        """Name of the turn to be answered next."""
        return self.turn_names()[self.turn]

    def turn_names(self) -> list[str]:
        """Names of all its turns."""
        if self.turns == 1:
            return [self.id]
        return [f"{self.id}{SEPARATOR}{turn}" for turn in range(self.turns)]

    def advance(self, answered: AnsweredTurn) -> bool:
        """Move on to the turn after an answered one; returns whether there is one."""
        if not self.later or answered.final:
            return False
        self.messages = answered.messages + self.later.pop(0)
        self.turn += 1
        return True

    def resume(self, answered: dict[str, AnsweredTurn]) -> bool:
        """Move past the turns that are answered already; returns whether one is left."""
        while self.turn_name in answered:
            if not self.advance(answered[self.turn_name]):
                return False
        return True


def conversations_of(prompts: list[Prompt], answers_per_prompt: int) -> list[Conversation]:
    """Every conversation to be answered; UserError where two turns would have one name."""
    found: list[Conversation] = []
    for prompt in prompts:
        for k in range(answers_per_prompt):
            found.append(
                Conversation(
                    f"{prompt.id}{SEPARATOR}{k}" if answers_per_prompt > 1 else prompt.id,
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


def split_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, the rest) of a verifier's answer."""
    if END_THINK not in text:
        return "", text
    reasoning, rest = text.split(END_THINK, 1)
    return reasoning.strip().removeprefix(THINK).strip(), rest.lstrip("\n")
