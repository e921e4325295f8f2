"""Where a chat template runs: Jinja with nothing in it but what chat templates use, every part of it counted.

A template comes with a model from somewhere. Jinja's sandbox keeps it from reaching Python; what it does not
bound is time and memory (loops, `"x" * 10**9`, `s ~ s` in a loop, lists within lists). So each node of the
syntax tree whose cost depends on data is wrapped in a filter that charges a `Budget`, and filters, methods
and functions are a closed list of which each is charged by the size of what it is given. Imported late: Jinja
takes 30 ms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, MethodType
from typing import Any, Final, cast

from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from meshinfer import limits
from meshinfer.answer.template_budget import TemplateLimit, check_length, current
from meshinfer.answer.template_words import (
    COMPARING_TESTS,
    DEEP_FILTERS,
    METHODS,
    NODES,
    PLAIN_TESTS,
    SHALLOW_FILTERS,
)

_WIDTH: Final = re.compile(r"%[^%a-zA-Z]*[\d*]")
"""A width or precision in `"…" % x`, which may be any number."""

_NESTED_STATEMENTS: Final = 20
"""As many loops within loops as Python compiles; Jinja takes quadratic time for more."""

_CALL_STEPS: Final = 5
"""What a call takes, measured against a loop's turn."""

_MARK: Final = "meshinfer:"
"""Begins the names of the filters that charge: no name in a template can have a colon."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates as transformers does, within `current`'s budget."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folds constants: that is computing before there is a budget
            cache_size=0,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        self.globals = {"range": _range, "namespace": Namespace, "dict": dict}
        self.filters = {
            **{name: _counted(name, _function(name), shallow=True) for name in SHALLOW_FILTERS},
            **{name: _counted(name, _function(name), shallow=False) for name in DEEP_FILTERS},
            **{_MARK + name: filter_ for name, filter_ in _CHARGES.items()},
        }
        self.tests = {
            **{name: TESTS[name] for name in PLAIN_TESTS},
            **{name: _counted_test(cast(Callable[..., Any], TESTS[name])) for name in COMPARING_TESTS},
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _check_language(template)
        return cast(nodes.Template, _Charging().visit(template))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return attr in METHODS.get(type(obj), ())

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` is not on the list: its widths may be any number."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Else a tool's parameter called "update" would be taken for the method of that name.
        if type(obj) is dict and attribute not in METHODS[dict] and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = current.get()
        budget.charge(_CALL_STEPS)
        if isinstance(__obj, BuiltinMethodType):
            _check_method(__obj, args, kwargs)
        elif not (isinstance(__obj, Macro | Undefined) or _is_function(__obj, __context)):
            raise TemplateLimit(f"calls {str(__obj)[:40]!r}")
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(__obj, BuiltinMethodType | Macro):
            # Views of a dict become lists: these are weighed wherever they go.
            result = list(result) if isinstance(result, _VIEWS) else result
            budget.size(result)
        else:
            budget.weigh(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current.get()
        budget.weigh(left)
        budget.weigh(right)
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and not (abs(left) < 2**32 and abs(right) <= 64):
            raise TemplateLimit("computes with huge numbers")
        elif operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise TemplateLimit("formats to a width")
        result = super().call_binop(context, operator, left, right)
        budget.weigh(result)
        return result


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: some templates mark the assistant's text so, for training."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Charging(NodeTransformer):
    """Wraps what costs."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.Output():
                node.nodes = [_charged("show", _constant(child)) for child in node.nodes]
            case nodes.Concat():
                return _charged("concat", nodes.List(node.nodes, lineno=node.lineno))
            case nodes.Compare():
                node.expr = _charged("weigh", node.expr)
                for operand in node.ops:
                    operand.expr = _charged("weigh", operand.expr)
            case nodes.List() | nodes.Dict():
                return _charged("weigh", node)
            case nodes.Tuple(ctx="load"):
                return _charged("weigh", node)
            case nodes.Getitem(arg=nodes.Slice()):
                return _charged("size", node)
            case nodes.For():
                self._loop(node)
            case _:
                pass
        return node

    @staticmethod
    def _loop(node: nodes.For) -> None:
        if node.recursive:
            raise TemplateLimit("uses a recursive loop")
        if node.test:
            node.iter = _charged(
                "each", cast(nodes.Expr, node.iter)
            )  # those that the test leaves out count as well
        step = nodes.ExprStmt(_charged("step", nodes.Const(None)), lineno=node.lineno)
        node.body.insert(0, step)


def _charged(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, _MARK + name, [], [], None, None, lineno=node.lineno)


def _constant(node: nodes.Expr) -> nodes.Expr:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


def _check_language(template: nodes.Template) -> None:
    stack: list[tuple[nodes.Node, int]] = [(template, 0)]
    while stack:
        node, depth = stack.pop()
        if type(node).__name__ not in NODES:
            raise TemplateLimit(f"uses {type(node).__name__.lower()!r}")
        if depth > _NESTED_STATEMENTS:
            raise TemplateLimit("nests statements too deeply")
        depth += isinstance(node, nodes.Stmt)
        stack.extend((child, depth) for child in node.iter_child_nodes())


# ── what charges ────────────────────────────────────────────────────────────────────────────────────────────
def _weighed(value: Any) -> Any:
    current.get().weigh(value)
    return value


def _sized(value: Any) -> Any:
    current.get().size(value)
    return value


def _in_context(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """A filter that wants the context is never run at compile time."""
    return pass_context(lambda context, value: function(value))


_CHARGES: Final[dict[str, Callable[..., Any]]] = {
    "show": _in_context(lambda value: current.get().show(value)),
    "concat": _in_context(lambda value: current.get().concat(value)),
    "each": _in_context(lambda value: current.get().each(value)),
    "step": _in_context(lambda value: current.get().charge()),
    "weigh": _in_context(_weighed),
    "size": _in_context(_sized),
}


def _counted(name: str, function: Callable[..., Any], shallow: bool) -> Callable[..., Any]:
    """A filter that charges for what it is given and what it gives; it gives lists, never iterators."""
    wants = getattr(function, "jinja_pass_arg", None)
    check = _FILTER_CHECKS.get(name)

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        budget.charge()
        (budget.size if shallow else budget.weigh)(value)
        budget.weigh([*args, *kwargs.values()])
        if check:
            check(value, *args, **kwargs)
        first = () if wants is None else (_passed(wants.name, context),)
        result = function(*first, value, *args, **kwargs)
        if isinstance(result, Iterator):
            result = list(budget.each(result))
        (budget.size if shallow else budget.weigh)(result)
        return result

    return counted


def _passed(wants: str, context: Context) -> Any:
    return {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[wants]


def _counted_test(function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(value: Any, *args: Any) -> Any:
        current.get().weigh([value, *args])
        return function(value, *args)

    return counted


def _function(name: str) -> Callable[..., Any]:
    return {"tojson": _to_json, "safe": _same}.get(name) or FILTERS[name]


# ── what is checked before it runs ──────────────────────────────────────────────────────────────────────────
_VIEWS: Final[tuple[type[Iterable[Any]], ...]] = (type({}.keys()), type({}.values()), type({}.items()))


def _check_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    budget, owner = current.get(), method.__self__
    if method.__name__ not in METHODS.get(type(owner), ()):
        raise TemplateLimit(f"calls {method.__name__!r}")
    budget.size(owner)
    budget.weigh([*args, *kwargs.values()])
    if isinstance(owner, list | tuple):
        budget.weigh(owner)  # searched by comparing
    elif method.__name__ == "replace":
        _check_replace(owner, *args)
    elif method.__name__ == "join":
        _check_join(args[0] if args else (), owner)


def _is_function(called: Any, context: Context) -> bool:
    if isinstance(called, MethodType):
        return called.__func__ is LoopContext.cycle
    given = (context.parent.get("raise_exception"), context.parent.get("strftime_now"))
    return any(called is function for function in (_range, Namespace, dict, *given))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    check_length(len(text) + text.count(old) * len(new))


def _check_join(values: Any, separator: Any = "", *_: Any, **__: Any) -> None:
    # The values themselves were weighed, each as often as it occurs.
    check_length(len(str(separator)) * (len(values) if hasattr(values, "__len__") else 0))


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    columns = len(width) if isinstance(width, str) else int(width)
    check_length(len(str(text)) + columns * (str(text).count("\n") + 1))


def _check_round(_: Any, precision: Any = 0, *__: Any, **___: Any) -> None:
    if not -16 <= int(precision) <= 16:
        raise TemplateLimit("rounds to a huge precision")


_FILTER_CHECKS: Final[dict[str, Callable[..., None]]] = {
    "replace": _check_replace,
    "join": _check_join,
    "indent": _check_indent,
    "round": _check_round,
}


def _check_product(left: Any, right: Any) -> None:
    for many, count in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(count, int):
            if not isinstance(many, str):
                current.get().charge(max(0, len(many) * count))
            check_length(len(many) * count)


# ── what there is ───────────────────────────────────────────────────────────────────────────────────────────
def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > limits.TEMPLATE_STEPS:
        raise TemplateLimit(f"counts to {len(numbers):,}")
    return numbers


def _same(value: Any) -> Any:
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own would escape for HTML."""
    if (indent is not None and not 0 <= int(indent) <= 16) or len("".join(separators or ())) > 16:
        raise TemplateLimit("spaces JSON out")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
