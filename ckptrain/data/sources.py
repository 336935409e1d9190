"""Where are the rows of a source of data, and what are they? From a config's path or Hub id to records.

A source is files in a fixed order, and of them the rows that its split has. What they hold is known by a fingerprint,
which does not change when they are moved. A plain file is found without importing more than the standard library.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import attrs

from ckptrain.config.presets import HUB_HOMES, HubHome
from ckptrain.config.schema import RecordFormat, SourceConfig
from ckptrain.data.formats import RowReader
from ckptrain.data.records import Malformed, Problem, Record, data_fingerprint
from ckptrain.data.rows import Row, count_rows, known_rows, read_rows
from ckptrain.data.splits import SplitSlice, parse_splits
from ckptrain.errors import ConfigError

Role = Literal["train", "validation"]


@attrs.frozen(kw_only=True)
class Part:
    """Rows of some files read as one: from number `start`, the first being 0, up to `stop`, or to the end."""

    files: tuple[Path, ...]
    start: int = 0
    stop: int | None = None


@attrs.frozen(kw_only=True)
class Located:
    """A source whose files are on this machine.

    `name` is for messages. `revision` is the commit of a Hub dataset, None where there is none or it is not known.
    """

    name: str
    parts: tuple[Part, ...]
    revision: str | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that rows are read from, once, in the order of the rows."""
        return tuple(dict.fromkeys(file for part in self.parts for file in part.files))

    def fingerprint(self) -> str:
        """Return what identifies the rows across starts, wherever the files lie: of one whole file its SHA-256.

        Otherwise it is the SHA-256 of the files' digests with the rows taken of them, as canonical JSON.

        Raises:
            DataError: a file cannot be read.
        """
        return self._fingerprint

    @cached_property
    def num_rows(self) -> int | None:
        """How many rows there are, if that is known without reading them."""
        counts = [_num_rows(part) for part in self.parts]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @cached_property
    def _fingerprint(self) -> str:
        digests = {file: data_fingerprint(file) for file in self.files}
        if len(digests) == 1 and [(part.start, part.stop) for part in self.parts] == [(0, None)]:
            return next(iter(digests.values()))
        parts = [
            {"files": [digests[file] for file in part.files], "rows": [part.start, part.stop]} for part in self.parts
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def locate(source: SourceConfig, role: Role, *, fetch: bool = True) -> Located:
    """Find the files of a source, and which of their rows its split has.

    `source.format` says where a known dataset is that has no path. Without `fetch` nothing is downloaded.

    Raises:
        ConfigError: there is no such file, dataset, configuration or split, and what there is instead.
        NotDownloaded: it is a ConfigError; the dataset is on the Hub only, and `fetch` is False.
        DataError: the files cannot be read.
    """
    home = _home(source)
    path = source.path if home is None else home.path
    name = source.name if home is None or source.name is not None else home.name
    slices = parse_splits(source.split or _default_split(role, home))
    splits = tuple(dict.fromkeys(part.split for part in slices))
    is_local = Path(str(path)).is_absolute()
    said = ", ".join(filter(None, (name, source.split or (None if is_local else splits[0]))))
    label = f"{path} ({said})" if said else str(path)
    commit = None
    if is_local:
        files = _local_files(Path(str(path)), name, splits)
    else:
        from ckptrain.data.hub import find_on_hub

        found = find_on_hub(str(path), name, splits, source.revision, fetch=fetch)
        files, commit = found.splits, found.commit
    return Located(name=label, parts=tuple(_part(label, part, files[part.split]) for part in slices), revision=commit)


def iterate(source: Located, record_format: RecordFormat, columns: Mapping[str, str]) -> Iterator[Record | Problem]:
    """Yield the records of a source in order; a row that is none is told, and the others go on.

    Raises:
        ConfigError: `columns` names what the format does not have.
        DataError: a file cannot be read, or is damaged so that its other rows are lost.
    """
    reader = RowReader(record_format, columns)
    for part in source.parts:
        for row in _part_rows(part):
            if isinstance(row, Problem):
                yield row
                continue
            try:
                yield reader.read(row.where, row.data)
            except Malformed as found:
                yield Problem(where=row.where, text=str(found))


def _home(source: SourceConfig) -> HubHome | None:
    """Return where a known dataset lives, if the source says no more than which it is."""
    if source.path is not None:
        return None
    if source.format is None or source.format not in HUB_HOMES:
        raise ConfigError("a source of data has no path", [f"give one, or one of {', '.join(HUB_HOMES)} as its format"])
    return HUB_HOMES[source.format]


def _default_split(role: Role, home: HubHome | None) -> str:
    if home is None or role == "train":
        return role if home is None else home.train
    if home.validation is None:
        raise ConfigError(
            f"{home.path} has no split for validation",
            ["set split to a part of the one for training, and train on the rest: train[95%:] and train[:95%]"],
        )
    return home.validation


def _local_files(path: Path, name: str | None, splits: Sequence[str]) -> Mapping[str, Sequence[Path]]:
    """Find the files of each split: those of a directory, or the same for all of a file or a pattern."""
    from ckptrain.data.saved import is_saved, saved_files

    if path.is_dir() and not is_saved(path):
        return _repository_files(path, name, splits)
    if name is not None:
        raise ConfigError(f"cannot use {path}", [f"it has no configurations; remove name ({name})"])
    if path.is_dir():
        return {split: saved_files(path, split) for split in splits}
    found = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  # as in shells
    files = [Path(file) for file in found if not Path(file).is_dir()]
    if not files:
        raise ConfigError(f"cannot use {path}", ["there is no such file, directory, or file of that pattern"])
    if len(splits) > 1:
        raise ConfigError(
            f"cannot use {path}", [f"{' and '.join(splits)} would be the same rows twice: a file has no splits"]
        )
    return dict.fromkeys(splits, files)


def _repository_files(directory: Path, name: str | None, splits: Sequence[str]) -> Mapping[str, Sequence[Path]]:
    from ckptrain.data.repository import read_card, read_layout

    label = str(directory)
    layout = read_layout(label, label, read_card(label, directory), name)
    return {split: [directory / file for file in layout.files(split)] for split in splits}


def _part(label: str, chosen: SplitSlice, files: Sequence[Path]) -> Part:
    start, stop = chosen.rows(lambda: sum(map(count_rows, files)))
    if stop is not None and start >= stop:
        raise ConfigError(f"{label} leaves no rows", [f"the split {chosen.split} is cut to rows {start} to {stop}"])
    return Part(files=tuple(files), start=start, stop=stop)


def _part_rows(part: Part) -> Iterator[Row | Problem]:
    first = 0
    for file in part.files:
        if part.stop is not None and first >= part.stop:
            return
        begin = max(part.start - first, 0)
        if begin and file != part.files[-1] and begin >= (count := count_rows(file)):
            first += count
            continue
        first += begin
        for row in read_rows(file, begin, None if part.stop is None else part.stop - first + begin):
            first += 1
            yield row


def _num_rows(part: Part) -> int | None:
    total = 0
    for file in part.files:
        if (count := known_rows(file)) is None:
            return None
        total += count
    return max(0, (total if part.stop is None else min(part.stop, total)) - part.start)
