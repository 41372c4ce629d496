"""The numbers of one batch that vllm-ascend's V1 model runner knows on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specgraph_plugin import PromptChunk


class HostBatch(NamedTuple):
    """The numbers of n requests, in the order of the batch.

    A request's rows are rows of its prompt or the row of its last token, then `num_drafts` rows of draft tokens. The
    target samples at its last `num_drafts` + 1 rows, unless its prompt goes on after this pass.
    """

    positions: Sequence[int]
    """The position of each request's first row."""
    num_rows: Sequence[int]
    num_drafts: Sequence[int]
    goes_on: frozenset[int]
    """The requests whose prompt goes on after this pass: nothing is sampled for them."""

    def is_uniform(self, query_len: int) -> bool:
        """Return True if the target sampled at all rows, of which each request has `query_len`."""
        return not self.goes_on and all(
            rows == query_len == drafts + 1 for rows, drafts in zip(self.num_rows, self.num_drafts, strict=True)
        )

    def start_positions(self) -> list[int]:
        """Return, for each request, the position of the first row at which the target samples."""
        return [at + rows - drafts - 1 for at, rows, drafts, _ in self.requests()]

    def chunks(self) -> list[PromptChunk]:
        """Return the rows of prompts. The token after a prompt that goes on has the request's own index."""
        made: list[PromptChunk] = []
        first = 0
        for request, (position, rows, drafts, goes_on) in enumerate(self.requests()):
            of_prompt = rows if goes_on else rows - drafts
            if goes_on or of_prompt > 1:
                made.append(PromptChunk(first, of_prompt, position, request, request if goes_on else None))
            first += rows
        return made

    def requests(self) -> list[tuple[int, int, int, bool]]:
        numbers = zip(self.positions, self.num_rows, self.num_drafts, strict=True)
        return [(*each, request in self.goes_on) for request, each in enumerate(numbers)]


def host_batch(runner: Any, scheduler_output: Any) -> HostBatch:
    """Return the numbers of the pass that the runner has just finished. They are exact also with async scheduling."""
    ids: list[str] = list(runner.input_batch.req_ids)
    num_rows = [int(scheduler_output.num_scheduled_tokens[each]) for each in ids]
    drafts = scheduler_output.scheduled_spec_decode_tokens
    # The runner corrects these lengths by the tokens that it knows to be rejected, before each pass.
    ends: list[int] = runner.optimistic_seq_lens_cpu[: len(ids)].tolist()
    discarded: list[int] = runner.discard_request_indices.np[: runner.num_discarded_requests].tolist()
    return HostBatch(
        positions=[end - rows for end, rows in zip(ends, num_rows, strict=True)],
        num_rows=num_rows,
        num_drafts=[len(drafts.get(each, ())) for each in ids],
        goes_on=frozenset(discarded),
    )


def num_sampled(runner: Any, batch: HostBatch) -> list[int] | Callable[[], list[int]]:
    """Return the number of tokens that the target sampled for each request, 0 if its prompt goes on.

    Without async scheduling the runner has read the tokens before it drafts. With it, the runner's own copy of the
    counts is under way, and the result is a function that waits for it.
    """
    n = len(batch.num_rows)
    if runner.use_async_scheduling:

        def counts() -> list[int]:
            runner.valid_sampled_token_count_event.synchronize()
            return runner.valid_sampled_token_count_cpu[:n].tolist()

        return counts
    known: list[int] = runner.input_batch.num_tokens_no_spec[:n].tolist()
    return [
        0 if request in batch.goes_on else known[request] - start - 1
        for request, start in enumerate(batch.start_positions())
    ]


def next_prompt_tokens(runner: Any, batch: HostBatch) -> list[int]:
    """Return the token after the pass of each request whose prompt goes on, 0 for the others."""
    tokens = runner.input_batch.token_ids_cpu
    return [
        int(tokens[request, at + rows]) if goes_on else 0
        for request, (at, rows, _, goes_on) in enumerate(batch.requests())
    ]
