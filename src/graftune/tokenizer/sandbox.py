"""Where chat templates run: Jinja's sandbox, with an end to the time and the memory that one may take.

A template is a program out of somebody's file. The sandbox keeps it from everything but its own variables, and bounds a
single range, not two of them nested. So every turn of a loop and every call looks at the clock here, and whatever makes
large things out of small ones (products, powers, joining, padding) says how large before it does. Loops are found in
the parsed template, not in its text: each is given its values one by one. Rejected: an alarm signal, which
only the main thread has, and a thread or process a rendering, which costs more than the rendering.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from types import CodeType
from typing import Any

import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from graftune.private import find

SECONDS = 5.0  # a rendering; real ones take milliseconds
EVERY = 32  # looks at the clock for one that reads it: a thread's own time takes longer to read than a short loop
LARGEST = 1 << 24  # characters of a text, or values of a list
IN_ALL = 1 << 28  # characters of all texts and lists that one rendering makes: it may keep them
LONGEST_CONVERSATION = LARGEST >> 2  # characters of a conversation that is rendered at all
LONGEST_SOURCE = 1 << 17  # characters; real ones have a quarter of that
EACH = 64  # characters that any value counts as
TERMS = 8  # of a sum between two looks at its size
MOST_BITS = 1 << 20  # of a whole number
MOST_NAMES = 4096  # of attributes that are remembered as safe or not
# Filters, and methods of texts, that make much of little.
_GROWING = {
    "center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "format", "format_map", "translate", "indent",
    "batch", "slice", "wordwrap", "round", "tojson",
}  # fmt: skip
# Compiled templates by their source: a process opens a tokenizer several times, and compiling takes much of that.
# What is compiled asks the environment it runs in for filters and globals, and all environments here are alike.
_CODES: dict[str, CodeType] = {}
MOST_CODES = 64

_NodeTransformer: Any = find("jinja2.visitor.NodeTransformer")


class Endless(Exception):
    """A template takes more time or memory than any has reason to."""


class _Turns:
    """What a loop goes over, with a look at the clock at every value."""

    def __init__(self, values: Iterable[Any], look: Callable[[], None]):
        self.values, self.look = values, look

    def __iter__(self) -> Iterator[Any]:
        for value in self.values:
            self.look()
            yield value

    def __len__(self) -> int:  # a TypeError where it has none: loop.length then counts
        return len(self.values)  # type: ignore[arg-type]


class _Watched(_NodeTransformer):
    """Puts filters of ours around what loops go over and around what puts values together. (As a filter, since the
    sandbox looks twice at calls.)"""

    def __init__(self, environment: Sandbox):
        self.environment = environment

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = self._through("turns", node.iter)
        return node

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        return self._made(node) if node.ctx == "load" else node

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:
        """A sum of many is looked at every few terms, not at each."""
        terms: list[Any] = []
        start: Any = node
        while isinstance(start, jinja2.nodes.Add):
            terms.append(start)
            start = start.left
        found = self.visit(start)
        for place, term in enumerate(reversed(terms), 1):
            term.left, term.right = found, self.visit(term.right)
            found = term if place % TERMS and place < len(terms) else self._through("sized", term)
        return found

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        while len(node.nodes) > TERMS:
            parts = [node.nodes[i : i + TERMS] for i in range(0, len(node.nodes), TERMS)]
            own = {"lineno": node.lineno, "environment": self.environment}
            node.nodes = [self._through("sized", jinja2.nodes.Concat(part, **own)) for part in parts]
        return self._through("sized", node)

    def _made(self, node: jinja2.nodes.Node) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._through("sized", node)

    visit_List = visit_Dict = _made

    def _through(self, name: str, node: Any) -> Any:
        own = {"lineno": node.lineno, "environment": self.environment}
        return jinja2.nodes.Filter(node, f"graftune.{name}", [], [], None, None, **own)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **settings: Any):
        # The optimiser's time grows with a power of an expression's depth.
        super().__init__(**settings, optimized=False)
        self._clock = threading.local()
        self._safe: dict[tuple[type, str], bool] = {}
        self.globals.pop("lipsum")  # paragraphs by the number, and in no template
        self.filters = {name: self._bounded(name, filter) for name, filter in self.filters.items()}
        self.filters |= {"graftune.turns": self._turns, "graftune.sized": self._sized}
        self.tests = {name: self._watched(test) for name, test in self.tests.items()}
        self.concat = _joined  # type: ignore[method-assign]

    def compiled(self, source: str) -> jinja2.Template:
        if len(source) > LONGEST_SOURCE:
            raise jinja2.TemplateSyntaxError(f"{len(source)} characters are more than any template has", 1)
        code = _CODES.get(source)
        if code is None:
            code = self.compile(_Watched(self).visit(self.parse(source)))
            if len(_CODES) < MOST_CODES:
                _CODES[source] = code
        # The globals are copied for each rendering: a chain of maps takes longer than the rest.
        return self.template_class.from_code(self, code, dict(self.globals))

    def rendered(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """One rendering, bounded in this thread."""
        clock = self._clock
        clock.end, clock.made, clock.looks = None, 0, 0
        try:
            return _joined(template.root_render_func(template.new_context(variables)))
        finally:
            clock.looks = None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's own answer, which depends on the object's type and the name alone and takes as long as all else that
        is done with an attribute."""
        key = (type(obj), attr)
        known = self._safe.get(key)
        if known is None:
            known = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < MOST_NAMES:
                self._safe[key] = known
        return known

    def look(self) -> None:
        clock = self._clock
        looks = getattr(clock, "looks", None)
        if looks is None:  # nothing is rendered
            return
        clock.looks = looks + 1
        if clock.looks % EVERY == 0:
            now = time.thread_time()
            clock.end = clock.end or now + SECONDS
            if now > clock.end:
                raise Endless(f"takes longer than {SECONDS:g} seconds")

    def _turns(self, values: Any) -> _Turns:
        return _Turns(values, self.look)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **named: Any) -> Any:
        __self.look()
        if getattr(__obj, "__name__", "") in _GROWING:
            # The sandbox puts a function of its own around a text's format.
            owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
            if isinstance(owner, str):
                args = _checked(__obj.__name__, (owner, *args), named)[1:]
        return __self._sized(super().call(__context, __obj, *args, **named))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _checked("format", (left, right), {})
        elif operator != "%":
            _check_product(operator, left, right)
        return self._sized(super().call_binop(context, operator, left, right))

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = self._bounded(name, function)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # with Jinja's marks of what the filter is handed
        def checked(*args: Any, **named: Any) -> Any:
            self.look()
            if name in _GROWING:
                handed = args[:1] if isinstance(args[0], _HANDED) else ()
                args = (*handed, *_checked(name, args[len(handed) :], named))
            return self._sized(function(*args, **named))

        return checked

    def _watched(self, test: Any) -> Callable[..., Any]:
        @functools.wraps(test)
        def checked(*args: Any, **named: Any) -> Any:
            self.look()
            return test(*args, **named)

        return checked

    def _sized(self, value: Any) -> Any:
        """The value, if what it comes to as text is not too large; the same list may stand in another many times."""
        size = 0
        if type(value) is str:
            size = len(value)
            if size > LARGEST:
                raise _too_large()
        elif isinstance(value, _HELD):
            size = LARGEST - _weigh(value, LARGEST)
        self._clock.made = made = getattr(self._clock, "made", 0) + size
        if made > IN_ALL:
            raise Endless(f"makes texts and lists of more than {IN_ALL} characters in all")
        return value


_HELD = (str, list, tuple, dict)
_HANDED = (jinja2.Environment, jinja2.runtime.Context, jinja2.nodes.EvalContext)


def _too_large() -> Endless:
    return Endless(f"makes a text or a list of more than {LARGEST} characters")


def _joined(pieces: Iterable[str]) -> str:
    kept, total = [], 0
    for piece in pieces:
        total += len(piece)
        if total > LARGEST:
            raise _too_large()
        kept.append(piece)
    return "".join(kept)


def _weigh(value: Any, budget: int) -> int:
    """What is left of `budget` characters after a value's text."""
    if isinstance(value, str):
        budget -= len(value)
    elif isinstance(value, list | tuple):
        for inner in value:
            budget = _weigh(inner, budget)
    elif isinstance(value, dict):
        for key, inner in value.items():
            budget = _weigh(inner, _weigh(key, budget))
    if budget < EACH:
        raise _too_large()
    return budget - EACH


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
        if bits > MOST_BITS:
            raise Endless("computes with numbers that are too large")
    for values, times in ((left, right), (right, left)):
        if isinstance(values, str | list | tuple) and isinstance(times, int) and len(values) * times > LARGEST:
            raise _too_large()


def _checked(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a filter or a method of texts is given, if its result will not be too large. An iterator comes back as a
    list: its values can be counted once only."""
    first, more = args[0] if args else "", [*args[1:], *named.values()]
    if name == "join":
        place = 1 if isinstance(first, str) and len(args) > 1 and not isinstance(args[1], str) else 0
        values = args[place] if args else ""
        values = list(itertools.islice(values, LARGEST // EACH)) if isinstance(values, Iterator) else values
        _weigh(values, LARGEST)
        args = (*args[:place], values, *args[place + 1 :])
    if _growth(name, first, args, more) > LARGEST:
        raise _too_large()
    return args


def _growth(name: str, first: Any, args: tuple[Any, ...], more: list[Any]) -> int:
    """About the size of what a filter or method makes, where that is not the size of what it is given."""
    numbers = [abs(value) for value in more if isinstance(value, int)]
    texts = [value for value in more if isinstance(value, str)]
    largest, longest = max(numbers, default=0), max(map(len, texts), default=0)
    if name in ("center", "ljust", "rjust", "zfill", "batch", "slice"):
        return largest
    if name == "round":
        return largest << 16  # digits: a thousand will do
    if name == "tojson":
        return (LARGEST - _weigh(first, LARGEST)) * largest
    if name == "join":
        return max((len(values) for values in args if isinstance(values, Sized)), default=0) * max(
            longest, len(first) if isinstance(first, str) and len(args) > 1 else 0
        )
    if not isinstance(first, str):
        return 0
    if name in ("indent", "expandtabs"):
        return (first.count("\n" if name == "indent" else "\t") + 1) * max(largest, longest)
    if name == "wordwrap":
        return len(first) * longest
    if name == "replace" and len(texts) == 2:
        return first.count(texts[0]) * len(texts[1])
    if name == "translate" and len(args) > 1 and isinstance(args[1], Mapping):
        return len(first) * max((len(text) for text in args[1].values() if isinstance(text, str)), default=1)
    if name in ("format", "format_map"):
        widths = [int(width[:10]) for width in re.findall(r"[%:.][-+ #0<>=^]*([0-9]+)", first)]
        if "*" in first or re.search(r"\{[^}]*\{", first):  # a width may be one of the values
            inner = [v for value in more if isinstance(value, tuple) for v in value if isinstance(v, int)]
            widths += [largest, *map(abs, inner)]
        return max(widths, default=0)
    return 0
