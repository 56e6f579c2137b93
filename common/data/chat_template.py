"""Conversations → token ids and loss masks, through the verifier's own chat template.

Here is decided which tokens are answers: loss_mask is 1 on an answer's tokens, its end-of-turn
token included, and 0 elsewhere. Which predictions of the draft carry loss follows from the mask, in
draft/loss_table.py.

For every assistant turn the prompt is the template's rendering of what comes before it with a
generation prompt, as the server would send it, and the answer is what the finished rendering adds:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n Hello!<|im_end|> \\n
    `------------- prompt (mask 0) -----------------------' `- answer (1) -'  (cut)

Each turn is rendered as the last one, so that nothing that a template does to earlier turns
touches it. Turns are kept in one sample while each prompt extends the one before; where a
template rewrites history (drops earlier reasoning), a turn starts a sample of its own.

Templates have quirks: some open `<think>` in the generation prompt, drop reasoning, trim, or mark
answers by {% generation %}. No template is known here by its name; `Template.split` and
`split_by_marks` find the border from what renderings show. A new quirk starts as a case in
tests/templates.py, with what the verifier says in a turn; if test_chat.py then fails, `split` is
the place to handle it.
"""

import datetime
import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.data.conversations import RowError, named_reasoning

# Stand for an answer's and another message's text in renderings, to find where a template puts
# them; private-use characters, which no data hold.
ANSWER, MESSAGE = "\ue000answer\ue001", "\ue000next\ue001"
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class Encoded:
    """One tokenized sample: ids and mask of equal length; `notes` are counted in the manifest."""

    input_ids: list[int]
    loss_mask: list[int]
    notes: list[str] = field(default_factory=list)


class Split(NamedTuple):
    """A rendering up to one answer's end, as text: what the verifier is given, and what it says
    (with what the template adds behind); `notes` as in Encoded."""

    prompt: str
    answer: str
    notes: list[str]


class Headers(NamedTuple):
    """What a template puts between the last message's text and the answer, as in
    `<|im_end|>\\n<|im_start|>assistant\\n<think>`.

    answer_start: where the answer begins in the finished rendering.
    prompt: the header in a rendering with a generation prompt.
    finished: the header in finished renderings, which may lack its end (`<think>`).
    """

    answer_start: int
    prompt: str
    finished: str

    def same_but_thinking(self) -> bool:
        """Whether they differ in what opens or closes the reasoning alone."""
        of_prompt, of_finished = (
            re.split(f"{THINK}|{END_THINK}", text)[0].rstrip()
            for text in (self.prompt, self.finished)
        )
        return of_prompt == of_finished


class Template:
    """A verifier's chat template with its tokenizer.

    Args:
        end_ids: ids that end an answer.
        options: the template's own variables (`enable_thinking`, ..).
        date: what it is told that today is, YYYY-MM-DD.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: tuple[int, ...],
        options: dict[str, Any] | None = None,
        date: str | None = None,
    ):
        self.tokenizer, self.end_ids, self.options = tokenizer, end_ids, dict(options or {})
        self.asked_date = False  # whether a rendering has asked for today
        if date:
            self.today = datetime.date.fromisoformat(date)
            self.options["strftime_now"] = self.strftime_now
        self.end_texts = [tokenizer.decode([i]) for i in end_ids]
        template = getattr(tokenizer, "chat_template", None)
        marks = re.search(r"\{%-?\s*generation\b", template if isinstance(template, str) else "")
        self.marks_answers = marks is not None
        # whether a text has the same ids behind another one (whose last token it does not join)
        alone, behind, before = (self.ids(text) for text in ("one", "\none", "\n"))
        self.ids_stand_alone = behind == before + alone
        self._role_tokens: dict[str, list[int]] = {}

    def strftime_now(self, form: str) -> str:
        """The name by which templates ask for today's date."""
        self.asked_date = True
        return self.today.strftime(form)

    def render(
        self, messages: list[dict], generation_prompt: bool, tools: list | None = None
    ) -> str:
        """The rendering, with a generation prompt or finished; RowError where it is refused."""
        try:
            return self.tokenizer.apply_chat_template(
                [named_reasoning(message) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.options,
            )
        except Exception as e:  # templates raise whatever their authors chose
            raise refused(e) from None

    def ids(self, text: str) -> list[int]:
        """A rendering's ids, as the server makes them."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt_ids(self, messages: list[dict], tools: list | None = None) -> list[int]:
        """What a server is sent to have these messages answered."""
        return self.ids(self.render(messages, True, tools))

    def has_special_tokens(self, text: str) -> bool:
        """Whether a text spells out special tokens, which are no text to the template."""
        ids, decode = self.ids(text), self.tokenizer.decode
        return bool(decode(ids) != decode(ids, skip_special_tokens=True))

    # ------------------------------------------------------------ a conversation

    def encode(self, messages: list[dict], tools: list | None = None) -> list[Encoded]:
        """Tokenize a conversation into one sample, or several where history is rewritten.

        Raises RowError when no turn is the assistant's, and where the tokens of an answer cannot be
        determined with certainty.
        """
        turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        if not turns:
            raise RowError("no assistant turn")
        if turns[0] == 0:  # answers no prompt: context for the others
            turns.pop(0)
        if not turns:
            raise RowError("no prompt", "the assistant speaks first, and nobody after")
        samples: list[Encoded] = []
        unseen: list[str] = []
        first = messages[: turns[0]]
        if tools and self.render(first, True, tools) == self.render(first, True):
            unseen = ["note: conversations whose tools the template does not show"]
        for n in turns:
            prompt, answer, notes = self.turn_ids(messages, n, tools)
            notes, unseen = unseen + notes, []
            last = samples[-1] if samples else None
            if last is not None and prompt[: len(last.input_ids)] == last.input_ids:
                mask = last.loss_mask + [0] * (len(prompt) - len(last.input_ids))
                notes = last.notes + notes
                samples.pop()
            else:
                mask = [0] * len(prompt)
            loss = 0 if messages[n].get("weight") == 0 else 1
            samples.append(Encoded(prompt + answer, mask + [loss] * len(answer), notes))
        return samples

    def turn_ids(
        self, messages: list[dict], n: int, tools: list | None
    ) -> tuple[list[int], list[int], list[str]]:
        """(prompt ids, answer ids, notes) of assistant turn n, as if the verifier had said it."""
        message = messages[n]
        calls = message.get("tool_calls", [])
        said = message["content"] + message.get("reasoning_content", "")
        said += json.dumps(calls, ensure_ascii=False) if calls else ""
        if any(end and end in said for end in self.end_texts):
            raise RowError("end-of-turn token inside an answer", f"turn {n}")
        split = self.split_by_marks(messages, n, tools) if self.marks_answers else None
        if split is None:
            split = self.split(messages, n, tools)
        prompt = self.ids(split.prompt)
        answer = self.answer_ids(split, prompt)
        if calls and not self.shows_calls(messages[:n], message, tools):
            raise RowError("tool calls dropped by the template", f"turn {n}")
        # Whatever follows the end-of-turn token belongs to the template, not to the answer.
        end = next((k for k, token in enumerate(answer) if token in self.end_ids), None)
        if end is not None:
            return prompt, answer[: end + 1], split.notes
        following = "tool" if calls else "user"
        if n + 1 < len(messages):
            following = messages[n + 1]["role"]
        return prompt, answer + self.ending_role_token(following), split.notes

    # ------------------------------------------------------------ where an answer begins

    def split(self, messages: list[dict], n: int, tools: list | None) -> Split:
        """Find the border between prompt and answer of turn n by what its renderings show."""
        before, message = messages[:n], messages[n]
        prompt = self.render(before, True, tools)
        finished = self.render([*before, message], False, tools)
        reasoning = reasoning_of(message)
        rest, shown = finished[len(prompt) :], self.shows_reasoning(before, message, tools)
        if finished.startswith(prompt) and shown and reasoning in rest:
            return Split(prompt, rest, [])
        # The rendering of earlier turns is another one, or lacks the end of the prompt (an opened
        # `<think>`), or the reasoning: look at what stands between last question and answer.
        header = self.headers(before, finished, tools)
        rest = finished[header.answer_start :]
        if shown and (reasoning in rest or reasoning in header.finished):
            if header.finished.startswith(header.prompt):
                return Split(prompt, header.finished[len(header.prompt) :] + rest, [])
            if not (header.prompt.startswith(header.finished) or header.same_but_thinking()):
                raise RowError(
                    "finished turns begin otherwise than the generation prompt",
                    f"turn {n}: {header.finished!r}, asked with {header.prompt!r}; train on"
                    " generation prompt and raw output ids instead"
                    " (tools/regenerate_responses.py)",
                )
            note = "note: turns whose rendering lacks the end of the generation prompt"
            return Split(prompt[: len(prompt) - len(header.prompt)] + header.finished, rest, [note])
        if not header.prompt.rstrip().endswith(THINK):
            raise lost_reasoning(n)
        # Said after a prompt that opens the reasoning, then dropped by the template: from its own
        # field, ...
        closing = header.finished.removeprefix(header.prompt.rstrip().removesuffix(THINK))
        closing = closing.removeprefix(THINK)
        if closing.lstrip().startswith(END_THINK):
            return Split(prompt, reasoning + closing + rest, [])
        # ... or from the content before `</think>`.
        thought, _, answer = message["content"].partition(END_THINK)
        kept = answer.strip()
        if not answer or kept not in rest:
            raise lost_reasoning(n)
        thought = thought.lstrip().removeprefix(THINK)
        thought = thought.removeprefix(header.prompt[header.prompt.rindex(THINK) + len(THINK) :])
        gap = answer[: len(answer) - len(answer.lstrip())]
        return Split(prompt, thought + END_THINK + gap + rest[rest.index(kept) :], [])

    def headers(self, before: list[dict], finished: str, tools: list | None) -> Headers:
        """See Headers; RowError where a finished rendering does not continue its prompt."""
        answer = {"role": "assistant", "content": ANSWER}
        start = self.render([*before, answer], False, tools).find(ANSWER)
        last = [*before[:-1], before[-1] | {"content": MESSAGE}]
        prompt = self.render(last, True, tools)
        up_to_answer = self.render([*last, answer], False, tools).partition(ANSWER)[0]
        of_prompt, of_finished = (x.rpartition(MESSAGE)[2] for x in (prompt, up_to_answer))
        if start < 0 or MESSAGE not in prompt or not finished[:start].endswith(of_finished):
            raise RowError("template rewrites the prompt", "the finished rendering is another text")
        return Headers(start, of_prompt, of_finished)

    def split_by_marks(self, messages: list[dict], n: int, tools: list | None) -> Split | None:
        """Split turn n where the template marks answers by {% generation %}; None where it has not
        marked this one."""
        finished, spans = self.marked_spans(messages[: n + 1], tools)
        prompt = self.render(messages[:n], True, tools)
        if not finished.startswith(prompt):
            return None
        # some turns may be marked only, or parts of a turn one by one
        start = next((start for start, end in spans if end > len(prompt)), None)
        if start is None:
            return None
        start = max(start, len(prompt))
        answer = finished[start:]
        if reasoning_of(messages[n]) not in answer or not self.shows_reasoning(
            messages[:n], messages[n], tools
        ):
            raise lost_reasoning(n)
        return Split(finished[:start], answer, [])

    def marked_spans(
        self, messages: list[dict], tools: list | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The finished rendering, and the (start, end) of what stands within {% generation %}."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                [[named_reasoning(message) for message in messages]],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.options},
            )
        except Exception as e:
            raise refused(e) from None
        (finished,), (spans,) = rendered
        return finished, spans

    # ------------------------------------------------------------ what the template leaves out

    def shows_calls(self, before: list[dict], message: dict, tools: list | None) -> bool:
        """Whether the finished rendering shows each call of a turn, its arguments too."""
        calls = message["tool_calls"]
        for n, call in enumerate(calls):
            bare = {**call, "function": call["function"] | {"arguments": {}}}
            others = [[*calls[:n], *calls[n + 1 :]]]
            others += [[*calls[:n], bare, *calls[n + 1 :]]] if call["function"]["arguments"] else []
            for other in others:
                if self.same_rendering(before, message, message | {"tool_calls": other}, tools):
                    return False
        return True

    def shows_reasoning(self, before: list[dict], message: dict, tools: list | None) -> bool:
        """Whether a turn's reasoning_content, if it has one, changes its finished rendering: text
        like it may stand there by chance."""
        without = {k: v for k, v in message.items() if k != "reasoning_content"}
        return len(without) == len(message) or not self.same_rendering(
            before, message, without, tools
        )

    def same_rendering(
        self, before: list[dict], one: dict, other: dict, tools: list | None
    ) -> bool:
        """Whether two turns have the same finished rendering; a turn that is refused has none."""
        try:
            found = self.render([*before, other], False, tools)
        except RowError:
            return False
        return found == self.render([*before, one], False, tools)

    # ------------------------------------------------------------ text to ids

    def answer_ids(self, split: Split, prompt: list[int]) -> list[int]:
        """Ids of an answer behind its prompt's, as a verifier continues: those of the text alone,
        but for a tokenizer that puts a space before a text."""
        if self.ids_stand_alone:
            return self.ids(split.answer)
        full = self.ids(split.prompt + split.answer)
        if full[: len(prompt)] == prompt:
            return full[len(prompt) :]
        ids = self.ids(split.answer)
        if self.tokenizer.decode(prompt + ids) == self.tokenizer.decode(full):
            return ids
        # a tokenizer that puts a space before a text: let it stand behind a line break
        anchor, anchored = self.ids("\n"), self.ids("\n" + split.answer)
        ids = anchored[len(anchor) :]
        if anchored[: len(anchor)] == anchor and self.tokenizer.decode(
            prompt + ids
        ) == self.tokenizer.decode(full):
            return ids
        raise RowError(
            "border inside a token",
            "a token spans the end of the prompt and the start of the answer",
        )

    def ending_role_token(self, role: str) -> list[int]:
        """The id that begins a turn of this role, where that is what ends an answer; else none."""
        if role not in self._role_tokens:
            self._role_tokens[role] = []
            turn = {"role": role, "content": MESSAGE, "tool_call_id": "0", "name": "f"}
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
            try:
                text = self.render([*messages, turn], False)
            except RowError:
                return []
            found = re.search(re.escape(ANSWER) + "(.*?)" + re.escape(MESSAGE), text, re.DOTALL)
            ids = self.ids(found[1].lstrip()) if found else []
            if ids and ids[0] in self.end_ids:
                self._role_tokens[role] = ids[:1]
        return self._role_tokens[role]


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
