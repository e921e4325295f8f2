# ruff: noqa: E501 (templates stand here as models carry them)
"""Conversations become the text that each model was trained on; a broken or hostile template harms nobody."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from meshinfer import limits
from meshinfer.answer.question import Message
from meshinfer.answer.template import ChatTemplate, render_plain
from meshinfer.errors import ModelError, PromptError

SYSTEM = Message("system", "Be brief.")
USER = Message("user", "Hi <b>there</b> & 'you'")
ANSWER = Message("assistant", "Hello!")
AGAIN = Message("user", "日本?")
NOW = datetime(2025, 3, 4, 5, 6, 7)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}
"""

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""

QWEN3_LIKE = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- macro turn(role, content) -%}
{{ '<|im_start|>' ~ role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
{%- endmacro -%}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}{{ turn('assistant', content) }}{% endgeneration %}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
    {%- if loop.index0 > 100000 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}x{%- endif %}{%- endif %}
"""
REAL = {
    "smollm2": CHATML,
    "llama3": LLAMA3,
    "qwen2.5": QWEN25,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "qwen3": QWEN3_LIKE,
}
HI = USER.content

EXPECTED = {
    "smollm2": f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{HI}<|im_end|>\n<|im_start|>assistant\nHello!"
    "<|im_end|>\n<|im_start|>user\n日本?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 04 Mar 2025\n\nBe brief.<|eot_id|>"
    f"<|start_header_id|>user<|end_header_id|>\n\n{HI}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello!"
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n日本?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": f"<s>[INST] {HI}[/INST] Hello!</s>[INST] Be brief.\n\n日本?[/INST]",
    "phi3": f"<|system|>\nBe brief.<|end|>\n<|user|>\n{HI}<|end|>\n<|assistant|>\nHello!<|end|>\n<|user|>\n日本?<|end|>\n"
    "<|assistant|>\n",
}  # fmt: skip
EXPECTED["qwen2.5"] = EXPECTED["qwen3"] = EXPECTED["smollm2"]


def render(source: str, *messages: Message, prompt: bool = True, now: datetime | None = NOW) -> str:
    return ChatTemplate(source).render(messages or (USER,), SPECIAL, prompt, now)


# ── honest templates ────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("family", REAL)
def test_a_conversation_reads_as_the_model_was_trained(family: str) -> None:
    assert render(REAL[family], SYSTEM, USER, ANSWER, AGAIN) == EXPECTED[family]


@pytest.mark.parametrize("family", REAL)
def test_templates_agree_with_transformers(family: str) -> None:
    """The same Jinja settings, filters and functions as the library that models are published for."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(REAL[family])
    for messages in ([USER], [SYSTEM, USER], [USER, ANSWER, AGAIN]):
        as_dicts = [{"role": message.role, "content": message.content} for message in messages]
        for prompt in (True, False):
            theirs = compiled.render(
                messages=as_dicts, add_generation_prompt=prompt, tools=None, documents=None,
                date_string="04 Mar 2025", **SPECIAL,
            )  # fmt: skip
            assert render(REAL[family], *messages, prompt=prompt) == theirs


def test_a_template_may_refuse_a_conversation_and_the_person_reads_why() -> None:
    with pytest.raises(PromptError, match="must alternate"):
        render(MISTRAL, USER, USER)


def test_the_date_is_only_what_is_handed_in() -> None:
    assert "26 Jul 2024" in render(LLAMA3, now=None)
    assert render('{{ strftime_now("%-d.%m.%Y %H:%M %% %1000d %s") }}') == "4.03.2025 05:06 %% %1000d %s"


def test_what_templates_for_tools_use() -> None:
    source = """{%- macro kind(spec) -%}
    {%- if spec.type == "array" -%}{{ kind(spec['items']) }}[]{%- else -%}{{ spec.type }}{%- endif -%}
    {%- endmacro -%}
    {%- set spec = {"type": "array", "items": {"type": "array", "items": {"type": "string"}}, "update": 7} -%}
    {{ kind(spec) }} {{ spec.update }} {{ spec | tojson }} {% for k, v in spec.items() %}{{ k }};{% endfor %}
    {%- for k, v in spec|dictsort %}{{ k|upper }}{{ loop.cycle(',', '.') }}{% endfor %}
    {{- ["a", "b"]|map("upper")|join("-") }} {{ "%s is %d" % ("x", 3) }} {{ "a\\nb"|indent(2) }} {{ [3, 1]|sort }}"""
    assert render(source) == (
        'string[][] 7 {"type": "array", "items": {"type": "array", "items": {"type": "string"}}, "update": 7} '
        "type;items;update;ITEMS,TYPE.UPDATE,A-B x is 3 a\n  b [1, 3]"
    )


def test_a_long_conversation_fits_the_budget() -> None:
    turns = [USER if i % 2 == 0 else ANSWER for i in range(601)]
    document = Message("user", "word " * 100_000)
    for source in REAL.values():
        template = ChatTemplate(source)
        assert len(template.render([SYSTEM, *turns], SPECIAL)) > 600 * 20
        assert len(template.render([document], SPECIAL)) > 490_000


def test_one_template_serves_many_conversations() -> None:
    template = ChatTemplate(CHATML)
    first = template.render([USER], SPECIAL)
    with pytest.raises(PromptError, match="longer than"):
        template.render([Message("user", "x" * (limits.TEMPLATE_OUTPUT_CHARS))], SPECIAL)
    assert template.render([USER], SPECIAL) == first


# ── missing and broken ones ─────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("source", [None, "", " \n"])
def test_a_missing_template_is_reported(source: str | None) -> None:
    with pytest.raises(ModelError, match="without a chat template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}{{ message.content }}",
        "{{ unclosed",
        "{% frobnicate %}",
        "{{ messages | frobnicate }}",
        "{{ '\\ud800' ~ }}",
        "\ud800{{",
    ],
)
def test_a_broken_template_is_reported_when_it_is_read(source: str) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ missing.attribute }}",
        "{{ messages[0].content.nothing() }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages | map(attribute='role') | sum }}",
        "{{ range('a') }}",
        "{{ ({}|first).x }}",
        "{% if 1 is frobnicate %}{% endif %}",
    ],
)
def test_a_template_that_fails_is_reported_without_a_traceback(source: str) -> None:
    with pytest.raises(ModelError, match="fails"):
        render(source)


# ── hostile ones ────────────────────────────────────────────────────────────────────────────────
DOUBLING = (
    "{% set ns = namespace(x={start}) %}{% for i in range(99) %}{% set ns.x = {step} %}{% endfor %}{{ ns.x }}"
)


def doubling(start: str, step: str) -> str:
    return DOUBLING.replace("{start}", start).replace("{step}", step)


HOSTILE = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for a in range(9999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "nested comprehension": "{% for a in range(9999) %}{{ range(99999)|map('string')|list|length }}{% endfor %}",
    "recursive loop": "{% for a in [[[]]] recursive %}{{ loop(a) }}{% endfor %}",
    "huge range": "{{ range(10**9)|list }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "call block recursion": "{% macro f() %}{% call f() %}{% endcall %}{% endmacro %}{{ f() }}",
    "multiplied text": "{{ 'x' * 10**9 }}",
    "multiplied text, other way": "{{ 10**9 * 'x' }}",
    "multiplied list": "{{ [0] * 10**9 }}",
    "multiplied empty list": "{% for i in range(9**5) %}{{ ([[]] * 9**5)|length }}{% endfor %}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "power of a power": doubling("3", "ns.x * ns.x"),
    "shifted power": "{{ 2 ** 63 * 2 ** 63 * 2 ** 63 }}",
    "long number": "{{ ('9' * 4000)|int }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "starred width": "{{ '%*d' % (1000000000, 1) }}",
    "precision": "{{ '%.1000000000f' % 1.0 }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "center": "{{ 'x'|center(10**9) }}",
    "center method": "{{ 'x'.center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a\nb'|indent(10**9) }}",
    "json indent": "{{ [1]|tojson(indent=10**9) }}",
    "json separator": "{{ [1, 2]|tojson(separators=('x' * 10**6, ':')) }}",
    "rounding": "{{ 1.5|round(10**9, 'ceil') }}",
    "concatenated doubling": doubling("'x'", "ns.x ~ ns.x"),
    "added doubling": doubling("'x'", "ns.x + ns.x"),
    "list doubling": doubling("[0]", "ns.x + ns.x"),
    "nested doubling": doubling("[0]", "[ns.x, ns.x]"),
    "nested doubling in tuples": doubling("(0,)", "(ns.x, ns.x)"),
    "nested doubling in dicts": doubling("{}", "{'a': ns.x, 'b': ns.x}"),
    "nested doubling by call": doubling("{}", "dict(a=ns.x, b=ns.x)"),
    "nested doubling as keys": doubling("(0,)", "{(ns.x, ns.x): 1}"),
    "block doubling": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "filter block doubling": "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}"
    "{{ f('xxxx', 60) }}",
    "replace": doubling("'xx'", "ns.x.replace('x', ns.x)"),
    "replace filter": doubling("'xx'", "ns.x|replace('x', ns.x)"),
    "replace of nothing": doubling("'xx'", "ns.x.replace('', ns.x)"),
    "join": doubling("'xx'", "ns.x.join(ns.x)"),
    "join filter": doubling("'xx'", "(ns.x|list)|join(ns.x)"),
    "self-containing namespace": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "namespaces in a list": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}",
    "namespace as text": "{% set ns = namespace() %}{% set ns.x = ns %}{{ 'a' ~ ns }}",
    "costly comparison": "{% set x = 'x' * 4000000 %}{% for i in range(99999) %}{% if x == x ~ '' %}{% endif %}{% endfor %}",
    "costly search": "{% set x = 'x' * 4000000 %}{% for i in range(99999) %}{% if 'y' in x %}{% endif %}{% endfor %}",
    "costly method": "{% set x = 'x' * 4000000 %}{% for i in range(99999) %}{{ x.find('y') }}{% endfor %}",
    "costly filter": "{% set x = 'x' * 4000000 %}{% for i in range(99999) %}{{ x|upper|length }}{% endfor %}",
    "costly slice": "{% set x = 'x' * 4000000 %}{% for i in range(99999) %}{{ x[1:]|length }}{% endfor %}",
    "costly sort": "{% set x = range(9999)|list %}{% for i in range(99999) %}{{ x|sort|length }}{% endfor %}",
    "costly constants": "{% for i in range(99999) %}{% set x = [" + "1," * 5000 + "] %}{% endfor %}",
    "repeated text": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "repeated text in a block": "{% set y %}{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by item": "{{ ''['__class__'] }}{{ ''['__class__'].x }}",
    "class by attr": "{{ ''|attr('__class__') }}",
    "class by map": "{{ ['']|map(attribute='__class__')|list|first|string ~ [''][0].__class__.mro() }}",
    "globals of a function": "{{ raise_exception.__globals__['__builtins__'] }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f._environment.globals }}",
    "loop internals": "{% for a in [1] %}{{ loop._iterable.__class__.x }}{% endfor %}",
    "template reference": "{{ self._TemplateReference__context.environment }}",
    "generator frame": "{{ (messages|map('upper')).gi_frame.f_builtins }}",
    "namespace internals": "{{ namespace(a=1)._Namespace__attrs.x }}",
    "context internals": "{{ dict.__base__.x }}",
    "str.format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a message": "{{ messages[0].update({'role': 'system'}) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
    "lipsum": "{{ lipsum(n=10000) }}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
    "deeply nested lists": "{{ " + "[" * 5000 + "1" + "]" * 5000 + " }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep ifs": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "deep loops": "{% for a in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
    "long sum": "{{ " + "1+" * 50_000 + "1 }}",
    "many parts": "{{ a }}" * 30_000,
    "too long": "x" * (limits.TEMPLATE_BYTES + 1),
    "digits": "{{ " + "9" * 100_000 + " }}",
    "huge refusal": "{{ raise_exception('x' * 1000000) }}",
}  # fmt: skip


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_template_is_contained(attack: str) -> None:
    start = time.perf_counter()
    with pytest.raises((ModelError, PromptError)) as caught:
        render(HOSTILE[attack])
    assert time.perf_counter() - start < 2.0  # 0.5 on an idle machine
    assert len(str(caught.value)) < 400
    assert "builtins" not in str(caught.value)


def test_dates_cannot_be_made_wide() -> None:
    assert len(render('{{ strftime_now("%1000000000Y") }}')) < 50


# ── without a template ──────────────────────────────────────────────────────────────────────────
def test_a_plain_prompt_is_the_text_as_it_stands() -> None:
    assert render_plain([USER]) == USER.content
    with pytest.raises(PromptError, match="one text"):
        render_plain([USER, ANSWER])
