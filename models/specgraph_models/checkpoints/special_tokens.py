"""Tokens that files beside tokenizer.json name: added tokens, special tokens, and the tokens for chat templates.

tokenizer_config.json is read first. If it has no `added_tokens_decoder`, special_tokens_map.json overrides it, and
added_tokens.json is read too. The class PreTrainedTokenizerFast of transformers reads a folder in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.gguf_file import json_of
from specgraph_models.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys that name a token even if their value is null. Any other key counts if it ends in `_token`."""
_MAP, _CONFIG, _LISTED = "special_tokens_map.json", "tokenizer_config.json", "added_tokens.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
_DIGITS = 9
"""The most digits of a token id."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens that a folder's JSON files name."""

    named: Mapping[str, AddedToken]
    """Tokens by name, such as `eos_token`; all are special. A chat template sees their content."""
    extra: Sequence[AddedToken]
    """Other special tokens."""
    listed: Mapping[int, AddedToken]
    """Tokens by the id that a file has for them."""
    has_decoder: bool
    """True if tokenizer_config.json has `added_tokens_decoder`. If not, the listed tokens come from added_tokens.json,
    and a token that tokenizer.json has already becomes special if a file names it."""


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Return the tokens that a folder's JSON files, or a GGUF file's keys, name beside its vocabulary.

    Raises:
        CheckpointError: a file can't be read, or has a value that is not a token.
    """
    config = dict(json_of(folder, _CONFIG) or {})
    has_decoder = "added_tokens_decoder" in config
    more = {} if has_decoder else json_of(folder, _MAP) or {}
    if not config.get(_EXTRA) and _ADDITIONAL in config:
        config[_EXTRA] = config.pop(_ADDITIONAL)
    both = {**config, **more}
    standard = {key: both[key] for key in STANDARD if both.get(key) is not None}
    others = {**_others(config, dict), **_others(more, dict, str), **_others(config, str)}
    lists: list[tuple[Path, Any]] = []
    for path, values in ((folder / _CONFIG, config), (folder / _MAP, more)):
        if isinstance(values.get(_EXTRA), dict):
            others |= values[_EXTRA]
            lists = []
        elif _EXTRA in values:
            lists.append((path, values[_EXTRA]))
    written = [*standard.values(), *(value for path, values in lists for value in _list(values, path))]
    if not lists:
        lists.append((folder / _MAP, both.get(_ADDITIONAL)))
    names = {
        key: _token(value, folder / (_MAP if key in more else _CONFIG), key, special=True)
        for key, value in {**standard, **others}.items()
    }
    extra = [_token(value, path, _EXTRA) for path, values in lists for value in _list(values, path)]
    if has_decoder:
        return SpecialTokens(names, extra, _listed(config["added_tokens_decoder"] or {}, folder / _CONFIG), True)
    # An object with `__type` is of tokenizer_config.json's form; transformers does not find it here.
    texts = [each if isinstance(each, str) else each.get("content") for each in written if "__type" not in each]
    listed = _added(json_of(folder, _LISTED) or {}, texts, folder / _LISTED)
    return SpecialTokens(names, extra, listed, False)


def add_special_tokens(tokenizer: Backend, tokens: SpecialTokens, folder: Path) -> None:
    """Add the tokens that tokenizer.json lacks, and mark special tokens, as transformers does.

    Raises:
        CheckpointError: a file gives a token an id that it can't get in the tokenizer.
    """
    own = tokenizer.get_added_tokens_decoder()
    source = folder / (_CONFIG if tokens.has_decoder else _LISTED)
    for index, token in tokens.listed.items():
        if not tokens.has_decoder and index in own and own[index].content != token.content:
            raise CheckpointError(
                f"{source} gives {shown(token.content)} the id {index}, which is {shown(own[index].content)} in "
                "tokenizer.json"
            )
    listed = dict(tokens.listed) if tokens.has_decoder else {**tokens.listed, **own}
    names = {token.content for token in tokens.named.values()}
    found = {token.content for token in (*own.values(), *listed.values())}
    more: list[AddedToken] = []
    for token in (*tokens.named.values(), *tokens.extra):
        # Tokens of one content with different flags are all added; the last one counts.
        if token.content not in found and token not in more:
            more.append(token)
    new = {token.content for token in listed.values() if tokenizer.token_to_id(token.content) is None}
    ordered = [listed[index] for index in sorted(listed)]
    for token in ordered:
        token.special = token.special or token.content in names
    tokenizer.add_tokens([*ordered, *more])
    for index, token in listed.items():
        if token.content in new and (given := tokenizer.token_to_id(token.content)) != index:
            raise CheckpointError(
                f"{source} gives {shown(token.content)} the id {index}, and the next free one in tokenizer.json is "
                f"{given}"
            )


def _others(values: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
    """Return a file's tokens of these types with keys that are not standard, such as `image_token`."""
    found = {key: value for key, value in values.items() if key.endswith("_token") and key not in STANDARD}
    found = {key: value for key, value in found.items() if isinstance(value, kinds)}
    return {key: value for key, value in found.items() if isinstance(value, str) or "content" in value}


def _list(values: Any, path: Path) -> list[Any]:
    if values is None:
        return []
    if not isinstance(values, list):
        raise CheckpointError(f"{path}: special tokens should be a list or a mapping, are {shown(values)}")
    return values


def _listed(values: Any, path: Path) -> dict[int, AddedToken]:
    """Return the tokens of `added_tokens_decoder`, by their ids."""
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: 'added_tokens_decoder' should be a mapping, is {shown(values)}")
    found: dict[int, AddedToken] = {}
    for index, entry in values.items():
        if not isinstance(entry, dict) or not (index.isascii() and index.isdecimal() and len(index) <= _DIGITS):
            raise CheckpointError(f"{path}: 'added_tokens_decoder' has {shown(index)}: {shown(entry)}, not a token")
        found[int(index)] = _token(entry, path, "added_tokens_decoder")
    return found


def _added(values: Mapping[str, Any], special: Collection[str], path: Path) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json, a mapping of tokens to ids."""
    found: dict[int, AddedToken] = {}
    for content, index in values.items():
        if type(index) is not int or not 0 <= index < 10**_DIGITS:
            raise CheckpointError(f"{path}: {shown(content)} has the id {shown(index)}, which is none")
        flags = {"normalized": content not in special, "special": content in special}
        found[index] = _token({"content": content, **flags}, path, content)
    return found


def _token(value: Any, path: Path, key: str, *, special: bool = False) -> AddedToken:
    """Return a token from its text, which makes it special, or from an object with `content` and flags.

    Args:
        key: names the value in messages.
        special: make it special, also if its flags do not.
    """
    from tokenizers import AddedToken

    given: Any = {"content": value, "special": True} if isinstance(value, str) else value
    content = given.get("content") if isinstance(given, dict) else None
    if not isinstance(content, str) or not _is_text(content):
        raise CheckpointError(f"{path}: {shown(key)} is {shown(value)}, not a token")
    flags = {flag: given[flag] for flag in _FLAGS if given.get(flag) is not None}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise CheckpointError(f"{path}: {shown(key)} is {shown(value)}; flags of a token are true or false")
    return AddedToken(content, **({**flags, "special": True} if special else flags))


def _is_text(content: str) -> bool:
    """Return True if a string is text. JSON can contain half a character, a lone surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in content)
