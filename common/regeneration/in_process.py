"""The backend that decodes with vLLM in this process."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from common.data.chat_template import Template
from common.data.conversations import RowError
from common.regeneration.settings import RegenerateSettings
from common.regeneration.turns import Answer, Conversation, Refusal, split_reasoning
from common.verifier.config import Verifier
from common.verifier.engine import generating


@contextlib.contextmanager
def in_process(
    settings: RegenerateSettings,
    verifier: Verifier,
    template: Callable[[], Template],
    longest: int,
) -> Iterator["InProcess"]:
    """The backend with its engine, which ends with the context. longest: tokens of a prompt."""
    with generating(settings, verifier, "regenerate") as llm:
        yield InProcess(llm.llm_engine, settings, verifier, template, longest)


class InProcess:
    """vLLM's engine and the turns under way in it; see loop.Backend."""

    def __init__(
        self,
        engine: Any,
        settings: RegenerateSettings,
        verifier: Verifier,
        template: Callable[[], Template],
        longest: int,
    ):
        self.concurrency = settings.batch_size
        self.engine, self.settings, self.verifier = engine, settings, verifier
        self.template, self.longest = template, longest
        self._under_way: dict[str, tuple[Conversation, list[int]]] = {}  # with the prompt's ids
        self._refused: list[Answer | Refusal] = []

    def room(self) -> int:
        """Enough to fill the next steps, few enough for a later turn not to queue behind all
        first ones."""
        return 2 * self.concurrency - len(self._under_way)

    def put(self, conversation: Conversation, seed: int | None) -> None:
        from vllm import SamplingParams

        name, ids = conversation.turn_name, conversation.input_ids
        if conversation.turn:
            try:
                ids = self.template().prompt_ids(conversation.messages, conversation.tools)
            except RowError as e:
                self._refused.append(Refusal(name, e.reason, str(e)))
                return
        if len(ids) > self.longest:
            detail = f"{len(ids)} tokens, over {self.longest} (--max-seq-len less --max-new-tokens)"
            self._refused.append(Refusal(name, "prompt grown too long", detail))
            return
        self._under_way[name] = conversation, ids
        params = SamplingParams(
            max_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            stop_token_ids=list(self.verifier.end_ids),
            detokenize=False,
            seed=seed,
        )
        self.engine.add_request(name, {"prompt_token_ids": ids}, params)

    def answers(self) -> list[Answer | Refusal]:
        """Run a step of the engine."""
        found, self._refused = self._refused, []
        outputs = self.engine.step() if self._under_way else []
        return found + [self.answer(output) for output in outputs if output.finished]

    def answer(self, output: Any) -> Answer:
        """The answer of a finished request, its text decoded for chats."""
        name, ids = output.request_id, list(output.outputs[0].token_ids)
        conversation, prompt_ids = self._under_way.pop(name)
        text = reasoning = final = ""
        if conversation.messages:
            spoken = ids[:-1] if ids and ids[-1] in self.verifier.end_ids else ids
            reasoning, text = split_reasoning(self.template().tokenizer.decode(spoken))
            if conversation.later and self.template().has_special_tokens(text):
                # a call of tools, say, which the template renders from other fields
                final = "answer with special tokens"
        reason = output.outputs[0].finish_reason
        return Answer(name, prompt_ids, ids, text, reasoning, reason, final=final)
