"""Where on this machine are the files of a dataset on the Hugging Face Hub?

What the cache has is used without asking the Hub, as it is for a base model: a run that is started again reads what it
read before. What is not there is downloaded, of the same commit, and of the split that is asked for only. Without a
network the Arrow files that `datasets` keeps do as well. No code of a repository is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path

import attrs

from ckptrain.data.repository import CARD_FILES, listing, read_card, read_layout
from ckptrain.data.saved import in_datasets_cache
from ckptrain.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SHARD = re.compile(r"(?P<before>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<behind>.*)")


class NotDownloaded(ConfigError):  # noqa: N818  # named by what is the case
    """A Hub dataset of which files are missing here, and that was not to be downloaded now."""


@attrs.frozen(kw_only=True)
class HubFiles:
    """The files of each split that was asked for, and the commit that they are of, where it is known."""

    splits: Mapping[str, tuple[Path, ...]]
    commit: str | None


@attrs.frozen(kw_only=True)
class _Snapshot:
    """What the cache has of one commit; `names` are those of all its files if it `is_listed`, else of those here."""

    directory: Path
    names: tuple[str, ...]
    is_listed: bool


class _Unreachable(Exception):  # noqa: N818  # never leaves this module
    """Why the Hub cannot be asked."""


def find_on_hub(path: str, name: str | None, splits: Sequence[str], revision: str | None, *, fetch: bool) -> HubFiles:
    """Find the files of some splits of a Hub dataset; with `fetch`, download those that are not here.

    Raises:
        NotDownloaded: files are missing here, and `fetch` is False.
        ConfigError: there is no such dataset, configuration or split, or it is not here and cannot be downloaded.
    """
    from huggingface_hub import constants

    if not _HUB_ID.fullmatch(path):
        raise _unusable(path, ["it is neither a path that exists nor a Hub id such as openai/gsm8k"])
    here = _snapshot(path, revision)
    found = None if here is None else _in_snapshot(path, here, name, splits)
    if isinstance(found, HubFiles):
        return found
    tried = [f"it is no path that exists, and not in the cache {constants.HF_HUB_CACHE}", *([found] if found else [])]
    if constants.HF_HUB_OFFLINE:
        tried.append("the Hub was not asked: HF_HUB_OFFLINE is set")
    elif not fetch:
        raise NotDownloaded(f"the dataset {path} is not downloaded yet", tried)
    else:
        try:
            return _download(path, name, splits, revision if here is None else here.directory.name)
        except _Unreachable as error:
            tried.append(f"the Hub could not be reached: {error}")
    if (cached := in_datasets_cache(path, name, revision)) is not None:
        return HubFiles(splits={split: cached.files(split) for split in splits}, commit=cached.commit)
    raise _unusable(
        path,
        [
            *tried,
            f"download it where there is a network: hf download {path} --repo-type dataset; or give a directory",
        ],
    )


def _snapshot(path: str, revision: str | None) -> _Snapshot | None:
    """Return what the cache has of a revision: datasets--ORG--NAME/refs/BRANCH holds a commit, snapshots/COMMIT files.

    The layout is documented at https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
    """
    from huggingface_hub import constants, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    cache = Path(constants.HF_HUB_CACHE) / f"datasets--{path.replace('/', '--')}"
    commit = revision or constants.DEFAULT_REVISION
    if ".." in Path(commit).parts:
        return None
    if (reference := cache / "refs" / commit).is_file():
        commit = reference.read_text(encoding="utf-8").strip()
    directory = cache / "snapshots" / commit
    if "/" in commit or not directory.is_dir():
        return None
    try:
        listed = [file.path for file in get_cached_repo_tree(path, repo_type="dataset", revision=commit)]
    except CachedRepoTreeNotFoundError:
        files = sorted(file for file in directory.rglob("*") if file.is_file())
        return _Snapshot(
            directory=directory, names=tuple(file.relative_to(directory).as_posix() for file in files), is_listed=False
        )
    return _Snapshot(directory=directory, names=tuple(sorted(listed)), is_listed=True)


def _in_snapshot(path: str, snapshot: _Snapshot, name: str | None, splits: Sequence[str]) -> HubFiles | str:
    """Return the files of some splits that are in the cache, or what it lacks.

    Raises:
        ConfigError: the repository has no such configuration or split.
    """
    gone = _missing(snapshot, [file for file in snapshot.names if file in CARD_FILES])
    if not gone:
        try:
            names = _names(path, snapshot, name, splits)
        except ConfigError as error:
            if snapshot.is_listed:
                raise
            return f"in what is downloaded of it: {error.summary}: {'; '.join(error.problems)}"
        gone = _missing(snapshot, _all_of(names))
        if not gone:
            return _found(snapshot, names)
    more = f" and {len(gone) - 3} more are" if len(gone) > 3 else " is" if len(gone) == 1 else " are"
    return f"of what is downloaded of it {', '.join(gone[:3])}{more} missing"


def _names(path: str, snapshot: _Snapshot, name: str | None, splits: Sequence[str]) -> dict[str, tuple[str, ...]]:
    label = f"the dataset {path}"
    card = read_card(label, snapshot.directory)
    with listing(snapshot.names) as root:
        layout = read_layout(label, root, card, name)
        return {split: layout.files(split) for split in splits}


def _all_of(names: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for of_split in names.values() for name in of_split]


def _missing(snapshot: _Snapshot, names: Sequence[str]) -> list[str]:
    """Return which of these files are not here, and their shards; without a listing a name says how many there are."""
    wanted = list(names)
    if not snapshot.is_listed:
        for shard in filter(None, map(_SHARD.fullmatch, names)):
            count = shard["count"]
            wanted += [f"{shard['before']}-{number:05d}-of-{count}{shard['behind']}" for number in range(int(count))]
    return [name for name in dict.fromkeys(wanted) if not (snapshot.directory / name).is_file()]


def _found(snapshot: _Snapshot, names: Mapping[str, Sequence[str]]) -> HubFiles:
    splits = {split: tuple(snapshot.directory / name for name in of_split) for split, of_split in names.items()}
    return HubFiles(splits=splits, commit=snapshot.directory.name)


def _download(path: str, name: str | None, splits: Sequence[str], revision: str | None) -> HubFiles:
    """Download the card and the listing, then the files that these say are of the splits."""
    from huggingface_hub import snapshot_download

    with _told(path, revision):
        card = snapshot_download(path, repo_type="dataset", revision=revision, allow_patterns=list(CARD_FILES))
    snapshot = _snapshot(path, Path(card).name)
    if snapshot is None or not snapshot.is_listed:
        raise _Unreachable("it does not list the files")
    names = _names(path, snapshot, name, splits)
    wanted = [escape(name) for name in _all_of(names)]
    with _told(path, revision):
        snapshot_download(path, repo_type="dataset", revision=snapshot.directory.name, allow_patterns=wanted)
    if missing := _missing(snapshot, _all_of(names)):
        raise _Unreachable(f"{', '.join(missing[:3])} did not come")
    return _found(snapshot, names)


@contextmanager
def _told(path: str, revision: str | None) -> Iterator[None]:
    """Turn what the Hub answers into an error that says what to do; _Unreachable where it does not answer."""
    import httpx
    from huggingface_hub import errors

    page = f"https://huggingface.co/datasets/{path}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise _unusable(path, [f"it is gated: ask for access at {page}, and log in with hf auth login"]) from error
    except errors.RevisionNotFoundError as error:
        raise _unusable(path, [f"it has no revision {revision!r}: see {page}/tree/main"]) from error
    except errors.RepositoryNotFoundError as error:
        text = "it is no path that exists, and there is no such dataset on the Hub, or it is private: hf auth login"
        raise _unusable(path, [text]) from error
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.HfHubHTTPError,
        httpx.HTTPError,
    ) as error:
        raise _Unreachable(str(error).partition("\n")[0]) from error
    except OSError as error:
        raise _unusable(path, [f"its files cannot be written: {error.strerror or error}"]) from error


def _unusable(path: str, problems: list[str]) -> ConfigError:
    return ConfigError(f"cannot use the dataset {path!r}", problems)
