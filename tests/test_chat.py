"""Masks and ids through the verifier's own template, proven by decoding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat import RowError, encode_conversation, messages_of, render

END = (2,)


def encode(tokenizer, *turns):
    """Encode [role, content] turns."""
    return encode_conversation(tokenizer, [{"role": r, "content": c} for r, c in turns], None, END)


def loss_texts(tokenizer, sample):
    """Decoded runs of loss tokens."""
    runs, run = [], []
    for token, m in [*zip(sample.input_ids, sample.loss_mask, strict=True), (0, 0)]:
        if m:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


def test_loss_is_the_answers_with_their_end_tokens(tokenizer):
    (sample,) = encode(
        tokenizer,
        ("user", "Hi there"),
        ("assistant", "Hello!"),
        ("user", "Name a colour"),
        ("assistant", "Blue.\n"),
    )
    assert loss_texts(tokenizer, sample) == ["Hello!<|im_end|>", "Blue.\n<|im_end|>"]
    text = tokenizer.decode(sample.input_ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("Blue.\n<|im_end|>")


words = st.text(st.sampled_from("ab \n<|é界>1"), min_size=0, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=3))
def test_any_conversation_is_the_templates_rendering(tokenizer, pairs):
    """Samples are the template's text; loss tokens are each answer once, and nothing else."""
    messages = []
    for question, answer in pairs:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    samples = encode_conversation(tokenizer, messages, None, END)
    full = tokenizer.decode(render(tokenizer, messages, False))
    spoken = []
    for sample in samples:  # more than one where a turn's border falls inside a token
        assert full.startswith(tokenizer.decode(sample.input_ids))
        assert len(sample.input_ids) == len(sample.loss_mask)
        spoken += loss_texts(tokenizer, sample)
    assert spoken == [f"{a}<|im_end|>" for _, a in pairs]


class HistoryRewriter:
    """A tokenizer of characters whose template drops the reasoning of earlier answers."""

    def apply_chat_template(self, messages, tools, tokenize, add_generation_prompt, **_):
        out = ""
        for n, m in enumerate(messages):
            content = m["content"]
            if m["role"] == "assistant" and n < len(messages) - 1:
                content = content.split("]")[-1]
            out += f"{m['role'][0]}:{content}$"
        out += "a:" if add_generation_prompt else ""
        return [ord(c) for c in out] if tokenize else out

    def encode(self, text, add_special_tokens):
        return [ord(c) for c in text]


def test_rewritten_history_makes_a_sample_a_turn():
    messages = messages_of(
        {
            "messages": [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": "[why]x"},
                {"role": "user", "content": "2"},
                {"role": "assistant", "content": "[how]y"},
            ]
        }
    )
    samples = encode_conversation(HistoryRewriter(), messages, None, (ord("$"),))
    texts = ["".join(map(chr, s.input_ids)) for s in samples]
    assert texts == ["u:1$a:[why]x$", "u:1$a:x$u:2$a:[how]y$"]
    assert [sum(s.loss_mask) for s in samples] == [len("[why]x$"), len("[how]y$")]


def test_sharegpt_roles():
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
    ]
    assert [m["role"] for m in messages_of({"conversations": turns})] == [
        "system",
        "user",
        "assistant",
    ]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role: turn 0 has role 'na"),
        ({"messages": [{"role": "user"}]}, "turn 0 has no text content"),
        ({"messages": []}, "empty conversation"),
        ({"text": "x"}, "needs messages or conversations, has text"),
    ],
)
def test_rows_that_are_no_conversation(row, text):
    with pytest.raises(RowError, match=text):
        messages_of(row)


def test_no_assistant_turn(tokenizer):
    with pytest.raises(RowError, match="no assistant turn"):
        encode(tokenizer, ("user", "hello"))
