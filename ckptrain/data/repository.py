"""Which files of a dataset repository have which split?

`datasets` decides, from the card (README.md) and the names of the files; nothing is read or run but the card. Files are
told by name, so that a repository of which only a listing is here is understood as well as a directory.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import yaml

from ckptrain.errors import ConfigError

CARD_FILES = ("README.md", ".huggingface.yaml")
_READ_HERE = ("json", "csv", "parquet", "arrow")
# What a configuration may say besides where its files are, and that does not change what is read from them.
_HARMLESS = ("data_files", "data_dir", "default", "description", "drop_labels", "features", "version")


@attrs.frozen(kw_only=True)
class Layout:
    """The splits of one configuration, with the patterns of their files; `root` is a directory or a listing."""

    label: str
    root: str
    base: str
    patterns: Mapping[str, Sequence[str]]

    def files(self, split: str) -> tuple[str, ...]:
        """Return the names of a split's files, relative to the root, in the order in which `datasets` has them.

        Raises:
            ConfigError: there is no such split, or its files are not there or of no kind that is read here.
        """
        from datasets.data_files import DataFilesList
        from datasets.load import _ALL_ALLOWED_EXTENSIONS, infer_module_for_data_files_list
        from datasets.packaged_modules import _MODULE_TO_EXTENSIONS

        if split not in self.patterns:
            raise ConfigError(
                f"{self.label} has no split {split!r}", [f"it has {', '.join(self.patterns)}; set split to one of them"]
            )
        # An archive would be opened to see what is in it.
        matches = [file for file in self._matches(split, _ALL_ALLOWED_EXTENSIONS) if not file.endswith(".zip")]
        found = DataFilesList(matches, [])
        module, _ = infer_module_for_data_files_list(found)
        if module not in _READ_HERE:
            raise ConfigError(
                f"{self.label} has no data files that are read here for the split {split!r}",
                [
                    f"expected JSON, CSV, Parquet or Arrow; found {', '.join(found[:3]) or 'nothing'} for the pattern"
                    f" {', '.join(self.patterns[split][:3])}"
                ],
            )
        root = PurePosixPath(self.root)
        return tuple(
            str(PurePosixPath(file).relative_to(root))
            for file in found.filter(extensions=_MODULE_TO_EXTENSIONS[module])
        )

    def _matches(self, split: str, extensions: list[str]) -> dict[str, None]:
        from datasets.data_files import resolve_pattern

        matches: dict[str, None] = {}
        for pattern in self.patterns[split]:
            if "://" in pattern or pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
                raise ConfigError(f"cannot use {self.label}", [f"its card names {pattern!r}, which is not in it"])
            try:
                matches |= dict.fromkeys(resolve_pattern(pattern, self.base, allowed_extensions=extensions))
            except FileNotFoundError:
                continue  # told by whoever finds that there are too few files
        return matches


def read_layout(label: str, root: str, card: Mapping[str, Any], name: str | None) -> Layout:
    """Find the splits of a configuration, or of the only or default one where `name` is None.

    Raises:
        ConfigError: there is no such configuration, or several and no default; or the card is not understood.
    """
    from datasets.data_files import EmptyDatasetError, get_data_patterns, sanitize_patterns

    configs = _configurations(label, card)
    chosen = _chosen(label, configs, name)
    params = configs.get(chosen, {})
    if unread := sorted(params.keys() - set(_HARMLESS)):
        raise ConfigError(
            f"cannot read {label} as its card says",
            [f"the configuration {chosen} sets {', '.join(unread)}, which is not done here: convert the files first"],
        )
    base = f"{root}/{params['data_dir']}" if params.get("data_dir") else root
    try:
        files = params.get("data_files")
        patterns = sanitize_patterns(files) if files is not None else get_data_patterns(base)
    except EmptyDatasetError as error:
        raise ConfigError(f"{label} holds no data files", ["expected JSON, CSV, Parquet or Arrow"]) from error
    except ValueError as error:
        raise _not_understood(label, error) from error
    by_name = {str(split): of_split for split, of_split in patterns.items()}
    return Layout(label=label, root=root, base=base, patterns=by_name)


def read_card(label: str, directory: Path) -> dict[str, Any]:
    """Return what the card of a repository says to programs; empty where there is none.

    Raises:
        ConfigError: it is not YAML.
    """
    from huggingface_hub import DatasetCard

    readme, beside = (directory / name for name in CARD_FILES)
    try:
        said = DatasetCard.load(readme).data.to_dict() if readme.is_file() else {}
        added = yaml.safe_load(beside.read_text(encoding="utf-8")) if beside.is_file() else None
    except (ValueError, yaml.YAMLError) as error:
        raise _not_understood(label, error) from error
    return {**said, **(added or {})}


@contextmanager
def listing(names: Sequence[str]) -> Iterator[str]:
    """Give a root under which files of these names are found, without their contents."""
    from fsspec.implementations.memory import MemoryFileSystem

    files = MemoryFileSystem()
    root = f"/ckptrain-{uuid.uuid4().hex}"
    files.pipe({f"{root}/{name}": b"" for name in names})
    try:
        yield f"memory:/{root}"
    finally:
        files.rm(root, recursive=True)


def _configurations(label: str, card: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData

    try:
        configs: Mapping[str, Mapping[str, Any]] = MetadataConfigs.from_dataset_card_data(DatasetCardData(**card))
    except (ValueError, TypeError) as error:
        raise _not_understood(label, error) from error
    return configs


def _chosen(label: str, configs: Mapping[str, Mapping[str, Any]], name: str | None) -> str:
    known = ", ".join(configs) or "default"
    if name is None:
        defaults = [key for key, params in configs.items() if key == "default" or params.get("default")]
        if len(configs) > 1 and len(defaults) != 1:
            raise ConfigError(f"{label} has several configurations", [f"set name to one of {known}"])
        return defaults[0] if defaults else next(iter(configs), "default")
    if name not in (configs or ("default",)):
        raise ConfigError(f"{label} has no configuration {name!r}", [f"it has {known}; set name to one of them"])
    return name


def _not_understood(label: str, error: Exception) -> ConfigError:
    return ConfigError(f"cannot read {label}", [f"its card (README.md) is not understood: {error}"])
