"""How much a checkpoint holds, and where in it, by its manifest alone: no tensor is read, and no torch is needed."""

from __future__ import annotations

import math

from ckptrain.checkpoint.dcp_metadata import DIRECTORIES
from ckptrain.checkpoint.manifest import ITEM_SIZES, Manifest, TensorEntry


def stored_bytes(manifest: Manifest) -> int:
    """Return the size of all files together; that of the manifest itself comes on top."""
    return sum(file.num_bytes for file in manifest.files.values())


def tensor_bytes(tensor: TensorEntry) -> int:
    """Return the size of a tensor's values."""
    return math.prod(tensor.shape) * ITEM_SIZES[tensor.dtype]


def directory_of(tensor: TensorEntry) -> str:
    """Return the directory of the checkpoint that a tensor is stored in."""
    return next(directory for directory, groups in DIRECTORIES.items() if tensor.group in groups)


def digests_in(manifest: Manifest, directory: str) -> dict[str, str]:
    """Return the SHA-256 of every file in a directory; where all of them are equal, so are the tensors there."""
    return {path: file.sha256 for path, file in manifest.files.items() if path.startswith(f"{directory}/")}
