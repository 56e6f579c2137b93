"""What is accepted of a draft: vLLM's counts, rates with an interval, and their table."""

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.artifacts import read_json, write_json
from common.data.loops import loops
from common.errors import UserError
from common.serving.generation import Decoded, Run
from common.serving.parity import Parity

BOOTSTRAP = 2000  # samples


@dataclass(frozen=True)
class DraftMeasurement:
    """The run with the draft, as with_draft.json keeps it until the verifier alone is measured.

    counters: of this run, see draft_counters; parity: None without --hidden-states.
    """

    run: Run
    counters: dict[str, float]
    parity: Parity | None

    def write(self, path: Path) -> None:
        rest = {"counters": self.counters, "checked": result_of(self.parity)}
        write_json(path, asdict(self.run) | rest)

    @classmethod
    def read(cls, path: Path, prompts: set[str], depths: int) -> "DraftMeasurement":
        """What `write` has written; UserError unless it is of these prompts and drafted tokens."""
        try:
            found = read_json(path)
            answers = {name: Decoded(**answer) for name, answer in found["answers"].items()}
            parity = Parity(**found["checked"]) if found["checked"] else None
            run = Run(answers, int(found["tokens"]), float(found["seconds"]))
            counters = {name: float(count) for name, count in found["counters"].items()}
            rates = [counters[f"position_{i}"] for i in range(depths)] + [counters["accepted"]]
            if min(counters["drafts"], run.seconds) <= 0 or min(rates) < 0:
                raise ValueError("no drafts")
            if answers.keys() != prompts:
                raise ValueError("other prompts")
        except (UserError, KeyError, TypeError, ValueError, AttributeError):
            raise UserError(
                f"{path}: is damaged; delete it, and the draft is measured again"
            ) from None
        return cls(run, counters, parity)


@dataclass(frozen=True)
class Acceptance:
    """Rates of both runs, by the keys of result.json.

    acceptance_length: tokens per forward pass of the verifier, 1 + accepted; interval_95: of it;
    acceptance_by_position: share accepted of each drafted token; identical_share: of the answers
    with and without the draft; prompts: id → [drafts, tokens emitted with them], for paired
    comparisons. looping_prompts: those whose answer with the draft repeats itself
    (data/loops.py), which is easily predicted; acceptance_length_without_looping: of the others,
    None where there are none.
    """

    acceptance_length: float
    interval_95: tuple[float, float]
    drafts: int
    acceptance_by_position: list[float]
    verifier_tokens_per_second: float
    draft_tokens_per_second: float
    speed_ratio: float
    identical_share: float
    tokens: int
    prompts: dict[str, list[int]]
    looping_share: float
    acceptance_length_without_looping: float | None
    looping_prompts: list[str]


def draft_counters(llm: Any) -> dict[str, float]:
    """vLLM's counters so far: `drafts`, `accepted` tokens, and of these `position_0` and on."""
    out: dict[str, float] = {"drafts": 0, "accepted": 0}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            out["drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            out["accepted"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            for i, value in enumerate(metric.values):
                out[f"position_{i}"] = out.get(f"position_{i}", 0) + value
    return out


def acceptance(plain: Run, drafted: DraftMeasurement, depths: int, seed: int) -> Acceptance:
    """Rates of both runs.

    The acceptance length is vLLM's count. Its interval is a bootstrap over prompts (passes of
    one prompt are alike) of the tokens that each pass emitted, moved to that count: the two
    differ by the accepted tokens that fall behind an answer's end. So is the length without
    looping answers.

    Args:
        depths: drafted tokens per pass; seed: of the bootstrap.
    """
    run, counters, drafts = drafted.run, drafted.counters, drafted.counters["drafts"]
    measured = {name: (o.passes, o.passes_tokens) for name, o in run.answers.items() if o.passes}
    per_prompt = list(measured.values())
    rng = random.Random(seed)
    means = sorted(
        tokens_per_pass(rng.choices(per_prompt, k=len(per_prompt))) for _ in range(BOOTSTRAP)
    )
    length = 1 + counters["accepted"] / drafts
    emitted = tokens_per_pass(per_prompt)
    looping = [name for name, answer in run.answers.items() if loops(answer.ids)]
    others = [pair for name, pair in measured.items() if name not in looping]
    without = length + (tokens_per_pass(others) - emitted) if others else None
    same = sum(plain.answers[k].ids == run.answers[k].ids for k in plain.answers)
    plain_rate, drafted_rate = plain.tokens / plain.seconds, run.tokens / run.seconds
    return Acceptance(
        acceptance_length=length,
        interval_95=(length + means[49] - emitted, length + means[1949] - emitted),
        drafts=int(drafts),
        acceptance_by_position=[counters[f"position_{i}"] / drafts for i in range(depths)],
        verifier_tokens_per_second=plain_rate,
        draft_tokens_per_second=drafted_rate,
        speed_ratio=drafted_rate / plain_rate,
        identical_share=same / len(plain.answers),
        tokens=run.tokens,
        prompts={name: [o.passes, o.passes_tokens] for name, o in run.answers.items()},
        looping_share=len(looping) / len(run.answers),
        acceptance_length_without_looping=without,
        looping_prompts=looping,
    )


def without_looping(found: Acceptance) -> str:
    """For people: how many answers loop, and the acceptance length of the others."""
    length = found.acceptance_length_without_looping
    others = f"{length:.3f} without them" if length is not None else "no other was measured"
    return f"{len(found.looping_prompts)} of {len(found.prompts)} answers loop, {others}"


def tokens_per_pass(prompts: list[tuple[int, int]]) -> float:
    """Of (passes, tokens) of prompts."""
    return sum(tokens for _, tokens in prompts) / sum(passes for passes, _ in prompts)


def result_of(parity: Parity | None) -> dict[str, Any]:
    """What result.json says of it."""
    return {k: v for k, v in asdict(parity).items() if v is not None} if parity else {}


def table(found: Acceptance, parity: Parity | None, quantized_copy: bool = False) -> str:
    """The result for people, a line per quantity.

    Args:
        quantized_copy: whether the verifier was one, of the draft's.
    """
    low, high = found.interval_95
    lines = [
        ("prompts, drafts", f"{len(found.prompts)}, {found.drafts}"),
        ("acceptance length", f"{found.acceptance_length:.3f} (95% {low:.3f} to {high:.3f})"),
        ("looping answers", without_looping(found)),
        (
            "acceptance per position",
            " ".join(f"{100 * share:.1f}%" for share in found.acceptance_by_position),
        ),
        ("verifier alone", f"{found.verifier_tokens_per_second:.0f} tok/s"),
        (
            "with the draft",
            f"{found.draft_tokens_per_second:.0f} tok/s ({found.speed_ratio:.2f}x)",
        ),
        ("identical answers", f"{100 * found.identical_share:.0f}%"),
    ]
    if quantized_copy:
        lines.append(("verifier", "a quantised copy of the draft's, by --quantized-copy"))
    if parity:
        error = parity.fed_states_relative_error
        lines.append(("parity, draft's input", f"relative error {error:.1e} against 03's states"))
        if parity.made_states_relative_error:
            by_depth = ", ".join(f"{x:.1e}" for x in parity.made_states_relative_error)
            text = f"relative error {by_depth} by depth against training's"
        else:
            text = f"not compared: {parity.made_states_not_compared}"
        lines.append(("parity, draft's output", text))
    return "\n".join(f"  {name:<23} {value}" for name, value in lines)
