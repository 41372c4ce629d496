"""Chat templates of Hugging Face folders and GGUF files: from messages to the prompt that a model was trained with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgraph.checkpoints.files import JSON_LIMIT, checked_file, exists
from specgraph.checkpoints.gguf_file import json_of
from specgraph.checkpoints.special_tokens import read_special_tokens
from specgraph.errors import CheckpointError, ConfigError, first_line

if TYPE_CHECKING:
    from jinja2 import Template

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an answer's reasoning in a message: the first one that is there counts."""


def render_chat(folder: Path, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
    """Return the prompt for `messages`, up to where the assistant's answer begins.

    The template is `chat_template.jinja`, else `chat_template` of tokenizer_config.json (of several the one of the name
    `default`, or `tool_use` where there are tools). It runs in a sandbox, with the tags, filters and variables that
    transformers gives it. The prompt holds its special tokens: encode it without adding others.

    Args:
        folder: the target's.
        messages: dictionaries with `role` (system, user, assistant, tool) and `content`; also `tool_calls`, and
            reasoning under one of the names of REASONING. A key that is None counts as absent.
        variables: what else the template sees, such as `tools` (a list of JSON schemas), `documents`,
            `enable_thinking` or `add_generation_prompt` (True unless given).

    Raises:
        ConfigError: no message.
        CheckpointError: no template, an unreadable one, or one that refuses these messages.
    """
    if not messages:
        raise ConfigError("a conversation needs at least one message")
    known = {"tools": None, "documents": None, "add_generation_prompt": True, **(variables or {})}
    template = _read(folder, "default" if known["tools"] is None else "tool_use")
    tokens = {name: token.content for name, token in read_special_tokens(folder).named.items()}
    try:
        # Through JSON: a template is a program of the folder's, and sees no object that has methods of its own.
        seen = json.loads(json.dumps({**tokens, **known, "messages": [_with_reasoning(each) for each in messages]}))
        return _compiled(template).render(seen)
    except Exception as error:  # a template raises anything, RecursionError too
        raise CheckpointError(
            f"the chat template of {folder} can't render these messages: {first_line(error)}"
        ) from None


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """Return a template with what transformers adds to jinja2: the tag `generation`, a filter, two functions."""
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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    return environment.from_string(template, {"raise_exception": refuse, "strftime_now": now})


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without keys that are None, whose reasoning has the two names that templates read."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _read(folder: Path, name: str) -> str:
    """Return the template: of several the one of a name, else `default`."""
    file, config = folder / "chat_template.jinja", json_of(folder, "tokenizer_config.json") or {}
    template: Any = config.get("chat_template")
    if exists(file):
        try:
            template = checked_file(file, JSON_LIMIT).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} can't be read: {first_line(error)}") from None
    if isinstance(template, list):
        named = {str(each.get("name")): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get(name, named.get("default"))
    if not isinstance(template, str):
        raise CheckpointError(
            f"{folder} has no chat template (chat_template.jinja, or in tokenizer_config.json): "
            "give a plain prompt, or another target"
        )
    return template
