"""What bench_convert.py exports: adapters of random values in the shape of known models, saved as a run saves them.

Of a base there is only its config.json, except where a contestant needs weights: then there are random ones.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from tiny import VOCAB_SIZE

if TYPE_CHECKING:
    from torch import Tensor

    from ckptrain.checkpoint.manifest import FileDigest, Manifest
    from ckptrain.checkpoint.sharded import ShardedState, StoredTensor
    from ckptrain.config.schema import RunConfig
    from ckptrain.config.shape import ModelShape
    from ckptrain.lifecycle.facts import LoraSpec

DTYPE = "bfloat16"
"""What training stores the adapter of a bfloat16 model in."""
_DEVIATION = 0.02


def _llama(num_layers: int, hidden_size: int, ffn_hidden_size: int, num_heads: int, **other: Any) -> dict[str, Any]:
    """Return the config.json of a Llama 3, but for what `other` says."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": ffn_hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "head_dim": hidden_size // num_heads,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **other,
    }


_QWEN3_235B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}


@attrs.frozen(kw_only=True)
class Case:
    """An adapter of every linear layer of a model."""

    model: str
    config: Mapping[str, Any]
    """config.json of the base."""
    rank: int
    tensor: int = 1
    pipeline: int = 1
    """It is stored in the pieces that so many tensor parallel ranks and pipeline stages would write."""

    @property
    def label(self) -> str:
        """The case in words."""
        cut = f", TP={self.tensor} x PP={self.pipeline}" if self.tensor * self.pipeline > 1 else ""
        return f"{self.model}, rank {self.rank}{cut}"

    @property
    def shape(self) -> ModelShape:
        """The dimensions of the base."""
        from ckptrain.config.shape import shape_of

        return shape_of(self.config, self.model)


_TINY = _llama(4, 64, 160, 8, num_key_value_heads=4, vocab_size=VOCAB_SIZE)
_LLAMA_70B = _llama(80, 8192, 28_672, 64)
CASES: dict[str, tuple[Case, ...]] = {
    "tiny": (Case(model="a tiny Llama", config=_TINY, rank=4, tensor=2, pipeline=2),),
    "1b": (Case(model="Llama-3.2-1B", config=_llama(16, 2048, 8192, 32, tie_word_embeddings=True), rank=8),),
    "8b": (Case(model="Llama-3-8B", config=_llama(32, 4096, 14_336, 32), rank=8),),
    "70b": (
        Case(model="Llama-3-70B", config=_LLAMA_70B, rank=8),
        Case(model="Llama-3-70B", config=_LLAMA_70B, rank=8, tensor=8, pipeline=4),
    ),
    "70b-r64": (Case(model="Llama-3-70B", config=_LLAMA_70B, rank=64),),
    "235b": (
        Case(model="half of Qwen3-235B-A22B", config={**_QWEN3_235B, "num_hidden_layers": 47}, rank=8),
        Case(model="Qwen3-235B-A22B", config=_QWEN3_235B, rank=8),
    ),
}
"""By what --shapes takes; the first is for the tests."""


@attrs.frozen(kw_only=True)
class Made:
    """A checkpoint that was written for a case."""

    checkpoint: Path
    stored_bytes: int
    """Of all its files."""
    adapter_bytes: int
    """Of all its numbers."""
    layer_bytes: int
    """Of those of one layer."""
    pieces: int
    """In how many its tensors are stored."""


def write_checkpoint_of(case: Case, directory: Path) -> Made:
    """Write a config.json and a checkpoint of a random adapter into a directory, the checkpoint as a run writes it."""
    import torch

    from ckptrain.checkpoint.contents import stored_bytes
    from ckptrain.checkpoint.dcp_metadata import ADAPTER_DIRECTORY, read_dcp_metadata
    from ckptrain.checkpoint.store import CheckpointStore
    from ckptrain.checkpoint.writer import Content, write_checkpoint
    from ckptrain.config.targets import resolve_targets
    from ckptrain.convert.checkpoint_source import stored_weights
    from ckptrain.lifecycle.facts import LoraSpec

    config = run_config(case, directory)
    lora = LoraSpec(settings=config.lora, modules=resolve_targets(config.lora, case.shape).modules)
    sizes = {weight.name: weight.shape for weight in stored_weights(lora, case.shape).values()}
    torch.manual_seed(0)
    state = {
        name: in_pieces(name, torch.empty(size, dtype=getattr(torch, DTYPE)).normal_(std=_DEVIATION), case)
        for name, size in sizes.items()
    }
    checkpoint = write_checkpoint(
        CheckpointStore(directory / "run"),
        Content(
            step=1,
            parts={ADAPTER_DIRECTORY: state},
            describe=lambda tensors, files: _manifest(case, config, lora, tensors[ADAPTER_DIRECTORY], files),
        ),
    )
    adapter_bytes = sum(tensor.nbytes for tensor in state.values())
    stored = read_dcp_metadata(checkpoint.path / ADAPTER_DIRECTORY).tensors
    return Made(
        checkpoint=checkpoint.path,
        stored_bytes=stored_bytes(checkpoint.manifest),
        adapter_bytes=adapter_bytes,
        layer_bytes=adapter_bytes // case.shape.num_layers,
        pieces=sum(len(tensor.chunks) for tensor in stored.values()),
    )


def write_base(directory: Path) -> None:
    """Write random weights beside a config.json, one tensor in memory at a time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ckptrain.convert.stream import Declared, SafetensorsStream

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    tied = set(model.all_tied_weights_keys)
    sizes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    declared = {name: Declared(dtype=DTYPE, shape=size) for name, size in sizes.items()}
    with SafetensorsStream(directory / "model.safetensors", declared) as stream:
        for name, size in sizes.items():
            stream.write(name, torch.empty(size, dtype=getattr(torch, DTYPE)).normal_(std=_DEVIATION))


def run_config(case: Case, directory: Path) -> RunConfig:
    """Write the base's config.json into a directory, and return what a run that trains it is asked to be."""
    from ckptrain.config.load import load_config

    (directory / "config.json").write_text(json.dumps(dict(case.config)))
    asked = {
        "model": {"pretrained": str(directory), "dtype": DTYPE},
        "lora": {"dim": case.rank, "alpha": 2 * case.rank},
        "data": {"train": "none.jsonl", "sequence_length": 128},
    }
    return load_config(asked, check_inputs=False)


def in_pieces(name: str, whole: Tensor, case: Case) -> ShardedState:
    """Return a stored tensor, [layers, ..., rows, columns], as the pieces that the ranks of the case would save.

    Megatron cuts B along its rows, gate and up each by themselves; A along its rows too, but along its columns, the
    inputs, where the layer itself is row parallel. Experts are not cut.
    """
    from ckptrain.checkpoint.sharded import Shard, ShardedState
    from ckptrain.config.modules import COLUMN_PARALLEL

    *_, module, _, half, _ = name.split(".")
    axis = whole.ndim - (1 if half == "linear_in" and module not in COLUMN_PARALLEL else 2)
    halves = 2 if (module, half) == ("linear_fc1", "linear_out") else 1
    tensor = 1 if ".experts." in name else case.tensor
    shards = []
    for layer, row in itertools.product(
        _cuts(whole.shape[0], case.pipeline), _cuts(whole.shape[axis], halves * tensor)
    ):
        offset = [0] * whole.ndim
        offset[0], offset[axis] = layer.start, row.start
        data = whole.narrow(0, layer.start, len(layer)).narrow(axis, row.start, len(row))
        shards.append(Shard(offset=tuple(offset), data=data))
    return ShardedState(tuple(whole.shape), shards)


def _cuts(size: int, count: int) -> list[range]:
    ends = [size * number // count for number in range(count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _manifest(
    case: Case,
    config: RunConfig,
    lora: LoraSpec,
    tensors: Mapping[str, StoredTensor],
    files: Mapping[str, FileDigest],
) -> Manifest:
    from ckptrain.checkpoint.manifest import Manifest, TensorEntry
    from ckptrain.config.identity import BaseIdentity
    from ckptrain.config.layout import Layout
    from ckptrain.config.load import flatten
    from ckptrain.training.start import versions

    return Manifest(
        run_id="benchmark",
        step=1,
        consumed_samples=0,
        consumed_tokens=0,
        created=dt.datetime.now(dt.UTC).isoformat(),
        base=BaseIdentity(fingerprint="0" * 64, name=config.model.pretrained, revision=None, num_bytes=0),
        shape=case.shape,
        tokenizer_fingerprint=None,
        data=None,
        lora=lora,
        layout=Layout(tensor=case.tensor, pipeline=case.pipeline, context=1, expert=1, data=1),
        metrics={},
        optimizer={},
        versions=versions(),
        config=flatten(config),
        files=files,
        tensors={
            name: TensorEntry(shape=tensor.shape, dtype=tensor.dtype, group="adapter")
            for name, tensor in tensors.items()
        },
    )
