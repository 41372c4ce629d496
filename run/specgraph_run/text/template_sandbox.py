"""The sandbox of chat templates. A template is a program that comes with the folder, so its work is limited.

jinja2's sandbox keeps a template from Python's objects, but limits neither its time nor its memory. This one counts
each operation (loops, calls, filters, tests, comparisons, operators, output), and the size of each value that the
operation reads or makes, before it makes it. No clock is read, so the count is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from specgraph_run.text.template_work import (
    CALL,
    CONSTANT,
    ITEM,
    SHALLOW,
    STEP,
    Work,
    called,
    filtered,
    operated,
    own_size,
)

SOURCE_LIMIT = 1 << 20
"""The most characters of a template. The longest published ones have about 50,000."""
_LEFT = "work left"
"""The variable of a rendering that holds its `Work`. The space keeps templates from naming it."""

_LEFT_OUT = ("urlize", "striptags", "wordwrap", "xmlattr", "pprint")
"""Filters for web pages. They are left out, as their time grows faster than the length of their value. The function
lipsum is left out too."""


class _Environment(ImmutableSandboxedEnvironment):
    """An environment in which every operation spends some of a rendering's work."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        work: Work = context.parent[_LEFT]
        work.spend(STEP + operated(work, operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        work: Work = __context.parent[_LEFT]
        if isinstance(__obj, Macro):
            work.spend(CALL + ITEM * (len(args) + len(kwargs)))
        else:
            method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `format`
            owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
            if name == "join" and args:
                args = ([*args[0]], *args[1:])
            work.spend(CALL + called(work, owner, name, [*args, *kwargs.values()]))
        result = super().call(__context, __obj, *args, **kwargs)
        work.spend(work.size(result) if not isinstance(result, Namespace) else 0)
        if isinstance(result, list):  # for example the parts of a split text
            work.spend(STEP * len(result))
        return result


@pass_context
def _spent(context: Context, value: Any) -> Any:
    """Spend the size of a value with all that it contains, and return it."""
    work: Work = context.parent[_LEFT]
    work.spend(STEP + work.size(value))
    return value


@pass_context
def _sized(context: Context, value: Any) -> Any:
    """Spend the size of a value without the contents of its items, and return it."""
    context.parent[_LEFT].spend(STEP + own_size(value))
    return value


@pass_context
def _text(context: Context, value: Any) -> Any:
    """Spend the size of a value that becomes text, and return it, as text unless it is a number or None."""
    work: Work = context.parent[_LEFT]
    work.spend(STEP + work.size(value))
    if isinstance(value, str | int | float) or value is None:
        return value
    text = str(value)
    work.spend(own_size(text))
    return text


def _counted_filter(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    """Return a filter that spends its work and then calls the plain environment's filter of this name."""

    @pass_context
    def run(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        work: Work = context.parent[_LEFT]
        if isinstance(value, Iterator) and name not in CONSTANT | SHALLOW:
            value = [*value]  # an iterator of another filter; as a list it has a size
        named = [kwargs[key] for key in sorted(kwargs, reverse=True)]  # `replace` takes `old` before `new`
        work.spend(CALL + filtered(work, name, value, [*args, *named]))
        result = plain.call_filter(name, value, args, kwargs, context, context.eval_ctx)
        if isinstance(result, str):
            work.spend(own_size(result))
        elif isinstance(result, list | dict):
            work.spend(STEP * len(result))
        return result

    return run


def _counted_test(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    """Return a test that spends its work and then calls the plain environment's test of this name."""

    @pass_context
    def run(context: Context, value: Any = None, *args: Any) -> Any:
        work: Work = context.parent[_LEFT]
        reads = bool(args) or isinstance(value, str)  # the other tests look at the type alone
        work.spend(CALL + (work.size(value, *args) if reads else 0))
        return plain.call_test(name, value, args, None, context, context.eval_ctx)

    return run


class _Counting(NodeTransformer):
    """Adds spending to a parsed template, in the places that have no hook in jinja2."""

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
    """Return the expression with a filter around it that spends its value. A short constant stays as it is."""
    if isinstance(value, nodes.Const) and not (isinstance(value.value, str) and len(value.value) > STEP):
        return value
    return nodes.Filter(value, f"counted {name}", [], [], None, None, lineno=at.lineno)


def _literals(node: nodes.Expr, items: Sequence[nodes.Expr]) -> nodes.Expr:
    """Return a list or tuple that spends its size when it is made. A few constants spend nothing."""
    few = len(items) <= STEP and all(isinstance(each, nodes.Const) for each in items)
    return node if few else _wrapped(node, "spent", node)


def _tick(length: int, at: nodes.Node) -> nodes.ExprStmt:
    """Return a statement that spends one operation and `length` characters of literal text."""
    spent = nodes.Filter(nodes.Const(length), "counted literal", [], [], None, None, lineno=at.lineno)
    return nodes.ExprStmt(spent, lineno=at.lineno)


@pass_context
def _literal(context: Context, length: Any) -> Any:
    context.parent[_LEFT].spend(STEP + length)
    return length


class _Generation(Extension):
    """The tag `generation`, which marks an answer for training. Here it is replaced by its text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it without ClassVar)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("text"), [], [], body).set_lineno(line)

    def text(self, caller: Callable[[], str]) -> str:
        return caller()


def compile_template(source: str, filters: Mapping[str, Any], functions: Mapping[str, Any]) -> Template:
    """Return a template for `render_template`.

    Args:
        source: the template's text, at most SOURCE_LIMIT characters.
        filters, functions: added to jinja2's own.

    Raises:
        TemplateError: the source is not a template, or is too long.
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
    """Render a compiled template.

    Raises:
        TemplateError: it does something that the sandbox forbids, or takes more than WORK.
    """
    return template.render({**variables, _LEFT: Work()})
