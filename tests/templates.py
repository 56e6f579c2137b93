"""Small chat templates that behave as the well-known ones do, each with what an answer is.

`said(content, reasoning)` is all that the verifier says in a turn after its generation prompt,
end-of-turn token included; of a turn without reasoning where the finished rendering lacks the
end of that prompt, after what it has of it.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """source: the template; special: its tokens; ends: those that end an answer; said: see above;
    reasoning: whether a reasoning_content can be told; system: whether it takes that role."""

    source: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    said: Callable[[str, str], str]
    reasoning: bool = False
    system: bool = True
    options: tuple[tuple[str, object], ...] = ()


# a default system prompt injected when none is given
CHATML = Case(
    """{% if messages[0].role != 'system' %}<|im_start|>system
Be kind.<|im_end|>
{% endif %}{% for m in messages %}\
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    ("<|im_start|>", "<|im_end|>"),
    ("<|im_end|>",),
    lambda content, _: content + "<|im_end|>",
)
# answers marked by the template itself, without their end token
MARKED = Case(
    """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}\
{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\
{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{% endif %}""",
    CHATML.special,
    CHATML.ends,
    CHATML.said,
)
# today's date in a default system prompt; strict alternation, told by an error; no generation
# prompt at all
MISTRAL = Case(
    """{{ '<s>' }}{% set rest = messages %}{% if messages[0].role == 'system' %}\
{% set rest = messages[1:] %}{{ '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}\
{% else %}\
{{ '[SYSTEM_PROMPT]Today is ' + strftime_now('%Y-%m-%d') + '.[/SYSTEM_PROMPT]' }}{% endif %}\
{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if m.role == 'user' %}\
{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}""",
    ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ("</s>",),
    lambda content, _: content + "</s>",
)
# every turn up to the last answer without tool calls loses its reasoning, that answer included;
# the generation prompt opens it
KIMI_K2 = Case(
    """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not \
m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}\
{% if m.role == 'assistant' %}{{ '<|im_assistant|>assistant<|im_middle|>' }}\
{{ '<think>' + ((m.reasoning_content or '') if loop.index0 > ns.last else '') + '</think>' }}\
{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}\
{{ '<|tool_call_begin|>' + c.function.name + '<|tool_call_argument_begin|>' }}\
{{ c.function.arguments | tojson }}{{ '<|tool_call_end|>' }}{% endfor %}\
<|tool_calls_section_end|>{% endif %}{{ '<|im_end|>' }}{% elif m.role == 'tool' %}\
{{ '<|im_system|>' + (m.name or 'tool') + '<|im_middle|>## Return of ' + (m.tool_call_id or '') \
+ '\\n' + m.content + '<|im_end|>' }}{% else %}\
{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>\
{% endif %}""",
    (
        "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
        "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
    ("<|im_end|>",),
    lambda content, reasoning: f"{reasoning}</think>{content}<|im_end|>",
    reasoning=True,
)  # fmt: skip
# reasoning only after the last user turn; the generation prompt opens it, and a rendering without
# reasoning lacks that
MINIMAX_M2 = Case(
    """{% set ns = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}\
{% if m.role == 'assistant' %}{{ ']~b]ai\\n' }}\
{% if m.reasoning_content and loop.index0 > ns.user %}\
{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}\
{{ m.content + '[e~[\\n' }}\
{% else %}{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}""",
    ("]~b]", "[e~[", "<think>", "</think>"),
    ("[e~[",),
    lambda content, reasoning: (
        f"{reasoning}\n</think>\n\n{content}[e~[" if reasoning else f"{content}[e~["
    ),
    reasoning=True,
)
# no end-of-turn token, the next role's token ends a turn; content trimmed and re-spaced;
# reasoning only after the last user turn
GLM = Case(
    """[gMASK]<sop>{% set ns = namespace(user=-1) %}{% for m in messages %}\
{% if m.role == 'user' %}\
{% set ns.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}\
{% if m.role == 'assistant' %}{{ '<|assistant|>' }}{% if loop.index0 > ns.user and \
m.reasoning_content %}{{ '\\n<think>' + m.reasoning_content.strip() + '</think>' }}{% else %}\
{{ '\\n<think></think>' }}{% endif %}{% if m.content.strip() %}{{ '\\n' + m.content.strip() }}\
{% endif %}{% else %}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\\n' \
+ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    ("[gMASK]", "<sop>", "<|assistant|>", "<|user|>", "<|system|>", "<|observation|>"),
    ("<|user|>", "<|observation|>"),
    lambda content, reasoning: (
        f"\n<think>{reasoning}</think>" + (f"\n{content.strip()}" if content.strip() else "")
        + "<|user|>"
    ),
    reasoning=True,
)  # fmt: skip
# text up to </think> cut from every answer; the generation prompt closes the reasoning at once, or
# opens it
V31 = """<|begin|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\
{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}{% elif m.role == 'assistant' %}\
{{ '<|Assistant|></think>' + m.content.split('</think>')[-1] + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|Assistant|>' + ('<think>' if thinking else '</think>') }}\
{% endif %}"""
V31_TOKENS = ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>", "<think>", "</think>")
DEEPSEEK_V31 = Case(V31, V31_TOKENS, ("<|end|>",), lambda content, _: content + "<|end|>")
DEEPSEEK_V31_THINKING = Case(
    V31,
    V31_TOKENS,
    ("<|end|>",),
    lambda content, reasoning: (
        f"{reasoning}</think>{content}<|end|>" if reasoning else f"{content}<|end|>"
    ),
    reasoning=True,
    options=(("thinking", True),),
)
# the same cut; the generation prompt opens the reasoning, and no rendering has it
DEEPSEEK_R1 = Case(
    """<|begin|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\
{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}{% elif m.role == 'assistant' %}\
{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}""",
    V31_TOKENS,
    ("<|end|>",),
    lambda content, _: content + "<|end|>",
)
# content trimmed
LLAMA_3 = Case(
    """<|begin_of_text|>{% for m in messages %}{{ '<|start_header_id|>' + m.role + \
'<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\
{% endif %}""",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ("<|eot_id|>",),
    lambda content, _: content.strip() + "<|eot_id|>",
)
# the end-of-text token after the last turn, where no generation prompt is asked for
PHI_4_MINI = Case(
    """{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% else %}<|eot|>{% endif %}""",
    ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|eot|>"),
    ("<|end|>", "<|eot|>"),
    lambda content, _: content + "<|end|>",
)
# no system role
GEMMA = Case(
    """<bos>{% for m in messages %}{% if m.role == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}{{ '<start_of_turn>' + \
('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    ("<end_of_turn>",),
    lambda content, _: content.strip() + "<end_of_turn>",
    system=False,
)
# the last turns' reasoning shown, in its own field or in the content
QWEN_3 = Case(
    """{% set ns = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}\
{% if m.role == 'assistant' %}{% set think = m.reasoning_content or '' %}{% set said = m.content %}\
{% if '</think>' in said %}{% set think = said.split('</think>')[0].split('<think>')[-1] %}\
{% set said = said.split('</think>')[-1] %}{% endif %}{{ '<|im_start|>assistant\\n' }}\
{% if loop.index0 > ns.user %}{{ '<think>\\n' + think.strip('\\n') + '\\n</think>\\n\\n' \
+ said.lstrip('\\n') }}{% else %}{{ said }}{% endif %}{{ '<|im_end|>\\n' }}{% else %}\
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is false %}\
{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}""",
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    ("<|im_end|>",),
    lambda content, reasoning: (
        "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n" + content.lstrip("\n") + "<|im_end|>"
    ),
    reasoning=True,
)
CASES = {
    "chatml": CHATML,
    "marked": MARKED,
    "mistral": MISTRAL,
    "kimi_k2": KIMI_K2,
    "minimax_m2": MINIMAX_M2,
    "glm": GLM,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v31_thinking": DEEPSEEK_V31_THINKING,
    "deepseek_r1": DEEPSEEK_R1,
    "llama_3": LLAMA_3,
    "phi_4_mini": PHI_4_MINI,
    "gemma": GEMMA,
    "qwen_3": QWEN_3,
}
