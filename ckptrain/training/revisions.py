"""Which revision of a dataset on the Hub does a run train on? The one that its first start found, for good.

A dataset may change between a start and a resume. A revision that the config leaves open is therefore written into the
configuration that the run keeps, and a run that goes on takes it from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.remote_store import store_of
from ckptrain.config.schema import DataConfig, SourceConfig
from ckptrain.config.values import BadValueError, convert
from ckptrain.data.fingerprint import sources_fingerprint
from ckptrain.data.sources import Role, locate
from ckptrain.lifecycle.facts import DataIdentity


def identify_data(data: DataConfig, run_dir: Path | None) -> tuple[DataConfig, DataIdentity]:
    """Return the data of a run with its revisions, and what it is; a dataset that is not here yet is downloaded.

    Raises:
        ConfigError: a source is not there.
        DataError: a file cannot be read.
    """
    newest = None if run_dir is None else store_of(run_dir).newest()
    saved = {} if newest is None else newest.manifest.config
    train, fingerprint = _identified(_as_saved(data.train, saved.get("data.train")), "train")
    if data.validation is None:
        return attrs.evolve(data, train=train), DataIdentity(fingerprint=fingerprint)
    sources = _as_saved(data.validation, saved.get("data.validation"))
    validation, of_validation = _identified(sources, "validation")
    return (
        attrs.evolve(data, train=train, validation=validation),
        DataIdentity(fingerprint=fingerprint, validation_fingerprint=of_validation),
    )


def _identified(sources: Sequence[SourceConfig], role: Role) -> tuple[tuple[SourceConfig, ...], str]:
    located = [locate(source, role) for source in sources]
    pinned = tuple(
        attrs.evolve(source, revision=found.revision) for source, found in zip(sources, located, strict=True)
    )
    return pinned, sources_fingerprint(sources, located)


def _as_saved(sources: Sequence[SourceConfig], saved: Any) -> tuple[SourceConfig, ...]:
    """Give sources without a revision the one that the same source has in a checkpoint's configuration."""
    known = {_apart_from_revision(source): source.revision for source in _read(saved)}
    return tuple(
        attrs.evolve(source, revision=source.revision or known.get(_apart_from_revision(source))) for source in sources
    )


def _apart_from_revision(source: SourceConfig) -> tuple[str | None, ...]:
    return (source.path, source.name, source.split, source.format)


def _read(saved: Any) -> tuple[SourceConfig, ...]:
    if not isinstance(saved, str | list | Mapping):
        return ()
    try:
        sources: tuple[SourceConfig, ...] = convert(saved, tuple[SourceConfig, ...], {})
    except BadValueError:  # another version's, which says things that this one does not know
        return ()
    return sources
