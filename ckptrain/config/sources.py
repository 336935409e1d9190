"""How may training data be written in a config? From a path alone to a list of mappings, and back to the shortest form.

A path is told from a Hub id by its looks, or because it is there; the name of a known dataset, such as `squad`, stands
for its form and its home on the Hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ckptrain.config.presets import HUB_HOMES
from ckptrain.config.schema import SourceConfig

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".arrow")


def is_data_path(text: str, directory: Path) -> bool:
    """Tell a path from a Hub id: by `./`, `/`, `~`, a glob, a data file's suffix, or being there in `directory`."""
    if text.startswith(("./", "../", "/", "~")) or text in (".", "..") or any(sign in text for sign in "*?["):
        return True
    name = Path(text)
    while name.suffix in _COMPRESSED:
        name = name.with_suffix("")
    return name.suffix in _SUFFIXES or (directory / text).exists()


def absolute_sources(value: Any, directory: Path) -> Any:
    """Return sources as a person wrote them, with absolute paths; what is malformed is left for others to refuse.

    The name of a known dataset becomes its format: where it lives is known.
    """
    if isinstance(value, str):
        known = value in HUB_HOMES and not is_data_path(value, directory)
        return {"format": value} if known else _absolute(value, directory)
    if isinstance(value, list):
        return [absolute_sources(item, directory) for item in value]
    if isinstance(value, Mapping) and isinstance(path := value.get("path"), str):
        return {**value, "path": _absolute(path, directory)}
    return value


def plain_sources(sources: Sequence[SourceConfig]) -> Any:
    """Return sources as YAML has them, in the shortest form that is read back to the same."""
    written = [_plain(source) for source in sources]
    return written[0] if len(written) == 1 else written


def source_problems(key: str, sources: Sequence[SourceConfig], *, check_inputs: bool) -> Iterator[str]:
    """Yield what is wrong with the sources under `key`; with `check_inputs` also the files that are not there."""
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        yield f"{key}: {sum(weighted)} of {len(sources)} sources have a weight; give one to each, or to none"
    if key != "data.train" and any(weighted):
        yield f"{key}: a validation set is looked at once as a whole, so its sources take no weight"
    for index, source in enumerate(sources):
        place = key if len(sources) == 1 else f"{key}[{index}]"
        if source.path is None and source.format not in HUB_HOMES:
            yield f"{place}.path is required: a file, a directory or a Hub id; without one format names a known dataset"
        elif source.path is not None and Path(source.path).is_absolute():
            yield from _file_problems(place, source, check_inputs=check_inputs)


def _file_problems(place: str, source: SourceConfig, *, check_inputs: bool) -> Iterator[str]:
    path = str(source.path)
    if source.revision is not None:
        yield f"{place}.revision is {source.revision!r}, but {path} is local and has no revisions: remove it"
    if not check_inputs:
        return
    if not Path(path).exists() and not any(sign in path for sign in "*?["):
        yield f"{place}: {path}: there is no such file"


def _absolute(text: str, directory: Path) -> str:
    return os.path.normpath(directory / Path(text).expanduser()) if text and is_data_path(text, directory) else text


def _plain(source: SourceConfig) -> Any:
    said = {name: value for name, value in attrs.asdict(source).items() if value not in (None, {})}
    return said["path"] if said.keys() == {"path"} else said
