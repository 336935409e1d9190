"""The rooms of the house: imports point downwards only, and what must answer at once loads no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ckptrain

PACKAGE = Path(ckptrain.__file__).parent
# From the bottom to the top; a room may import itself and those of lower levels.
LEVELS = {
    "errors": 0,
    "installed": 0,
    "config": 1,
    "lifecycle": 2,
    "checkpoint": 3,
    "data": 4,
    "megatron": 5,
    "convert": 6,
    "training": 7,
    "api": 8,
    "trainer": 9,
    "cli": 9,
}
# `ckptrain plan` and `ckptrain status` import these: none may import torch when it is imported.
WITHOUT_TORCH = [
    "ckptrain",
    "ckptrain.api",
    "ckptrain.trainer",
    "ckptrain.cli.main",
    "ckptrain.cli.doctor",
    "ckptrain.cli.self_test",
    "ckptrain.installed",
    "ckptrain.config.load",
    "ckptrain.lifecycle.start_plan",
    "ckptrain.lifecycle.journal",
    "ckptrain.checkpoint.manifest",
    "ckptrain.checkpoint.store",
    "ckptrain.checkpoint.integrity",
    "ckptrain.checkpoint.resolve",
    "ckptrain.checkpoint.contents",
    "ckptrain.checkpoint.dcp_metadata",
    "ckptrain.checkpoint.lock",
    "ckptrain.checkpoint.remote_store",
    "ckptrain.checkpoint.working_copy",
    "ckptrain.checkpoint.reading",
    "ckptrain.checkpoint.retention",
    "ckptrain.data.dataset",
    "ckptrain.data.records",
    "ckptrain.data.sources",
    "ckptrain.training.start",
    "ckptrain.training.startup",
]


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms that a file imports, at its top or anywhere inside."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"ckptrain.{alias.name}" for alias in node.names}
            modules |= names if node.module == "ckptrain" else {node.module or ""}
    parts = [module.split(".") for module in modules]
    return {part[1] for part in parts if part[0] == "ckptrain" and len(part) > 1}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    """A file imports its own room and lower ones; only `megatron` imports megatron-core and Megatron-Bridge."""
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    above = {other for other in imported_rooms(path) & LEVELS.keys() if LEVELS[other] > LEVELS[room]}
    assert above == set()


def test_one_room_imports_megatron() -> None:
    """Everything else reaches Megatron through the room of that name."""
    users = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name == "megatron" or name.startswith("megatron.") for name in names):
                users.add(path.relative_to(PACKAGE).parts[0])
    assert users == {"megatron"}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_must_answer_at_once_loads_no_torch(module: str) -> None:
    """Importing it in a fresh interpreter leaves torch, transformers and megatron alone."""
    code = (
        f"import sys, {module}; print([name for name in ('torch', 'transformers', 'megatron') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
