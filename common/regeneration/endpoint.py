"""Asking an OpenAI-compatible server, several questions at a time.

vLLM's tells the exact token ids of prompt and answer (`return_token_ids`); of others there is
the text.
"""

import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from common.data.conversations import REASONING
from common.errors import UserError, again, one_line
from common.regeneration.turns import Answer, Conversation, Refusal, split_reasoning

# What reading an answer that is no completion ends in.
ODD = (LookupError, TypeError, ValueError, AttributeError)
FAILURES = 20  # questions that fail before a server is taken for broken


class Endpoint:
    """A server and the questions under way at it.

    Args:
        url: up to and with /v1; the key is OPENAI_API_KEY's, if it wants one.
        retries: of a request that fails by the connection, a timeout or the server's fault.
        template_args: variables of the chat template.
        body: of every request: max_tokens, temperature, ..
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        concurrency: int,
        retries: int,
        timeout: float,
        template_args: dict[str, Any],
        body: dict[str, Any],
    ):
        import openai

        if not url.startswith(("http://", "https://")):
            raise UserError(f"--endpoint {url}: expected http://HOST:PORT/v1")
        self.url, self.body, self.concurrency = url, body, concurrency
        self.template_args = template_args
        self.client = openai.OpenAI(
            base_url=url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            max_retries=retries,
            timeout=timeout,
        )
        self.model = model or self.only_model()
        self._pool = ThreadPoolExecutor(concurrency, "ask")
        self._waiting: dict[Future[Answer], Conversation] = {}
        self._fault: UserError | None = None
        self._failed: list[tuple[str, Exception]] = []  # the questions' fault, or the server's
        self._answered = False

    def only_model(self) -> str:
        """The name of the one model that the server has."""
        import openai

        try:
            names = [m.id for m in self.client.models.list()]
        except (openai.OpenAIError, *ODD) as e:
            raise UserError(f"--endpoint {self.url}: {reason_of(e)}; {remedy(e)}") from None
        if len(names) != 1:
            raise UserError(
                f"--endpoint {self.url}: serves {', '.join(names[:5]) or 'nothing'}; choose one by"
                " --served-model"
            )
        return names[0]

    def room(self) -> int:
        """How many more questions may be put; few are kept waiting, for a stop to be quick."""
        return 0 if self._fault else self.concurrency - len(self._waiting)

    def put(self, asked: Conversation, seed: int | None) -> None:
        """Ask a conversation's turn."""
        self._waiting[self._pool.submit(self.ask, asked, seed)] = asked

    def answers(self) -> list[Answer | Refusal]:
        """Wait a moment for answers.

        A question that the server fails on is refused once another one is answered, which shows
        that the server is well. UserError, once all that is under way has come and is returned,
        where it is not reached, or fails on too many, or on all that are left.
        """
        import openai

        nothing_left = not self._waiting
        found: list[Answer | Refusal] = []
        for future in wait(self._waiting, timeout=0.5, return_when=FIRST_COMPLETED).done:
            asked = self._waiting.pop(future)
            try:
                found.append(future.result())
                self._answered = True
            except (openai.BadRequestError, openai.UnprocessableEntityError) as e:
                found.append(Refusal(asked.key, "refused by the server", reason_of(e)))
            except openai.APIConnectionError as e:
                self.give_up(asked.key, e)
            except (openai.OpenAIError, *ODD) as e:
                # 500 may be this question's fault, 502 to 504 are not
                if getattr(e, "status_code", 500) == 500:
                    self._failed.append((asked.key, e))
                else:
                    self.give_up(asked.key, e)
            except UserError as e:
                self._fault = e
        if self._failed and not self._fault:
            well = any(isinstance(one, Answer) for one in found)
            if well or (nothing_left and self._answered):
                found += [Refusal(k, "failed by the server", reason_of(e)) for k, e in self._failed]
                self._failed = []
            elif nothing_left or len(self._failed) >= FAILURES:
                self.give_up(*self._failed[-1])
        if self._fault and not found and not self._waiting:
            raise self._fault
        return found

    def give_up(self, key: str, e: Exception) -> None:
        """Ask nothing more."""
        self._fault = UserError(
            f"--endpoint {self.url}: {reason_of(e)} (asking {key}); {remedy(e)}, and {again()}:"
            " what was answered is kept"
        )

    def ask(self, asked: Conversation, seed: int | None) -> Answer:
        """One request, in a thread of the pool."""
        body: dict[str, Any] = {"return_token_ids": True}
        more = {"model": self.model, "extra_body": body, **self.body}
        if seed is not None:
            more["seed"] = seed
        if asked.messages and self.template_args:
            body["chat_template_kwargs"] = self.template_args
        if not asked.messages:
            made = self.client.completions.create(prompt=asked.input_ids, **more)
            choice = made.choices[0]
            reasoning, text = split_reasoning(choice.text)
            prompt_ids: list[int] | None = asked.input_ids
            calls: list[dict[str, Any]] = []
        else:
            if asked.tools:
                more["tools"] = asked.tools
            messages: Any = [
                {k: v for k, v in message.items() if k != "weight"} for message in asked.messages
            ]
            chat = self.client.chat.completions.create(messages=messages, **more)
            choice, said = chat.choices[0], chat.choices[0].message
            fields = (getattr(said, key, None) for key in REASONING)
            reasoning, text = next((x for x in fields if x), ""), said.content or ""
            if not reasoning:
                reasoning, text = split_reasoning(text)
            prompt_ids = getattr(chat, "prompt_token_ids", None)
            calls = [call.model_dump(exclude_none=True) for call in said.tool_calls or []]
        ids = getattr(choice, "token_ids", None)
        if ids is None and not asked.messages:
            raise UserError(
                f"--endpoint {self.url}: does not tell token ids, without which an answer to"
                " tokenized prompts is lost; give chat rows, or use vLLM's server"
            )
        for found in (ids, prompt_ids):
            if found is not None and not all(type(i) is int and i >= 0 for i in found):
                raise ValueError(f"token ids {str(found)[:60]}")
        if not isinstance(text, str) or not isinstance(reasoning, str):
            raise ValueError("an answer that is no text")
        reason = choice.finish_reason or "stop"
        final = "answer that calls tools" if calls else ""
        return Answer(asked.key, prompt_ids, ids, text, reasoning, reason, calls, final)

    def close(self) -> None:
        """Give up what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()


def remedy(e: Exception) -> str:
    import openai

    if isinstance(e, (openai.AuthenticationError, openai.PermissionDeniedError)):
        return "set OPENAI_API_KEY"
    if isinstance(e, openai.NotFoundError):
        return "is the URL right (up to and with /v1), and --served-model?"
    if isinstance(e, openai.RateLimitError):
        return "lower --concurrency"
    return "is the server up, and OpenAI-compatible?"


def reason_of(e: Exception) -> str:
    """The error in one line; of what is no server's error, that the answer is not as expected."""
    import openai

    text = one_line(e, 200)
    return text if isinstance(e, openai.OpenAIError) else f"its answer is no completion ({text})"
