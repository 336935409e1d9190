"""What rows does a file of text have? JSON lines, a JSON array, or comma separated values, one row after the other.

Each reader takes the open file and yields the place of a row in it and the row, or why it is none. `json` rather than
orjson because orjson silently keeps the last of duplicate keys, which in a data file is a lost turn.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import IO, Any, TextIO

from ckptrain.data.records import DamagedFile, Malformed, kind_of

Rows = Iterator[tuple[str, dict[str, Any] | Malformed]]

_CHARACTERS = 1 << 16
_LONGEST_FIELD = 2**31 - 1
# What may be missing at the end of a piece of JSON, such as of `false` or of an escape.
_LONGEST_TOKEN = 16
_BLANK = re.compile(r"[ \t\r\n]*")


def json_lines(file: IO[bytes], start: int, stop: int | None) -> Rows:
    """Read an object a line; blank lines are no rows, but count as lines, as in an editor."""
    parser = _Parser()
    lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    for number, line in islice(lines, start, stop):
        try:
            yield str(number), parser.parse(line)
        except Malformed as found:
            yield str(number), found


def json_array(file: IO[bytes], start: int, stop: int | None) -> Rows:
    """Read the objects of one array, of which a piece is held at a time.

    Raises:
        DamagedFile: the array is not JSON from some place on.
    """
    elements = _elements(io.TextIOWrapper(file, encoding="utf-8-sig"))
    for index, element in islice(enumerate(elements), start, stop):
        yield f"row {index + 1}", element


def separated_values(file: IO[bytes], start: int, stop: int | None, separator: str) -> Rows:
    """Read rows of text under a header; every value is text, and an empty one is empty text.

    Raises:
        DamagedFile: the header has no or equal names, or quotes are not closed.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=separator, strict=True)
    try:
        header = next(reader, [])
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice or not all(header):
            found = f"{', '.join(map(repr, twice))} twice" if twice else "one that is empty"
            raise DamagedFile(f"expected a header with a name for each column, found {found}")
        filled = (values for values in reader if values)
        for index, values in islice(enumerate(filled), start, stop):
            if len(values) == len(header):
                yield f"row {index + 1}", dict(zip(header, values, strict=True))
            else:
                yield (
                    f"row {index + 1}",
                    Malformed(f"expected {len(header)} values, as in the header; found {len(values)}"),
                )
    except csv.Error as error:
        raise DamagedFile(f"line {reader.line_num}: {error}") from error


class _Parser:
    """Parses JSON objects, and refuses those that say a key twice."""

    def __init__(self) -> None:
        self._twice: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def parse(self, line: bytes) -> dict[str, Any]:
        """Parse a line.

        Raises:
            Malformed: it is no object.
        """
        try:
            value = self._start().decode(line.decode("utf-8-sig").rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise Malformed(f"not UTF-8 at byte {error.start} of the line") from error
        except json.JSONDecodeError as error:
            text = f"not JSON: {error.msg} at column {error.colno}; expected one object a line"
            raise Malformed(text) from error
        except RecursionError as error:
            raise Malformed("not a record: nested too deeply") from error
        return self._checked(value)

    def parse_from(self, text: str, begin: int) -> tuple[dict[str, Any] | Malformed, int]:
        """Parse what begins in a text at `begin`, and return it and where it ends."""
        value, end = self._start().raw_decode(text, begin)
        try:
            return self._checked(value), end
        except Malformed as found:
            return found, end

    def _start(self) -> json.JSONDecoder:
        self._twice.clear()
        return self._decoder

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            self._twice += sorted({name for name in names if names.count(name) > 1})
        return row

    def _checked(self, value: object) -> dict[str, Any]:
        if self._twice:
            raise Malformed(f"{', '.join(map(repr, self._twice))} appears twice in one object; keep one of them")
        if not isinstance(value, dict):
            raise Malformed(f"expected a JSON object, found {kind_of(value)}")
        return value


class _Window:
    """The part of a text that is being looked at."""

    def __init__(self, text: TextIO) -> None:
        self._file = text
        self.text = ""
        self.position = 0

    def grow(self) -> bool:
        """Drop what is behind the position, and read at least as much again; False at the end of the file."""
        left = self.text[self.position :]
        more = self._file.read(max(_CHARACTERS, len(left)))
        self.text, self.position = left + more, 0
        return bool(more)

    def next_sign(self) -> str:
        """Go to the next character that is not white space, and return it; nothing at the end of the file."""
        while True:
            blank = _BLANK.match(self.text, self.position)
            self.position = blank.end() if blank else self.position
            if self.position < len(self.text):
                return self.text[self.position]
            if not self.grow():
                return ""

    def take_sign(self) -> str:
        """Return the next character that is not white space, and go behind it."""
        sign = self.next_sign()
        self.position += len(sign)
        return sign


def _elements(text: TextIO) -> Iterator[dict[str, Any] | Malformed]:
    window, parser = _Window(text), _Parser()
    window.take_sign()  # the bracket that made it an array
    number, sign = 1, "," if window.next_sign() != "]" else window.take_sign()
    while sign == ",":
        window.next_sign()
        yield _element(window, parser, number)
        number, sign = number + 1, window.take_sign()
    if sign != "]":
        raise DamagedFile(f"not JSON after row {number - 1}: expected a comma or the end of the array, found {sign!r}")
    if window.next_sign():
        raise DamagedFile(f"not JSON after row {number - 1}: there is more behind the end of the array")


def _element(window: _Window, parser: _Parser, number: int) -> dict[str, Any] | Malformed:
    """Parse the element at the window's position, which is read on while it is not whole."""
    while True:
        try:
            element, end = parser.parse_from(window.text, window.position)
        except json.JSONDecodeError as error:
            is_cut = error.pos + _LONGEST_TOKEN > len(window.text) or error.msg.startswith("Unterminated")
            if not (is_cut and window.grow()):
                raise DamagedFile(f"not JSON in row {number}: {error.msg}") from error
        except RecursionError as error:
            raise DamagedFile(f"row {number} is nested too deeply") from error
        else:
            begin = window.position
            # A number at the end of the window may go on behind it.
            if end < len(window.text) or isinstance(element, dict):
                window.position = end
                return element
            if not window.grow():
                window.position = end - begin
                return element
