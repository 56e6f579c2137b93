"""Rows of chat data, in the forms that people have, → OpenAI messages.

messages        {"messages": [{"role", "content"}, ..]}, `tools` beside it
conversations   {"conversations": [{"from", "value"}, ..]}, ShareGPT's; `system`, `tools` beside it
alpaca          {"instruction", "input", "output" or "response"}
pair            {"prompt", "response" or "completion" or "answer"}: texts, or lists of messages
"""

import json
from typing import Any

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
FORMS = ("messages", "conversations", "alpaca", "pair")
ANSWERS = {"alpaca": ("output", "response"), "pair": ("response", "completion", "answer")}
REASONING = ("reasoning_content", "reasoning", "thinking")
KEPT = ("name", "tool_call_id")
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


def form_of(row: dict[str, Any]) -> str:
    """Which of FORMS a row is, by its keys."""
    for form in ("messages", "conversations"):
        if form in row:
            return form
    if "instruction" in row and any(k in row for k in ANSWERS["alpaca"]):
        return "alpaca"
    if "prompt" in row:
        return "pair"
    found = ", ".join(sorted(map(str, row))[:8]) or "nothing"
    raise bad_row(
        "no conversation",
        "needs messages, conversations, instruction and output, or prompt and response; has"
        f" {found}",
    )


def messages_of(row: dict[str, Any], form: str | None = None) -> list[dict[str, Any]]:
    """Return a row's conversation as OpenAI messages.

    Args:
        form: one of FORMS; None finds it out.
    """
    form = form or form_of(row)
    if form in ("messages", "conversations"):
        turns = row.get(form)
    elif form == "alpaca":
        asked = [str(row.get(k) or "") for k in ("instruction", "input")]
        turns = as_turns("\n\n".join(x for x in asked if x), "user") + answer_turns(row, form)
    else:
        turns = as_turns(row.get("prompt"), "user") + answer_turns(row, form)
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


def as_turns(value: Any, role: str) -> list:
    """A text as one turn; a list of turns as it is."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def answer_turns(row: dict[str, Any], form: str) -> list:
    """The answer of a row that holds one; none, for a prompt without."""
    key = next((k for k in ANSWERS[form] if row.get(k) is not None), None)
    return as_turns(row[key], "assistant") if key else []


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
    if isinstance(content, list) and all(
        isinstance(p, dict) and p.get("type", "text") == "text" and isinstance(p.get("text"), str)
        for p in content
    ):
        content = "".join(p["text"] for p in content)
    if not isinstance(content, str):
        raise bad_row("malformed turn", f"turn {n} has no text content")
    message: dict[str, Any] = {"role": ROLES[name], "content": content}
    reasoning = next((turn[k] for k in REASONING if isinstance(turn.get(k), str) and turn[k]), None)
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        if not isinstance(calls, list):
            raise bad_row("malformed tool call", f"turn {n}: tool_calls is not a list")
        message["tool_calls"] = [tool_call(n, call) for call in calls]
    if turn.get("weight") == 0:  # OpenAI's fine-tuning format: context, not to be learnt
        message["weight"] = 0
    return message | {k: turn[k] for k in KEPT if turn.get(k)}


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
