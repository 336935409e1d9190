"""A LoRA checkpoint of Megatron-Bridge or NeMo-RL as an adapter that can be read: each tensor in its place, or refused.

Its tensors are megatron-core's, in torch's distributed format, so they are read as a checkpoint of ckptrain is: by
their names and places, one layer at a time, with nothing in it loaded or run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from ckptrain.checkpoint.dcp_metadata import METADATA_NAME, DcpTensor, read_foreign_metadata
from ckptrain.checkpoint.integrity import hash_file
from ckptrain.config.linear import LORA_A, LORA_B, is_expert, short_names, weight_names
from ckptrain.config.modules import FUSED, PARTS, SPLIT, split_names
from ckptrain.config.schema import LoraConfig
from ckptrain.config.shape import ModelShape
from ckptrain.convert.megatron_files import (
    BACKEND_FILE,
    RUN_CONFIG,
    TRACKER,
    MegatronSettings,
    base_problems,
    check_format,
    checksum_problems,
    find_iteration,
    iteration_number,
    read_settings,
)
from ckptrain.convert.megatron_layout import (
    MegatronLayout,
    is_adapter_tensor,
    is_base_tensor,
    map_tensors,
    permuted_by,
)
from ckptrain.convert.source import BaseReference, ReadLayer
from ckptrain.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, first_problems
from ckptrain.lifecycle.facts import AdapterFacts, LoraSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ckptrain.checkpoint.slices import SliceReader


@attrs.frozen(kw_only=True)
class MegatronSource:
    """The adapter in one iteration of a LoRA training under Megatron-Bridge."""

    path: Path
    shape: ModelShape
    base: BaseReference
    settings: MegatronSettings
    kind: Literal["lora", "canonical"]
    tensors: Mapping[str, DcpTensor]
    layout: MegatronLayout
    notes: tuple[str, ...]

    run_id: str = ""

    @property
    def step(self) -> int:
        """Its iteration."""
        return iteration_number(self.path)

    @property
    def modules(self) -> tuple[str, ...]:
        """The global names of what is adapted, layer by layer."""
        return tuple(name for module in self.layout.modules for name in self._given_as(module))

    @property
    def facts(self) -> AdapterFacts:
        """What a start is decided from."""
        settings = LoraConfig(
            kind=self.kind,
            target_modules=short_names(self.modules, self.shape),
            dim=self.settings.rank,
            alpha=self.settings.alpha,
            dropout=self.settings.dropout,
            dropout_position=self.settings.dropout_position,
        )
        return AdapterFacts(
            path=self.path,
            form="LoRA checkpoint of Megatron-Bridge",
            base_name=self.settings.base,
            base_fingerprint=None,
            tokenizer_fingerprint=None,
            lora=LoraSpec(settings=settings, modules=self.modules),
            dtype=" and ".join(sorted({tensor.dtype for tensor in self.tensors.values()})),
            notes=(*self.settings.notes, *self.notes),
        )

    def held(self) -> AbstractContextManager[None]:
        """Do nothing: a training under Megatron does not look who reads a checkpoint before it removes it."""
        return nullcontext()

    def problems(self) -> list[str]:
        """Read every tensor, and name those that are not what their checksums say, or hold NaN or infinity."""
        try:
            if problems := list(checksum_problems(self.path, self.tensors)):
                return problems
            with self.layers() as read:
                return [
                    f"{name} holds NaN or infinity"
                    for layer in sorted({int(module.split(".")[2]) for module in self.layout.modules})
                    for name, matrix in read(layer).items()
                    if not matrix.isfinite().all()
                ]
        except CheckpointDamaged as error:
            return list(error.problems)
        except OSError as error:
            return [f"{error.filename} cannot be read: {error.strerror}"]

    @contextmanager
    def layers(self) -> Iterator[ReadLayer]:
        """Open the files, and give what reads the matrices of a layer."""
        from ckptrain.checkpoint.slices import SliceReader

        with SliceReader(self.path, self.tensors) as reader:

            def read(layer: int) -> dict[str, Tensor]:
                matrices: dict[str, Tensor] = {}
                for module in self.layout.modules:
                    if int(module.split(".")[2]) == layer:
                        lora_a, lora_b = (self._matrix(reader, module, half, layer) for half in (LORA_A, LORA_B))
                        matrices |= self._given(module, lora_a, lora_b)
                return matrices

            yield read

    def provenance(self) -> dict[str, Any]:
        """Return where it comes from."""
        data = sorted({chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks})
        return {
            "form": self.facts.form,
            "step": self.step,
            "files": {name: hash_file(self.path / name).sha256 for name in (RUN_CONFIG, METADATA_NAME, *data)},
            "base": attrs.asdict(self.base),
            "lora": attrs.asdict(self.facts.lora),
        }

    def _matrix(self, reader: SliceReader, module: str, half: str, layer: int) -> Tensor:
        """Read A or B of a module, whole, with an axis for the experts where there are such."""
        import torch

        by_expert: dict[int | None, list[Tensor]] = {}
        for part in self.layout.parts[module, half]:
            rows = reader.read(part.tensor, layer if part.layer is None else None)
            by_expert.setdefault(part.expert, []).append(rows)
        whole = [rows[0] if len(rows) == 1 else torch.cat(rows, dim=-2) for rows in by_expert.values()]
        matrix = whole[0] if None in by_expert else torch.stack(whole)
        if is_expert(module) and matrix.dim() == 2:  # shared by all
            matrix = matrix.expand(self.shape.num_experts, *matrix.shape)
        ranks = permuted_by(module, self.settings) if half == LORA_B else 1
        return matrix if ranks == 1 else _in_order(matrix, ranks)

    def _given_as(self, module: str) -> tuple[str, ...]:
        """Return the modules that one of the checkpoint is given as: itself, or its parts where those are apart."""
        place, _, short = module.rpartition(".")
        if self.kind == "lora" or len(FUSED.get(short, ())) < 2:
            return (module,)
        names = split_names(short)
        return tuple(f"{place}.{names[part]}" for part in PARTS[short])

    def _given(self, module: str, lora_a: Tensor, lora_b: Tensor) -> dict[str, Tensor]:
        names = self._given_as(module)
        rows = [lora_b] if names == (module,) else _split_rows(module, lora_b, self.shape)
        matrices: dict[str, Tensor] = {}
        for name, part in zip(names, rows, strict=True):
            matrices |= dict(zip(weight_names(name), (lora_a, part), strict=True))
        return matrices


def looks_like_megatron(path: Path) -> bool:
    """Tell whether a path leads to a checkpoint of Megatron: an iteration, what is above it, or a step of NeMo-RL."""
    return find_iteration(path) is not None


def open_megatron(
    path: Path, base_of: Callable[[str | None, str | None], tuple[BaseReference, ModelShape]], kind: str
) -> MegatronSource:
    """Return the adapter in a LoRA checkpoint of Megatron-Bridge or NeMo-RL, after the checks that read no numbers.

    Args:
        path: an iteration, the directory above it, of which the latest is taken, or a step of NeMo-RL.
        base_of: gives the base and its dimensions of the name and the revision that the checkpoint says.
        kind: what it is to be read as: lora, canonical, or auto, which is what it is.

    Raises:
        CheckpointNotFound: it is none of these.
        CheckpointDamaged: it was not saved to the end, or its files cannot hold what they are said to.
        ConfigError: it cannot be used with this base or as this kind, every reason is listed; run_config.yaml cannot be
            read; what `base_of` raises.
    """
    directory = find_iteration(path)
    if directory is None:
        raise CheckpointNotFound(f"{path} is no checkpoint of Megatron: expected {METADATA_NAME} and {BACKEND_FILE}")
    if not directory.is_dir():
        raise CheckpointDamaged(f"{path} is damaged", [f"{TRACKER} names {directory.name}, which is not there"])
    check_format(directory)
    metadata = read_foreign_metadata(directory, is_adapter_tensor)
    base_tensors = [name for name in metadata.others if is_base_tensor(name)]
    if not metadata.tensors:
        held = "a whole model and no adapter" if base_tensors else "no adapter"
        raise ConfigError(f"cannot use {directory}", [f"it holds {held}; expected a checkpoint of a LoRA training"])
    settings = read_settings(directory)
    base, shape = base_of(settings.base, settings.revision)
    layout, problems = map_tensors(metadata.tensors, settings, shape)
    problems = base_problems(settings, shape) + problems
    if problems:
        raise ConfigError(f"cannot use the adapter {directory} with the base {base.name}", first_problems(problems))
    split = sorted({short for module in layout.modules if (short := module.rpartition(".")[2]) in SPLIT})
    why = {
        "lora": f"{', '.join(split)} have an A of their own; set lora.kind=canonical, or auto, which chooses it",
        "dora": "it has no magnitudes; set lora.kind=auto, which chooses what it is",
    }
    if kind == "dora" or (kind == "lora" and split):
        raise ConfigError(f"cannot use the adapter {directory} as lora.kind={kind}", [why[kind]])
    notes = [f"it holds {len(base_tensors)} tensors of the base too, which are not read"] if base_tensors else []
    return MegatronSource(
        path=directory,
        shape=shape,
        base=base,
        settings=settings,
        kind="canonical" if split or kind == "canonical" else "lora",
        tensors=metadata.tensors,
        layout=layout,
        notes=tuple(notes),
    )


def _in_order(matrix: Tensor, ranks: int) -> Tensor:
    """Undo the order in which the rows of one of gate and up are saved: upper halves of all ranks, then lower ones."""
    blocks = matrix.unflatten(-2, (2, ranks, -1))
    return blocks.transpose(-4, -3).flatten(-4, -2)


def _split_rows(module: str, lora_b: Tensor, shape: ModelShape) -> list[Tensor]:
    """Return the rows of each part of a fused layer, of all experts where there are such."""
    import torch

    from ckptrain.convert.unfuse import unfuse_rows

    short = module.rpartition(".")[2]
    if lora_b.dim() == 2:
        return list(unfuse_rows(short, lora_b, shape))
    of_experts = [unfuse_rows(short, expert, shape) for expert in lora_b]
    return [torch.stack(parts) for parts in zip(*of_experts, strict=True)]
