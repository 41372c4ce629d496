"""Chat templates without bound: each is refused in one line, before it has taken much time or memory."""

from __future__ import annotations

import pytest
from specgraph_models.errors import CheckpointError
from specgraph_run.text import template_sandbox, template_work
from specgraph_run.text.chat_template import render_chat

MESSAGES = [{"role": "user", "content": "hi"}]
MADE = (
    "{{ 'a' * 6000000000 }}",
    "{{ ([1] * 6000000000) | length }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%.999999999f' % 1.0 }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "{{ ('a\\n' * 10000) | indent(1000000) }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ ('a' * 1000000).replace('', 'b' * 100000) }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 100000) }}",
    "{{ ('a' * 1000000) | replace(new='b' * 100000, old='a') }}",
    "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "{{ (['a'] * 100000) | map('string') | join('b' * 100000) }}",
    "{{ ['a'] | map('center', 999999999) | list }}",
    "{{ [1] | slice(999999999) | list }}",
    "{{ 1.5 | round(99999999) }}",
    "{{ (1).to_bytes(9999999999, 'big') }}",
)
"""Each asks for gigabytes in one operation."""
GROWING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x] * 2 %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x={}) %}{% for i in range(99) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{{ range(100000) | sum }}{% endfor %}",
    "{% for a in range(100000) %}{{ range(100000) | select('odd') | list | length }}{% endfor %}",
    "{% set x = 'a' * 100000 %}{% for a in range(100000) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 100000 %}{% for a in range(100000) %}{% set y = x[1:] %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{% endmacro %}{% for a in range(100000) %}{{ m(*range(100000)) }}{% endfor %}",
    "{% macro m() %}"
    + "x" * 10000
    + "{% endmacro %}{% set x %}{% for b in range(100000) %}{{ m() }}{% endfor %}{% endset %}",
    "{% for a in range(100000) %}" + "x" * 10000 + "{% endfor %}",
)
"""Each would run for ever, or until memory is full, in many small operations."""
DEEP = (
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "{% set ns = namespace(x=()) %}{% for i in range(100000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
    "{% for a in [1] %}" * 300 + "{% endfor %}" * 300,
)


def check(folder, template, words):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=words) as refused:
        render_chat(folder, MESSAGES)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("template", MADE)
def test_one_operation(template, tmp_path):
    check(tmp_path, template, "can't render.*(steps and bytes|a width of)")


@pytest.mark.parametrize("template", GROWING, ids=range(len(GROWING)))
def test_many_operations(template, tmp_path, monkeypatch):
    monkeypatch.setattr(template_work, "WORK", 1 << 21)  # as with the real limit, sooner
    check(tmp_path, template, "can't render.*more than 2097152 steps and bytes")


@pytest.mark.parametrize("template", DEEP, ids=range(len(DEEP)))
def test_deep_nesting(template, tmp_path):
    check(tmp_path, template, "can't render.*(recursion|nests more than|nested blocks)")


@pytest.mark.parametrize("template", ["{{ 9 ** (9 ** 9) }}", "{{ (9 ** 999) ** 999 }}"])
def test_large_numbers(template, tmp_path):
    check(tmp_path, template, "a number of more than 4096 bits")


def test_a_long_template(tmp_path):
    check(tmp_path, " " * (template_sandbox.SOURCE_LIMIT + 1), "it has 1048577 characters")


def test_a_filter_of_ours_can_not_give_work_back(tmp_path, monkeypatch):
    monkeypatch.setattr(template_work, "WORK", 1 << 16)
    negative = "{% for i in range(9999) %}{% set x = [-9999999999] | map('counted literal') | list %}{% endfor %}"
    check(tmp_path, negative, "steps and bytes")


def test_the_work_is_the_same_each_time(tmp_path, monkeypatch):
    """The last loop that fits, and the first that does not, are the same in every run."""
    (tmp_path / "chat_template.jinja").write_text("{% for i in range(messages[0].n) %}{{ i }}{% endfor %}")

    def fits(n):
        try:
            render_chat(tmp_path, [{"role": "user", "n": n}])
        except CheckpointError:
            return False
        return True

    monkeypatch.setattr(template_work, "WORK", 1 << 15)
    limits = [max(n for n in range(400) if fits(n)) for _ in range(2)]
    assert limits[0] == limits[1]
    assert 50 < limits[0] < 399


def test_a_long_conversation_has_room(tmp_path):
    """A million characters in a thousand messages, with the constructs of published templates."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' and m.content is string %}<|user|>{{ m.content | trim }}"
        "{% else %}{% set parts = m.content.split('</think>') %}<|it|>{{ parts[-1].lstrip('\\n').replace('a', 'b') }}"
        "{% endif %}{{ '<|end|>' ~ '\\n' }}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    messages = [{"role": ("user", "assistant")[i % 2], "content": "a" * 1000} for i in range(1000)]
    assert len(render_chat(tmp_path, messages)) > 1_000_000
