"""A manifest from a stranger, signed as ours are: every way of opening a checkpoint refuses what it cannot be."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.hostile import NEWEST, WAYS, Document, Payload, bounded, by_verify, change_manifest, sign

from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.checkpoint.manifest import WrittenByNewer
from ckptrain.errors import CheckpointDamaged, CkptrainError


def _set(*path: str | int, value: object) -> Callable[[Document], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def _first_tensor(**values: object) -> Callable[[Document], None]:
    return lambda document: next(iter(document["tensors"].values())).update(values)


NESTED: Any = []
for _ in range(400):
    NESTED = [NESTED]

MANIFESTS: dict[str, tuple[Callable[[Document], object], str]] = {
    "an unknown key": (_set("extra", value=1), "extra is not a key"),
    "a missing key": (lambda document: document.pop("step"), "step is missing"),
    "a wrong type": (_set("step", value="4"), "step is"),
    "a newer format": (_set("schema_version", value=4), "newer ckptrain"),
    "a format of the far future": (_set("schema_version", value=10**400), "newer ckptrain"),
    "a huge step": (_set("step", value=10**400), "too large"),
    "a huge metric": (_set("metrics", value={"val_loss": 10**400}), "too large"),
    "a huge rate in what is not interpreted": (_set("optimizer", "lr", value=10**400), "too large"),
    "a huge dropout": (_set("lora", "settings", "dropout", value=10**400), "too large"),
    "deep nesting in what is not interpreted": (_set("optimizer", "x", value=NESTED), "nested"),
    "a path out": (_set("files", "../../run.yaml", value={"num_bytes": 1, "sha256": "0" * 64}), "leads out"),
    "an absolute path": (_set("files", "/etc/passwd", value={"num_bytes": 1, "sha256": "0" * 64}), "absolute"),
    "a path that steers the terminal": (
        _set("files", "\x1b[2J", value={"num_bytes": 1, "sha256": "0" * 64}),
        "cannot be shown",
    ),
    "a path without end": (_set("files", "x" * 5000, value={"num_bytes": 1, "sha256": "0" * 64}), "longer than"),
    "a tensor name that steers the terminal": (
        _set("tensors", "\x1b[2J\n", value={"shape": [1], "dtype": "uint8", "group": "rng"}),
        "is not the name of a tensor",
    ),
    "a tensor of terabytes": (_first_tensor(shape=[2**20, 2**22]), "its files have no more than"),
    "a tensor of 10^95 bytes": (_first_tensor(shape=[2**63 - 1] * 5), "its files have no more than"),
    "a tensor of 10,000 dimensions": (_first_tensor(shape=[1] * 10_000), "10000 dimensions"),
    "an unknown type": (_first_tensor(dtype="object"), "dtype"),
    "a type that is a function of torch": (_first_tensor(dtype="load"), "dtype"),
    "a tensor that is not stored": (
        _set("tensors", "rng.rank99", value={"shape": [1], "dtype": "uint8", "group": "rng"}),
        "is not in it, and is a tensor of the manifest",
    ),
    "a tensor of another group": (_first_tensor(group="rng"), "is not a tensor of the manifest"),
    "another shape": (_first_tensor(shape=[1, 1]), "in the manifest"),
    "an optimizer without a step": (_set("optimizer", value={}), "optimizer.step is null"),
    "a file of terabytes": (
        _set("files", "adapter/__0_0.distcp", "num_bytes", value=2**62),
        "is truncated",
    ),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_hostile_manifest_is_refused_however_it_is_opened(kind: str, run: Any) -> None:
    """With digests that agree, so that what it says alone is at fault."""
    change, expected = MANIFESTS[kind]
    change_manifest(run.path / NEWEST, change)
    with bounded():
        for way in WAYS:
            with pytest.raises(CkptrainError) as caught:
                way(run)
            assert expected in str(caught.value) or way is not by_verify
            assert all(character.isprintable() or character == "\n" for character in str(caught.value))


RAW_MANIFESTS: dict[str, Callable[[bytes], bytes]] = {
    "not a number": lambda data: data.replace(b'"step":4', b'"step":NaN'),
    "infinity": lambda data: data.replace(b'"step":4', b'"step":-Infinity'),
    "1e999": lambda data: data.replace(b'"step":4', b'"step":1e999'),
    "a key twice": lambda data: data.replace(b'"step":4', b'"step":4,"step":4'),
    "10^10000": lambda data: data.replace(b'"step":4', b'"step":1' + b"0" * 10_000),
    "lists in lists": lambda _: b"[" * 1_000_000,
    "objects in objects": lambda _: b'{"a":' * 1_000_000,
    "not UTF-8": lambda data: data.replace(b'"step":4', b'"step":"\xff"'),
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "half of a character": lambda data: data.replace(b'"step":4', b'"step":"\\ud800"'),
    "a pickle": lambda _: pickle.dumps(Payload(Path("mark"))),
    "nothing": lambda _: b"",
    "a list": lambda _: b"[]",
}


@pytest.mark.parametrize("kind", RAW_MANIFESTS)
def test_what_is_no_manifest_is_refused_however_it_is_opened(kind: str, run: Any) -> None:
    """Whatever stands in its place."""
    path = run.path / NEWEST / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(RAW_MANIFESTS[kind](data))
    assert path.read_bytes() != data
    with bounded():
        for way in WAYS:
            with pytest.raises(CkptrainError):
                way(run)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: (path.touch(), os.truncate(path, 2**40))],
)
def test_a_manifest_without_end_is_not_read(make: Callable[[Path], object], run: Any) -> None:
    """A FIFO would block, a device never ends, and a terabyte of zeros takes no room on disk."""
    path = run.path / NEWEST / "manifest.json"
    path.unlink()
    make(path)
    with bounded():
        for way in WAYS:
            with pytest.raises(CheckpointDamaged):
                way(run)


def test_a_manifest_from_the_future_is_no_damage(run: Any) -> None:
    """It is refused, and must not be moved away as damaged."""
    change_manifest(run.path / NEWEST, lambda document: document.update(schema_version=4))
    for way in WAYS:
        with pytest.raises(WrittenByNewer):
            way(run)


@settings(max_examples=200, deadline=10_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0),
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers()
                | st.sampled_from([10**400, 2**63, -1, 1e308, "", "\x1b", "float32"])
                | st.text(max_size=4),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
                max_leaves=6,
            ),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_a_manifest_with_any_value_replaced_is_read_or_is_refused(
    changes: list[tuple[int, object]], trained: Any, tmp_path: Path
) -> None:
    """Anywhere in it, signed again: what can be opened can be written again and has files of its own alone."""
    document = orjson.loads((trained.path / NEWEST / "manifest.json").read_bytes())
    for number, value in changes:
        places = list(_places(document))
        parent, key = places[number % len(places)]
        parent[key] = value
    (tmp_path / "manifest.json").write_bytes(sign(document))
    with pytest.raises(CkptrainError):  # the files are not there, so at the latest that is found
        open_checkpoint(tmp_path)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) in a document."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])
