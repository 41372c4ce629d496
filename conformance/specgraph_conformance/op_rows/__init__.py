"""All rows of the op table, a family of ops per module."""

from specgraph_conformance.op_rows import attention, linears
from specgraph_conformance.op_table import Row

ROWS: list[Row] = [*linears.TABLE.rows, *attention.TABLE.rows]
