"""Conversations → token ids and loss masks, through the verifier's own chat template.

A loss position is an answer token, its end-of-turn token included. For every assistant turn the
prompt is the template's rendering of what comes before it with a generation prompt, as the
server would send it, and the answer is what the finished rendering adds:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n Hello!<|im_end|> \\n
    `------------- prompt (mask 0) -----------------------' `- answer (1) -'  (cut)

Each turn is rendered as the last one, so that nothing that a template does to earlier turns
touches it. Turns are kept in one sample while each prompt extends the one before; where a
template rewrites history (drops earlier reasoning), a turn starts a sample of its own.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from common.data.conversations import RowError
from common.errors import UserError

# Stand for texts in renderings, to find where a template puts them.
ANSWER, NEXT = "\ue000answer\ue001", "\ue000next\ue001"
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class Encoded:
    """One tokenized sample: ids and mask of equal length; `notes` is for the report."""

    input_ids: list[int]
    loss_mask: list[int]
    notes: list[str] = field(default_factory=list)


def load_tokenizer(model_path: str, trust_remote_code: bool) -> Any:
    """Load the verifier's tokenizer; remote code runs only by flag, and nothing is asked."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except Exception as e:  # missing files, remote code without the flag, hub errors
        text = " ".join(str(e).split())[:300]
        if "trust_remote_code" in str(e):
            text = (
                "its tokenizer is Python code that ships with the model; pass --trust-remote-code"
            )
        raise UserError(f"--model-path {model_path}: cannot load the tokenizer: {text}") from None
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"--model-path {model_path}: its tokenizer has no chat template")
    return tokenizer


class Template:
    """A verifier's chat template with its tokenizer.

    Args:
        end_ids: ids that end an answer.
        options: the template's own variables (`enable_thinking`, ..).
    """

    def __init__(
        self, tokenizer: Any, end_ids: tuple[int, ...], options: dict[str, Any] | None = None
    ):
        self.tokenizer, self.end_ids, self.options = tokenizer, end_ids, options or {}
        self.ends = [tokenizer.decode([i]) for i in end_ids]
        template = getattr(tokenizer, "chat_template", None)
        marks = re.search(r"\{%-?\s*generation\b", template if isinstance(template, str) else "")
        self.marks_answers = marks is not None
        # a text's ids are the same after another one (whose last token it does not join)
        ids, behind, before = (self.ids(x) for x in ("one", "\none", "\n"))
        self.goes_on = behind == before + ids
        self._openers: dict[str, list[int]] = {}

    def text(self, messages: list[dict], prompt: bool, tools: list | None = None) -> str:
        """The rendering, with a generation prompt or finished; RowError where it is refused."""
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **self.options,
            )
        except Exception as e:  # templates raise whatever their authors chose
            raise refused(e) from None

    def ids(self, text: str) -> list[int]:
        """A rendering's ids, as the server makes them."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt_ids(self, messages: list[dict], tools: list | None = None) -> list[int]:
        """What a server is sent to have these messages answered."""
        return self.ids(self.text(messages, True, tools))

    def has_special_tokens(self, text: str) -> bool:
        """Whether a text spells out special tokens, which are no text to the template."""
        ids, decode = self.ids(text), self.tokenizer.decode
        return bool(decode(ids) != decode(ids, skip_special_tokens=True))

    # ------------------------------------------------------------ one answer

    def turn(
        self, messages: list[dict], n: int, tools: list | None
    ) -> tuple[list[int], list[int], list[str]]:
        """(prompt ids, answer ids, notes) of assistant turn n, as if the verifier had said it."""
        message = messages[n]
        calls = message.get("tool_calls", [])
        said = message["content"] + message.get("reasoning_content", "")
        said += json.dumps(calls, ensure_ascii=False) if calls else ""
        if any(end and end in said for end in self.ends):
            raise RowError("end-of-turn token inside an answer", f"turn {n}")
        marked = self.marked(messages, n, tools) if self.marks_answers else None
        notes: list[str] = []
        if marked is None:
            prompt_text, text, notes = self.split(messages, n, tools)
        else:
            prompt_text, text = marked
            if reasoning_of(message) not in text or not self.shows_field(
                messages[:n], message, tools
            ):
                raise lost_reasoning(n)
        prompt = self.ids(prompt_text)
        answer = self.continuation(prompt_text, prompt, text)
        if calls and not self.shows_calls(messages[: n + 1], tools):
            raise RowError("tool calls dropped by the template", f"turn {n}")
        # Whatever follows the end-of-turn token belongs to the template, not to the answer.
        end = next((k for k, token in enumerate(answer) if token in self.end_ids), None)
        if end is not None:
            return prompt, answer[: end + 1], notes
        following = "tool" if calls else "user"
        if n + 1 < len(messages):
            following = messages[n + 1]["role"]
        return prompt, answer + self.opener(following), notes

    def marked(self, messages: list[dict], n: int, tools: list | None) -> tuple[str, str] | None:
        """(prompt, rest), as text, where the template marks answers by {% generation %}; None
        where it has not marked this one."""
        finished, spans = self.marks(messages[: n + 1], tools)
        prompt = self.text(messages[:n], True, tools)
        if not finished.startswith(prompt):
            return None
        # some turns may be marked only, or parts of a turn one by one
        start = next((start for start, end in spans if end > len(prompt)), None)
        if start is None:
            return None
        start = max(start, len(prompt))
        return finished[:start], finished[start:]

    def shows_calls(self, messages: list[dict], tools: list | None) -> bool:
        """Whether the finished rendering tells each call of the last turn, its arguments too."""
        *before, message = messages
        calls = message["tool_calls"]
        for n, call in enumerate(calls):
            bare = {**call, "function": call["function"] | {"arguments": {}}}
            others = [[*calls[:n], *calls[n + 1 :]]]
            others += [[*calls[:n], bare, *calls[n + 1 :]]] if call["function"]["arguments"] else []
            for other in others:
                if self.same(before, message, message | {"tool_calls": other}, tools):
                    return False
        return True

    def shows_field(self, before: list[dict], message: dict, tools: list | None) -> bool:
        """Whether a turn's reasoning_content, if it has one, changes its finished rendering: text
        like it may stand there by chance."""
        without = {k: v for k, v in message.items() if k != "reasoning_content"}
        return len(without) == len(message) or not self.same(before, message, without, tools)

    def same(self, before: list[dict], one: dict, other: dict, tools: list | None) -> bool:
        """Whether two turns have the same finished rendering; a turn that is refused has none."""
        try:
            found = self.text([*before, other], False, tools)
        except RowError:
            return False
        return found == self.text([*before, one], False, tools)

    def marks(self, messages: list[dict], tools: list | None) -> tuple[str, list[tuple[int, int]]]:
        """The finished rendering, and what of it stands within {% generation %}."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.options},
            )
        except Exception as e:
            raise refused(e) from None
        (finished,), (spans,) = rendered
        return finished, spans

    def split(self, messages: list[dict], n: int, tools: list | None) -> tuple[str, str, list[str]]:
        """(prompt, what the verifier says from there on, notes), as text."""
        before, message = messages[:n], messages[n]
        prompt = self.text(before, True, tools)
        finished = self.text([*before, message], False, tools)
        reasoning = reasoning_of(message)
        rest, shown = finished[len(prompt) :], self.shows_field(before, message, tools)
        if finished.startswith(prompt) and shown and reasoning in rest:
            return prompt, rest, []
        # The rendering of earlier turns is another one, or lacks the end of the prompt (an opened
        # `<think>`), or the reasoning: look at what stands between last question and answer.
        at, asked, told = self.leads(before, finished, tools)
        rest = finished[at:]
        if shown and (reasoning in rest or reasoning in told):
            if told.startswith(asked):
                return prompt, told[len(asked) :] + rest, []
            note = "note: turns whose rendering lacks the end of the generation prompt"
            return prompt[: len(prompt) - len(asked)] + told, rest, [note]
        if not asked.rstrip().endswith(THINK):
            raise lost_reasoning(n)
        # Said after a prompt that opens the reasoning, then dropped by the template.
        closing = told.removeprefix(asked.rstrip().removesuffix(THINK)).removeprefix(THINK)
        if closing.lstrip().startswith(END_THINK):
            return prompt, reasoning + closing + rest, []
        spoken, _, answer = message["content"].partition(END_THINK)
        kept = answer.strip()
        if not answer or kept not in rest:
            raise lost_reasoning(n)
        spoken = spoken.lstrip().removeprefix(THINK)
        spoken = spoken.removeprefix(asked[asked.rindex(THINK) + len(THINK) :])
        gap = answer[: len(answer) - len(answer.lstrip())]
        return prompt, spoken + END_THINK + gap + rest[rest.index(kept) :], []

    def leads(self, before: list[dict], finished: str, tools: list | None) -> tuple[int, str, str]:
        """(where the answer begins in a finished rendering; what stands between the last message's
        text and there in the prompt; the same in finished renderings)."""
        said = {"role": "assistant", "content": ANSWER}
        at = self.text([*before, said], False, tools).find(ANSWER)
        last = [*before[:-1], before[-1] | {"content": NEXT}]
        prompt = self.text(last, True, tools)
        told = self.text([*last, said], False, tools).partition(ANSWER)[0]
        asked, told = (x.rpartition(NEXT)[2] for x in (prompt, told))
        if at < 0 or NEXT not in prompt or not finished[:at].endswith(told):
            raise RowError("template rewrites the prompt", "the finished rendering is another text")
        return at, asked, told

    def continuation(self, prompt_text: str, prompt: list[int], text: str) -> list[int]:
        """Ids of a text that goes on from a prompt, as a verifier goes on: those of the text alone,
        but for a tokenizer that puts a space before a text."""
        if self.goes_on:
            return self.ids(text)
        full = self.ids(prompt_text + text)
        if full[: len(prompt)] == prompt:
            return full[len(prompt) :]
        ids = self.ids(text)
        if self.tokenizer.decode(prompt + ids) == self.tokenizer.decode(full):
            return ids
        # a tokenizer that puts a space before a text: let it stand behind a line break
        anchor, anchored = self.ids("\n"), self.ids("\n" + text)
        ids = anchored[len(anchor) :]
        if anchored[: len(anchor)] == anchor and self.tokenizer.decode(
            prompt + ids
        ) == self.tokenizer.decode(full):
            return ids
        raise RowError("border inside a token", "the answer's ids cannot be told from the prompt's")

    def opener(self, role: str) -> list[int]:
        """The id that begins a turn of this role, where that is what ends an answer; else none."""
        if role not in self._openers:
            self._openers[role] = []
            turn = {"role": role, "content": NEXT, "tool_call_id": "0", "name": "f"}
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
            try:
                text = self.text([*messages, turn], False)
            except RowError:
                return []
            found = re.search(re.escape(ANSWER) + "(.*?)" + re.escape(NEXT), text, re.DOTALL)
            ids = self.ids(found[1].lstrip()) if found else []
            if ids and ids[0] in self.end_ids:
                self._openers[role] = ids[:1]
        return self._openers[role]

    # ------------------------------------------------------------ a conversation

    def encode(self, messages: list[dict], tools: list | None = None) -> list[Encoded]:
        """Tokenize a conversation into one sample, or several where history is rewritten.

        Raises RowError when no turn is the assistant's, and where the tokens of an answer cannot be
        told with certainty.
        """
        turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        if not turns:
            raise RowError("no assistant turn")
        if turns[0] == 0:  # said unasked: context for the others
            turns.pop(0)
        if not turns:
            raise RowError("no prompt", "the assistant speaks first, and nobody after")
        samples: list[Encoded] = []
        unseen: list[str] = []
        first = messages[: turns[0]]
        if tools and self.text(first, True, tools) == self.text(first, True):
            unseen = ["note: conversations whose tools the template does not show"]
        for n in turns:
            prompt, answer, notes = self.turn(messages, n, tools)
            notes, unseen = unseen + notes, []
            last = samples[-1] if samples else None
            if last is not None and prompt[: len(last.input_ids)] == last.input_ids:
                mask = last.loss_mask + [0] * (len(prompt) - len(last.input_ids))
                notes = last.notes + notes
                samples.pop()
            else:
                mask = [0] * len(prompt)
            trained = 0 if messages[n].get("weight") == 0 else 1
            samples.append(Encoded(prompt + answer, mask + [trained] * len(answer), notes))
        return samples


def load_template(
    model_path: str, trust_remote_code: bool, end_ids: tuple[int, ...], options: dict[str, Any]
) -> Template:
    """The template of a verifier's tokenizer; see load_tokenizer and Template."""
    return Template(load_tokenizer(model_path, trust_remote_code), end_ids, options)


def reasoning_of(message: dict[str, Any]) -> str:
    """A turn's reasoning: its own field, or what its content has before `</think>`."""
    reasoning = message.get("reasoning_content", "")
    if not reasoning and END_THINK in message["content"]:
        reasoning = message["content"].split(END_THINK, 1)[0].lstrip().removeprefix(THINK)
    return reasoning.strip()


def refused(e: Exception) -> RowError:
    reason = " ".join(str(e).split())[:120]
    return RowError(f"template refused ({reason or type(e).__name__})")


def lost_reasoning(n: int) -> RowError:
    return RowError(
        "reasoning dropped by the template",
        f"turn {n} has reasoning that its rendering lacks; train on generation prompt and raw"
        " output ids instead (tools/regenerate_responses.py)",
    )
