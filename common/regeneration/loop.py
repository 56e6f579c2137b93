"""The loop that has every conversation answered, by vLLM in this process or by a server."""

from collections import Counter
from typing import Protocol

from common.errors import Interrupted, UserError, again
from common.progress import Progress, Stopper, log
from common.regeneration.responses import Responses
from common.regeneration.turns import Answer, Conversation, Refusal

REFUSED = 20  # refusals without one answer, after which the fault is not the prompts'
LOGGED = 5  # refusals logged one by one; all are counted


class Backend(Protocol):
    """Who answers. `concurrency`: turns that it answers at the same time."""

    concurrency: int

    def room(self) -> int:
        """How many more turns it takes now."""

    def put(self, conversation: Conversation, seed: int | None) -> None:
        """Give it a conversation's next turn."""

    def answers(self) -> list[Answer | Refusal]:
        """Work or wait a moment; what has come since the last call, in any order."""


def regenerate(
    backend: Backend,
    conversations: list[Conversation],
    responses: Responses,
    turns: int,
    seed: int | None,
) -> Counter[str]:
    """Have every conversation answered to its end; each answer is in the file when it comes.

    Args:
        conversations: those with a turn to be answered.
        turns: of all conversations, answered ones included, for the progress.
        seed: of sampling; None where decoding is greedy.

    Returns:
        How many turns were refused, by reason.

    Raises:
        UserError: the first REFUSED turns, or all, were refused.
        Interrupted: on SIGTERM or SIGINT.
    """
    bar = Progress("regenerate", turns, "answers", len(responses.answered), backend.concurrency)
    stopper = Stopper()
    waiting = conversations[::-1]
    under_way: dict[str, Conversation] = {}
    refused: Counter[str] = Counter()
    while (waiting or under_way) and not stopper.code:
        while waiting and backend.room() > 0 and not stopper.code:
            conversation = waiting.pop()
            under_way[conversation.turn_name] = conversation
            backend.put(conversation, turn_seed(conversation, seed))
        for answer in backend.answers():
            conversation = under_way.pop(answer.turn_name)
            if isinstance(answer, Refusal):
                refused[answer.reason] += 1
                text = f"{answer.turn_name}: {answer.reason}: {answer.detail}"
                if refused.total() <= LOGGED:
                    log(f"regenerate: {text}")
                none_left = not (waiting or under_way)
                if not responses.answered and (refused.total() == REFUSED or none_left):
                    raise UserError(f"{text}; the first {refused.total()} prompts all failed")
                continue
            answered = responses.add(conversation, answer)
            bar.add(1)
            if conversation.advance(answered):
                waiting.append(conversation)
    bar.close()
    if waiting or under_way:
        count = len(responses.answered)
        raise Interrupted(stopper.code, f"{count} answers are in {responses.path}; {again()}")
    return refused


def turn_seed(conversation: Conversation, seed: int | None) -> int | None:
    """A turn's seed by its place among all, the same in a resumed run."""
    return None if seed is None else seed + conversation.number + 1_000_003 * conversation.turn
