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


def test_as_transformers(tmp_path):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    [wanted], _ = utils.render_jinja_template(
        [MESSAGES], chat_template=TEMPLATE, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert render_chat(write(tmp_path, CONFIG), MESSAGES) == wanted
    named = [{"name": "tool_use", "template": "-"}, {"name": "default", "template": TEMPLATE}]
    assert render_chat(write(tmp_path, {**CONFIG, "chat_template": named}), MESSAGES) == wanted
    (tmp_path / "chat_template.jinja").write_text("file")
    assert render_chat(tmp_path, MESSAGES) == "file"


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
