"""Which Arrow files has `datasets` written? In a directory of `save_to_disk`, or in its own cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ckptrain.errors import ConfigError, DataError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DICT, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"


@attrs.frozen(kw_only=True)
class CachedDataset:
    """A configuration of a Hub dataset that `datasets` has written as Arrow files before."""

    directory: Path
    info: Mapping[str, Any]

    @property
    def commit(self) -> str | None:
        """The commit that it was; old versions of `datasets` have named the directory otherwise."""
        return self.directory.name if _COMMIT.fullmatch(self.directory.name) else None

    def files(self, split: str) -> tuple[Path, ...]:
        """Return a split's files.

        Raises:
            ConfigError: there is no such split, or its files are gone.
        """
        from datasets.naming import filenames_for_dataset_split

        splits = self.info.get("splits") or {}
        label = f"{self.directory}, which datasets has written,"
        if split not in splits:
            raise ConfigError(f"{label} has no split {split!r}", [f"it has {', '.join(splits)}"])
        names = filenames_for_dataset_split(
            str(self.directory), self.info["dataset_name"], split, "arrow", splits[split].get("shard_lengths")
        )
        if missing := [name for name in names if not Path(name).is_file()]:
            raise ConfigError(f"{label} is not whole", [f"{name} is not there" for name in missing])
        return tuple(map(Path, names))


def is_saved(directory: Path) -> bool:
    """Tell whether `save_to_disk` has written a directory."""
    return any((directory / name).is_file() for name in (_DICT, _STATE))


def saved_files(directory: Path, split: str) -> tuple[Path, ...]:
    """Return the files of a split in a directory of `save_to_disk`; one that has no splits has any.

    Raises:
        ConfigError: there is no such split.
        DataError: what it lists is not there.
    """
    if (directory / _DICT).is_file():
        splits = _read(directory / _DICT)["splits"]
        if split not in splits:
            raise ConfigError(f"{directory} has no split {split!r}", [f"it has {', '.join(splits)}; set split"])
        directory /= split
    files = tuple(directory / Path(entry["filename"]).name for entry in _read(directory / _STATE)["_data_files"])
    if missing := [str(file) for file in files if not file.is_file()]:
        raise DataError(
            f"{directory} is not whole", [f"{name} is not there, which state.json lists" for name in missing]
        )
    return files


def in_datasets_cache(path: str, name: str | None, revision: str | None) -> CachedDataset | None:
    """Find the newest Arrow files of a Hub dataset in the cache of `datasets`; None where there are none.

    Raises:
        ConfigError: there are several configurations, and `name` does not choose one.
    """
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import constants

    *owner, last = path.split("/")
    home = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))
    root = home / "___".join([*owner, camelcase_to_snakecase(last)])
    found = []
    for file in root.glob(f"*/*/*/{_INFO}"):
        info = _read(file)
        # A directory of another name was made with other options than the configuration's own.
        if info.get("config_name") == file.parts[-4] and revision in (None, file.parent.name):
            found.append(CachedDataset(directory=file.parent, info=info))
    names = sorted({str(cached.info["config_name"]) for cached in found})
    if name is None and len(names) > 1:
        raise ConfigError(f"{path} has several configurations", [f"set name to one of {', '.join(names)}"])
    fitting = [cached for cached in found if name in (None, cached.info["config_name"])]
    return max(fitting, key=lambda cached: cached.directory.stat().st_mtime, default=None)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}", [str(error.strerror or error)]) from error
    except ValueError as error:
        raise DataError(f"cannot read {path}", [f"not JSON: {error}"]) from error
    if not isinstance(values, dict):
        raise DataError(f"cannot read {path}", [f"expected a JSON object, found a {type(values).__name__}"])
    return values
