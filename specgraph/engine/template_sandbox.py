"""The sandbox that chat templates run in: a template is a program of the folder's, so its work has a limit.

jinja2's sandbox keeps a template from Python's objects, and bounds neither its time nor its memory. Here each operation
is counted, and the size of each value that it reads or makes, before it makes it: loops, calls, filters, tests,
comparisons, operators and output. The count is the same on every machine, as no clock is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Sized, ValuesView
from itertools import chain
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

WORK = 1 << 28
"""Units that one rendering may spend. A conversation of a million characters takes about a tenth of it."""
SOURCE_LIMIT = 1 << 20
"""Characters of a template. The longest published ones have about 50,000."""
_STEP, _CALL = 64, 256
"""Units of an operation, and of one that calls a function. A step is also an item that is made, and 1 in a number that
says how much to make. A byte is one unit."""
_ITEM, _VISIT = 8, 64
"""Units of an item of a value that is read, and of each value that is visited in all that a value holds."""
_DEPTH, _BITS = 100, 4096
"""Containers in each other, and bits of an integer."""
_LEFT = "work left"
"""Among the variables of a rendering: no template can name it."""

_CONSTANT = frozenset({"length", "count", "first", "last", "default", "d", "attr", "random"})
"""Filters that do not read their value."""
_SHALLOW = frozenset(
    {"list", "select", "reject", "selectattr", "rejectattr", "map", "batch", "slice", "reverse", "items", "groupby"}
)
"""Filters that read the items of their value, and not all that these hold."""
_ESCAPING = frozenset({"escape", "e", "forceescape", "urlencode", "tojson"})
"""Filters that may write six characters for one."""
_LEFT_OUT = ("urlize", "striptags", "wordwrap", "xmlattr", "pprint")
"""Filters for web pages, which take more time than their values are long. Neither is there the function lipsum."""


class _Work:
    """The work that a rendering has left."""

    def __init__(self) -> None:
        self.left = WORK

    def spend(self, units: int) -> None:
        self.left -= max(units, 0)
        if self.left < 0:
            raise TemplateRuntimeError(f"it takes more than {WORK} steps and bytes: its loops or values are too large")

    def size(self, *values: Any) -> int:
        """Return the units of values with all that they hold; raise where these are more than is left."""
        total = 0
        open_: list[Iterator[Any]] = [iter(values)]
        while open_:
            for value in open_[-1]:
                total += _VISIT + _own_size(value)
                if (inner := _items(value)) is not None:
                    open_.append(iter(inner))
                    break
            else:
                open_.pop()
            if total > self.left:
                self.spend(total)
            if len(open_) > _DEPTH:
                raise TemplateRuntimeError(f"it nests more than {_DEPTH} lists or mappings")
        return total


def _own_size(value: Any) -> int:
    """Return the units of a value without those of its items."""
    if isinstance(value, str | bytes):
        return len(value) if isinstance(value, bytes) or value.isascii() else 4 * len(value)
    if isinstance(value, int):
        return value.bit_length() >> 3
    if isinstance(value, Namespace):
        raise TemplateRuntimeError("it uses a namespace as a value")
    if isinstance(value, Mapping | ItemsView):
        return 2 * _ITEM * len(value)
    return _ITEM * len(value) if isinstance(value, Sequence | KeysView | ValuesView) else 0


def _items(value: Any) -> Iterable[Any] | None:
    if isinstance(value, Mapping):
        return chain(value, value.values())
    plain = isinstance(value, str | bytes | range)
    return value if isinstance(value, Sequence | KeysView | ValuesView | ItemsView) and not plain else None


def _numbers(values: Iterable[Any]) -> int:
    """Return the sum of the integers among arguments: how much a call may be asked to make."""
    return sum(abs(value) for value in values if isinstance(value, int))


def _replaced(text: Any, arguments: Sequence[Any]) -> int:
    """Return the units that `replace` adds to a text."""
    if len(arguments) < 2 or not all(isinstance(each, str) for each in (text, *arguments[:2])):
        return 0
    return text.count(arguments[0]) * _own_size(arguments[1])


def _widths(form: str, arguments: Iterable[Any], directive: str) -> int:
    """Return the units that a format makes beside its values: its widths and precisions, and values named again."""
    found = re.findall(directive, form)
    digits = re.findall(r"\d+", " ".join(found))
    if any(len(each) > 9 for each in digits):
        raise TemplateRuntimeError(f"it formats with a width of {max(digits, key=len)[:20]}...")
    nested = _numbers(arguments) if any(each.endswith("{") or "*" in each for each in found) else 0
    return _STEP * (sum(int(each) for each in digits) + len(found) * nested)


_PERCENT = r"%(?:\([^)]*\))?([^a-zA-Z%]*)"
_BRACES = r":[^{}]*\{?"


class _Environment(ImmutableSandboxedEnvironment):
    """An environment whose every operation spends a rendering's work."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        work: _Work = context.parent[_LEFT]
        work.spend(_STEP + self._operated(work, operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _operated(self, work: _Work, operator: str, left: Any, right: Any) -> int:
        """Return the units that an operator's result has, before there is one."""
        if isinstance(left, int) and isinstance(right, int):
            bits = [left.bit_length(), right.bit_length()]
            most = {"*": sum(bits), "**": bits[0] * max(right, 0)}.get(operator, max(bits))
            if most > _BITS:
                raise TemplateRuntimeError(f"it computes a number of more than {_BITS} bits")
            return 0
        if operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            return _own_size(left) + left.count("%") * work.size(right) + _widths(left, values, _PERCENT)
        if operator == "*":
            times = _numbers((left, right))
            return (work.size(left, right) + 1) * times
        return _own_size(left) + _own_size(right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        work: _Work = __context.parent[_LEFT]
        if isinstance(__obj, Macro):
            work.spend(_CALL + _ITEM * (len(args) + len(kwargs)))
        else:
            method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `format`
            owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
            if name == "join" and args:
                args = ([*args[0]], *args[1:])
            work.spend(_CALL + __self._called(work, owner, name, [*args, *kwargs.values()]))
        result = super().call(__context, __obj, *args, **kwargs)
        work.spend(work.size(result) if not isinstance(result, Namespace) else 0)
        if isinstance(result, list):  # such as the parts of a text
            work.spend(_STEP * len(result))
        return result

    def _called(self, work: _Work, owner: Any, name: str, arguments: Sequence[Any]) -> int:
        """Return the units that a call reads or makes, at most."""
        given = work.size(*arguments)
        if isinstance(owner, Mapping):
            return given
        if not isinstance(owner, str | bytes | int | Sequence):
            return given
        size = work.size(owner)
        if name == "translate":
            raise TemplateRuntimeError("it calls 'translate', which chat templates cannot use here")
        if name in ("format", "format_map") and isinstance(owner, str):
            return size + owner.count("{") * given + _widths(owner, arguments, _BRACES)
        if name == "replace":
            return size + given + _replaced(owner, arguments)
        if name == "join":
            return given + size * len(arguments[0]) if arguments else 0
        numbers = _numbers(arguments)
        return size + given + (size * numbers if name == "expandtabs" else _STEP * numbers)


def _filtered(work: _Work, name: str, value: Any, arguments: Sequence[Any]) -> int:
    """Return the units that a filter reads or makes, at most."""
    if name in _CONSTANT:
        return 0
    if name in _SHALLOW:
        return (_STEP if isinstance(value, str) else 1) * _own_size(value) + _STEP * _numbers(arguments)
    size, given = work.size(value), work.size(*arguments)
    if name == "replace":
        return size + given + _replaced(value, arguments)
    if name == "join":
        return size + given * (1 + len(value) if isinstance(value, Sized) else 1)
    if name == "format":
        return size + str(value).count("%") * given + _widths(str(value), arguments, _PERCENT)
    numbers = _numbers(arguments)
    if name == "indent" or name in _ESCAPING:
        return (size * (6 if name in _ESCAPING else 1) + 1) * (1 + numbers + given)
    if name == "sum" and arguments:
        return size * (1 + len(value) if isinstance(value, Sized) else 1)
    return size + given + _STEP * numbers


@pass_context
def _spent(context: Context, value: Any) -> Any:
    """Spend a value with all that it holds, and return it."""
    work: _Work = context.parent[_LEFT]
    work.spend(_STEP + work.size(value))
    return value


@pass_context
def _sized(context: Context, value: Any) -> Any:
    """Spend a value and its items, and return it."""
    context.parent[_LEFT].spend(_STEP + _own_size(value))
    return value


@pass_context
def _text(context: Context, value: Any) -> Any:
    """Spend a value that becomes text, and return it."""
    work: _Work = context.parent[_LEFT]
    work.spend(_STEP + work.size(value))
    if isinstance(value, str | int | float) or value is None:
        return value
    text = str(value)
    work.spend(_own_size(text))
    return text


def _counted_filter(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    """Return a filter that spends its work and then is the one of this name in a plain environment."""

    @pass_context
    def run(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        work: _Work = context.parent[_LEFT]
        if isinstance(value, Iterator) and name not in _CONSTANT | _SHALLOW:
            value = [*value]  # made by other filters: now it has a size
        work.spend(_CALL + _filtered(work, name, value, [*args, *kwargs.values()]))
        result = plain.call_filter(name, value, args, kwargs, context, context.eval_ctx)
        if isinstance(result, str):
            work.spend(_own_size(result))
        elif isinstance(result, list | dict):
            work.spend(_STEP * len(result))
        return result

    return run


def _counted_test(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    """Return a test that spends its work and then is the one of this name in a plain environment."""

    @pass_context
    def run(context: Context, value: Any = None, *args: Any) -> Any:
        work: _Work = context.parent[_LEFT]
        reads = bool(args) or isinstance(value, str)  # others look at the type
        work.spend(_CALL + (work.size(value, *args) if reads else 0))
        return plain.call_test(name, value, args, None, context, context.eval_ctx)

    return run


class _Counting(NodeTransformer):
    """Puts what spends work into a parsed template: where jinja2 has no hook for it."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body = [_tick(0, node), *node.body]
        if node.test is not None:
            node.test = nodes.And(_tick(1, node).node, node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> Any:
        self.generic_visit(node)
        length = sum(len(each.data) for each in node.nodes if isinstance(each, nodes.TemplateData))
        return [_tick(length, node), node] if length else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _wrapped(node.expr, "spent", node)
        for operand in node.ops:
            operand.expr = _wrapped(operand.expr, "spent", node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_wrapped(each, "text", node) for each in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _wrapped(node, "sized", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _literals(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _literals(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _wrapped(node, "spent", node)


def _wrapped(value: nodes.Expr, name: str, at: nodes.Node) -> nodes.Expr:
    """Return the expression passed through a filter that spends it; a short constant as it is."""
    if isinstance(value, nodes.Const) and not (isinstance(value.value, str) and len(value.value) > _STEP):
        return value
    return nodes.Filter(value, f"counted {name}", [], [], None, None, lineno=at.lineno)


def _literals(node: nodes.Expr, items: Sequence[nodes.Expr]) -> nodes.Expr:
    """Return a list or tuple that is spent when it is made, unless all it holds are a few constants."""
    few = len(items) <= _STEP and all(isinstance(each, nodes.Const) for each in items)
    return node if few else _wrapped(node, "spent", node)


def _tick(length: int, at: nodes.Node) -> nodes.ExprStmt:
    """Return a statement that spends an operation and some literal text."""
    spent = nodes.Filter(nodes.Const(length), "counted literal", [], [], None, None, lineno=at.lineno)
    return nodes.ExprStmt(spent, lineno=at.lineno)


@pass_context
def _literal(context: Context, length: Any) -> Any:
    context.parent[_LEFT].spend(_STEP + length)
    return length


class _Generation(Extension):
    """The tag `generation`, which marks an answer for training: here its text only."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it without ClassVar)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("text"), [], [], body).set_lineno(line)

    def text(self, caller: Callable[[], str]) -> str:
        return caller()


def compile_template(source: str, filters: Mapping[str, Any], functions: Mapping[str, Any]) -> Template:
    """Return a template that `render_template` runs.

    Args:
        source: of at most SOURCE_LIMIT characters.
        filters, functions: what it sees beside jinja2's own.

    Raises:
        TemplateError: it is no template, or too long.
    """
    if len(source) > SOURCE_LIMIT:
        raise TemplateRuntimeError(f"it has {len(source)} characters, more than the {SOURCE_LIMIT} that one may have")
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_text, extensions=[_Generation, loopcontrols]
    )
    del environment.globals["lipsum"]
    plain = ImmutableSandboxedEnvironment()
    plain.filters.update(filters)
    own = {"spent": _spent, "sized": _sized, "text": _text, "literal": _literal}
    counted: dict[str, Any] = {f"counted {name}": function for name, function in own.items()}
    counted |= {name: _counted_filter(plain, name) for name in plain.filters if name not in _LEFT_OUT}
    environment.filters = counted
    environment.tests = {name: _counted_test(plain, name) for name in plain.tests}
    tree = environment.parse(source)
    _Counting().visit(tree)
    tree.set_environment(environment)
    code = environment.compile(tree)
    return Template.from_code(environment, code, environment.make_globals(dict(functions)))


def render_template(template: Template, variables: Mapping[str, Any]) -> str:
    """Return the text of a compiled template.

    Raises:
        TemplateError: it asks for what the sandbox forbids, or takes more than WORK.
    """
    return template.render({**variables, _LEFT: _Work()})
