"""Answers that repeat themselves: measured, counted by 01, droppable, and apart in acceptance."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.data.loops import LOOPING, Loops, count_loops, loops, repeated_share
from common.serving.acceptance import DraftMeasurement, acceptance, table, without_looping
from common.serving.generation import Decoded, Run
from tests.conftest import fails, last_line, must, script, write_jsonl

answers = st.lists(st.integers(0, 3), min_size=1, max_size=60)
LOOP = [5, 6, 7, 8, 9] * 8
PLAIN = list(range(20, 60))


@pytest.mark.quick
@given(answers, st.permutations(range(100, 104)))
def test_the_share_is_of_eight_tokens_seen_before(ids, names):
    """As one counts it by hand, whatever the tokens are called."""
    grams = [ids[n : n + 8] for n in range(len(ids) - 7)]
    again = sum(gram in grams[:n] for n, gram in enumerate(grams))
    assert repeated_share(ids) == pytest.approx(again / max(1, len(grams)))
    assert repeated_share([names[i] for i in ids]) == repeated_share(ids)


@pytest.mark.quick
@given(st.integers(1, 30), st.integers(0, 12))
def test_a_phrase_said_over_and_over_loops(phrase, times):
    """From the second or third time on; never said twice, it has no share."""
    ids = [*range(phrase)] * times + [99]
    count = max(1, len(ids) - 7)
    # every place in the phrase begins an n-gram once, and so do the ends behind the last full one
    distinct = min(count, phrase + 1)
    assert repeated_share(ids) == pytest.approx(1 - distinct / count)
    assert not loops([*range(phrase), 99])
    assert loops([*range(phrase)] * 12) == (12 * phrase > 8)


@pytest.mark.quick
@given(st.lists(st.tuples(st.integers(1, 4), answers), max_size=5))
def test_a_sample_is_counted_by_its_answers(turns):
    ids, mask = [], []
    for prompt, answer in turns:
        ids += [7] * prompt + answer
        mask += [0] * prompt + [1] * len(answer)
    looping = [answer for _, answer in turns if repeated_share(answer) > LOOPING]
    assert count_loops(ids, mask) == Loops(
        len(turns), sum(mask), len(looping), sum(map(len, looping))
    )
    assert count_loops([*ids, 7], [*mask, 0]) == count_loops(ids, mask)


def row(name: str, *answers: list[int]) -> dict:
    """A tokenized row: two tokens before each answer."""
    return {
        "id": name,
        "input_ids": [t for answer in answers for t in [3, 4, *answer]],
        "loss_mask": [t for answer in answers for t in [0, 0, *[1] * len(answer)]],
    }


@pytest.mark.quick
def test_01_counts_looping_answers_and_drops_them_on_demand(tiny_llama, tmp_path):
    """By turns, once where a sample comes twice; a folder made with the flag is another one."""
    rows = [
        row("a", PLAIN), row("b", PLAIN, LOOP), row("c", LOOP[:30]), row("d", PLAIN[:10]),
        row("twice", LOOP[:30]),
    ]  # fmt: skip
    args = ["--model-path", tiny_llama, "--dataset", write_jsonl(tmp_path / "d.jsonl", rows)]
    kept, dropped = tmp_path / "kept", tmp_path / "dropped"
    result = must(script("01_prepare_data.py", *args, "--output-dir", kept))
    assert "; 2 of 5 answers loop (44% of their tokens); " in last_line(result)
    manifest = json.loads((kept / "data_config.json").read_text())
    assert "drop_looping" not in manifest["settings"]  # as before there was the flag
    counts = manifest["counts"]
    assert (counts["answers"], counts["looping_answers"]) == (5, 2)
    assert (counts["loss_tokens"], counts["looping_loss_tokens"]) == (160, 70)

    config = tmp_path / "c.yaml"
    config.write_text("prepare: {drop_looping: true}\n")
    for more in ["--drop-looping"], ["--config", config]:
        command = [*args, *more, "--output-dir", dropped, "--overwrite"]
        result = must(script("01_prepare_data.py", *command))
        assert "dropped: looping answer 3" in last_line(result)
        assert "; 0 of 2 answers loop" in last_line(result)
        lines = (dropped / "tokenized_data.jsonl").read_text().splitlines()
        assert [json.loads(line)["id"] for line in lines] == ["a", "d"]
    fails(script("01_prepare_data.py", *args, "--output-dir", dropped), "drop_looping")
    again = script("01_prepare_data.py", *args, "--output-dir", kept, "--drop-looping")
    fails(again, "drop_looping")


def measured(**prompts: tuple[list[int], int]) -> tuple[Run, DraftMeasurement]:
    """Runs with and without a draft that gave each prompt an answer in so many passes; vLLM
    counted 2 more tokens accepted, behind the answers' ends."""
    found = {name: Decoded(ids, n, len(ids) - 1) for name, (ids, n) in prompts.items()}
    tokens = sum(len(one.ids) for one in found.values())
    drafts = sum(one.passes for one in found.values())
    accepted = tokens - len(found) - drafts + 2
    run = Run(found, tokens, 1.0)
    counters = {"drafts": float(drafts), "accepted": float(accepted), "position_0": 1.0}
    return run, DraftMeasurement(run, counters, None)


@pytest.mark.quick
def test_acceptance_is_told_without_looping_answers_too():
    """41 - 1 tokens in 10 passes and 39 in 26 loop or not: 1.5 without, and vLLM's count above
    what was emitted by 2 tokens in 36 passes."""
    found = acceptance(*measured(a=([*LOOP, 1], 10), b=(PLAIN, 26)), 1, 0)
    assert found.acceptance_length == pytest.approx(81 / 36)
    assert found.acceptance_length_without_looping == pytest.approx(39 / 26 + 2 / 36)
    assert (found.looping_share, found.looping_prompts) == (0.5, ["a"])
    assert without_looping(found) == "1 of 2 answers loop, 1.556 without them"
    assert "looping answers         1 of 2 answers loop, 1.556" in table(found, None)


@pytest.mark.quick
def test_acceptance_where_all_answers_loop_or_none_does():
    found = acceptance(*measured(a=(LOOP, 10)), 1, 0)
    assert (found.looping_share, found.acceptance_length_without_looping) == (1, None)
    assert "1 of 1 answers loop" in without_looping(found)
    found = acceptance(*measured(a=(PLAIN, 26), b=(PLAIN[:20], 12)), 1, 0)
    assert found.looping_share == 0
    assert found.acceptance_length_without_looping == found.acceptance_length
