"""Chat templates as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracle_release import read_since_then
from specgraph_models.checkpoints.architectures import ARCHITECTURES
from specgraph_models.errors import CheckpointError
from specgraph_run.text.chat_template import render_chat
from specgraph_run.text.load import shipped_pair

from specgraph.errors import ConfigError

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
KEYS = ("reasoning_content", "thinking", "reasoning", "None", "call")
"""Conversations with an answer's reasoning, under each name of it, or with keys that are None."""
FAMILIES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "chat_templates").iterdir())}
"""Templates of our own, each with the constructs that the published ones of the family use."""
VARIABLES = [
    {}, {"add_generation_prompt": False}, {"tools": [TOOL, TOOL]}, {"tools": [TOOL], "add_generation_prompt": False},
    {"enable_thinking": False, "reasoning_effort": "high", "date": "2 Feb", "builtin_tools": ["search", "python"]},
]  # fmt: skip


WITHOUT_A_TEMPLATE = {
    "glm4_moe_lite", "kimi_k2", "minimax_m2", "ministral3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
}  # fmt: skip
"""Families whose published templates were not looked up: whether a template needs something new is not tested."""


def test_every_family_has_a_template_or_is_named():
    assert FAMILIES.keys() | WITHOUT_A_TEMPLATE == ARCHITECTURES.keys()
    assert not FAMILIES.keys() & WITHOUT_A_TEMPLATE


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_of_a_family(family, tmp_path, by_transformers):
    others = [messages for name, messages in CONVERSATIONS.items() if name not in KEYS]
    check_conversations(family, others, tmp_path, by_transformers)


@read_since_then("names of an answer's reasoning, and keys that are None, are read")
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_messages(family, tmp_path, by_transformers):
    check_conversations(family, map(CONVERSATIONS.get, KEYS), tmp_path, by_transformers)


def check_conversations(family, conversations, tmp_path, by_transformers):
    """Render conversations as transformers does, or refuse as it does."""
    folder = write(tmp_path, {**CONFIG, **TOKENS, "chat_template": FAMILIES[family]})
    rendered = 0
    for messages in conversations:
        for variables in VARIABLES:
            wanted = by_transformers(FAMILIES[family], messages, variables)
            if wanted is None:
                with pytest.raises(CheckpointError, match="can't render"):
                    render_chat(folder, messages, variables)
            else:
                assert render_chat(folder, messages, variables) == wanted
                rendered += 1
    assert rendered >= 10


FILES = {
    "one": {"chat_template.jinja": "one"},
    "one and tools": {"chat_template.jinja": "one", "additional_chat_templates/tool_use.jinja": "tools"},
    "default of the subfolder": {"additional_chat_templates/default.jinja": "sub"},
    "both defaults": {"chat_template.jinja": "one", "additional_chat_templates/default.jinja": "sub"},
    "tools only": {"additional_chat_templates/tool_use.jinja": "tools"},
    "another": {"chat_template.jinja": "one", "additional_chat_templates/rag.jinja": "{{ documents | length }}"},
    "none": {},
}
IN_CONFIG = (
    None, "config", [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "listed tools"}],
    [{"name": "rag", "template": "listed rag"}],
)  # fmt: skip
CHOICES = ({}, {"tools": []}, {"tools": [TOOL]}, {"chat_template": "rag"}, {"chat_template": "{{ messages | length }}"})


@pytest.mark.parametrize("files", FILES.values(), ids=FILES.keys())
@pytest.mark.parametrize("in_config", IN_CONFIG, ids=["none", "one", "list", "list without default"])
def test_named_templates(files, in_config, tmp_path):
    transformers = pytest.importorskip("transformers")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((shipped_pair()[0] / name).read_bytes())
    write(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": in_config})
    for name, template in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for choice in CHOICES:
        variables = {"documents": [{"title": "a", "text": "b"}], **choice}
        try:
            wanted = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **variables)
        except ValueError:
            with pytest.raises(CheckpointError, match="has no chat template"):
                render_chat(tmp_path, MESSAGES, variables)
        else:
            assert render_chat(tmp_path, MESSAGES, variables) == wanted, choice


CONTINUED = {
    "content": ([user("a"), assistant(" b ")], True, True),
    "stripped": ([user("a"), assistant("b")], True, True),
    "of a user": ([user("a ")], True, True),
    "by name": ([user("a"), assistant("b")], "content", True),
    "reasoning": ([user("a"), assistant("b", thinking="so ")], "thinking", True),
    "reasoning by another name": ([user("a"), assistant("b", reasoning="so")], "reasoning_content", True),
    "parts": ([user("a"), assistant([{"type": "text", "text": "b"}, {"type": "image"}])], True, True),
    "no content": ([user("a"), assistant(None, tool_calls=CALL)], True, False),
    "no text": ([user("a"), assistant([{"type": "image"}])], True, False),
    "not in the template": ([user("a"), assistant("b", plan="c")], "plan", False),
    "no template writes it": ([user("a"), assistant("b", tool_calls="c")], "tool_calls", False),
}
"""Messages, the option, and whether a template of some family can do it."""


@read_since_then("reasoning is continued, and keys that are None are left out,")
@pytest.mark.parametrize("case", CONTINUED.values(), ids=CONTINUED.keys())
def test_a_message_that_is_continued(case, tmp_path, by_transformers):
    messages, field, works = case
    rendered = 0
    for template in FAMILIES.values():
        folder = write(tmp_path, {**CONFIG, **TOKENS, "chat_template": template})
        variables = {"continue_final_message": field}
        wanted = by_transformers(template, messages, {**variables, "add_generation_prompt": False})
        if wanted is None:
            with pytest.raises((CheckpointError, ConfigError), match=r"continue|can't render"):
                render_chat(folder, messages, variables)
        else:
            assert render_chat(folder, messages, variables) == wanted
            rendered += 1
    assert (rendered > 0) == works


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"tokenize": False}, "'tokenize' is no variable"),
        ({"messages": []}, "'messages' is no variable"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "contradict each other"),
        ({"continue_final_message": 3}, "continue_final_message is 3"),
        ({"chat_template": 3}, "chat_template is 3"),
        ({"tools": [print]}, "should be JSON values"),
    ],
)
def test_options_that_have_no_meaning_are_refused(variables, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        render_chat(write(tmp_path, CONFIG), MESSAGES, variables)


def test_a_template_sees_tokens_under_other_names(tmp_path):
    """Names are those of transformers, whose `special_tokens_map` `tests/models/test_special_tokens.py` compares."""
    config = {"eos_token": "</s>", "image_token": "<i>", "extra_special_tokens": {"end_token": "<e>"}}
    write(tmp_path, {**config, "chat_template": "{{ eos_token }}{{ image_token }}{{ end_token }}{{ bos_token }}"})
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>", "lstrip": false}}')
    assert render_chat(tmp_path, MESSAGES) == "</s><i><e><s>"


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
