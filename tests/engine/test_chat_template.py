"""Chat templates as transformers renders them."""

from __future__ import annotations

import json

import pytest

from specgraph.engine.chat_template import render_chat
from specgraph.errors import CheckpointError

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
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": TEMPLATE}


def write(folder, config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def by_transformers(template, messages=MESSAGES, **tokens):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    [text], _ = utils.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>", **tokens
    )
    return text


def test_as_transformers(tmp_path):
    wanted = by_transformers(TEMPLATE)
    assert render_chat(write(tmp_path, CONFIG), MESSAGES) == wanted
    named = [{"name": "tool_use", "template": "-"}, {"name": "default", "template": TEMPLATE}]
    assert render_chat(write(tmp_path, {**CONFIG, "chat_template": named}), MESSAGES) == wanted
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
def test_tags_filters_and_variables_of_transformers(template, tmp_path):
    """Compare with transformers what the published templates of the families in docs/models.md use."""
    tokens = {"pad_token": "<pad>", "unk_token": "<unk>"}
    folder = write(tmp_path, {**CONFIG, **tokens, "chat_template": template})
    assert render_chat(folder, MESSAGES) == by_transformers(template, **tokens)


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
