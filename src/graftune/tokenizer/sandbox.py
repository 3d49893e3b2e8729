"""Where chat templates run: Jinja's sandbox, with an end to the time and the memory that one may take.

A template is a program out of somebody's file. The sandbox keeps it from everything but its own variables, and bounds a
single range, not two of them nested. So loops, calls, filters and comparisons look at the clock here, and whatever
makes large things out of small ones asks bounds.py before it does. Both limits grow with the conversation, which is
weighed only where a rendering goes beyond what any may have. Loops are found in the parsed template, not in its text:
each is given its values one by one. Rejected: an alarm signal, which only the main thread has, and a thread or process
a rendering, which costs more than the rendering.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from graftune.private import find
from graftune.tokenizer.bounds import (
    EACH,
    FLOOR,
    FREE,
    LARGEST,
    MOST_BITS,
    SMALL,
    Endless,
    EscapeFormatter,
    Formatter,
    check_given,
    is_slow,
    made,
    most_made,
    operation_made,
    too_large,
    weight,
)

SECONDS = 0.75  # of a rendering; real ones take milliseconds
MORE_SECONDS = 4  # at most, one for every `A_SECOND` characters of the conversation
A_SECOND = 1 << 16
EVERY = 32  # looks at the clock for one that reads it: a thread's own time takes longer to read than a short loop
WORK = 256  # characters or values that count as a look more
KEPT = 12 << 20  # bytes of all texts and lists that a rendering may hold at a time, beside four of the largest
KEPT_FROM = 1 << 10  # characters: smaller ones are not counted
LONGEST_CONVERSATION = LARGEST >> 2  # characters of a conversation that is rendered at all
LONGEST_SOURCE = 1 << 17  # characters; real ones have a quarter of that
TERMS = 8  # of a sum between two looks at its size
MOST_NAMES = 4096  # of attributes that are remembered as safe or not
# Methods that make bytes, whose own methods nobody bounds, or tables of a million letters.
_UNSAFE = {"encode", "maketrans", "to_bytes"}
# These hand on one value after the other and keep none.
_LAZY = {"map", "reject", "rejectattr", "select", "selectattr"}
# Compiled templates by their source: a process opens a tokenizer several times, and compiling takes much of that.
# What is compiled asks the environment it runs in for filters and globals, and all environments here are alike.
_CODES: dict[str, CodeType] = {}
MOST_CODES = 64

_NodeTransformer: Any = find("jinja2.visitor.NodeTransformer")


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

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        """Slices are copies; other items Jinja looks up by itself."""
        self.generic_visit(node)
        return self._through("sliced", node) if isinstance(node.arg, jinja2.nodes.Slice) else node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        """Comparing with a word of the template takes no time; searching, or comparing two values, may."""
        found = [operand.op in ("in", "notin") for operand in node.ops]
        words = [isinstance(side, jinja2.nodes.Const) for side in (node.expr, *(one.expr for one in node.ops))]
        self.generic_visit(node)
        quick = len(node.ops) == 1 and (words[1] or (words[0] and not found[0]))
        return node if quick else self._through("compared", node)

    def _made(self, node: jinja2.nodes.Node) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._through("sized", node)

    visit_List = visit_Dict = _made

    def _through(self, name: str, node: Any) -> Any:
        own = {"lineno": node.lineno, "environment": self.environment}
        return jinja2.nodes.Filter(node, f"graftune.{name}", [], [], None, None, **own)


class _Clock(threading.local):
    """Of the rendering that a thread is in."""

    looks: int | None = None  # None where nothing is rendered
    began = 0.0
    more: float = 0  # seconds that the conversation is worth
    given: dict[str, Any] | None = None  # the variables, until they are weighed
    largest = FLOOR
    bytes_made = 0
    kept: dict[int, Any]


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%", "//"))

    def __init__(self, **settings: Any):
        # The optimiser's time grows with a power of an expression's depth.
        super().__init__(**settings, optimized=False)
        self._clock, self._source = _Clock(), 0
        self._safe: dict[tuple[type, str], bool] = {}
        self.globals.pop("lipsum")  # paragraphs by the number, and in no template
        self.filters = {name: self._bounded(name, filter) for name, filter in self.filters.items()}
        self.filters |= {"graftune.turns": self._turns, "graftune.sized": self._sized}
        self.filters |= {"graftune.sliced": self._sliced, "graftune.compared": self._compared}
        self.tests = {name: self._watched(test) for name, test in self.tests.items()}
        self.concat = self.joined  # type: ignore[method-assign]

    def compiled(self, source: str) -> jinja2.Template:
        if len(source) > LONGEST_SOURCE:
            raise jinja2.TemplateSyntaxError(f"{len(source)} characters are more than any template has", 1)
        self._source = len(source)
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
        clock.began, clock.more, clock.given, clock.largest = time.thread_time(), 0, variables, FLOOR
        clock.looks, clock.bytes_made, clock.kept = 0, 0, {}
        try:
            return self.joined(template.root_render_func(template.new_context(variables)))
        finally:
            clock.looks, clock.given, clock.kept = None, None, {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's own answer, which depends on the object's type and the name alone and takes as long as all else that
        is done with an attribute."""
        key = (type(obj), attr)
        known = self._safe.get(key)
        if known is None:
            known = super().is_safe_attribute(obj, attr, value)
            known = known and not (attr in _UNSAFE and isinstance(obj, str | int))
            if len(self._safe) < MOST_NAMES:
                self._safe[key] = known
        return known

    def look(self, work: int = 0) -> None:
        """At the clock, now and then; `work` is the size of what is about to be done."""
        clock = self._clock
        if clock.looks is None:
            return
        clock.looks += 1 + work // WORK
        if clock.looks >= EVERY:
            clock.looks = 0
            taken = time.thread_time() - clock.began
            if taken > SECONDS:
                self._weigh_conversation()
                if taken > SECONDS + clock.more:
                    raise Endless(f"takes longer than {SECONDS + clock.more:g} seconds")

    def _weigh_conversation(self) -> None:
        clock = self._clock
        if clock.given is not None:
            given = weight(clock.given, LARGEST)
            clock.given, clock.more = None, min(MORE_SECONDS, given // A_SECOND)
            clock.largest = most_made(self._source, given)

    def _most(self) -> int:
        """The characters that a text or a list may have."""
        self._weigh_conversation()
        return self._clock.largest

    def _allow(self, size: int) -> None:
        if size > FLOOR and size > self._most():
            raise too_large(self._clock.largest)

    def _turns(self, values: Any) -> _Turns:
        return _Turns(values, self.look)

    def _compared(self, answer: Any) -> Any:
        self.look(EVERY * WORK // 2)
        return answer

    def _sliced(self, values: Any) -> Any:
        """A list's values are not new ones."""
        self.look(len(values) if isinstance(values, _HELD) else 0)
        if isinstance(values, str):
            return self._sized(values)
        if isinstance(values, list | tuple):
            self._keep(values)
        return values

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **named: Any) -> Any:
        name = getattr(__obj, "__name__", "")
        # The sandbox puts a function of its own around a text's format.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            if name in ("format", "format_map"):
                return __self._sized(__self._formatted(owner, name, args, named))
            args = __self._checked(name, (owner, *args), named)[1:]
        elif isinstance(owner, type):  # dict.fromkeys, int.from_bytes
            check_given(name, args, named)
        else:
            __self.look(len(owner) if isinstance(owner, list | tuple | dict) else 0)
        return __self._sized(super().call(__context, __obj, *args, **named))

    def _formatted(self, text: str, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> str:
        self.look(len(text))
        if len(text) > SMALL:
            raise too_large(SMALL)
        if name == "format_map":
            if len(args) != 1 or named:
                raise TypeError("format_map takes one table")
            named, args = args[0], ()
        escape = getattr(text, "escape", None)  # of a text that was marked as safe
        formatter = EscapeFormatter(self, self._allow, escape=escape) if escape else Formatter(self, self._allow)
        return type(text)(formatter.vformat(text, args, named))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.look()
        self._allow(operation_made(operator, left, right))
        return self._sized(super().call_binop(context, operator, left, right))

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = self._bounded(name, function)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # with Jinja's marks of what the filter is handed
        def checked(*args: Any, **named: Any) -> Any:
            handed = args[:1] if isinstance(args[0], _HANDED) else ()
            args = self._checked(name, args[len(handed) :], named)
            return self._sized(function(*handed, *args, **named))

        return checked

    def _checked(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """What a filter or a method of texts is given, if it may have that. Iterators are counted as they go."""
        first = args[0] if args else None
        self.look(len(first) if isinstance(first, _COUNTED) else 0)
        if name not in FREE:
            if name not in _LAZY and any(isinstance(value, Iterator) for value in args):
                args = tuple(self._counted(value) if isinstance(value, Iterator) else value for value in args)
                if name == "join" or is_slow(name):  # by how many they are
                    args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            check_given(name, args, named)
        self._allow(made(name, args, named))
        return args

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        total = 0
        for value in values:
            self.look()
            total += weight(value, LARGEST)
            self._allow(total)
            yield value

    def _watched(self, test: Any) -> Callable[..., Any]:
        @functools.wraps(test)
        def checked(*args: Any, **named: Any) -> Any:
            self.look(sum(len(value) for value in args if isinstance(value, _COUNTED)))
            return test(*args, **named)

        return checked

    def _sized(self, value: Any) -> Any:
        """The value, if what it comes to as text is not too large."""
        if type(value) is str:
            size = len(value)
        elif isinstance(value, _HELD):
            size = weight(value, LARGEST)
        else:
            if isinstance(value, int) and value.bit_length() > MOST_BITS:
                raise Endless("computes with numbers that are too large")
            return value
        if size >= KEPT_FROM:
            self._allow(size)
            self._keep(value)
        return value

    def _keep(self, value: Any) -> None:
        """Counts what the template may still hold. Once that is twice what it may, whatever nobody but this holds any
        more is let go of."""
        clock = self._clock
        if clock.looks is None:
            return
        pieces = value if isinstance(value, list | tuple) else ()
        for one in (value, *(piece for piece in pieces if isinstance(piece, str) and len(piece) >= KEPT_FROM)):
            if id(one) not in clock.kept:
                clock.kept[id(one)] = one
                clock.bytes_made += _bytes(one)
        if clock.bytes_made > 2 * KEPT:
            most = KEPT + 4 * self._most()
            if clock.bytes_made > 2 * most:
                clock.kept = {key: clock.kept[key] for key in clock.kept if sys.getrefcount(clock.kept[key]) > 2}
                clock.bytes_made = sum(map(_bytes, clock.kept.values()))
                if clock.bytes_made > most:
                    raise Endless(f"keeps texts and lists of more than {most} bytes")

    def joined(self, pieces: Iterable[str]) -> str:
        kept, total = [], 0
        for piece in pieces:
            total += len(piece)
            if total > FLOOR:
                self._allow(total)
            kept.append(piece)
        text = "".join(kept)
        if total >= KEPT_FROM:
            self._keep(text)
        return text


_HELD = (str, list, tuple, dict)
_COUNTED = (*_HELD, range)
_HANDED = (jinja2.Environment, jinja2.runtime.Context, jinja2.nodes.EvalContext)


def _bytes(value: Any) -> int:
    """A list's texts count beside it."""
    return value.__sizeof__() if isinstance(value, str) else EACH * len(value)
