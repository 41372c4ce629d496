"""All rows of the op table. Each module of this folder has the rows of one family of ops, in its `TABLE`."""

from importlib import import_module
from pkgutil import iter_modules

from specgraph_conformance.op_table import Row

FAMILIES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
ROWS: list[Row] = [row for family in FAMILIES for row in family.TABLE.rows]
