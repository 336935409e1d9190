"""A checkpoint from a stranger, whose digests all agree: every way of opening it refuses it, and runs nothing of it."""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.hostile import (
    NEWEST,
    WAYS,
    Payload,
    bounded,
    by_verify,
    change_metadata,
    change_record,
    rezipped,
    sign_files,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageMeta

from ckptrain.checkpoint.dcp_metadata import read_dcp_metadata
from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.checkpoint.sharded import load_tensors
from ckptrain.checkpoint.tensor_record import record_problem
from ckptrain.errors import CheckpointDamaged, CkptrainError

Attack = Callable[[Path], object]
EXTENSION = 0xB0


def by_pickle(data: bytes) -> Attack:
    """Return an attack that has this pickle for the adapter's metadata."""
    return lambda root: (root / "adapter/.metadata").write_bytes(data)


def by_metadata(change: Callable[[Any, Path], object]) -> Attack:
    """Return an attack that changes the adapter's metadata; the change is given the mark that a payload makes."""
    return lambda root: change_metadata(root / "adapter", lambda metadata: change(metadata, root.parent / "mark"))


def by_record(change: Callable[[bytes, Path], bytes]) -> Attack:
    """Return an attack that changes the first stored tensor of the adapter."""
    return lambda root: change_record(root / "adapter", lambda record: change(record, root.parent / "mark"))


def first_place(metadata: Any) -> Any:
    """Return where the first piece of a tensor is stored."""
    return next(iter(metadata.storage_data.values()))


def first_tensor(metadata: Any) -> Any:
    """Return what is said of the first tensor."""
    return next(iter(metadata.state_dict_metadata.values()))


def add_bytes_entry(metadata: Any, _: Path) -> None:
    """Add an object that torch would unpickle without restriction."""
    metadata.state_dict_metadata["extra"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("extra")] = first_place(metadata)


def move_a_piece(metadata: Any, _: Path) -> None:
    """Let two pieces of a tensor lie on each other, and leave as much of it out."""
    tensor = first_tensor(metadata)
    index, place = next((index, place) for index, place in metadata.storage_data.items() if any(index.offset))
    del metadata.storage_data[index]
    moved = torch.Size(max(0, start - 1) for start in index.offset)
    metadata.storage_data[MetadataIndex(index.fqn, moved)] = place
    tensor = metadata.state_dict_metadata[index.fqn]
    tensor.chunks = [
        ChunkStorageMetadata(moved if chunk.offsets == index.offset else chunk.offsets, chunk.sizes)
        for chunk in tensor.chunks
    ]


def rename_a_tensor(metadata: Any, _: Path) -> None:
    """Store a tensor under another name."""
    name = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata["other"] = metadata.state_dict_metadata.pop(name)
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        metadata.storage_data[MetadataIndex("other", index.offset)] = metadata.storage_data.pop(index)


def named(module: str, name: str) -> bytes:
    """Return the instructions that push a class or function."""
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


METADATA = named("torch.distributed.checkpoint.metadata", "Metadata")
TUPLES_IN_TUPLES = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
PICKLES: dict[str, tuple[bytes, str]] = {
    "os.system": (pickle.dumps(Payload(Path("mark"))), "posix.system"),
    "INST": (b"(S'touch mark'\nios\nsystem\n.", "STRING"),
    "OBJ": (b"(cos\nsystem\n\x8c\x0atouch marko.", "os.system"),
    "NEWOBJ_EX": (b"\x80\x04" + METADATA + b")}\x92.", "NEWOBJ_EX"),
    "eval": (b'c__builtin__\neval\n(S\'open("mark","w")\'\ntR.', "__builtin__.eval"),
    "a name with dots": (
        b"\x80\x04" + named("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__") + b".",
        "Metadata.__init__.__globals__",
    ),
    "a module with dots in the name": (
        b"\x80\x04" + named("torch.distributed", "checkpoint.os.system") + b".",
        "os.sys",
    ),
    "a name that is no text": (b"\x80\x04" + TUPLES_IN_TUPLES + b"h\x3c\x93.", "not text"),
    "the extension registry": (b"\x80\x02\x82" + bytes([EXTENSION]) + b'(S\'open("mark", "w")\'\ntR.', "EXT1"),
    "a persistent id": (b"\x80\x04\x8c\x04markQ.", "Reference"),
    "a persistent id in text": (b"Pmark\n.", "PERSID"),
    "state put into a class": (b"\x80\x04" + METADATA + b"}\x8c\x05clear)sb.", "fills a Name"),
    "state put in by setattr": (b"\x80\x04" + METADATA + b")\x81N}\x8c\x09__class__)s\x86b.", "Metadata"),
    "state put in twice": (b"\x80\x04" + METADATA + b")\x81}b}b.", "twice"),
    "a call of what was made": (b"\x80\x04" + METADATA + b")\x81)R.", "calls"),
    "a place in the memo": (b"\x80\x04]r\xff\xff\xff\x7f.", "a list"),
    "a length of text": (b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.", "only 2 remain"),
    "a length of bytes": (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.", "only 2 remain"),
    "a length of a number": (b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"x.", "not enough data"),
    "a length of a frame": (b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.", "a NoneType"),
    "lists in lists": (b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", "a list"),
    "marks upon marks": (b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b".", "a tuple"),
    "a key that is hashed for ever": (b"\x80\x04}" + TUPLES_IN_TUPLES + b"h\x3cNs.", "keys"),
    "no end": (b"\x80\x04N", "exhausted"),
    "nothing": (b"", "exhausted"),
    "a stack that is empty": (b"\x80\x04a.", "not a pickle"),
    "no pickle": (b"\xff\xfe\x00garbage", "unknown"),
}

ATTACKS: dict[str, tuple[Attack, str]] = {
    **{f"metadata: {kind}": (by_pickle(data), expected) for kind, (data, expected) in PICKLES.items()},
    "metadata: a call in a value": (
        by_metadata(lambda metadata, mark: metadata.state_dict_metadata.update(weight=Payload(mark))),
        "posix.system",
    ),
    "metadata: a call in a key": (
        by_metadata(lambda metadata, mark: metadata.storage_data.update({Payload(mark): 1})),
        "posix.system",
    ),
    "metadata: a call in what nobody reads": (
        by_metadata(lambda metadata, mark: setattr(metadata, "planner_data", {"x": (Payload(mark),)})),
        "posix.system",
    ),
    "metadata: a call in the state of a class of DCP's": (
        by_metadata(lambda metadata, mark: setattr(metadata, "storage_meta", StorageMeta(Payload(mark)))),
        "posix.system",
    ),
    "metadata: bytes": (by_metadata(add_bytes_entry), "extra is a pickled object"),
    **{
        f"metadata: a place at {path!r}": (
            by_metadata(lambda metadata, _, path=path: setattr(first_place(metadata), "relative_path", path)),
            "is not a file of the directory",
        )
        for path in ("../../step-00000002/adapter/__0_0.distcp", "/dev/zero", "x/y", "..", "", "a\0b", "\x1b[2J", 7)
    },
    "metadata: a place in a file that is not listed": (
        by_metadata(lambda metadata, _: setattr(first_place(metadata), "relative_path", "__9_0.distcp")),
        "No such file",
    ),
    "metadata: a transformation": (
        by_metadata(lambda metadata, _: setattr(first_place(metadata), "transform_descriptors", ("zstd",))),
        "is stored under a transformation",
    ),
    "metadata: a place beyond the end": (
        by_metadata(lambda metadata, _: setattr(first_place(metadata), "length", 2**40)),
        "ends at byte",
    ),
    "metadata: a place below zero": (
        by_metadata(lambda metadata, _: setattr(first_place(metadata), "offset", -1)),
        "-1 for a size",
    ),
    "metadata: one place for two pieces": (
        by_metadata(lambda metadata, _: [setattr(place, "offset", 0) for place in metadata.storage_data.values()]),
        "overlaps",
    ),
    "metadata: a piece that is left out": (
        by_metadata(lambda metadata, _: setattr(first_tensor(metadata), "chunks", [])),
        "do not fill its shape",
    ),
    "metadata: pieces upon each other": (by_metadata(move_a_piece), "do not fill its shape"),
    "metadata: a piece that is nowhere": (
        by_metadata(lambda metadata, _: metadata.storage_data.popitem()),
        "that is not stored",
    ),
    "metadata: a tensor of terabytes": (
        by_metadata(lambda metadata, _: setattr(first_tensor(metadata), "size", torch.Size([2**20, 2**20]))),
        "do not fill its shape",
    ),
    "metadata: a tensor of 60 dimensions": (
        by_metadata(lambda metadata, _: setattr(first_tensor(metadata), "size", torch.Size([1] * 60))),
        "60 dimensions",
    ),
    "metadata: another type": (
        by_metadata(lambda metadata, _: setattr(first_tensor(metadata).properties, "dtype", torch.float32)),
        "in the manifest",
    ),
    "metadata: a type of no checkpoint": (
        by_metadata(lambda metadata, _: setattr(first_tensor(metadata).properties, "dtype", torch.complex64)),
        "torch.complex64",
    ),
    "metadata: another name": (by_metadata(rename_a_tensor), "is not a tensor of the manifest"),
    "metadata: as a link": (
        lambda root: (
            (root / "adapter/.metadata").rename(root.parent / "moved"),
            (root / "adapter/.metadata").symlink_to(root.parent / "moved"),
        ),
        "is a symbolic link",
    ),
    "metadata: not listed": (lambda root: (root / "adapter/.metadata").unlink(), "is not listed in the manifest"),
    "record: os.system": (
        by_record(lambda record, mark: rezipped(record, {"data.pkl": pickle.dumps(Payload(mark))})),
        "posix.system",
    ),
    "record: torch's own way to unpickle more": (
        by_record(
            lambda record, _: rezipped(record, {"data.pkl": b"ctorch.storage\n_load_from_bytes\n(S'x'\ntR."})
        ),
        "torch.storage._load_from_bytes",
    ),
    "record: another tensor": (
        by_record(lambda _, __: saved(torch.zeros(3))),
        "bytes of numbers",
    ),
    "record: no tensor": (by_record(lambda record, _: rezipped(record, {"data.pkl": b"N."})), "is not a plain tensor"),
    "record: numbers that reach beyond": (
        by_record(lambda record, _: rezipped(record, {"data.pkl": strided_beyond(record)})),
        "reaches beyond its numbers",
    ),
    "record: compressed": (
        by_record(lambda record, _: rezipped(record, {}, zipfile.ZIP_DEFLATED)),
        "has a compressed member",
    ),
    "record: a bomb": (
        by_record(lambda record, _: rezipped(record, {"data.pkl": b"(" * 50_000_000}, zipfile.ZIP_DEFLATED)),
        "has a compressed member",
    ),
    "record: a large description": (
        by_record(lambda record, _: rezipped(record, {"data.pkl": b"(" * 1_000_000})),
        "has a member data.pkl of 1000000 bytes",
    ),
    "record: a large directory": (
        by_record(lambda record, _: rezipped(record, {f"{n:01000}": b"" for n in range(70)})),
        "a directory of",
    ),
    "record: code": (
        by_record(lambda record, _: rezipped(record, {"code/evil.py": b"import os"})),
        "code/evil.py",
    ),
    "record: two descriptions": (
        by_record(lambda record, _: rezipped(record, {}, doubled=["data.pkl"])),
        "two members of the same name",
    ),
    "record: no numbers": (by_record(lambda record, _: rezipped(record, {"data/0": None})), "has no member data/0"),
    "record: not an archive": (
        by_record(lambda _, mark: pickle.dumps(Payload(mark)).ljust(2000, b"\0")),
        "not a zip file",
    ),
    "file: a FIFO": (
        lambda root: (replaced(root / "adapter/__0_0.distcp", os.mkfifo)),
        "is not a regular file",
    ),
    "file: a link out": (
        lambda root: replaced(root / "adapter/__0_0.distcp", lambda path: path.symlink_to("/etc/passwd")),
        "is a symbolic link",
    ),
    "file: a device": (
        lambda root: replaced(root / "optimizer/__0_0.distcp", lambda path: path.symlink_to("/dev/zero")),
        "is a symbolic link",
    ),
    "file: a directory as a link": (
        lambda root: replaced(root / "adapter", lambda path: path.symlink_to("/etc")),
        "is a symbolic link",
    ),
}  # fmt: skip
PRESENCE = ("file: ", "metadata: as a link")
"""Attacks that the manifest does not follow."""


def saved(tensor: torch.Tensor) -> bytes:
    """Return what torch.save writes."""
    out = io.BytesIO()
    torch.save(tensor, out)
    return out.getvalue()


def strided_beyond(record: bytes) -> bytes:
    """Return the description of a tensor whose second dimension steps over more numbers than there are."""
    tensor = torch.load(io.BytesIO(record), weights_only=True)
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as archive:
        description = archive.read("archive/data.pkl")
    row = tensor.stride()[0].to_bytes(2, "little") if tensor.stride()[0] > 255 else bytes([tensor.stride()[0]])
    opcode = b"M" if len(row) == 2 else b"K"
    before, found, after = description.rpartition(opcode + row)
    assert found
    return before + b"M\xff\x7f" + after


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    """Put something else in the place of a file or directory."""
    path.rename(path.parent.parent.parent / "moved-away")
    make(path)


@pytest.fixture(autouse=True)
def extension() -> Iterator[None]:
    """Register an extension code that stands for eval, as a library that is imported could."""
    copyreg.add_extension("builtins", "eval", EXTENSION)
    yield
    copyreg.remove_extension("builtins", "eval", EXTENSION)


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_hostile_checkpoint_is_refused_however_it_is_opened(
    kind: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify names what is wrong with it, and inspect, a start and an export refuse it; the payload has made no file."""
    attack, expected = ATTACKS[kind]
    monkeypatch.chdir(run.path)
    attack(run.path / NEWEST)
    if not kind.startswith(PRESENCE):
        sign_files(run.path / NEWEST)
    with bounded():
        for way in WAYS:
            with pytest.raises(CkptrainError) as caught:
                way(run)
            assert expected in str(caught.value) or way is not by_verify
    assert not list(run.path.rglob("*mark"))
    assert not (run.path / "exported").exists()


@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind.startswith("metadata: ") and "listed" not in kind])
def test_a_hostile_metadata_is_refused_by_a_restore_that_nobody_verified(kind: str, run: Any) -> None:
    """Reading tensors trusts no earlier check, as far as what DCP would believe is concerned."""
    attack, _ = ATTACKS[kind]
    tensors = open_checkpoint(run.path / NEWEST).manifest.tensors
    state = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in tensors.items()
        if entry.group == "adapter"
    }
    attack(run.path / NEWEST)
    with contextlib.suppress(CkptrainError) if "type" in kind else pytest.raises(CkptrainError):
        load_tensors(state, run.path / NEWEST / "adapter", alone=True)
    assert not list(run.path.rglob("*mark"))


def test_the_payload_runs_where_a_reader_allows_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing above would show anything."""
    monkeypatch.chdir(run.path)
    for kind in ("os.system", "the extension registry", "INST", "eval"):
        with contextlib.suppress(Exception):
            pickle.loads(PICKLES[kind][0])
        Path("mark").unlink()


def test_the_checkpoint_is_accepted_before_it_is_attacked(run: Any) -> None:
    """And after being signed again without a change: it is the attack that is refused."""
    for sign_again in (lambda _: None, sign_files):
        sign_again(run.path / NEWEST)
        for way in WAYS:
            way(run)
        export = run.path / "exported"
        assert export.is_dir()
        export.rename(run.path / f"exported-{id(sign_again)}")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=10_000)
@given(data=st.data())
def test_a_mutated_metadata_is_read_or_is_damage(data: st.DataObject, trained: Any, tmp_path: Path) -> None:
    """Bytes replaced, left out and put in anywhere: no other error comes out of the reader."""
    whole = (trained.path / NEWEST / "adapter/.metadata").read_bytes()
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(whole)))
        length = data.draw(st.sampled_from([0, 1, 1, 2, 50]))
        opcodes = st.sampled_from(list(b".()]}a0123RbcdehijlopqrstuKMJNQ\x81\x85\x86\x87\x8c\x93\x94"))
        noise = bytes(data.draw(st.lists(opcodes | st.integers(0, 255), max_size=6)))
        whole = whole[:start] + noise + whole[start + length :]
    for file in ("__0_0.distcp", "__1_0.distcp"):
        with contextlib.suppress(FileExistsError):
            (tmp_path / file).symlink_to(trained.path / NEWEST / "adapter" / file)
    (tmp_path / ".metadata").write_bytes(whole)
    with contextlib.suppress(CheckpointDamaged):
        read_dcp_metadata(tmp_path)


@settings(max_examples=300, deadline=10_000)
@given(place=st.integers(0), noise=st.binary(max_size=8), length=st.integers(0, 8))
def test_a_mutated_record_is_a_tensor_or_has_a_problem(place: int, noise: bytes, length: int) -> None:
    """No error comes out of the reader of one stored tensor."""
    record = saved(torch.arange(12, dtype=torch.float32).view(3, 4))
    place %= len(record)
    mutated = record[:place] + noise + record[place + length :]
    problem = record_problem(io.BytesIO(mutated), 0, len(mutated), (3, 4), "float32")
    assert problem is None or problem.isprintable()
