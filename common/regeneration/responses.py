"""The file of answers, responses.jsonl: written as they come, read by a resume, joined at the end.

A line per answered turn: id, input_ids and loss_mask (where the exact ids are known), messages
with the answer, finish_reason. When all turns are answered, those whose prompt continues the turn
before to the token are joined to one line.
"""

import json
from pathlib import Path
from typing import IO, Any

from common.artifacts import atomic_file, decode_json, writing
from common.data.conversations import CUT
from common.data.loops import Loops, count_loops
from common.errors import UserError, again
from common.manifest import Output
from common.regeneration.turns import Answer, AnsweredTurn, Conversation

FILE = "responses.jsonl"


class Responses:
    """The file while it grows. `answered`: turn name → turn, those of earlier runs included;
    `loops`: how many of those with ids loop."""

    def __init__(self, output: Output, all_turns: bool):
        self.path = output.folder / FILE
        self.answered: dict[str, AnsweredTurn] = {}
        self.loops = Loops()
        if not output.overwrite:
            self.answered, self.loops = read_responses(self.path, all_turns)
        self._output = output
        self._file: IO[str] | None = None

    def add(self, conversation: Conversation, answer: Answer) -> AnsweredTurn:
        """Append an answer. With the first one the folder becomes this run's."""
        if self._file is None:
            self._output.empty()
            self._output.begin()
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (see close)
        row = response_row(conversation, answer)
        with writing(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        messages = row.get("messages", []) if conversation.later else []
        name, tokens, reason = turn_summary(row)
        self.loops += loops_of(row)
        self.answered[name] = AnsweredTurn(messages, tokens, reason, row.get("final", ""))
        return self.answered[name]

    def close(self) -> None:
        if self._file is not None:
            with writing(self.path):
                self._file.close()


def response_row(conversation: Conversation, answer: Answer) -> dict[str, Any]:
    """The line of an answered turn. `final` says why the turns after it get no answer."""
    row: dict[str, Any] = {"id": answer.turn_name, "finish_reason": answer.finish_reason}
    if answer.ids is not None and answer.prompt_ids is not None:
        row["input_ids"] = answer.prompt_ids + answer.ids
        row["loss_mask"] = [0] * len(answer.prompt_ids) + [1] * len(answer.ids)
    if conversation.messages:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = answer.tool_calls
        # for 01, where it has no ids: this answer is the verifier's, those before are context
        row["messages"] = [*map(without_loss, conversation.messages), message]
        if conversation.tools:
            row["tools"] = conversation.tools
    final = "answer cut by the length limit" if answer.finish_reason == CUT else answer.final
    if conversation.later and final:
        row["final"] = final
    return row


def without_loss(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "weight": 0} if message["role"] == "assistant" else message


def turns_of(row: dict[str, Any]) -> list[list[Any]]:
    """The summaries of the turns on a line of the file, which must be what a run has written;
    TypeError where not."""
    turns = row.get("joined") or [turn_summary(row)]
    for name, tokens, reason in turns:
        texts = row["id"], name, reason, row.get("final", "")
        if not all(isinstance(text, str) for text in texts) or not isinstance(tokens, int):
            raise TypeError("its id, tokens or finish_reason are none")
    if not isinstance(row.get("messages", []), list):
        raise TypeError("its messages are no list")
    return turns


def turn_summary(row: dict[str, Any]) -> list[Any]:
    """[name, answer tokens, finish_reason] of a turn's line, as a joined line lists its turns."""
    return [row["id"], sum(row.get("loss_mask", [])), row["finish_reason"]]


def loops_of(row: dict[str, Any]) -> Loops:
    """Of a line's answers; of none where it has no ids."""
    return count_loops(row.get("input_ids", []), row.get("loss_mask", []))


def read_responses(path: Path, all_turns: bool) -> tuple[dict[str, AnsweredTurn], Loops]:
    """The turns already answered, and how many loop; cuts off a last line that a kill left
    unfinished."""
    answered: dict[str, AnsweredTurn] = {}
    loops = Loops()
    if not path.exists():
        return answered, loops
    good = 0
    with open(path, "rb") as f:
        for line in f:
            if not line.endswith(b"\n"):
                break
            try:
                row = decode_json(line)
                messages = row.get("messages", []) if all_turns else []
                for name, tokens, reason in turns_of(row):
                    answered[name] = AnsweredTurn(messages, tokens, reason, row.get("final", ""))
                loops += loops_of(row)
            except (ValueError, TypeError, KeyError, AttributeError) as e:
                raise UserError(
                    f"{path}: the line after byte {good} is damaged ({e}); delete that line (its"
                    f" prompt will be answered again) and {again()}"
                ) from None
            good += len(line)
    with open(path, "r+b") as f:
        f.truncate(good)
    return answered, loops


def join_turns(path: Path, names: list[list[str]]) -> None:
    """Rewrite the file with the turns of each conversation joined, see `joined`.

    Args:
        names: of each conversation's turns.
    """
    offsets: dict[str, int] = {}
    with open(path, "rb") as source:
        while line := source.readline():
            offsets[json.loads(line)["id"]] = source.tell() - len(line)
        with atomic_file(path, "w") as f:
            for turns in names:
                rows = []
                for name in turns:
                    if name in offsets:
                        source.seek(offsets[name])
                        rows.append(json.loads(source.readline()))
                for row in joined(rows):
                    f.write(json.dumps(row) + "\n")


def joined(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one conversation, a row that continues the one before to the token in its place,
    with the turns of both under `joined`; an answer cut by the length limit keeps its own row,
    for 01 to drop."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        last = kept[-1] if kept else {}
        before, ids = last.get("input_ids", []), row.get("input_ids", [])
        continues = before and ids and ids[: len(before)] == before
        if continues and CUT not in (last["finish_reason"], row["finish_reason"]):
            kept[-1] = {
                **row,
                "loss_mask": last["loss_mask"] + row["loss_mask"][len(before) :],
                "joined": [*last.get("joined", [turn_summary(last)]), turn_summary(row)],
            }
        else:
            kept.append(row)
    return kept
