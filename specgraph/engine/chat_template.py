"""Chat templates of Hugging Face folders and GGUF files: from messages to the prompt that a model was trained with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specgraph.checkpoints.files import JSON_LIMIT, checked_file, exists
from specgraph.checkpoints.gguf_file import json_of
from specgraph.errors import CheckpointError, first_line

TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that a template may name, as tokenizer_config.json calls them; undefined where it has none."""


def render_chat(folder: Path, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the prompt for `messages`, up to where the assistant's answer begins.

    The template is `chat_template.jinja`, else `chat_template` of tokenizer_config.json (its entry `default` if there
    are several). It runs in a sandbox, with the tags, filters and variables that transformers gives it. The prompt
    holds its special tokens: encode it without adding others.

    Args:
        folder: the target's.
        messages: dictionaries with `role` (system, user, assistant) and `content`.

    Raises:
        CheckpointError: no template, an unreadable one, or one that refuses these messages.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `generation`, which marks an answer for training: here its text only."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it without ClassVar)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("text"), [], [], body).set_lineno(line)

        def text(self, caller: Callable[[], str]) -> str:
            return caller()

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own escapes HTML

    config, template = _read(folder)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    tokens = {name: _text(config[name]) for name in TOKENS if config.get(name)}
    try:
        return environment.from_string(template).render(
            messages=messages,
            raise_exception=refuse,
            strftime_now=now,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **tokens,
        )
    except Exception as error:  # a template is a program of the folder's: it raises anything, RecursionError too
        raise CheckpointError(
            f"the chat template of {folder} can't render these messages: {first_line(error)}"
        ) from None


def _read(folder: Path) -> tuple[Mapping[str, Any], str]:
    """Return tokenizer_config.json and the template."""
    file, config = folder / "chat_template.jinja", json_of(folder, "tokenizer_config.json") or {}
    template: Any = config.get("chat_template")
    if exists(file):
        try:
            template = checked_file(file, JSON_LIMIT).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} can't be read: {first_line(error)}") from None
    if isinstance(template, list):
        named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str):
        raise CheckpointError(f"{folder} has no chat template (chat_template.jinja, or in tokenizer_config.json)")
    return config, template


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
