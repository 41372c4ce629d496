"""Chat templates of Hugging Face folders: from messages to the prompt that the model was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specgraph.checkpoints.files import JSON_LIMIT, checked_file, exists, read_json
from specgraph.errors import CheckpointError, first_line


def render_chat(folder: Path, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the prompt for `messages`, up to where the assistant's answer begins.

    The template is `chat_template.jinja`, else `chat_template` of tokenizer_config.json (its entry `default` if there
    are several). It runs in a sandbox, as in transformers. The prompt holds its special tokens: encode it without
    adding others.

    Args:
        folder: the target's.
        messages: dictionaries with `role` (system, user, assistant) and `content`.

    Raises:
        CheckpointError: no template, an unreadable one, or one that refuses these messages.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    config, template = _read(folder)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        return environment.from_string(template).render(
            raise_exception=refuse,
            messages=messages, add_generation_prompt=True, bos_token=_token(config, "bos_token"),
            eos_token=_token(config, "eos_token"),
        )  # fmt: skip
    except Exception as error:  # a template is a program of the folder's: it raises anything, RecursionError too
        raise CheckpointError(
            f"the chat template of {folder} can't render these messages: {first_line(error)}"
        ) from None


def _read(folder: Path) -> tuple[Mapping[str, Any], str]:
    """Return tokenizer_config.json and the template."""
    path, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(path) if exists(path) else {}
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


def _token(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name)
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
