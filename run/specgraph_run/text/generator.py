"""Text from a loaded pair: makes requests of prompts, generates and streams."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from specgraph_models.checkpoints.tokenizer import Tokenizer

from specgraph.device import Platform
from specgraph.errors import ConfigError
from specgraph.validation import Requests, checked, checked_fields, suggestion
from specgraph_run.decoder.decoder import SpeculativeDecoder
from specgraph_run.decoder.layout import ParallelLayout
from specgraph_run.decoder.request import UNSUPPORTED, Chunk, Generation, Request
from specgraph_run.options import check_num_sequences
from specgraph_run.text.chat_template import refuse_pictures, render_chat
from specgraph_run.text.stream import TextStream, text_of


@checked_fields
@dataclass(frozen=True, slots=True)
class TextGenerator:
    """A loaded pair with its tokenizer, ready to generate. `load_generator` makes it.

    It is a context manager: leaving the block, or `close()`, frees the graphs.
    """

    decoder: SpeculativeDecoder
    tokenizer: Tokenizer
    """Wraps a tokenizer of the package tokenizers."""
    stop_token_ids: Sequence[int]
    platform: Platform
    folder: Path
    """The target's folder or GGUF file."""
    description: str
    """A line about the loaded pair: platform, dtype, lowering and the reason for it, drafter, KV cache, stop tokens."""
    layout: ParallelLayout | None = None
    """The processes that run the models together. None if this process runs alone."""

    @checked
    def request(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        seed: int | None = None,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **parameters: Any,
    ) -> Request:
        """Make a request for one prompt.

        Args:
            prompt: a text; or the messages of a conversation, for the target's chat template. Each message has `role`
                (system, user, assistant, tool) and `content`.
            max_tokens: the largest number of tokens to generate.
            temperature: 0 is greedy. Above 0, the generator must have been loaded with `sampled=True`.
            seed: sampling repeats for the same seed. None gives each request a seed of its own; see `Request.seed`.
            chat: put the text into the target's chat template, as a message of the user.
            chat_template_kwargs: variables of the chat template, such as `tools` (JSON schemas) or `enable_thinking`;
                and transformers' options `chat_template`, `continue_final_message`, `add_generation_prompt`.
            parameters: other fields of `Request`. `stop_token_ids` replaces the target's own stop tokens. top_k, top_p,
                min_p, penalties and logit_bias need a generator that was loaded with `sampling_parameters=True`.
        Raises:
            ConfigError: the prompt is empty, or has a picture or sound; the generator is greedy and the temperature is
                above 0; or a parameter is not supported.
            CheckpointError: the tokenizer can't encode the text; or the target's folder has no usable template, for
                messages or with `chat`.
        """
        known = {field.name for field in fields(Request)} - {"prompt_token_ids"}
        if unknown := sorted(parameters.keys() - known):
            others = suggestion(unknown[:1], known) or f"there are {', '.join(sorted(known))}"
            why = UNSUPPORTED.get(unknown[0], f"there is no parameter of this name; {others}")
            raise ConfigError(f"'{unknown[0]}' is not supported: {why}")
        parameters.setdefault("stop_token_ids", self.stop_token_ids)
        if temperature > 0 and not self.decoder.config.sampled:
            raise ConfigError(f"temperature {temperature}: this generator is greedy; load it with sampled=True")
        plain = isinstance(prompt, str) and not chat
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if plain and chat_template_kwargs:
            raise ConfigError("chat_template_kwargs are for a chat template: give messages, or chat=True")
        refuse_pictures(messages)
        text = prompt if isinstance(prompt, str) and plain else render_chat(self.folder, messages, chat_template_kwargs)
        ids = self.tokenizer.encode(text, add_special_tokens=plain).ids
        return Request(prompt_token_ids=ids, max_tokens=max_tokens, temperature=temperature, seed=seed, **parameters)

    @checked
    def requests(
        self, prompt: str | Sequence[Mapping[str, Any]], *, n: Requests = 1, seed: int | None = None, **settings: Any
    ) -> list[Request]:
        """Make `n` requests for one prompt. If a seed is given, their seeds are seed, seed + 1 ..., as in vLLM.

        Args:
            prompt, settings: as in `request`.

        Raises:
            ConfigError: n is less than 1, or more than 1 at temperature 0. Also raised as in `request`.
        """
        first = self.request(prompt, seed=seed, **settings)
        check_num_sequences(n, first.temperature)
        return [first if seed is None else replace(first, seed=seed + i) for i in range(n)]

    @checked
    def stream_text(
        self,
        prompt: str | Request,
        *,
        stop: str | Sequence[str] = (),
        skip_special_tokens: bool = True,
        **settings: Any,
    ) -> TextStream:
        """Stream the text for one prompt as it is generated, in whole characters.

        Args:
            prompt: the prompt, or a request made by `request`.
            stop: a stop string, or several. The text ends before the one that is complete first. A stop string with a
                special token in it, such as "<|eot_id|>", also ends a text that leaves special tokens out.
            skip_special_tokens: leave special tokens out of the text, as vLLM and transformers do.
            settings: as in `request`, if `prompt` is a text.

        Returns:
            An iterable of `TextPiece` that is also a context manager.
        """
        request = self.request(prompt, **settings) if isinstance(prompt, str) else prompt
        self.decoder.check(request)
        return TextStream(self.tokenizer, request, self.stream([request]), stop, skip_special_tokens)

    @checked
    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Generate token ids for every request."""
        return self.decoder.generate(requests)

    @checked
    def add(self, request: Request) -> int:
        """Queue a request for `step`, and return the id that names it in chunks and in `cancel`."""
        return self.decoder.add(request)

    @checked
    def cancel(self, request_id: int) -> bool:
        """End a request, from any thread. Return True if it was unfinished; see `SpeculativeDecoder.cancel`."""
        return self.decoder.cancel(request_id)

    def step(self) -> Sequence[Chunk]:
        """Run a round over all unfinished requests; see `SpeculativeDecoder.step`."""
        return self.decoder.step()

    @checked
    def stream(self, requests: Sequence[Request]) -> Generator[Chunk]:
        """Give the tokens of each round as they come; see `SpeculativeDecoder.stream`."""
        return self.decoder.stream(requests)

    @checked
    def text(
        self, prompts: str | Sequence[str], *, n: Requests = 1, skip_special_tokens: bool = True, **settings: Any
    ) -> list[str]:
        """Return `n` continuations per prompt, prompt by prompt; greedy by default.

        Warns if there are more texts than `max_num_requests`: some then wait for others.

        Args:
            prompts: the prompts; a plain string is one prompt.
            n: texts per prompt, as in `requests`. More than 1 needs a temperature above 0.
            skip_special_tokens: leave special tokens out of the texts.
            settings: as in `request`, for all prompts.

        Raises:
            CapacityError: a prompt, or the KV that its request may need, is too long; nothing was run.
            ConfigError: as in `request`.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        requests = [each for text in texts for each in self.requests(text, n=n, **settings)]
        for request in requests:
            self.decoder.check(request)
        together = self.decoder.config.max_num_requests
        if len(requests) > together:
            what = "prompts" if n == 1 else "sequences"
            warnings.warn(
                f"{len(requests)} {what} are generated {together} at a time; load_generator(max_num_requests="
                f"{len(requests)}) runs them together",
                stacklevel=2,
            )
        results = self.generate(requests)
        return [
            text_of(self.tokenizer, *each, skip_special_tokens=skip_special_tokens)
            for each in zip(requests, results, strict=True)
        ]

    def close(self) -> None:
        """Release the graphs and their memory, and leave the ranks. Later requests are refused."""
        self.decoder.close()
        if self.layout is not None:
            self.layout.ranks.close()

    def __enter__(self) -> TextGenerator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
