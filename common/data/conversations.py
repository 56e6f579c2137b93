"""Rows of chat data, in the forms that people have, → OpenAI messages.

messages        {"messages": [{"role", "content"}, ..]}, `tools` beside it
conversations   {"conversations": [{"from", "value"}, ..]}, ShareGPT's; `system`, `tools` beside it
alpaca          {"instruction", "input", "output" or "response"}
pair            {"prompt", "response" or "completion" or "answer"}: texts, or lists of messages

A new form of data is a function from a row to its turns and an entry in FORMS; roles and keys of
turns that other tools write go into the tables above it.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from common.errors import nearest

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",  # its value is the call
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
# Keys of a turn's reasoning in rows and in templates; the first is the one used here.
REASONING = (
    "reasoning_content", "reasoning", "thinking", "thought", "thoughts", "thinking_content",
    "reasoning_text",
)  # fmt: skip
KEPT = ("name", "tool_call_id")  # keys of a turn that templates read, kept as they are
CUT = "length"  # finish_reason of an answer that the length limit cut
# finish_reasons of servers that did not let the verifier end its answer
NO_ANSWER = ("content_filter", "error", "abort")


class RowError(ValueError):
    """A row that cannot become a sample; `reason` is a short kind that can be counted.

    malformed: it is no conversation at all, where another file or form may have been meant.
    """

    def __init__(self, reason: str, detail: str = "", malformed: bool = False):
        super().__init__(f"{reason}{': ' + detail if detail else ''}")
        self.reason, self.malformed = reason, malformed


def bad_row(reason: str, detail: str = "") -> RowError:
    return RowError(reason, detail, malformed=True)


# ---------------------------------------------------------------- forms


class Form(NamedTuple):
    """A form of rows.

    keys: a row is of this form when it has one key of each group.
    turns: a row's turns, each {"role" or "from", "content" or "value", ..} as message_of reads it.
    """

    keys: tuple[tuple[str, ...], ...]
    turns: Callable[[dict[str, Any]], Any]


def alpaca_turns(row: dict[str, Any]) -> list:
    texts = [str(row.get(key) or "") for key in ("instruction", "input")]
    question = "\n\n".join(text for text in texts if text)
    return as_turns(question, "user") + answer_turns(row, "output", "response")


def pair_turns(row: dict[str, Any]) -> list:
    question = as_turns(row.get("prompt"), "user")
    return question + answer_turns(row, "response", "completion", "answer")


def as_turns(value: Any, role: str) -> list:
    """A text as one turn; a list of turns as it is."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def answer_turns(row: dict[str, Any], *keys: str) -> list:
    """The answer under the first of these keys that the row has; none, for a prompt without."""
    key = next((key for key in keys if row.get(key) is not None), None)
    return as_turns(row[key], "assistant") if key else []


# The first form whose keys a row has is taken.
FORMS = {
    "messages": Form((("messages",),), lambda row: row.get("messages")),
    "conversations": Form((("conversations",),), lambda row: row.get("conversations")),
    "alpaca": Form((("instruction",), ("output", "response")), alpaca_turns),
    "pair": Form((("prompt",),), pair_turns),
}


def form_of(row: dict[str, Any]) -> str:
    """Which of FORMS a row is, by its keys."""
    for name, form in FORMS.items():
        if all(any(key in row for key in group) for group in form.keys):
            return name
    found = ", ".join(sorted(map(str, row))[:8]) or "nothing"
    raise bad_row(
        "no conversation",
        "needs messages, conversations, instruction and output, or prompt and response; has"
        f" {found}",
    )


# ---------------------------------------------------------------- a row


def messages_of(row: dict[str, Any], form: str | None = None) -> list[dict[str, Any]]:
    """Return a row's conversation as OpenAI messages; RowError where it is none.

    Args:
        form: a name in FORMS; by default it is found by the row's keys.
    """
    form = form or form_of(row)
    turns = FORMS[form].turns(row)
    if not isinstance(turns, list):
        raise bad_row("no conversation", f"{form} is not a list")
    if not turns:
        raise bad_row("empty conversation")
    messages = [message_of(n, turn) for n, turn in enumerate(turns)]
    system = row.get("system") or ""
    if not isinstance(system, str):
        raise bad_row("malformed turn", "system is no text")
    if system and messages[0]["role"] == "system" and messages[0]["content"] != system:
        raise bad_row("two system prompts", "one in its turns, another beside them")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_row("text that is not Unicode", "it holds half of a surrogate pair") from None
    return messages


def tools_of(row: dict[str, Any]) -> list | None:
    """The row's tools; a string of them is JSON."""
    tools = row.get("tools") or None
    if isinstance(tools, str):
        tools = decoded(tools, "tools") or None
    if tools is not None and not isinstance(tools, list):
        raise bad_row("malformed tools", "tools is not a list")
    return tools


def message_of(n: int, turn: Any) -> dict[str, Any]:
    """Turn n of a row as an OpenAI message."""
    if not isinstance(turn, dict):
        raise bad_row("malformed turn", f"turn {n} is not an object")
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str) or name not in ROLES:
        raise bad_row("unknown role", f"turn {n} has role {name!r}{nearest(str(name), [*ROLES])}")
    content, calls = turn.get("content", turn.get("value")), turn.get("tool_calls")
    if name == "function_call":
        content, calls = "", [{"type": "function", "function": decoded(content, f"turn {n}")}]
    if content is None and calls:
        content = ""
    content = joined(content)
    if not isinstance(content, str):
        raise bad_row("malformed turn", f"turn {n} has no text content")
    message: dict[str, Any] = {"role": ROLES[name], "content": content}
    reasoning = joined(next((turn[k] for k in REASONING if turn.get(k)), None))
    if reasoning is not None and not isinstance(reasoning, str):
        raise bad_row("malformed turn", f"turn {n} has reasoning that is no text")
    if reasoning:
        message[REASONING[0]] = reasoning
    if calls:
        if not isinstance(calls, list):
            raise bad_row("malformed tool call", f"turn {n}: tool_calls is not a list")
        message["tool_calls"] = [tool_call(n, call) for call in calls]
    if turn.get("weight") == 0:  # OpenAI's fine-tuning format: context, not to be learnt
        message["weight"] = 0
    return message | {k: turn[k] for k in KEPT if turn.get(k)}


def named_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under every name that a template may read it by."""
    reasoning = message.get(REASONING[0])
    return message | dict.fromkeys(REASONING, reasoning) if reasoning else message


def joined(value: Any) -> Any:
    """A list of text parts as one text; anything else as it is."""
    if isinstance(value, list) and all(
        isinstance(p, dict) and p.get("type", "text") == "text" and isinstance(p.get("text"), str)
        for p in value
    ):
        return "".join(p["text"] for p in value)
    return value


def tool_call(n: int, call: Any) -> dict[str, Any]:
    """A call of turn n; its arguments as an object, as a server hands them to the template."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_row("malformed tool call", f"turn {n} calls something without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = decoded(arguments or "{}", f"turn {n}: arguments")
    inner = {**function, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else {"function": inner}


def decoded(text: Any, what: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise bad_row("malformed tools or call", f"{what}: not JSON") from None
