"""All rows of the op table. Each module has the rows of one family of ops."""

from specgraph_conformance.op_rows import (
    attention,
    context_parallel,
    draws,
    experts,
    large_vocabularies,
    linears,
    next_step,
    ngram,
    passes,
    ragged,
    rounds,
    sampling_parameters,
    trees,
    verify,
)
from specgraph_conformance.op_table import Row

FAMILIES = (
    linears, experts, attention, context_parallel, passes, next_step, rounds, ragged, ngram, draws, verify,
    sampling_parameters, trees, large_vocabularies,
)  # fmt: skip
ROWS: list[Row] = [row for family in FAMILIES for row in family.TABLE.rows]
