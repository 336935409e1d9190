"""Tokenise a source once, into the cache: by one process of a machine while the others wait.

A cache is built in a directory with another name and gets its own when it is whole, so a build that is killed leaves
nothing that could be taken for one; what it leaves is removed by the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import orjson
from filelock import FileLock

from ckptrain.config.cache import cache_directory
from ckptrain.config.schema import RecordFormat
from ckptrain.data.chat import LossOn, Sample, encode_batch
from ckptrain.data.records import Problem, Record, shorten
from ckptrain.data.sources import Located, iterate
from ckptrain.data.token_cache import TokenCache, TokenCacheWriter, open_token_cache
from ckptrain.data.workers import TokeniserWorkers
from ckptrain.errors import DataError

# Raised whenever the same rows would give other tokens than before, so that an old cache is not taken for a new one.
_VERSION = "tokens-v1"
_BATCH = 256
_MOST_PROBLEMS = 1000
_SMALL_BYTES = 32 << 20
"""Below this a tokeniser of its own costs more to start than it saves."""
_MOST_WORKERS = 16

type Tell = Callable[[str, int, int | None], object]
"""Told of the source's name, how many of its rows are done, and how many there are, where that is known."""


@attrs.frozen(kw_only=True)
class Tokenisation:
    """How rows become tokens: all that the tokens depend on besides the rows."""

    tokenizer: Any
    """A fast tokenizer of transformers, with the chat template that is used."""
    tokenizer_fingerprint: str
    loss_on: LossOn
    workers: int | None = None
    """Processes; 0 is this one, None decides by the size of the source and of the machine."""

    def made_from(self, source: Located, record_format: RecordFormat, columns: dict[str, Any]) -> dict[str, Any]:
        """Return what a cache is known by."""
        import tokenizers
        import transformers

        return {
            "version": _VERSION,
            "rows": source.fingerprint(),
            "format": record_format,
            "columns": columns,
            "tokenizer": self.tokenizer_fingerprint,
            "loss_on": self.loss_on,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        }


def tokenised(
    source: Located,
    record_format: RecordFormat,
    columns: dict[str, Any],
    how: Tokenisation,
    tell: Tell = lambda *_: None,
) -> TokenCache:
    """Return the tokens of a source, from the cache where they are there.

    Raises:
        DataError: rows are malformed or cannot be tokenised; the first of them are named. Or the cache cannot be
            written.
    """
    made_from = how.made_from(source, record_format, columns)
    key = hashlib.sha256(orjson.dumps(made_from, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]
    directory = cache_directory() / _VERSION / key
    if (found := open_token_cache(directory, source.files)) is not None:
        return found
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_suffix(".lock")):
            if (found := open_token_cache(directory, source.files)) is not None:
                return found
            _build(directory, source, record_format, columns, how, tell, made_from)
    except OSError as error:
        raise DataError(
            f"cannot keep the tokens of {source.name}",
            [f"{directory.parent}: {error.strerror or error}; set CKPTRAIN_CACHE to keep them elsewhere"],
        ) from error
    built = open_token_cache(directory, source.files)
    if built is None:
        raise DataError(f"cannot keep the tokens of {source.name}", [f"{directory} is not what was just written to it"])
    return built


def record_at(source: Located, record_format: RecordFormat, columns: dict[str, Any], index: int) -> Record:
    """Return the record that the sample of number `index` in a source's cache was made from."""
    rows = itertools.islice(iterate(source, record_format, columns), index, None)
    record = next(rows)
    if isinstance(record, Problem):
        raise DataError(f"{source.name} has a malformed row", [f"{record.where}: {record.text}"])
    return record


def _build(
    directory: Path,
    source: Located,
    record_format: RecordFormat,
    columns: dict[str, Any],
    how: Tokenisation,
    tell: Tell,
    made_from: dict[str, Any],
) -> None:
    for left in (directory, *directory.parent.glob(f".building-{directory.name}-*")):
        shutil.rmtree(left, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".building-{directory.name}-", dir=directory.parent))
    try:
        with TokenCacheWriter(staging, source.files, made_from) as writer:
            _write(writer, source, iterate(source, record_format, columns), how, tell)
            writer.finish()
        if attrs.evolve(source).fingerprint() != made_from["rows"]:
            raise DataError(f"{source.name} changed while it was tokenised", ["start again when it is written whole"])
        staging.rename(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write(
    writer: TokenCacheWriter,
    source: Located,
    rows: Iterable[Record | Problem],
    how: Tokenisation,
    tell: Tell,
) -> None:
    malformed: list[str] = []
    refused: list[str] = []
    done = 0
    with contextlib.closing(_records(rows, malformed)) as records, _encoder(source, how) as encode:
        for encoded in encode(itertools.batched(records, _BATCH)):
            samples = [sample for sample in encoded if isinstance(sample, Sample)]
            refused += [_as_line(error) for error in encoded if isinstance(error, DataError)]
            writer.add(samples)
            done += len(encoded)
            tell(source.name, done, source.num_rows)
            if len(refused) > _MOST_PROBLEMS:
                break
    if malformed:
        more = "more than " if len(malformed) > _MOST_PROBLEMS else ""
        count = min(len(malformed), _MOST_PROBLEMS)
        raise DataError(f"{source.name} has {more}{count} malformed row(s)", shorten(malformed))
    if refused:
        raise DataError(f"{source.name} cannot be tokenised", shorten(refused))
    if not done:
        raise DataError(f"{source.name} has no records", ["expected at least one row, found none; check data.train"])


def _records(rows: Iterable[Record | Problem], malformed: list[str]) -> Generator[Record]:
    """Yield the records and put the problems aside; so many of them are looked for as may be worth a look."""
    for row in rows:
        if not isinstance(row, Problem):
            yield row
            continue
        malformed.append(f"{row.where}: {row.text}")
        if len(malformed) > _MOST_PROBLEMS:
            return


def _as_line(error: DataError) -> str:
    return f"{error.summary}: {'; '.join(error.problems)}"


type _Encode = Callable[[Iterable[tuple[Record, ...]]], Iterator[list[Sample | DataError]]]


@contextlib.contextmanager
def _encoder(source: Located, how: Tokenisation) -> Iterator[_Encode]:
    """Give what makes samples of batches of records, in their order: this process, or several others."""
    workers = num_workers(source, how.workers)
    if workers == 0:
        yield lambda batches: (encode_batch(batch, how.tokenizer, how.loss_on) for batch in batches)
        return
    with TokeniserWorkers(workers, how.tokenizer, how.loss_on) as started:
        yield started.encode


def num_workers(source: Located, asked: int | None) -> int:
    """Return how many processes tokenise a source; 0 is the one that asks."""
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0))
    small = sum(file.stat().st_size for file in source.files) < _SMALL_BYTES
    return 0 if small or cores <= 2 else min(cores - 1, _MOST_WORKERS)
