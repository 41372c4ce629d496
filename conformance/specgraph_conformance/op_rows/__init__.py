"""All rows of the op table, a family of ops per module."""

from specgraph_conformance.op_rows import attention, collectives, experts, linears
from specgraph_conformance.op_table import Row

ROWS: list[Row] = [*linears.TABLE.rows, *experts.TABLE.rows, *attention.TABLE.rows, *collectives.TABLE.rows]
