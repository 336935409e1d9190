"""From a Hugging Face PEFT adapter to a checkpoint: the same numbers under Megatron's names, whole or not there."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import attrs
import torch

import ckptrain
from ckptrain.checkpoint.dcp_metadata import ADAPTER_DIRECTORY
from ckptrain.checkpoint.integrity import fsync_directory, hash_file
from ckptrain.checkpoint.manifest import MANIFEST_NAME, Manifest, TensorEntry
from ckptrain.checkpoint.sharded import Written, save_tensors
from ckptrain.config.base import locate_base
from ckptrain.config.identity import base_identity
from ckptrain.config.layout import Layout
from ckptrain.config.schema import ModelConfig
from ckptrain.convert.checkpoint_source import stored_state
from ckptrain.convert.directory import IMPORTED, check_destination, published
from ckptrain.convert.peft_files import PEFT_CONFIG, PEFT_WEIGHTS
from ckptrain.convert.peft_source import PeftSource
from ckptrain.convert.sources import open_source
from ckptrain.convert.to_peft import check_whole
from ckptrain.errors import CheckpointNotFound


@attrs.frozen(kw_only=True)
class Import:
    """A checkpoint that was made of a PEFT adapter."""

    path: Path
    kind: str
    rank: int
    alpha: int
    modules: int
    """How many Megatron modules carry an adapter."""
    tensors: int
    num_bytes: int
    dtype: str
    base: str
    notes: tuple[str, ...]


def import_adapter(peft: Path, out: Path, *, base: str | None = None, kind: str = "auto") -> Import:
    """Write a PEFT adapter as a checkpoint that `model.adapter`, `ckptrain export` and `ckptrain merge` take.

    Args:
        peft: a directory that PEFT has saved.
        out: the directory to make; it is there complete or not at all.
        base: the base model, where the adapter names none or one that lies elsewhere.
        kind: what it becomes: lora, canonical, dora, or auto, which is lora where the parts of fused layers share an A,
            and dora where it has magnitudes.

    Raises:
        CheckpointNotFound: `peft` is no PEFT adapter.
        ConfigError: it cannot be held, or does not fit the base, every reason is listed; or the base is not here.
        CheckpointDamaged: its weights are cut short, or hold NaN or infinity.
        CkptrainError: `out` is in the way, or cannot be written.
    """
    peft, out = peft.resolve(), out.resolve()
    if not (peft / PEFT_CONFIG).is_file():
        raise CheckpointNotFound(f"{peft} is no Hugging Face PEFT adapter: expected {PEFT_CONFIG} in it")
    check_destination(IMPORTED, out, peft, overwrite=False)
    source = open_source(peft, base=base, kind=kind)
    assert isinstance(source, PeftSource)
    check_whole(source, "import")
    with published(out, overwrite=False) as staging:
        written = save_tensors(stored_state(source, stacked=True), staging / ADAPTER_DIRECTORY)
        fsync_directory(staging / ADAPTER_DIRECTORY)
        manifest = _manifest(source, written)
        (staging / MANIFEST_NAME).write_bytes(manifest.to_json())
    return Import(
        path=out,
        kind=source.kind,
        rank=source.settings.rank,
        alpha=source.settings.alpha,
        modules=len(source.modules),
        tensors=len(manifest.tensors),
        num_bytes=sum(file.num_bytes for file in manifest.files.values()),
        dtype=source.facts.dtype,
        base=source.base.name,
        notes=source.facts.notes,
    )


def _manifest(source: PeftSource, written: Written) -> Manifest:
    base = locate_base(ModelConfig(pretrained=source.base.pretrained, revision=source.base.revision))
    weights = hash_file(source.path / PEFT_WEIGHTS)
    return Manifest(
        run_id=f"imported-{weights.sha256[:16]}",
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        base=base_identity(base),
        shape=source.shape,
        tokenizer_fingerprint=None,
        data=None,
        lora=source.facts.lora,
        layout=Layout(tensor=1, pipeline=1, context=1, expert=1, data=1),
        metrics={},
        optimizer={},
        versions={
            "ckptrain": ckptrain.__version__,
            "torch": str(torch.__version__),
            **({"peft": source.settings.peft_version} if source.settings.peft_version else {}),
        },
        config={"model.pretrained": source.base.pretrained},
        files={f"{ADAPTER_DIRECTORY}/{name}": digest for name, digest in written.files.items()},
        tensors={
            name: TensorEntry(shape=tensor.shape, dtype=tensor.dtype, group="adapter")
            for name, tensor in written.tensors.items()
        },
    )
