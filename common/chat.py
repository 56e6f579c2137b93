"""Chat rows → token ids and loss masks, through the verifier's own chat template.

A loss position is an answer token, its end-of-turn token included. For every assistant
turn the prompt is the template's rendering of what comes before it with a generation
prompt, as the server would send it, and the answer is what the finished rendering adds:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n Hello!<|im_end|> \\n
    `------------- prompt (mask 0) -----------------------' `- answer (1) -'  (cut)

Turns are kept in one sample while each rendering extends the one before; where a template
rewrites history (drops earlier reasoning), a turn starts a sample of its own.
"""

from dataclasses import dataclass
from typing import Any

from common.cli import UserError, nearest

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


class RowError(ValueError):
    """A row that cannot become a sample; `reason` is a short kind that can be counted."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}{': ' + detail if detail else ''}")
        self.reason = reason


@dataclass(frozen=True)
class Encoded:
    """One tokenized sample: ids and mask of equal length."""

    input_ids: list[int]
    loss_mask: list[int]


def load_tokenizer(model_path: str, trust_remote_code: bool) -> Any:
    """Load the verifier's tokenizer; remote code runs only by flag, and nothing is asked."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except Exception as e:  # missing files, remote code without the flag, hub errors
        text = " ".join(str(e).split())[:300]
        if "trust_remote_code" in text:
            text = (
                "its tokenizer is Python code that ships with the model; pass --trust-remote-code"
            )
        raise UserError(f"--model-path {model_path}: cannot load the tokenizer: {text}") from None
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"--model-path {model_path}: its tokenizer has no chat template")
    return tokenizer


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row's conversation as OpenAI messages.

    Takes `messages` (role/content) or ShareGPT `conversations` (from/value).
    """
    turns = row.get("messages", row.get("conversations"))
    if turns is None:
        found = ", ".join(sorted(map(str, row))[:8]) or "nothing"
        raise RowError("no conversation", f"needs messages or conversations, has {found}")
    if not isinstance(turns, list) or not turns:
        raise RowError("empty conversation")
    messages = []
    for n, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise RowError("malformed turn", f"turn {n} is not an object")
        role = turn.get("role", turn.get("from"))
        if not isinstance(role, str) or role not in ROLES:
            raise RowError(
                "unknown role", f"turn {n} has role {role!r}{nearest(str(role), [*ROLES])}"
            )
        content = turn.get("content", turn.get("value"))
        if content is None and turn.get("tool_calls"):
            content = ""
        if isinstance(content, list) and all(
            isinstance(p, dict) and isinstance(p.get("text"), str) for p in content
        ):
            content = "".join(p["text"] for p in content)
        if not isinstance(content, str):
            raise RowError("malformed turn", f"turn {n} has no text content")
        extra = {k: turn[k] for k in ("reasoning_content", "tool_calls", "name") if turn.get(k)}
        messages.append({"role": ROLES[role], "content": content, **extra})
    return messages


def render(tokenizer: Any, messages: list[dict], prompt: bool, tools: Any = None) -> list[int]:
    """Token ids of the template's rendering, with or without a generation prompt."""
    try:
        ids = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, add_generation_prompt=prompt, return_dict=False
        )
    except Exception as e:  # templates raise whatever their authors chose
        raise RowError("template refused", " ".join(str(e).split())[:200]) from None
    return list(ids)


def render_text(tokenizer: Any, messages: list[dict], prompt: bool, tools: Any = None) -> str:
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=prompt
    )


def answer_ids(
    tokenizer: Any, messages: list[dict], turn: int, tools: Any, end_ids: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Return (prompt ids, answer ids) of an assistant turn, as if the verifier had said it."""
    before, through = messages[:turn], messages[: turn + 1]
    prompt = render(tokenizer, before, True, tools)
    full = render(tokenizer, through, False, tools)
    if full[: len(prompt)] == prompt:
        answer = full[len(prompt) :]
    else:
        # The border falls inside a token, or the finished rendering is another text.
        prompt_text = render_text(tokenizer, before, True, tools)
        full_text = render_text(tokenizer, through, False, tools)
        if full_text.startswith(prompt_text):
            text = full_text[len(prompt_text) :]
            answer = tokenizer.encode(text, add_special_tokens=False)
        else:
            raise RowError(
                "template rewrites the prompt",
                f"the finished rendering of turn {turn} does not begin with its prompt",
            )
    reasoning = str(messages[turn].get("reasoning_content") or "").strip()
    if reasoning and reasoning not in tokenizer.decode(answer):
        raise RowError(
            "reasoning dropped by the template",
            f"turn {turn} has reasoning that its rendering lacks; train on generation prompt and"
            " raw output ids instead (tools/regenerate_responses.py)",
        )
    for call in messages[turn].get("tool_calls") or []:
        name = (call.get("function") or call).get("name") if isinstance(call, dict) else None
        if name and str(name) not in tokenizer.decode(answer):
            raise RowError(
                "tool calls dropped by the template",
                f"turn {turn} calls {name}; it is not rendered",
            )
    # Whatever follows the end-of-turn token belongs to the template, not to the answer.
    ends = [n for n, token in enumerate(answer) if token in end_ids]
    return prompt, answer[: ends[0] + 1] if ends else answer


def encode_conversation(
    tokenizer: Any, messages: list[dict], tools: Any, end_ids: tuple[int, ...]
) -> list[Encoded]:
    """Tokenize a conversation into one sample, or several where history is rewritten.

    Raises RowError when no turn is the assistant's.
    """
    turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    if not turns:
        raise RowError("no assistant turn")
    if turns[0] == 0:
        raise RowError("no prompt", "the first turn is the assistant's")
    samples: list[Encoded] = []
    for turn in turns:
        prompt, answer = answer_ids(tokenizer, messages, turn, tools, end_ids)
        last = samples[-1] if samples else None
        if last is not None and prompt[: len(last.input_ids)] == last.input_ids:
            mask = last.loss_mask + [0] * (len(prompt) - len(last.input_ids))
            samples.pop()
        else:
            mask = [0] * len(prompt)
        samples.append(Encoded(prompt + answer, mask + [1] * len(answer)))
    return samples
