"""What rows does a Parquet or Arrow file have? Batch by batch, as plain Python values.

Each reader yields the place of a row in its file, and the row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ckptrain.data.records import DamagedFile
from ckptrain.data.text_files import Rows

# Rows that are Python objects at a time: conversations may be long.
_BATCH = 256
_BUFFER_BYTES = 1 << 20
_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\0\0\0\0"

_Decode = Callable[[Any], Any]


def parquet_rows(path: Path, start: int, stop: int | None) -> Rows:
    """Read rows of a Parquet file, from the row groups that have them.

    Raises:
        DamagedFile: it is no Parquet file.
        OSError: it cannot be read, or is damaged.
    """
    with _told(), pq.ParquetFile(path, buffer_size=_BUFFER_BYTES) as file:
        ends = list(accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)))
        begins = [0, *ends]
        groups = [group for group, end in enumerate(ends) if end > start and (stop is None or begins[group] < stop)]
        if groups:
            batches = file.iter_batches(_BATCH, row_groups=groups)
            yield from _batch_rows(file.schema_arrow, batches, begins[groups[0]], start, stop)


def arrow_rows(path: Path, start: int, stop: int | None) -> Rows:
    """Read rows of an Arrow IPC file or stream, such as `datasets` writes.

    Raises:
        DamagedFile: it is no Arrow file, or is cut short.
        OSError: it cannot be read.
    """
    with _opened(path) as (schema, batches):
        yield from _batch_rows(schema, batches, 0, start, stop)


def count_parquet(path: Path) -> int:
    """Return how many rows the file's footer says there are."""
    with _told(), pq.ParquetFile(path) as file:
        return int(file.metadata.num_rows)


def count_arrow(path: Path) -> int:
    """Return how many rows the file's batches have; what is in them is not read."""
    with _opened(path) as (_, batches):
        return sum(batch.num_rows for batch in batches)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise DamagedFile(f"it is damaged or cut short: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    with _told(), pa.memory_map(str(path)) as source:
        magic = source.read(len(_FILE_MAGIC))
        if magic == _FILE_MAGIC:
            file = pa.ipc.open_file(source)
            yield file.schema, map(file.get_batch, range(file.num_record_batches))
            return
        # A stream that is cut between two batches reads as a shorter one.
        source.seek(max(0, source.size() - len(_END_OF_STREAM)))
        if source.read() != _END_OF_STREAM:
            raise DamagedFile("it is damaged or cut short: it does not end as an Arrow stream does")
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        yield stream.schema, iter(stream)


def _batch_rows(schema: pa.Schema, batches: Iterator[pa.RecordBatch], first: int, start: int, stop: int | None) -> Rows:
    """Yield the rows from number `start` to `stop` of batches whose first row is number `first`."""
    if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise DamagedFile(f"{', '.join(map(repr, twice))} names several columns")
    decoders = {field.name: decode for field in schema if (decode := _decoder(field.type)) is not None}
    for batch in batches:
        begin = max(start - first, 0)
        end = batch.num_rows if stop is None else min(stop - first, batch.num_rows)
        for offset in range(begin, end, _BATCH):
            piece = batch.slice(offset, min(_BATCH, end - offset))
            for number, row in enumerate(piece.to_pylist(maps_as_pydicts="lossy"), start=first + offset + 1):
                yield f"row {number}", {**row, **{name: decode(row[name]) for name, decode in decoders.items()}}
        first += batch.num_rows
        if stop is not None and first >= stop:
            return


def _decoder(kind: pa.DataType) -> _Decode | None:
    """Return what makes plain values of JSON text, which is how `datasets` keeps objects of different keys."""
    if isinstance(kind, pa.JsonType):
        return _whole(json.loads)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _decoder(kind.value_type)
        return None if inner is None else _whole(lambda items: [inner(item) for item in items])
    if pa.types.is_struct(kind):
        fields = {field.name: decode for field in kind if (decode := _decoder(field.type)) is not None}
        return (
            _whole(lambda row: {**row, **{name: decode(row[name]) for name, decode in fields.items()}})
            if fields
            else None
        )
    return None


def _whole(decode: _Decode) -> _Decode:
    return lambda value: None if value is None else decode(value)
