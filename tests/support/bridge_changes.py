"""Checkpoints of Megatron-Bridge opened as what they are, and changed to be something else."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from ckptrain.config.layout import Layout
from ckptrain.config.shape import ModelShape
from ckptrain.convert.megatron_source import MegatronSource, open_megatron
from ckptrain.convert.source import AdapterSource, BaseReference

Change = Callable[[dict[str, Any]], object]


def layout(*, tensor: int = 1, pipeline: int = 1, expert: int = 1) -> Layout:
    """Return a layout of as few processes as it needs."""
    return Layout(tensor=tensor, pipeline=pipeline, context=1, expert=expert, data=expert)


def open_with(shape: ModelShape, path: Path, kind: str = "auto") -> MegatronSource:
    """Open a checkpoint with a base of this shape, whatever the checkpoint says it is."""
    return open_megatron(path, lambda said, _: (BaseReference(pretrained=str(said), name=str(said)), shape), kind)


def matrices(source: AdapterSource) -> dict[str, Tensor]:
    """Read all of them."""
    with source.layers() as read:
        return {name: matrix for layer in range(source.shape.num_layers) for name, matrix in read(layer).items()}


def change_config(iteration: Path, change: Change) -> None:
    """Change run_config.yaml."""
    path = iteration / "run_config.yaml"
    config = yaml.safe_load(path.read_text())
    change(config)
    path.write_text(yaml.safe_dump(config))


def setting(section: str, key: str, value: object) -> Change:
    """Return what sets a key of a section."""
    return lambda config: config[section].update({key: value})


def without(section: str, key: str) -> Change:
    """Return what takes a key out of a section."""
    return lambda config: config[section].pop(key)


def rename(iteration: Path, new_name: Callable[[str], str]) -> None:
    """Give tensors other names, as torch writes them."""
    path = iteration / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata = {new_name(name): entry for name, entry in metadata.state_dict_metadata.items()}
    metadata.storage_data = {
        _renamed(index, new_name(index.fqn)): place for index, place in metadata.storage_data.items()
    }
    path.write_bytes(pickle.dumps(metadata))


def _renamed(index: Any, name: str) -> Any:
    return type(index)(name, getattr(index, "offset", None), index.index)
