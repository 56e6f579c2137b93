"""Masks and ids through chat templates, proven by decoding."""

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.chat_template import Encoded, Template
from common.data.conversations import RowError, messages_of
from common.data.rendering import load_tokenizer
from common.errors import UserError
from tests.templates import CASES as TEMPLATES
from tests.templates import Case
from tests.tiktoken_tokenizer import SPECIAL, make_tiktoken

pytestmark = pytest.mark.quick

CASES = TEMPLATES | {"kimi_tiktoken": TEMPLATES["kimi_k2"]}


@pytest.fixture(scope="session")
def tiktoken_folder(tmp_path_factory):
    return make_tiktoken(tmp_path_factory.mktemp("tiktoken") / "model")


@pytest.fixture(scope="session")
def templates(tokenizer, tiktoken_folder):
    """Every case's template over the embedded verifier's tokens and its own special ones; Kimi's
    over a tokenizer of its kind too."""
    own = load_tokenizer(str(tiktoken_folder), True)
    assert not own.is_fast
    found = {"kimi_tiktoken": Template(own, (SPECIAL["<|im_end|>"],))}
    return found | {name: template_of(case, tokenizer) for name, case in TEMPLATES.items()}


def template_of(case: Case, tokenizer) -> Template:
    """A case's template over a tokenizer's tokens and its own special ones."""
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": list(case.special)})
    own.chat_template = case.source
    return Template(own, tuple(own.convert_tokens_to_ids(list(case.ends))), dict(case.options))


def turns(*pairs: tuple[str, str], reasoning: str = "", system: str = "") -> list[dict]:
    """A conversation of questions and answers, each answer with this reasoning."""
    messages = [{"role": "system", "content": system}] if system else []
    more = {"reasoning_content": reasoning} if reasoning else {}
    for question, answer in pairs:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, **more})
    return messages


def loss_texts(template: Template, samples: list[Encoded]) -> list[str]:
    """Decoded runs of loss tokens."""
    runs, run = [], []
    for sample in samples:
        assert len(sample.input_ids) == len(sample.loss_mask)
        for token, m in [*zip(sample.input_ids, sample.loss_mask, strict=True), (0, 0)]:
            if m:
                run.append(token)
            elif run:
                runs.append(template.tokenizer.decode(run))
                run = []
    return runs


TALK = [("Hi there", "Hello!"), ("Name a colour", "Blue.\n"), ("And two?", "  Red\n\nGreen")]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reasoning", ["", "Let me think.\nYes."])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_loss_is_the_answers_with_their_end_tokens(templates, name, reasoning, system):
    case, template = CASES[name], templates[name]
    messages = turns(*TALK, reasoning=reasoning, system=system)
    if system and not case.system:
        with pytest.raises(RowError, match=r"template refused \(.*System role not supported"):
            template.encode(messages)
        return
    if reasoning and not case.reasoning:
        with pytest.raises(RowError, match="reasoning dropped by the template"):
            template.encode(messages)
        return
    samples = template.encode(messages)
    assert loss_texts(template, samples) == [case.said(a, reasoning) for _, a in TALK]
    for sample in samples:
        check_ids(template, messages, sample)


def check_ids(template: Template, messages: list[dict], sample: Encoded) -> None:
    """The ids before a sample's last answer are what the server is sent to have it answered (or
    what a finished rendering has of it), ids for ids."""
    border = len(sample.loss_mask) - 1
    while sample.loss_mask[border - 1]:
        border -= 1
    prompt = sample.input_ids[:border]
    asked = [messages[:n] for n, m in enumerate(messages) if m["role"] == "assistant"]
    rendered = [template.prompt_ids(before) for before in asked]
    if sample.notes:  # the rendering lacks the end of the generation prompt
        finished = [messages[: len(before) + 1] for before in asked]
        texts = [template.ids(template.render(x, False)) for x in finished]
        assert any(ids[: len(prompt)] == prompt for ids in [*texts, *rendered])
        assert "note: turns whose rendering lacks" in sample.notes[0]
    else:
        assert prompt in rendered


words = st.text(st.sampled_from("ab \n<|é界>1"), min_size=0, max_size=12)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(pairs=st.lists(st.tuples(words, words), min_size=1, max_size=3), thinks=st.booleans())
def test_any_conversation(templates, name, pairs, thinks):
    """Loss tokens are each answer once, whatever users say; ids are the template's own."""
    case, template = CASES[name], templates[name]
    reasoning = "because a\nb" if thinks and case.reasoning else ""
    messages = turns(*pairs, reasoning=reasoning)
    samples = template.encode(messages)
    assert loss_texts(template, samples) == [case.said(a, reasoning) for _, a in pairs]
    for sample in samples:
        check_ids(template, messages, sample)


def test_history_kept_is_one_sample_and_rewritten_one_a_turn(templates):
    def count(name, **more):
        return len(templates[name].encode(turns(*TALK, **more)))

    assert count("chatml") == count("mistral") == count("glm") == count("kimi_k2") == 1
    why = "why"
    assert count("kimi_k2", reasoning=why) == count("glm", reasoning=why) == len(TALK)
    assert count("minimax_m2", reasoning=why) == len(TALK)


def test_reasoning_inside_the_content(templates):
    """As distilled data have it: kept by templates that show it, and put after a generation
    prompt that opens it by those that cut it."""
    talk = turns(("Sum?", "<think>\n1 and 1\n</think>\n\nTwo."))

    def texts(name):
        return loss_texts(templates[name], templates[name].encode(talk))

    assert texts("qwen_3") == ["<think>\n1 and 1\n</think>\n\nTwo.<|im_end|>"]
    assert texts("chatml") == ["<think>\n1 and 1\n</think>\n\nTwo.<|im_end|>"]
    assert texts("deepseek_r1") == ["1 and 1\n</think>\n\nTwo.<|end|>"]
    (sample,) = templates["deepseek_r1"].encode(talk)
    check_ids(templates["deepseek_r1"], talk, sample)
    assert not sample.notes
    with pytest.raises(RowError, match="reasoning dropped"):
        templates["deepseek_v31"].encode(talk)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_tool_calls_are_part_of_the_answer(templates):
    """Kimi-K2 keeps the reasoning of turns after the last answer without calls."""
    messages: list[dict] = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "reasoning_content": "use it", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "tool_call_id": "add:0", "content": "2"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "so"},
    ]
    template = templates["kimi_k2"]
    samples = template.encode(messages)
    call = (
        '<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert loss_texts(template, samples) == [
        f"use it</think>{call}<|im_end|>",
        "so</think>Two.<|im_end|>",
    ]
    assert len(samples) == 1
    messages[1] = {k: v for k, v in messages[1].items() if k != "reasoning_content"}
    with pytest.raises(RowError, match="tool calls dropped by the template"):
        templates["chatml"].encode(messages)


def test_tools_that_the_template_does_not_show_are_noted(templates):
    (sample,) = templates["chatml"].encode(turns(("a", "b"), ("c", "d")), [CALL])
    assert sample.notes == ["note: conversations whose tools the template does not show"]


def test_the_next_roles_token_ends_a_turn_before_a_tool(templates):
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "add(1, 1)"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    template = templates["glm"]
    assert loss_texts(template, template.encode(messages)) == [
        "\n<think></think>\nadd(1, 1)<|observation|>",
        "\n<think></think>\nTwo.<|user|>",
    ]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "hello"}], "no assistant turn"),
        (turns(("a", "b"))[1:], "no prompt"),
        (turns(("a", "I end with <|im_end|> always")), "end-of-turn token inside an answer"),
    ],
)
def test_conversations_that_make_no_sample(templates, messages, reason):
    with pytest.raises(RowError, match=reason):
        templates["chatml"].encode(messages)


@pytest.mark.parametrize("name", ["mistral", "chatml", "glm"])
@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_tokenizer_that_puts_a_space_before_a_text(name, scheme):
    """As sentencepiece does: the answer behind its prompt must not get one, but where each part of
    a rendering does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["\n", "▁", *map(chr, range(33, 127))]
    inner = Tokenizer(models.BPE({c: n for n, c in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    case = CASES[name]
    own = PreTrainedTokenizerFast(tokenizer_object=inner)
    own.add_special_tokens({"additional_special_tokens": list(case.special)})
    own.chat_template = case.source
    template = Template(own, tuple(own.added_tokens_encoder[token] for token in case.ends))
    assert not template.ids_stand_alone
    talk = [("Hi there", "Hello!"), ("Name two", "Red\n\nGreen")]
    samples = template.encode(turns(*talk))
    tokens = [
        "".join(own.convert_ids_to_tokens([i for i, m in pairs if m]))
        for pairs in (list(zip(s.input_ids, s.loss_mask, strict=True)) for s in samples)
    ]
    want = "".join(case.said(a, "") for _, a in talk).replace(" ", "▁")
    finished = template.ids(template.render(turns(*talk), False))
    if scheme == "first":
        assert "".join(tokens) == want
    else:  # parts get spaces of their own, which are the template's
        assert "".join(tokens).replace("▁", "") == want.replace("▁", "")
        assert samples[-1].input_ids[: len(finished)] == finished[: len(samples[-1].input_ids)]


def test_calls_that_a_template_leaves_unmarked_carry_loss_all_the_same(tokenizer):
    """{% generation %} round texts, not round calls: the last mark is an earlier turn's."""
    source = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{% if m.tool_calls %}{{ m.tool_calls[0].function.name + '()' }}{% elif m.role == 'assistant' %}\
{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\
{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
    template = template_of(dataclasses.replace(TEMPLATES["chatml"], source=source), tokenizer)
    assert template.marks_answers
    call = {"type": "function", "function": {"name": "clock", "arguments": {}}}
    messages = [
        *turns(("Hi", "Hello!")),
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
    ]
    assert loss_texts(template, template.encode(messages)) == [
        "Hello!<|im_end|>", "clock()<|im_end|>", "Noon.<|im_end|>",
    ]  # fmt: skip


def call_of(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_what_a_template_leaves_out_is_noticed_even_if_like_text_is_there(templates, tokenizer):
    """A call's name, or the reasoning, may stand in the answer by chance; a template may print the
    first call alone, or no arguments."""
    asked = [{"role": "user", "content": "a"}]
    said: dict[str, Any] = {"role": "assistant", "content": "I think I call get now"}
    lost: list[tuple[dict[str, Any], str]] = [
        ({"tool_calls": [call_of("get")]}, "tool calls dropped"),
        ({"reasoning_content": "think"}, "reasoning dropped"),
    ]
    for more, reason in lost:
        with pytest.raises(RowError, match=reason):
            templates["chatml"].encode([*asked, said | more])
    source = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}\
{% if m.tool_calls %}{{ m.tool_calls[0].function.name + '()' }}{% endif %}{{ '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
    template = template_of(dataclasses.replace(TEMPLATES["chatml"], source=source), tokenizer)
    (sample,) = template.encode([*asked, said | {"tool_calls": [call_of("get")]}])
    assert loss_texts(template, [sample]) == ["I think I call get nowget()<|im_end|>"]
    for calls in ([call_of("get"), call_of("get")], [call_of("get", x=1)]):
        with pytest.raises(RowError, match="tool calls dropped"):
            template.encode([*asked, said | {"tool_calls": calls}])


def test_an_answer_marked_in_parts_or_with_its_header(tokenizer):
    """The mask is from the generation prompt's end, or the first mark behind it."""
    for marked, want in [
        ("{% generation %}<think>{{ m.reasoning_content }}</think>{% endgeneration %}"
         "{% generation %}{{ m.content }}{% endgeneration %}", "<think>why</think>Yes.<|im_end|>"),
        ("{% generation %}{{ m.content }}{% endgeneration %} | "
         "{% generation %}{{ m.reasoning_content }}{% endgeneration %}", "Yes. | why<|im_end|>"),
    ]:  # fmt: skip
        source = (
            """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{% if m.role == 'assistant' %}"""
            + marked
            + """{% else %}{{ m.content }}{% endif %}\
{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
        )
        template = template_of(dataclasses.replace(TEMPLATES["chatml"], source=source), tokenizer)
        samples = template.encode(turns(("Really?", "Yes."), reasoning="why"))
        assert loss_texts(template, samples) == [want]
    source = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\
{{ '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}{% endgeneration %}{% else %}\
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
    template = template_of(dataclasses.replace(TEMPLATES["chatml"], source=source), tokenizer)
    samples = template.encode(turns(("Hi", "Hello!"), ("Bye", "Bye!")))
    assert loss_texts(template, samples) == ["Hello!<|im_end|>", "Bye!<|im_end|>"]


def test_an_answer_of_weight_0_is_context(templates):
    row = {"messages": turns(("Hi", "Helo"), ("Again", "Hello!"))}
    row["messages"][1]["weight"] = 0
    samples = templates["chatml"].encode(messages_of(row))
    assert loss_texts(templates["chatml"], samples) == ["Hello!<|im_end|>"]
    assert "Helo" in templates["chatml"].tokenizer.decode(samples[0].input_ids)


def test_an_end_of_turn_token_in_a_call_is_counted(templates):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}
    messages = [*turns(("a", "b"))[:1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(RowError, match="end-of-turn token inside an answer"):
        templates["chatml"].encode(messages)


def test_an_assistant_that_speaks_first_is_context(templates):
    messages = [{"role": "assistant", "content": "Welcome."}, *turns(("Hi", "Hello!"))]
    (sample,) = templates["chatml"].encode(messages)
    assert loss_texts(templates["chatml"], [sample]) == ["Hello!<|im_end|>"]
    assert "Welcome." in templates["chatml"].tokenizer.decode(sample.input_ids)


def test_a_tokenizer_that_is_code_runs_by_flag_alone(tiktoken_folder):
    with pytest.raises(UserError, match="pass --trust-remote-code"):
        load_tokenizer(str(tiktoken_folder), False)


def test_a_template_that_raises_is_counted_by_its_message(templates):
    messages = [*turns(("a", "b")), {"role": "assistant", "content": "c"}]
    with pytest.raises(RowError) as e:
        templates["mistral"].encode(messages)
    assert e.value.reason == "template refused (roles must alternate user/assistant)"
