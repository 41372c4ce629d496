"""Chat templates of Hugging Face folders and GGUF files: they turn messages into a model's prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgraph_models.checkpoints.files import JSON_LIMIT, checked_file, exists, shown
from specgraph_models.checkpoints.gguf_file import json_of
from specgraph_models.checkpoints.special_tokens import read_special_tokens
from specgraph_models.errors import CheckpointError

from specgraph.errors import ConfigError, first_line

if TYPE_CHECKING:
    from jinja2 import Template

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys that a message's reasoning may have. The first key that is there counts."""
_OPTIONS = frozenset(
    {
        "conversation", "messages", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs",
    }
)  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are not variables of a template, and mean nothing here."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the message that is continued. It marks the message's end in the prompt."""


def render_chat(folder: Path, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
    """Return the prompt for `messages`, up to the beginning of the assistant's answer.

    A folder's templates are `chat_template.jinja` (named `default`) and `additional_chat_templates/NAME.jinja`. Without
    such files, `chat_template` of tokenizer_config.json is one template or a list of named ones. A GGUF file has
    `tokenizer.chat_template` and `tokenizer.chat_template.NAME`. With tools, the template `tool_use` is used if there
    is one. Otherwise `default` is used. A template runs in a sandbox that limits its work
    (`template_sandbox`), with the tags, filters and variables that transformers gives it. The prompt already has its
    special tokens: encode it without adding others.

    Args:
        folder: the target's folder or GGUF file.
        messages: dictionaries with `role` (system, user, assistant, tool) and `content`; also `tool_calls`, and
            reasoning under one of the names of REASONING. A key with the value None counts as absent.
        variables: other variables of the template, such as `tools` (a list of JSON schemas), `documents` or
            `enable_thinking`. Three are options, as in transformers' `apply_chat_template`. `chat_template` is a
            template, or the name of one of the folder's. `continue_final_message` is True or a key of the last message:
            the prompt ends with that text, and the answer continues it. `add_generation_prompt` is True by default, but
            not with `continue_final_message`.

    Raises:
        ConfigError: no message, a value that is not JSON, or options that contradict each other or the messages.
        CheckpointError: there is no template; it is unreadable, refuses these messages or takes too much work.
    """
    if not messages:
        raise ConfigError("a conversation needs at least one message")
    known = {"tools": None, "documents": None, **(variables or {})}
    if refused := sorted(known.keys() & _OPTIONS):
        raise ConfigError(f"'{refused[0]}' is no variable of a chat template, and no option here: leave it out")
    template, field = known.pop("chat_template", None), known.pop("continue_final_message", None) or ""
    field = "content" if field is True else field
    if not isinstance(field, str):
        raise ConfigError(f"continue_final_message is {shown(field)}; give True, or a key of the last message")
    prompted = known.setdefault("add_generation_prompt", not field)
    if field and prompted:
        raise ConfigError("continue_final_message and add_generation_prompt contradict each other: give one of them")
    source = _chosen(folder, template, has_tools=known["tools"] is not None)
    tokens = {name: token.content for name, token in read_special_tokens(folder).named.items()}
    try:
        # Through JSON: a template comes with the folder, and must not see objects with methods of their own.
        seen = json.loads(json.dumps({**tokens, **known, "messages": [_with_reasoning(each) for each in messages]}))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"messages and chat_template_kwargs should be JSON values: {first_line(error)}") from None
    final = _marked(seen["messages"][-1], field, source) if field else ""
    prompt = _rendered(folder, source, seen)
    return _until_mark(prompt, final, folder) if field else prompt


def _rendered(folder: Path, source: str, variables: Mapping[str, Any]) -> str:
    from specgraph_run.text.template_sandbox import render_template

    try:
        return render_template(_compiled(source), variables)
    except Exception as error:  # a template may raise any error, RecursionError too
        raise CheckpointError(
            f"the chat template of {folder} can't render these messages: {first_line(error)}"
        ) from None


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """Return a compiled template with the filter and two functions that transformers adds to jinja2."""
    from jinja2 import TemplateError

    from specgraph_run.text.template_sandbox import compile_template

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own filter escapes HTML

    return compile_template(template, {"tojson": to_json}, {"raise_exception": refuse, "strftime_now": now})


def refuse_pictures(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if the content of a message has a part that is not text: a target is a text model here."""
    for number, message in enumerate(messages):
        content: Any = message.get("content")
        for part in content if isinstance(content, list) else ():
            names: list[str] = [part.get("type", ""), *part] if isinstance(part, dict) else []
            found = next((kind for kind in ("image", "video", "audio") if any(kind in str(n) for n in names)), None)
            if found is not None:
                raise ConfigError(
                    f"message {number} has a part of type {found}: only text is read, also by targets that take more; "
                    "leave the part out"
                )


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without keys that are None, and with its reasoning under both names that templates read."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _marked(message: dict[str, Any], field: str, source: str) -> str:
    """Append the mark to a message's text under a key, and return the text without the mark.

    Reasoning may be in a message under several names. All are marked: the template may read any of them.
    """
    value: Any = message.get(field)
    keys = [name for name in REASONING if message.get(name) == value] if field in REASONING else [field]
    if value is None or not any(key in source for key in keys):
        place = "the last message" if value is None else "the chat template"
        raise ConfigError(f"continue_final_message: {place} has no {shown(field)} to go on with")
    if isinstance(value, str):
        message |= dict.fromkeys(keys, value + _TAG)
        return value
    blocks: list[Any] = value if isinstance(value, list) else []
    texts = [block for block in blocks if isinstance(block, dict) and isinstance(block.get("text"), str)]
    if not texts:
        raise ConfigError(f"continue_final_message: {shown(field)} of the last message has no text to go on with")
    text: str = texts[-1]["text"]
    texts[-1]["text"] = text + _TAG
    return text


def _until_mark(prompt: str, final: str, folder: Path) -> str:
    """Return the prompt up to the mark. After it a template writes the end of the message."""
    mark = _TAG.strip()
    if final.strip() not in prompt or mark not in prompt:
        raise CheckpointError(
            f"the chat template of {folder} does not write all of the last message, so it can't be continued"
        )
    place = prompt.rindex(mark)
    # A template that strips its messages has removed the mark's space, and would have removed the text's own space.
    return prompt[:place] if prompt.startswith(_TAG, place) else prompt[:place].rstrip()


def _chosen(folder: Path, template: Any, *, has_tools: bool) -> str:
    """Return the template that the caller gives, or names. Without one, return the folder's default."""
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"chat_template is {shown(template)}; give a template, or the name of one of the folder's")
    found = _templates(folder)
    if template is not None:
        return found.get(template, template)
    names = ("tool_use", "default") if has_tools else ("default",)
    chosen = next((found[name] for name in names if name in found), None)
    if chosen is None and found:
        raise CheckpointError(
            f"{folder} has no chat template named default, only {', '.join(sorted(found))}: name one as chat_template "
            "in chat_template_kwargs"
        )
    if chosen is None:
        raise CheckpointError(
            f"{folder} has no chat template (chat_template.jinja, or in tokenizer_config.json): "
            "give a plain prompt, or another target"
        )
    return chosen


def _templates(folder: Path) -> dict[str, str]:
    """Return the folder's templates by name. If any is a file of its own, tokenizer_config.json is not looked at."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if exists(folder / "chat_template.jinja"):
        files.setdefault("default", folder / "chat_template.jinja")
    if files:
        return {name: _text_of(path) for name, path in files.items()}
    given: Any = (json_of(folder, "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(given, list):
        given = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
    named: dict[Any, Any] = given if isinstance(given, dict) else {"default": given}
    return {name: source for name, source in named.items() if isinstance(name, str) and isinstance(source, str)}


def _text_of(path: Path) -> str:
    try:
        return checked_file(path, JSON_LIMIT).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {first_line(error)}") from None
