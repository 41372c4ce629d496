"""Chat templates as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specgraph.checkpoints.architectures import ARCHITECTURES
from specgraph.engine.chat_template import render_chat
from specgraph.errors import CheckpointError, ConfigError

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + message.role) }}{% endif %}\n"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": " hello "},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "?"},
]
TOKENS = {"pad_token": "<pad>", "unk_token": "<unk>"}
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": TEMPLATE}


def write(folder, config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def by_transformers():
    """`by_transformers(template, messages, variables)`: the prompt by transformers; None where it refuses."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, "<unk>")),
        **TOKENS, bos_token="<s>", eos_token="</s>",
    )  # fmt: skip

    def render(template, messages=MESSAGES, variables=None):
        settings = {"tokenize": False, "add_generation_prompt": True, **(variables or {})}
        try:
            return tokenizer.apply_chat_template(messages, chat_template=template, **settings)
        except Exception:
            return None

    return render


def test_as_transformers(tmp_path, by_transformers):
    wanted = by_transformers(TEMPLATE)
    assert render_chat(write(tmp_path, CONFIG), MESSAGES) == wanted
    named = [{"name": "tool_use", "template": "-"}, {"name": "default", "template": TEMPLATE}]
    assert render_chat(write(tmp_path, {**CONFIG, "chat_template": named}), MESSAGES) == wanted
    assert render_chat(tmp_path, MESSAGES, {"tools": [TOOL]}) == "-"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert render_chat(tmp_path, MESSAGES) == "file"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        "{% set n = 1 %}{% generation %}\n{% set n = 2 %}{{ messages[1].content }}{{ n }}{% endgeneration %}\n{{ n }}",
        "{{ {'b': '<é & \"x\">', 'a': [1, none]} | tojson }}|{{ messages[:1] | tojson(indent=2) }}",
        "{{ 'é' | tojson(ensure_ascii=true) }}|{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
        "{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}",
        "{{ strftime_now('%Y') }}",
        "{{ pad_token }}|{{ unk_token is defined }}|{{ sep_token is defined }}|{{ '' ~ mask_token }}",
        "{{ tools is none }}|{{ documents is none }}|{% if tools %}tools{% endif %}{{ other is defined }}",
        "{% macro said(m) %}[{{ m.role }}]{% endmacro %}{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ said(m) }}{% endfor %}{{ ns.n }}",
        "{%- for m in messages[::-1] -%}\n  {{- m['content'].strip().split('h')[-1] }}\n{% endfor %}\n",
    ],
)
def test_tags_filters_and_variables_of_transformers(template, tmp_path, by_transformers):
    wanted = by_transformers(template)
    assert wanted is not None
    assert render_chat(write(tmp_path, {**CONFIG, **TOKENS, "chat_template": template}), MESSAGES) == wanted


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Give the <weather> & \"wind\" of é.", "parameters": {
            "type": "object", "required": ["city"], "properties": {
                "city": {"type": "string", "enum": ["Å", "b"]}, "days": {"type": "array", "items": {"type": "integer"}},
            },
        }, "return": {"type": "string"},
    },
}  # fmt: skip
CALL = [
    {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Å<", "days": [1]}}}
]
ANSWER = {"role": "tool", "content": '{"t": "3 °"}', "name": "weather", "tool_call_id": "abcdefghi"}
CONVERSATIONS = {
    "one": [user("hi")],
    "system": [{"role": "system", "content": " be <good> & "}, user(" a "), assistant("b\n"), user("é\n\n")],
    "answered": [user("a"), assistant("<think>\nso\n</think>\n\nb")],
    "two users": [user("a"), user("b")],
    "reasoning_content": [user("a"), assistant("b", reasoning_content=" so\n")],
    "thinking": [user("a"), assistant("b", thinking="so"), user("c")],
    "reasoning": [user("a"), assistant("b", reasoning="so", thinking=None)],
    "None": [user("a"), assistant("b", tool_calls=None, reasoning_content=None), user("c")],
    "call": [user("a"), assistant(None, tool_calls=CALL, reasoning_content="so"), ANSWER, ANSWER],
    "two calls": [user("a"), assistant("x", tool_calls=CALL * 2), ANSWER, assistant("3"), user("c")],
    "parts": [user([{"type": "text", "text": "hello "}, {"type": "text", "text": "you"}])],
    "no role": [{"content": "a"}],
}
FAMILIES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "chat_templates").iterdir())}
"""Templates of our own, each with the constructs that the published ones of the family use."""
VARIABLES = [
    {}, {"add_generation_prompt": False}, {"tools": [TOOL, TOOL]}, {"tools": [TOOL], "add_generation_prompt": False},
    {"enable_thinking": False, "reasoning_effort": "high", "date": "2 Feb", "builtin_tools": ["search", "python"]},
]  # fmt: skip


def test_every_family_has_a_template():
    assert FAMILIES.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_of_a_family(family, tmp_path, by_transformers):
    folder = write(tmp_path, {**CONFIG, **TOKENS, "chat_template": FAMILIES[family]})
    rendered = 0
    for messages in CONVERSATIONS.values():
        for variables in VARIABLES:
            wanted = by_transformers(FAMILIES[family], messages, variables)
            if wanted is None:
                with pytest.raises(CheckpointError, match="can't render"):
                    render_chat(folder, messages, variables)
            else:
                assert render_chat(folder, messages, variables) == wanted
                rendered += 1
    assert rendered >= 20


def test_an_empty_conversation_is_refused_as_in_transformers(tmp_path, by_transformers):
    assert by_transformers(TEMPLATE, []) is None
    with pytest.raises(ConfigError, match="at least one message"):
        render_chat(write(tmp_path, CONFIG), [])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "has no chat template"),
        ({"chat_template": "{% if %}"}, "can't render"),
        ({"chat_template": "{{ raise_exception('no system role') }}"}, "no system role"),
        ({"chat_template": "{{ ''.__class__.__mro__ }}"}, "can't render|unsafe"),
    ],
)
def test_what_can_not_be_rendered_is_one_message(config, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        render_chat(write(tmp_path, config), MESSAGES)


def test_a_broken_file_is_one_message(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        render_chat(tmp_path, MESSAGES)
