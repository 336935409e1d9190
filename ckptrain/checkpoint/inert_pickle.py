"""A pickle read as data: what it names stays a name, what it would call stays a description of the call.

A pickle is a program. This reader walks its instructions and knows only those that torch's checkpoints are made of;
nothing is imported, called or hashed on the pickle's behalf, so there is nothing for it to reach. Sizes are bounded by
those of the file: lengths that it claims and places in its memo that it names allocate nothing.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Container
from typing import Any

import attrs

MOST_INSTRUCTIONS = 4_000_000
"""Some 40 to each piece of a tensor; a few seconds and some hundred megabytes at the worst."""
_LONGEST_SHOWN = 200


@attrs.frozen
class Name:
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@attrs.define(eq=False)  # compared and hashed by identity: what lies in it may be nested without end
class Made:
    """What a pickle would make: an object of a class, or the result of a function, and the state put into it."""

    of: Name
    arguments: tuple[Any, ...]
    state: Any = None


@attrs.frozen(eq=False)
class Reference:
    """Something outside of the pickle, by the id that it is found by; torch's storages are."""

    id: Any


def read_pickle(data: bytes, allowed: Container[Name], most_instructions: int = MOST_INSTRUCTIONS) -> Any:
    """Return what a pickle holds, in plain values, `Name`, `Made` and `Reference`.

    Args:
        data: the pickle.
        allowed: the classes and functions that it may name.
        most_instructions: how many it may have.

    Raises:
        ValueError: it names another, has an instruction that torch does not write, or is no pickle.
    """
    reader = _Reader(allowed)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if opcode.name == "STOP":
                return reader.result()
            if count >= most_instructions:
                raise ValueError(f"it has more than {most_instructions:,} instructions")
            instruction = _INSTRUCTIONS.get(opcode.name)
            if instruction is None:
                raise ValueError(f"it has the instruction {opcode.name}, which torch does not write")
            instruction(reader, argument)
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeError) as error:
        raise ValueError(f"it is not a pickle ({type(error).__name__})") from None
    raise ValueError("it has no end")


class _Reader:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self, allowed: Container[Name]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        if len(self._stack) != 1:
            raise ValueError(f"it leaves {len(self._stack)} values, expected 1")
        return self._stack[0]

    def skip(self, _: Any) -> None:
        pass

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def get(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def tuple_of_marked(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def append(self, _: Any) -> None:
        item = self._stack.pop()
        self._top(list).append(item)

    def append_marked(self, _: Any) -> None:
        items = self._since_mark()
        self._top(list).extend(items)

    def set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def set_marked(self, _: Any) -> None:
        self._set_items(self._since_mark())

    def global_name(self, pair: str) -> None:
        module, _, name = pair.partition(" ")
        self._push_name(module, name)

    def stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push_name(module, name)

    def make(self, _: Any) -> None:
        arguments, made_of = self._stack.pop(), self._stack.pop()
        if type(made_of) is not Name or type(arguments) is not tuple:
            raise ValueError(f"it calls {_described(made_of)}, which is not the name of a class or function")
        self._stack.append(Made(made_of, arguments))

    def build(self, _: Any) -> None:
        state = self._stack.pop()
        made = self._top(Made)
        if made.state is not None:
            raise ValueError(f"it sets the state of a {made.of} twice")
        made.state = state

    def reference(self, _: Any) -> None:
        self._stack.append(Reference(self._stack.pop()))

    def _push_name(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("it names something by what is not text")
        found = Name(module, name)
        if found not in self._allowed:
            raise ValueError(f"it names {str(found)[:_LONGEST_SHOWN]!r}, which does not belong there")
        self._stack.append(found)

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _top(self, expected: type) -> Any:
        if type(self._stack[-1]) is not expected:
            raise ValueError(f"it fills a {_described(self._stack[-1])}")
        return self._stack[-1]

    def _set_items(self, items: list[Any]) -> None:
        keys = items[::2]
        # Hashing a tuple goes through all that is in it, which a memo can make more than there are atoms.
        if not all(type(key) in (str, Made) for key in keys):
            raise ValueError("it has a dictionary with keys that are neither text nor objects")
        self._top(dict).update(zip(keys, items[1::2], strict=True))


def _described(value: object) -> str:
    return str(value.of) if isinstance(value, Made) else type(value).__name__


def _constant(make: Callable[[], Any]) -> Callable[[_Reader, Any], None]:
    return lambda reader, _: reader.push(make())


def _tuple_of(count: int) -> Callable[[_Reader, Any], None]:
    def take(reader: _Reader, _: Any) -> None:
        items = tuple(reader._stack[-count:])
        del reader._stack[-count:]
        reader.push(items)

    return take


_INSTRUCTIONS: dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _Reader.skip),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"), _Reader.push),
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "EMPTY_TUPLE": _constant(tuple),
    "EMPTY_LIST": _constant(list),
    "EMPTY_DICT": _constant(dict),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": _Reader.tuple_of_marked,
    "MARK": _Reader.mark,
    "MEMOIZE": _Reader.memoize,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Reader.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Reader.get),
    "APPEND": _Reader.append,
    "APPENDS": _Reader.append_marked,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_marked,
    "GLOBAL": _Reader.global_name,
    "STACK_GLOBAL": _Reader.stack_global,
    **dict.fromkeys(("NEWOBJ", "REDUCE"), _Reader.make),
    "BUILD": _Reader.build,
    "BINPERSID": _Reader.reference,
}
