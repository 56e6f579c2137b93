"""The backend that sends requests to an OpenAI-compatible server.

vLLM's server returns the exact token ids of prompt and answer (`return_token_ids`); others the
text alone.
"""

import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import openai

from common.data.conversations import REASONING, named_reasoning
from common.errors import UserError, again, one_line
from common.regeneration.settings import RegenerateSettings
from common.regeneration.turns import Answer, Conversation, Refusal, split_reasoning

# What reading a response that is no completion ends in.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
FAILURES = 20  # failed requests without an answer, after which the fault is the server's


class Endpoint:
    """A server and the requests under way at it; see loop.Backend.

    The client retries what fails by the connection, a timeout or the server's fault. Each request
    has a thread: `answers` needs those that are done, in any order, without an event loop.
    """

    def __init__(self, settings: RegenerateSettings, stop_token_ids: tuple[int, ...] = ()):
        """stop_token_ids: at which the server does not stop by itself."""
        url = settings.endpoint or ""
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--endpoint {url}: expected http://HOST:PORT/v1")
        self.url, self.settings, self.concurrency = url, settings, settings.concurrency
        self.stop_token_ids = list(stop_token_ids)
        self.client = openai.OpenAI(
            base_url=url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            max_retries=settings.retries,
            timeout=settings.request_timeout,
        )
        self.model = settings.served_model or self.only_model()
        self._pool = ThreadPoolExecutor(self.concurrency, "request")
        self._under_way: dict[Future[Answer], str] = {}  # with the turn's name
        self._fault: UserError | None = None
        self._failed: list[tuple[str, Exception]] = []  # the prompts' fault, or the server's
        self._answered = False

    def only_model(self) -> str:
        """The name of the one model that the server has."""
        try:
            names = [m.id for m in self.client.models.list()]
        except (openai.OpenAIError, *MALFORMED) as e:
            raise UserError(f"--endpoint {self.url}: {reason_of(e)}; {remedy(e)}") from None
        if len(names) != 1:
            raise UserError(
                f"--endpoint {self.url}: serves {', '.join(names[:5]) or 'nothing'}; choose one by"
                " --served-model"
            )
        return names[0]

    def room(self) -> int:
        """Few are kept waiting, for a stop to be quick."""
        return 0 if self._fault else self.concurrency - len(self._under_way)

    def put(self, conversation: Conversation, seed: int | None) -> None:
        future = self._pool.submit(self.request, conversation, seed)
        self._under_way[future] = conversation.turn_name

    def answers(self) -> list[Answer | Refusal]:
        """Wait a moment for answers.

        A request that the server fails on is refused once another one is answered, which shows
        that the server works. UserError, once all that is under way has come and is returned,
        where it is not reached, or fails on too many, or on all that are left.
        """
        none_left = not self._under_way
        found: list[Answer | Refusal] = []
        for future in wait(self._under_way, timeout=0.5, return_when=FIRST_COMPLETED).done:
            name = self._under_way.pop(future)
            try:
                found.append(future.result())
                self._answered = True
            except (openai.BadRequestError, openai.UnprocessableEntityError) as e:
                found.append(Refusal(name, "refused by the server", reason_of(e)))
            except (openai.OpenAIError, *MALFORMED) as e:
                # 500 may be this prompt's fault; 502 to 504 and no connection are not
                lost = isinstance(e, openai.APIConnectionError)
                if lost or getattr(e, "status_code", 500) != 500:
                    self.give_up(name, e)
                else:
                    self._failed.append((name, e))
            except UserError as e:
                self._fault = e
        if self._failed and not self._fault:
            works = any(isinstance(one, Answer) for one in found)
            if works or (none_left and self._answered):
                found += [Refusal(n, "failed by the server", reason_of(e)) for n, e in self._failed]
                self._failed = []
            elif none_left or len(self._failed) >= FAILURES:
                self.give_up(*self._failed[-1])
        if self._fault and not found and not self._under_way:
            raise self._fault
        return found

    def give_up(self, name: str, e: Exception) -> None:
        """Send no more requests."""
        self._fault = UserError(
            f"--endpoint {self.url}: {reason_of(e)} (request {name}); {remedy(e)}, and {again()}:"
            " the answers so far are kept"
        )

    def request(self, conversation: Conversation, seed: int | None) -> Answer:
        """One request, in a thread of the pool."""
        options: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.settings.max_new_tokens,
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p,
            "extra_body": {"return_token_ids": True},
        }
        if self.stop_token_ids:
            options["extra_body"]["stop_token_ids"] = self.stop_token_ids
        if seed is not None:
            options["seed"] = seed
        if conversation.messages:
            answer = self.chat(conversation, options)
        else:
            answer = self.completion(conversation, options)
        for found in (answer.ids, answer.prompt_ids):
            if found is not None and not all(type(i) is int and i >= 0 for i in found):
                raise ValueError(f"token ids {str(found)[:60]}")
        if not isinstance(answer.text, str) or not isinstance(answer.reasoning, str):
            raise ValueError("an answer that is no text")
        return answer

    def completion(self, conversation: Conversation, options: dict[str, Any]) -> Answer:
        """The answer to a prompt of token ids."""
        prompt_ids = conversation.input_ids
        choice = self.client.completions.create(prompt=prompt_ids, **options).choices[0]
        ids = getattr(choice, "token_ids", None)
        if ids is None:
            raise UserError(
                f"--endpoint {self.url}: returns no token ids, without which answers to tokenized"
                " prompts are lost; give chat rows, or use vLLM's server"
            )
        reasoning, text = split_reasoning(choice.text)
        reason = choice.finish_reason or "stop"
        return Answer(conversation.turn_name, prompt_ids, ids, text, reasoning, reason)

    def chat(self, conversation: Conversation, options: dict[str, Any]) -> Answer:
        """The answer to messages."""
        if self.settings.template_args:
            options["extra_body"]["chat_template_kwargs"] = self.settings.template_args
        if conversation.tools:
            options["tools"] = conversation.tools
        messages: Any = [
            {k: v for k, v in named_reasoning(message).items() if k != "weight"}
            for message in conversation.messages
        ]
        response = self.client.chat.completions.create(messages=messages, **options)
        choice, message = response.choices[0], response.choices[0].message
        fields = (getattr(message, key, None) for key in REASONING)
        reasoning, text = next((x for x in fields if x), ""), message.content or ""
        if not reasoning:
            reasoning, text = split_reasoning(text)
        calls = [call.model_dump(exclude_none=True) for call in message.tool_calls or []]
        return Answer(
            conversation.turn_name,
            getattr(response, "prompt_token_ids", None),
            getattr(choice, "token_ids", None),
            text,
            reasoning,
            choice.finish_reason or "stop",
            calls,
            "answer that calls tools" if calls else "",
        )

    def close(self) -> None:
        """Drop what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()


def remedy(e: Exception) -> str:
    if isinstance(e, (openai.AuthenticationError, openai.PermissionDeniedError)):
        return "set OPENAI_API_KEY"
    if isinstance(e, openai.NotFoundError):
        return "is the URL right (up to and with /v1), and --served-model?"
    if isinstance(e, openai.RateLimitError):
        return "lower --concurrency"
    return "is the server up, and OpenAI-compatible?"


def reason_of(e: Exception) -> str:
    """The error in one line; where it is not the client's, that the response has another form."""
    text = one_line(e, 200)
    return text if isinstance(e, openai.OpenAIError) else f"the response is no completion ({text})"
