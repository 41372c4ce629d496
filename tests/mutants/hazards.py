"""The hazard table: how graph-captured drafters went wrong in public projects.

Each row: where it was seen, how it showed, why it happened. `docs/hazards.md` is made from it (`write_hazards.py`).
"""

from __future__ import annotations

from typing import NamedTuple


class Hazard(NamedTuple):
    """One failure of the field."""

    seen: str
    symptom: str
    cause: str


REVIEW = "review of the suite"
"""Put into this repository by a reviewer, and passed by an earlier version of the suite."""

SAMPLED = "sampled mutant"
"""Drawn at random from the operators, numbers and decorators of the core, and passed by an earlier version of the
suite."""

OWN = "no report found"
"""What a part can get wrong; nobody is known to have reported it."""

HAZARDS: dict[str, Hazard] = {
    "stale-metadata-rebound": Hazard(
        "vLLM #20190; #34880; vllm-musa #50",
        "mean acceptance length 2.82 -> 2.08; positions 1-4 fall to 7/3/1/0.6 %",
        "metadata tensor reassigned (`x = arange[:n]`) instead of written in place; the graph reads the old address",
    ),
    "stale-metadata-copied-late": Hazard(
        "vLLM #20190",
        "2.82 -> 2.46 after copying some tensors",
        "one of seq_lens, slot_mapping, query_start_loc, block_table not copied before replay",
    ),
    "metadata-none-at-capture": Hazard(
        "vLLM #20190",
        "2.08 -> 1.53",
        "captured with no attention metadata",
    ),
    "metadata-not-rebuilt-between-steps": Hazard(
        "vLLM #41162",
        "illegal memory access with more than 2 draft tokens",
        "position-dependent builder state moved on for lengths and slots only",
    ),
    "capture-key-mismatch": Hazard(
        "vllm-musa #52",
        'capture at request time, "inappropriate time" error',
        "dummy run captured under uniform=True, request dispatched under uniform=False",
    ),
    "capture-at-request-time": Hazard(
        "vllm-musa (step 4)",
        "first request captures, or asserts",
        "wrapper engaged, boot capture not wired",
    ),
    "wrapper-hides-type": Hazard(
        "vllm-musa (step 3 fix)",
        "first request dies on an isinstance assert",
        "graph wrapper not unwrapped before a type check",
    ),
    "padded-rows-write-kv": Hazard(
        "vLLM #56734, #43682",
        "zero acceptance that stays in the prefix cache; access at block_table[-1]",
        "padded or idle rows run with stale rows or length 1",
    ),
    "stale-padding-rows": Hazard(
        "SGLang #10892, #28569",
        "illegal access as the batch shrinks",
        "buffers' tail keeps the last, larger batch",
    ),
    "query-len-zero": Hazard(
        "vLLM #34880",
        "wrong token index for padded requests",
        "no early return for query_len == 0",
    ),
    "num-reqs-unpadded": Hazard(
        "vLLM #34880",
        "crash in cu_num_draft_tokens",
        "spec metadata not padded to the graph's request count",
    ),
    "k-equals-2": Hazard(
        "vLLM #34880",
        "wrong shapes at num_speculative_tokens=2",
        "capture sizes not rounded to K+1 for that case",
    ),
    "step-ladder-overpadding": Hazard(
        "vLLM #34880 review; vllm-ascend",
        "(K+1) x rows in every later step",
        "step 0's size ladder reused for one-token steps",
    ),
    "size-truncated": Hazard(
        "vLLM #54933, #55004",
        "25 tok/s instead of 133",
        "a maximum of 42 silently became 40, so batches ran eager",
    ),
    "block-misaligned-sizes": Hazard(
        "vllm-musa #52",
        "illegal access in a parallel (DFlash) draft capture; or 9 tokens padded to 72",
        "capture sizes not multiples of 1+K, or only large ones kept",
    ),
    "buffer-smaller-than-padded-size": Hazard(
        "vLLM #50065",
        "short slices",
        "buffers sized by the asked maximum, not the padded one",
    ),
    "merged-chain-collectives": Hazard(
        "vllm-musa #43 -> #50",
        "acceptance 3.49 %, positions 1-4 at 0 %, device reboot",
        "collectives' barrier state baked between steps of one giant capture (toolchain)",
    ),
    "chain-without-slots": Hazard(
        "vllm-musa #43",
        "draft KV never written",
        "chain captured without slot_mapping",
    ),
    "graph-reuses-target-metadata": Hazard(
        "vLLM #48261",
        "illegal access in attention's combine",
        "capture kept the target's metadata, overwritten later",
    ),
    "update-dropped": Hazard(
        "torch_npu (no value-wait in the runtime)",
        "stale attention lengths, no error",
        "external event's wait/reset captured before its first record are dropped",
    ),
    "update-missing": Hazard(
        "Ascend",
        "hang at replay",
        "a task group's event is never recorded",
    ),
    "update-key-ignored": Hazard(
        "torch_npu `NPUGraph.update`",
        "lengths never change",
        "unknown key ignored; count mismatch handled by zip",
    ),
    "update-before-previous-replay-ends": Hazard(
        "vllm-ascend #4233, #8354",
        "hang at event wait",
        "update of round i recorded before replay i-1 finished",
    ),
    "update-prefill-decode-mixed": Hazard(
        "vllm-ascend #8365, #10374",
        "acceptance wrong",
        "two graphs of one size share one parameter list",
    ),
    "rejected-tokens-in-lengths": Hazard(
        "vllm-ascend (admitted in a note)",
        "draft attends to rejected tokens",
        "host lengths ignore this round's num_rejected",
    ),
    "per-step-lengths-not-updated": Hazard(
        "SGLang #21255; vllm-ascend #3892",
        "acceptance falls at positions 2-3",
        "every step got step 0's lengths",
    ),
    "pool-clash": Hazard(
        "vLLM (eagle pool), SGLang #22930",
        "corrupted outputs",
        "drafter and target share a pool while their lifetimes overlap",
    ),
    "output-aliases-graph-buffer": Hazard(
        "SGLang #25512, #23037",
        "last round's result changes",
        "a static output handed out, overwritten by the next replay",
    ),
    "draft-step-column": Hazard(
        "vLLM #41162",
        "sampled logits in the wrong column",
        "`t[:, step]` with a tensor step is a copy, not a view",
    ),
    "gumbel-seed-position": Hazard(
        "vLLM",
        "accepted distribution biased",
        "draft and target use different positions for the noise",
    ),
    "weights-moved": Hazard(
        "vLLM #55013; vllm-ascend #14687",
        "illegal access after sleep/wake or reload",
        "graph holds old weight addresses",
    ),
    "capture-left-broken": Hazard(
        "many",
        "every later op fails",
        "exception or host read inside capture leaves the stream capturing",
    ),
    "exec-budget": Hazard(
        "torchada (2048 live graphs on MUSA); vllm-ascend #2472 (streams, 207008)",
        "late failure at capture",
        "too many live graphs",
    ),
    "reset-leaks-pool": Hazard(
        "torch_musa `MUSAGraph::reset`",
        "memory never comes back",
        "pool release commented out",
    ),
    "max-len-clamp": Hazard(
        "vLLM",
        "out-of-range position near max_model_len",
        "later draft steps pass the end",
    ),
    "dynamic-k-negative": Hazard(
        "vLLM #48494",
        "capture assert, query length -5",
        "K changed between capture and replay",
    ),
    "acceptance-hidden": Hazard(
        "all",
        'graph "works", tokens differ',
        "nobody compares tokens with eager",
    ),
    "replay-on-default-stream": Hazard(
        REVIEW,
        "drafts of the last round, or torn ones, under an engine that drafts on a side stream",
        "the launch names the default stream instead of the current one",
    ),
    "elapsed-time-units": Hazard(
        REVIEW,
        "timings a thousand times too short, or 0",
        "the vendor's seconds are handed on as milliseconds, or timing is not asked for",
    ),
    "reserved-is-allocated": Hazard(
        REVIEW,
        "memory budgets that forget graph pools",
        "reserved counts living tensors only",
    ),
    "pool-closed-under-graphs": Hazard(
        REVIEW,
        "a graph writes into another tensor's memory",
        "close() of a pool does not wait for its graphs",
    ),
    "graph-closes-shared-pool": Hazard(
        REVIEW,
        "the other sizes of a ladder read freed memory once one graph is closed",
        "a shared pool is not counted",
    ),
    "shared-pool-not-shared": Hazard(
        REVIEW,
        "every captured size takes memory of its own",
        "the pool is named and not used",
    ),
    "open-ignores-index": Hazard(
        REVIEW,
        "two processes on one device, the other one idle",
        "open(index) opens device 0",
    ),
    "probe-cached": Hazard(
        REVIEW,
        "a device that has gone is opened, one that came back is refused",
        "the first answer of the probe is kept",
    ),
    "mixed-requests-in-verify": Hazard(
        REVIEW,
        "near-zero temperature takes the argmax in 122 of 200 draws; biased output for others",
        "rejection sampling tested with equal requests only",
    ),
    "parallel-block-sampling": Hazard(
        REVIEW,
        "accepted distribution biased with a parallel drafter",
        "draft probabilities without temperature, or of another row",
    ),
    "parallel-block-rows": Hazard(
        REVIEW,
        "a parallel drafter drafts one position off, or attends to rejected rows",
        "the block's first position, or slots of rejected rows",
    ),
    "prompt-padding": Hazard(
        REVIEW,
        "KV after a prompt is overwritten, or the first drafts are bad",
        "padding of a prompt pass counts as rows",
    ),
    "stale-block-table": Hazard(
        REVIEW,
        "reads of a block that now belongs to another request",
        "the tail of a block table or of a batch keeps the last round",
    ),
    "module-token-shift": Hazard(
        REVIEW,
        "acceptance of later modules falls where drafts were rejected",
        "the latest token goes to a row that is not selected",
    ),
    "module-past-rows": Hazard(
        "TensorRT-LLM #4762",
        "acceptance of later MTP modules is below what their training gave",
        "their last keys were written with draft tokens, and what computes them again is kept of other rows",
    ),
    "synthetic-acceptance": Hazard(
        REVIEW,
        "benchmarks at another acceptance than asked for",
        "one chance for all positions",
    ),
    "fused-linears": Hazard(
        REVIEW,
        "acceptance falls with fused kernels only",
        "a fused op computes another function than its parts",
    ),
    "attention-op-rows": Hazard(
        REVIEW,
        "requests from the eighth on decode another request's text",
        "tests with at most four requests",
    ),
    "attention-many-requests": Hazard(
        REVIEW,
        "requests from the eighth on decode another request's text",
        "tests with at most four requests",
    ),
    "attention-many-keys": Hazard(
        REVIEW,
        "long prompts are forgotten",
        "keys past a window, a number of splits or 16 bits are left out",
    ),
    "attention-rounded-scores": Hazard(
        REVIEW,
        "acceptance falls in half precision only",
        "scores rounded before the softmax",
    ),
    "one-group-not-gated": Hazard(
        REVIEW,
        "later layers attend with the lengths of the last round",
        "only one group of a graph waits for its update",
    ),
    "group-partly-rewritten": Hazard(
        REVIEW,
        "some ops keep the lengths of the capture",
        "an update stops after one op of its group",
    ),
    "bad-first-drafts": Hazard(
        REVIEW,
        "lossless output, and the first drafts of each request are rejected",
        "the propose after a prompt takes another row",
    ),
    "prompt-keys": Hazard(
        REVIEW,
        "lossless output, and acceptance falls with the position",
        "rotary angles in half precision, or prompt chunks of the drafter shifted",
    ),
    "head-arithmetic": Hazard(
        REVIEW,
        "lossless output, and a lower acceptance with one kind of drafter",
        "a mask or an order of modules that the checkpoint was not trained with",
    ),
    "metrics-count-the-bonus": Hazard(
        REVIEW,
        "acceptance reported one token too high",
        "the target's own token counts as accepted",
    ),
    "fused-sampling": Hazard(
        REVIEW,
        "sampled drafts differ with the fused head only",
        "a fused op samples from other logits, or with other noise, than its parts",
    ),
    "round-copy-overwritten": Hazard(
        REVIEW,
        "tokens of one round twice, those of another never",
        "one place on the host for rounds of which two are in flight",
    ),
    "round-row-reused": Hazard(
        "SGLang #18744, #18803; vLLM #49620",
        "a new request begins with another one's tokens, or reads out of bounds",
        "results of a round in flight are matched with requests by a row that has changed hands since",
    ),
    "round-token-after-stop": Hazard(
        "vLLM #45357",
        "tokens or KV after a stop token",
        "the next round was launched before the host saw the stop, and its tokens were handed out",
    ),
    "round-k-changed-in-flight": Hazard(
        "vLLM #40768, #46899",
        "placeholders or tokens of other places where the number of drafts changes",
        "results of a round are taken apart with the number of drafts of a later one",
    ),
    "sibling-sees-sibling": Hazard(
        "sglang-jax #1569, #1611",
        "drafts and acceptance depend on branches that exclude each other",
        "the rows of a tree attend causally, or without a mask in the draft steps",
    ),
    "ancestor-mask-shifted": Hazard(
        OWN,
        "tokens that are not the target's after a node that is no first child",
        "bits of the verify's rows leave out the last token, which is row 0",
    ),
    "path-kv-not-moved": Hazard(
        "SGLang #15360, #26866",
        "gibberish with top-k above 1",
        "the accepted path lies scattered among the nodes, and the next round takes the first slots for it",
    ),
    "rejected-node-kv-left-visible": Hazard(
        OWN,
        "drafts depend on the round before",
        "bits or lengths reach slots that only an earlier round's nodes have written",
    ),
    "node-ties-differ": Hazard(
        OWN,
        "two devices, or eager and a graph, choose different trees",
        "torch.topk and unstable sorts leave open which of equal scores they take",
    ),
    "tree-slot-overlaps-next-request": Hazard(
        "SGLang, refusal of top-k above 1 with pages larger than 1 token",
        "another request's KV is overwritten at the end of a block",
        "slots of a step's nodes are counted on in memory instead of through the block table",
    ),
    "cancel-ends-another": Hazard(
        SAMPLED,
        "a cancelled request goes on, and another one ends",
        "the request is looked up by the wrong number",
    ),
    "kv-blocks-needed": Hazard(
        SAMPLED,
        "requests that fit are refused, or wait",
        "the blocks of the last position counted one too many",
    ),
    "wrong-request-taken": Hazard(
        SAMPLED,
        "an overflow in the middle of a batch",
        "a bound of a request that is not checked when it is made",
    ),
    "metrics-without-drafts": Hazard(
        SAMPLED,
        "a division by zero before the first draft, or without a drafter",
        "a mean over no drafts",
    ),
    "cache-too-large": Hazard(
        SAMPLED,
        "out of memory long after the start, or a wrong number in the message",
        "an allocation error that is not turned into ours",
    ),
    "draft-probs-of-another-row": Hazard(
        SAMPLED,
        "sampled output follows the drafter where the two disagree",
        "the verify has other distributions than those that the drafts came from",
    ),
    "wrong-round-taken": Hazard(
        SAMPLED,
        "rows of another request, or an error of the device",
        "a shape that is not compared before it is copied",
    ),
    "default-sizes": Hazard(
        SAMPLED,
        "a graph for a size that nobody asked for, or none for one that runs",
        "bounds of the ladder of capture sizes",
    ),
    "lowering-refused-wrongly": Hazard(
        SAMPLED,
        "stale host lengths in a captured graph, or no graph where one is possible",
        "a condition on capabilities the wrong way round",
    ),
    "noise-of-another-position": Hazard(
        SAMPLED,
        "seeds do not repeat from one device to another",
        "noise taken at a position next to the token's, or a hash that differs",
    ),
    "part-of-the-head-rotated": Hazard(
        SAMPLED,
        "gibberish with models that rotate part of the head",
        "elements past rotary_dim lost, or rotated",
    ),
    "pool-keeps-failed-capture": Hazard(
        SAMPLED,
        "memory of graph pools grows with each failed capture",
        "only successful captures leave their pool",
    ),
    "retired-pool-reused": Hazard(
        SAMPLED,
        "an allocator assertion at the capture after the last graph was closed",
        "the handle of a released pool is kept",
    ),
    "collector-left-off": Hazard(
        SAMPLED,
        "host memory grows without end",
        "the collector is turned off for a capture and not turned on again",
    ),
    "dropped-graph-keeps-memory": Hazard(
        SAMPLED,
        "memory of graphs that nobody closed is never free",
        "nothing resets a graph whose last reference is gone",
    ),
    "recorded-op-loses-its-result": Hazard(
        "a backend written from the guide",
        "queries of the capture with the keys of the replay",
        "a recorder replays ops with written arguments for their writes only",
    ),
    "failing-probe": Hazard(
        SAMPLED,
        "one broken backend hides all others",
        "a vendor's exception leaves the probe",
    ),
    "collective-order-differs": Hazard(
        "vLLM #37588 (its class)",
        "all ranks wait for ever",
        "a rank issues its collectives in another order",
    ),
    "rank-captures-other-size": Hazard(
        "vLLM #37588",
        "all ranks wait for ever",
        "a rank captures or dispatches another padded size than its peers",
    ),
    "ranks-differ-in-k": Hazard(
        "vLLM #37588 (its class)",
        "all ranks wait for ever",
        "a rank drafts another number of tokens",
    ),
    "idle-rank-skips-round": Hazard(
        "vLLM #37588 (its class)",
        "all ranks wait for ever",
        "a rank that has no requests, or has finished, runs no round while the others do",
    ),
    "dummy-run-skips-collectives": Hazard(
        "vLLM #37588 (its class)",
        "all ranks wait for ever",
        "the pass that a rank runs for the others' sake returns before a collective",
    ),
    "large-vocabulary": Hazard(
        REVIEW,
        "other tokens in vocabularies above 65,536",
        "a token id in 16 bits, or a fixed number of tiles",
    ),
    "linears-of-many-rows": Hazard(
        REVIEW,
        "wrong drafts in large batches, or with another eps",
        "rows past a tile, an eps of the kernel's own, a choice of norms that was not tried",
    ),
    "verify-rounds-probabilities": Hazard(
        REVIEW,
        "a bias of some tenths of a percent in bfloat16",
        "probabilities rounded to the dtype of the logits",
    ),
    "trees-of-one-shape": Hazard(
        REVIEW,
        "wrong nodes in batches of different trees, or of more than 32 rows",
        "masks of 32 bits, request 0's parents, noise of another position",
    ),
    "nan-behind-the-last-key": Hazard(
        REVIEW,
        "NaN in one request",
        "values behind the last key are multiplied by a weight of 0",
    ),
    "attention-own-scale": Hazard(
        REVIEW,
        "wrong attention in layers with a scale of their own",
        "the kernel scales by the head size",
    ),
    "attention-many-blocks": Hazard(
        REVIEW,
        "wrong keys in large caches, or with many heads",
        "block numbers, or heads, of too few bits",
    ),
    "pool-closed-before-its-graphs": Hazard(
        REVIEW,
        "memory of graphs is never free",
        "a closed pool gives nothing back",
    ),
    "warm-up-over-live-requests": Hazard(
        REVIEW,
        "KV of running requests overwritten by a capture",
        "the warm-up runs over what is in the buffers",
    ),
    "small-tensor-unguarded": Hazard(
        REVIEW,
        "a scalar of the capture in every replay",
        "the guard leaves tensors of one element out",
    ),
    "bound-tensors-of-other-rounds": Hazard(
        REVIEW,
        "wrong drafts after a round of another K",
        "bound tensors read by the rows of the largest round, or after their memory was exchanged",
    ),
    "inert-request-between-others": Hazard(
        REVIEW,
        "the last request drafts with length 0",
        "host lengths for as many requests as are live",
    ),
    "round-rows-compacted": Hazard(
        REVIEW,
        "bad drafts, or an error about a finished request, after others have left",
        "hidden states are not moved when rows are compacted, or a row keeps the stop tokens of its last request",
    ),
    "small-inputs-baked": Hazard(
        REVIEW,
        "a number, an index or a condition of the capture in every replay",
        "small tensors are passed to captured kernels by value",
    ),
    "integers-in-32-bits": Hazard(
        REVIEW,
        "seeds or positions of many sequences repeat",
        "integers of captured ops are kept in 32 bits",
    ),
    "close-ends-other-platforms": Hazard(
        REVIEW,
        "a second drafter of the process fails once the first one is closed",
        "close() resets the device",
    ),
    "capture-moves-the-generator": Hazard(
        REVIEW,
        "eager results depend on whether something was captured before",
        "the default generator is not put back after a capture",
    ),
    "update-in-16-bits": Hazard(
        REVIEW,
        "lossless output, and acceptance falls for contexts above 32,767",
        "lengths of an update are kept in 16 bits",
    ),
    "graph-cut-off": Hazard(
        REVIEW,
        "the last draft steps of a merged loop keep the tokens of the capture",
        "a graph with more nodes than the runtime holds is cut without an error",
    ),
    "special-values-lost": Hazard(
        REVIEW,
        "masked tokens are drawn, or an overflow goes unnoticed",
        "infinities or NaN become finite in captured ops",
    ),
    "update-of-one-list": Hazard(
        REVIEW,
        "rows of a prompt or of a tree attend as another request's",
        "an update rewrites the lengths and keeps the numbers of rows",
    ),
    "failed-update-opens-gate": Hazard(
        REVIEW,
        "a round with the lengths of the last one after an error that was handled",
        "the gate opens although the update failed",
    ),
    "wait-returns-early": Hazard(
        REVIEW,
        "drafts of the last round, or torn ones, under load only",
        "a wait for long work orders nothing, or names another stream",
    ),
    "closed-under-a-replay": Hazard(
        REVIEW,
        "torn results of the last round before a drafter is closed",
        "close() frees a graph that still runs",
    ),
    "scratch-given-away": Hazard(
        REVIEW,
        "values of eager tensors change at a replay",
        "memory that a capture made and dropped comes from the ordinary allocator, which hands it out again",
    ),
    "close-frees-other-graphs": Hazard(
        REVIEW,
        "closing a drafter of one model breaks the other's",
        "close() gives the memory of all captures back",
    ),
    "cancelled-request-lives-on": Hazard(
        REVIEW,
        "rows of a long prompt are overwritten after others were cancelled",
        "the device goes on with a cancelled request, in KV blocks that another one has by now",
    ),
    "draft-length-without-offset": Hazard(
        REVIEW,
        "a draft model's later tokens are worse than its own text, with host lengths only",
        "the length of a later step leaves out the key of its own row",
    ),
    "unsampled-counted": Hazard(
        REVIEW,
        "token 0 is penalised although it was never given",
        "the -1 after the sampled tokens of a round counts as a token",
    ),
    "stops-of-one-request": Hazard(
        REVIEW,
        "a request runs past its stop token",
        "a request ends at the stop tokens of another one",
    ),
    "bound-tensors-read-elsewhere": Hazard(
        REVIEW,
        "poor drafts of an engine that writes its own tensors, with changing K",
        "a shorter round reads other columns of bound tensors than the first ones",
    ),
    "stale-padding-in-place": Hazard(
        REVIEW,
        "KV of requests that left a batch in place is overwritten",
        "not all requests behind a batch in place are made inert",
    ),
    "ranks-add-twice": Hazard(
        REVIEW,
        "a split model gives other text than the whole one",
        "every rank adds the residual to its part before the all-reduce",
    ),
    "logits-gathered-by-rank": Hazard(
        REVIEW,
        "right greedy tokens, wrong sampled ones and log-probabilities, on split targets only",
        "gathered logits are read as if each row were whole",
    ),
    "fork-passed-over": Hazard(
        REVIEW,
        "work of a second stream runs once, at the capture, and in no replay",
        "a wait for work of a capture does nothing on a device whose captures have one stream",
    ),
    "logprobs-of-other-logits": Hazard(
        REVIEW,
        "log-probabilities that no target gives, or more of them than tokens",
        "logits after bias and penalties, rows of other nodes of a tree, or values that a stop token does not cut",
    ),
    "linears-in-tiles": Hazard(
        OWN,
        "poor drafts and wrong text with models of real sizes, none with small ones",
        "a kernel that a device takes for half precision, some rows and some columns only",
    ),
    "heads-in-tiles": Hazard(
        OWN,
        "poor acceptance, or draws that repeat nowhere else, in half precision only",
        "the fused head of real sizes: blocks of the vocabulary, noise, equal logits",
    ),
    "wide-rows": Hazard(
        OWN,
        "poor drafts of models whose hidden states are wider than a chunk",
        "a copy ends with the first chunk of a row",
    ),
    "many-in-one-program": Hazard(
        OWN,
        "requests from some number on stand still, or keys of a path are lost in large batches",
        "one program for all requests, or moves that are made in parts",
    ),
    "drafts-past-a-number": Hazard(
        REVIEW,
        "acceptance ends at the eighth draft; the text is right",
        "a tile of rows, or a mask, that is too small for K",
    ),
    "large-trees": Hazard(
        OWN,
        "trees without the tokens of high ids",
        "the best tokens of blocks of the vocabulary merged wrongly",
    ),
    "rows-without-block-uncounted": Hazard(
        REVIEW,
        "an engine that hands over short block tables gets no warning, only poor drafts",
        "rows of some kind are left out of the count",
    ),
    "query-before-the-work": Hazard(
        REVIEW,
        "results are read before they are written, now and then",
        "query() that is true while work is left",
    ),
    "event-of-the-current-stream": Hazard(
        REVIEW,
        "a wait for another stream's work waits for nothing",
        "record_event() of a stream records on the current one",
    ),
    "one-pool-for-all": Hazard(
        REVIEW,
        "wrong results where two graphs run at the same time",
        "graphs that were given no pool share the memory that their captures dropped",
    ),
    "sums-in-half": Hazard(
        REVIEW,
        "norms and means of long rows are too small",
        "sums are kept in the dtype of their terms",
    ),
    "order-of-equals": Hazard(
        REVIEW,
        "target and drafter choose differently among equal tokens",
        "a sort that leaves the order of equal values open",
    ),
    "drafts-not-penalised": Hazard(
        REVIEW,
        "drafts repeat tokens that the target's penalties forbid: acceptance falls",
        "logits of later draft steps do not know the drafts before them",
    ),
    "waiting-request-overtaken": Hazard(
        REVIEW,
        "a long request waits for as long as short ones come",
        "the batch is filled with whatever fits",
    ),
    "update-of-lengths-only": Hazard(
        REVIEW,
        "attention with the scale, the window or the flags of the capture",
        "a task update rewrites lists or positional arguments only, and says nothing of the others",
    ),
    "carry-before-the-norm": Hazard(
        REVIEW,
        "acceptance of EAGLE 3.1 heads falls from the second draft on, in merged graphs only",
        "the op between two draft steps takes the hidden states before the head's output norm",
    ),
    "noise-of-the-chunk": Hazard(
        REVIEW,
        "a sampled request gives another text when its prompt is prefilled in chunks",
        "the position of the first token is counted within the last chunk",
    ),
    "path-hidden-not-taken": Hazard(
        REVIEW,
        "acceptance with trees falls after accepted drafts; the text is right",
        "the drafter is given hidden states of other rows than those of the accepted path",
    ),
    "tree-without-room": Hazard(
        REVIEW,
        "wrong last tokens, or log-probabilities, of requests that end at max_model_len with trees",
        "no KV block for the nodes of a tree behind the last position",
    ),
    "dropped-graph-in-an-update": Hazard(
        OWN,
        "the process aborts, or hangs, rarely and wherever the garbage collector happens to run",
        "releasing a graph frees memory in a capture (CUDA) or waits for a launch that waits for its update (NPU)",
    ),
}

NOT_PUT_BACK: dict[str, str] = {
    "one-pool-for-all": (
        "needs two replays at the same time: with it, the accelerator backend on its test device fails "
        "`replay.two-graphs-at-once`"
    ),
    "merged-chain-collectives": (
        "needs a device whose collectives can be captured: the cases of the group `collectives` run where a platform "
        "claims them, and the MUSA backend's policy refuses the combination"
    ),
}
"""Hazards without a mutant, and why."""
