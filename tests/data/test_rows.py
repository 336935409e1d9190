"""Reading files of every kind: the rows that others read, where they stand, and what damage is told."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.datasets_on_disk import CHATS, GSM8K_ROWS, SQUAD_ROWS, write_lines, write_parquet

from ckptrain.data.records import Problem
from ckptrain.data.rows import Row, count_rows, known_rows, read_rows
from ckptrain.errors import DataError

MIXED = [{"text": "a", "tags": ["x", None], "turn": {"role": "user", "name": None}}, {"text": None, "tags": None, "turn": {"role": "tool", "name": "f"}}] * 6  # fmt: skip


def values_of(path: Path, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of a file, none of which may be a problem."""
    rows = list(read_rows(path, start, stop))
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.data for row in rows if isinstance(row, Row)]


def write_stream(path: Path, rows: list[dict[str, Any]], batch: int = 4) -> Path:
    """Write an Arrow stream of several batches, as `datasets` does."""
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def write_arrow_file(path: Path, rows: list[dict[str, Any]], batch: int = 4) -> Path:
    """Write an Arrow file of several batches."""
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def write_array(path: Path, rows: list[dict[str, Any]], indent: int | None = None) -> Path:
    """Write one JSON array."""
    path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    return path


def packed(pack: Callable[[bytes], Any]) -> Callable[[Path, list[dict[str, Any]]], Path]:
    """Return what writes JSON lines through a compression."""

    def write_packed(path: Path, rows: list[dict[str, Any]]) -> Path:
        path.write_bytes(pack(write_lines(path, rows).read_bytes()))
        return path

    return write_packed


WRITERS = {
    "data.jsonl": write_lines,
    "data.ndjson": write_lines,
    "DATA.JSONL": write_lines,
    "no_suffix": write_lines,
    "lines.json": write_lines,
    "array.json": write_array,
    "indented.json": lambda path, rows: write_array(path, rows, indent=2),
    "data.parquet": write_parquet,
    "stream.arrow": write_stream,
    "file.arrow": write_arrow_file,
    "data.jsonl.gz": packed(gzip.compress),
    "data.json.bz2": packed(bz2.compress),
    "data.jsonl.xz": packed(lzma.compress),
    "data.jsonl.zst": packed(lambda content: pa.compress(content, codec="zstd", asbytes=True)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_has_the_rows_that_were_written(name: str, tmp_path: Path) -> None:
    """Nested values and nulls come back as plain Python, in order; a slice is the slice of them."""
    path = WRITERS[name](tmp_path / name, MIXED)
    assert values_of(path) == MIXED
    assert count_rows(path) == len(MIXED)
    assert known_rows(path) == (len(MIXED) if path.suffix in (".parquet", ".arrow") else None)
    for start, stop in ((0, 3), (5, 9), (7, None), (11, 40), (12, None), (4, 4)):
        assert values_of(path, start, stop) == MIXED[start:stop]


@pytest.mark.parametrize(
    ("name", "places"),
    [("data.jsonl", ["1", "2"]), ("array.json", ["row 1", "row 2"]), ("data.parquet", ["row 1", "row 2"]),
     ("stream.arrow", ["row 1", "row 2"])],
)  # fmt: skip
def test_a_row_is_told_by_its_place(name: str, places: list[str], tmp_path: Path) -> None:
    """Lines where a file has some, else rows; both from 1, also when a slice begins later."""
    path = WRITERS[name](tmp_path / name, GSM8K_ROWS[:20])
    assert [row.where for row in read_rows(path, 0, 2)] == [f"{path}:{place}" for place in places]
    (row,) = read_rows(path, 16, 17)
    assert row.where == f"{path}:{places[0].removesuffix('1')}17"


@pytest.mark.parametrize("rows", [CHATS, SQUAD_ROWS, GSM8K_ROWS], ids=["chats", "squad", "gsm8k"])
@pytest.mark.parametrize("name", ["data.jsonl", "array.json", "data.parquet", "stream.arrow", "data.jsonl.gz"])
def test_rows_are_those_of_datasets(
    name: str, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `load_dataset` reads of the same file."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    path = WRITERS[name](tmp_path / name, rows)
    builder = {".parquet": "parquet", ".arrow": "arrow"}.get(path.suffix, "json")
    theirs = datasets.load_dataset(builder, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert values_of(path) == list(theirs)


def test_objects_that_datasets_keeps_as_json_are_objects(tmp_path: Path) -> None:
    """Tools have different arguments, so `datasets` stores them as text with a type of its own."""
    rows = [{"tools": [{"name": "a", "x": 1}, {"name": "b", "y": {"z": [None]}}], "meta": {"k": {"v": 1}}}] * 3
    written = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    assert "Json" in str(written.features)
    written.to_parquet(tmp_path / "data.parquet")
    written.save_to_disk(tmp_path / "saved")
    assert values_of(tmp_path / "data.parquet") == list(written) == rows
    assert values_of(next((tmp_path / "saved").glob("*.arrow"))) == rows


@pytest.mark.parametrize(("name", "separator"), [("data.csv", ","), ("data.tsv", "\t"), ("data.csv.gz", ",")])
def test_separated_values_are_text_under_the_header(name: str, separator: str, tmp_path: Path) -> None:
    """Quotes, line breaks and separators within values as pandas writes them; a number stays the text it is."""
    rows = [{"question": 'say "hi",\nnow', "answer": "007"}, {"question": "a\tb", "answer": ""}]
    pd.DataFrame(rows).to_csv(tmp_path / name, index=False, sep=separator)
    assert values_of(tmp_path / name) == rows
    theirs = pd.read_csv(tmp_path / name, sep=separator, dtype=str, keep_default_na=False)
    assert theirs.to_dict("records") == rows
    assert count_rows(tmp_path / name) == 2
    assert [row.where for row in read_rows(tmp_path / name, 1)] == [f"{tmp_path / name}:row 2"]


def test_a_byte_order_mark_windows_line_ends_and_blank_lines_are_read(tmp_path: Path) -> None:
    """Files that were edited on Windows are ordinary files; lines are counted as an editor counts them."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "1"}\r\n\r\n  \r\n{"a": "2"}')
    assert [(row.where, row.data) for row in read_rows(path)] == [
        (f"{path}:1", {"a": "1"}),
        (f"{path}:4", {"a": "2"}),
    ]
    assert count_rows(path) == 2
    for name, content in (("array.json", b'\xef\xbb\xbf \r\n[{"a": "1"}]'), ("data.csv", b"\xef\xbb\xbfa\r\n1\r\n")):
        (tmp_path / name).write_bytes(content)
        assert values_of(tmp_path / name) == [{"a": "1"}]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"a": [', "not JSON: Expecting value at column 8; expected one object a line"),
        ("[1, 2]", "expected a JSON object, found a list"),
        ("NaN", "expected a JSON object, found a number"),
        ('"x"', "expected a JSON object, found a string"),
        ('{"a": "x", "b": {"c": 1, "c": 2}}', "'c' appears twice in one object; keep one of them"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_line_that_is_no_object_is_a_problem_and_the_others_are_read(
    line: str, expected: str, tmp_path: Path
) -> None:
    """A row that cannot be told does not hide those behind it."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": "1"}\n' + line + '\n{"a": "2"}\n', encoding="utf-8")
    first, found, last = read_rows(path)
    assert isinstance(found, Problem)
    assert (found.where, expected in found.text) == (f"{path}:2", True)
    assert [row.data for row in (first, last) if isinstance(row, Row)] == [{"a": "1"}, {"a": "2"}]


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    """Latin-1 is told as a place in the line rather than as a traceback."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9", "completion": "x"}\n')
    assert [str(row) for row in read_rows(path)] == [f"{path}:1: not UTF-8 at byte 15 of the line"]


def test_problems_of_an_array_and_of_values_are_told_by_row(tmp_path: Path) -> None:
    """Also there the other rows are read."""
    array = tmp_path / "array.json"
    array.write_text('[{"a": "1"}, 12, {"b": 1, "b": 2}, {"a": "2"}]')
    assert [str(row) for row in read_rows(array) if isinstance(row, Problem)] == [
        f"{array}:row 2: expected a JSON object, found a number",
        f"{array}:row 3: 'b' appears twice in one object; keep one of them",
    ]
    values = tmp_path / "data.csv"
    values.write_text("a,b\n1,2\n3\n4,5\n")
    first, problem, last = read_rows(values)
    assert str(problem) == f"{values}:row 2: expected 2 values, as in the header; found 1"
    assert isinstance(first, Row)
    assert isinstance(last, Row)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(rows=st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=6), indent=st.sampled_from([None, 0, 3]), window=st.integers(1, 40))  # fmt: skip
def test_an_array_that_is_read_piece_by_piece_is_the_array(
    rows: list[dict[str, Any]], indent: int | None, window: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Wherever a piece ends: within a text, an escape, a number, a name."""
    path = tmp_path_factory.mktemp("array") / "data.json"
    path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptrain.data.text_files._CHARACTERS", window)
        assert values_of(path) == rows


def cut(content: bytes) -> bytes:
    """Leave out the end."""
    return content[: len(content) * 2 // 3]


def overwritten(content: bytes) -> bytes:
    """Put zeros over the middle, where a file keeps what it holds."""
    middle = len(content) // 2
    return content[: middle - 40] + bytes(80) + content[middle + 40 :]


DAMAGE = [
    ("data.parquet", cut, "damaged or cut short"),
    ("data.parquet", lambda content: b"", "damaged or cut short"),
    ("stream.arrow", cut, "damaged or cut short"),
    ("file.arrow", cut, "damaged or cut short"),
    ("stream.arrow", lambda content: b"", "damaged or cut short"),
    ("array.json", cut, "not JSON in row"),
    ("array.json", lambda content: content + b" {}", "there is more behind the end of the array"),
    ("array.json", lambda content: content.replace(b"}, {", b"} {", 1), "expected a comma or the end of the array"),
    ("data.jsonl.gz", cut, "damaged or cut short"),
    ("data.jsonl.gz", overwritten, "damaged or cut short"),
    ("data.json.bz2", cut, "damaged or cut short"),
    ("data.jsonl.xz", cut, "damaged or cut short"),
    ("data.jsonl.zst", cut, "damaged or cut short"),
    ("data.jsonl.gz", lambda content: b"{}\n", "damaged or cut short"),
    ("data.jsonl", gzip.compress, "begins as a .gz file does"),
    ("lines.json", lambda content: b"PAR1" + content, "begins as a .parquet file does"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "expected"), DAMAGE)
def test_a_damaged_file_is_named_with_what_is_wrong(
    name: str, damage: Callable[[bytes], bytes], expected: str, tmp_path: Path
) -> None:
    """Never a traceback of a library, and never fewer rows without a word."""
    path = WRITERS[name](
        tmp_path / name, [{"text": f"{number} {number * 2_654_435_761 % 2**40}"} for number in range(500)]
    )
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert caught.value.summary == f"cannot read the data file {path}"
    assert expected in caught.value.problems[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('a,b\n1,"2\n', "unexpected end of data"),
        ('a,b\n1,"2"3\n', "line 2: ',' expected after '\"'"),
        ("a,,c\n1,2,3\n", "expected a header with a name for each column, found one that is empty"),
        ("a,b,a\n1,2,3\n", "found 'a' twice"),
        (b"a\ncaf\xe9\n", "it is not UTF-8"),
    ],
)
def test_separated_values_that_cannot_be_told_apart_are_refused(
    content: str | bytes, expected: str, tmp_path: Path
) -> None:
    """A quote that is not closed swallows the rows behind it."""
    path = tmp_path / "data.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert expected in caught.value.problems[0]


def test_a_stream_that_ends_between_batches_is_cut_short(tmp_path: Path) -> None:
    """Arrow reads it as a shorter one without a word."""
    path = write_stream(tmp_path / "data.arrow", GSM8K_ROWS, batch=10)
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_stream(source)
        reader.read_next_batch()
        end = source.tell()
    path.write_bytes(path.read_bytes()[:end])
    with pa.memory_map(str(path)) as source:
        assert pa.ipc.open_stream(source).read_all().num_rows == 10
    for read in (count_rows, lambda damaged: list(read_rows(damaged))):
        with pytest.raises(DataError, match="does not end as an Arrow stream does"):
            read(path)


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "none.arrow", "none.csv.gz"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    """A missing file and a directory are told with the reason of the operating system."""
    with pytest.raises(DataError, match=rf"{name}\n.*No such file"):
        list(read_rows(tmp_path / name))
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="Is a directory"):
        count_rows(tmp_path / name)


def test_a_packed_parquet_file_is_refused(tmp_path: Path) -> None:
    """It would have to be unpacked whole."""
    (tmp_path / "data.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(DataError, match="compressed inside: unpack it"):
        list(read_rows(tmp_path / "data.parquet.gz"))


def peak_bytes(rows: Iterator[object]) -> tuple[int, int]:
    """Go through rows, and return how many there were and the most memory that Python held meanwhile."""
    tracemalloc.start()
    try:
        count = sum(1 for _ in rows)
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["data.jsonl", "array.json", "data.parquet", "stream.arrow"])
def test_a_large_file_is_streamed(name: str, tmp_path: Path) -> None:
    """Fifty thousand rows take the memory of a few hundred."""
    rows = [{"text": f"{number}" * 20} for number in range(50_000)]
    whole = sum(len(json.dumps(row)) for row in rows)
    path = tmp_path / name
    write_parquet(path, rows, 50_000) if path.suffix == ".parquet" else WRITERS[name](path, rows)
    del rows
    count, peak = peak_bytes(read_rows(path))
    assert count == 50_000
    assert peak < whole / 8
