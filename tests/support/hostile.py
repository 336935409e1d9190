"""Makes a checkpoint say something else than it did, with digests that agree, and opens it in every way there is."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import resource
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptrain.checkpoint.integrity import open_checkpoint, verify_files
from ckptrain.checkpoint.resolve import resolve_checkpoint
from ckptrain.checkpoint.tensors import read_each
from ckptrain.convert.to_peft import export_adapter
from ckptrain.errors import CheckpointDamaged
from ckptrain.training.start import decide_start

Document = dict[str, Any]
NEWEST = "checkpoints/step-00000004"


def by_verify(run: Any) -> None:
    """Read every file, as `ckptrain verify` does."""
    if problems := verify_files(open_checkpoint(run.path / NEWEST)):
        raise CheckpointDamaged("damaged", problems)


def by_inspect(run: Any) -> None:
    """Read every tensor, as `ckptrain inspect --norms` does."""
    checkpoint = resolve_checkpoint(run.path)
    for _ in read_each(checkpoint, checkpoint.manifest.tensors):
        pass


def by_start(run: Any) -> None:
    """Decide what to go on from, as `ckptrain resume` does; on_damaged is refuse."""
    decide_start(run.survey, run.path, read_contents=True)


def by_export(run: Any) -> None:
    """Export the adapter."""
    export_adapter(run.path / NEWEST, run.path / "exported")


WAYS = [by_verify, by_inspect, by_start, by_export]


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """See that what is done takes no more than a few seconds and no more than some memory."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB
    assert time.monotonic() - started < 30


class Payload:
    """Makes a file when it is unpickled by a reader that allows it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        """Ask for a system call."""
        return (os.system, (f"touch {self.mark}",))


def sign(document: Document) -> bytes:
    """Return a manifest's JSON with digests that fit what it says."""
    document = {key: value for key, value in document.items() if key != "digest"}
    if "config" in document:
        document["config_digest"] = _digest(document["config"])
    return json.dumps({**document, "digest": _digest(document)}).encode()


def change_manifest(checkpoint: Path, change: Callable[[Document], object]) -> None:
    """Change what the manifest of a checkpoint says, and sign it again."""
    path = checkpoint / "manifest.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(sign(document))


def sign_files(checkpoint: Path) -> None:
    """List the files as they are now, each with its digest."""
    files = {
        path.relative_to(checkpoint).as_posix(): path.read_bytes()
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    listed = {
        path: {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in files.items()
    }
    change_manifest(checkpoint, lambda document: document.update(files=listed))


def change_metadata(directory: Path, change: Callable[[Any], object]) -> None:
    """Change DCP's metadata as torch's objects."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def change_record(directory: Path, change: Callable[[bytes], bytes], file: str = "__0_0.distcp") -> None:
    """Change the first stored tensor of a file, and move those after it."""
    places: list[Any] = []

    def collect(metadata: Any) -> None:
        places.extend(place for place in metadata.storage_data.values() if place.relative_path == file)
        places.sort(key=lambda place: place.offset)
        records = [data[place.offset : place.offset + place.length] for place in places]
        records[0] = change(records[0])
        start = 0
        for place, record in zip(places, records, strict=True):
            place.offset, place.length = start, len(record)
            start += len(record)
        (directory / file).write_bytes(b"".join(records))

    data = (directory / file).read_bytes()
    change_metadata(directory, collect)


def rezipped(
    record: bytes,
    members: Mapping[str, bytes | None],
    compression: int = zipfile.ZIP_STORED,
    doubled: Iterable[str] = (),
) -> bytes:
    """Return the zip archive of a tensor with members replaced, added, left out (None) or there twice."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(record)) as old, zipfile.ZipFile(out, "w", compression) as new:
        contents = {name: old.read(name) for name in old.namelist()}
        contents |= {f"archive/{name}": data for name, data in members.items()}  # type: ignore[dict-item]
        for name, data in contents.items():
            for _ in range(2 if name.removeprefix("archive/") in doubled else 1):
                if data is not None:
                    new.writestr(name, data)
    return out.getvalue()


def _digest(document: object) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
