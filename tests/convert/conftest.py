"""Tiny models of each family on disk, and real checkpoints of random adapters for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.manifest import Manifest, TensorEntry
from ckptrain.checkpoint.sharded import save_tensors
from ckptrain.checkpoint.store import CheckpointStore
from ckptrain.config.base import locate_base
from ckptrain.config.identity import base_identity
from ckptrain.config.layout import Layout
from ckptrain.config.load import flatten, load_config
from ckptrain.config.schema import RunConfig
from ckptrain.config.shape import ModelShape, read_shape
from ckptrain.config.targets import resolve_targets
from ckptrain.lifecycle.facts import DataIdentity, LoraSpec

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 160,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
_FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SMALL),
    "mistral": MistralConfig(**_SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**_SMALL),
    "qwen3": Qwen3Config(**_SMALL, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(
        **_SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}
DENSE = ("llama", "mistral", "qwen2", "qwen3")


@attrs.frozen(kw_only=True)
class Base:
    """A small base model on disk."""

    path: Path
    shape: ModelShape

    def load(self) -> PreTrainedModel:
        """Load it in float32."""
        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()


BaseOf = Callable[[str], Base]
Save = Callable[..., CommittedCheckpoint]


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> BaseOf:
    """Return a function that gives the base of a family, with random weights and biases."""
    made: dict[str, Base] = {}

    def make(family: str) -> Base:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            torch.manual_seed(5)
            model = AutoModelForCausalLM.from_config(_FAMILIES[family])
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            model.save_pretrained(path)
            made[family] = Base(path=path, shape=read_shape(locate_base(_config(path, path).model)))
        return made[family]

    return make


def _config(base: Path, directory: Path, *overrides: str) -> RunConfig:
    data = directory / "train.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    fixed = {"model": {"pretrained": str(base), "dtype": "float32"}, "data": {"train": str(data)}}
    return load_config(fixed, [f"data.sequence_length={_SMALL['max_position_embeddings']}", *overrides])


def random_adapter(
    modules: tuple[str, ...], rank: int, shape: ModelShape, seed: int = 0, *, magnitudes: bool = False
) -> dict[str, torch.Tensor]:
    """Draw A and B of each module as a run stores them: in one tensor over all layers where all layers have them.

    With `magnitudes` there are those of DoRA too, about as large as rows of the bases here.

    Names and sizes are written out here once more, on purpose.
    """
    generator = torch.Generator().manual_seed(seed)
    attention = shape.num_heads * shape.head_dim
    ffn = shape.moe_ffn_hidden_size or shape.ffn_hidden_size
    sizes = {
        "linear_qkv": (shape.hidden_size, attention + 2 * shape.num_kv_heads * shape.head_dim),
        "linear_proj": (attention, shape.hidden_size),
        "linear_fc1": (shape.hidden_size, 2 * ffn),
        "linear_fc2": (ffn, shape.hidden_size),
        "linear_q": (shape.hidden_size, attention),
        "linear_k": (shape.hidden_size, shape.num_kv_heads * shape.head_dim),
        "linear_v": (shape.hidden_size, shape.num_kv_heads * shape.head_dim),
        "linear_fc1_gate": (shape.hidden_size, ffn),
        "linear_fc1_up": (shape.hidden_size, ffn),
    }
    within = {
        "linear_q": "linear_qkv.adapter.adapter_q",
        "linear_k": "linear_qkv.adapter.adapter_k",
        "linear_v": "linear_qkv.adapter.adapter_v",
        "linear_fc1_gate": "linear_fc1.adapter.adapter_gate",
        "linear_fc1_up": "linear_fc1.adapter.adapter_up",
    }
    layers_of: dict[str, list[str]] = {}
    for module in modules:
        _, _, layer, place = module.split(".", 3)
        layers_of.setdefault(place, []).append(layer)
    adapter = {}
    for place, layers in layers_of.items():
        in_features, out_features = sizes[place.rpartition(".")[2]]
        experts = (shape.num_experts,) if ".experts." in place else ()
        at, _, short = place.rpartition(".")
        stored = f"{at}.".replace(".experts.", ".experts.experts.") + within.get(short, f"{short}.adapter")
        stacked = len(layers) == shape.num_layers
        over_layers = (shape.num_layers,) if stacked else ()
        for start in ["decoder.layers"] if stacked else [f"decoder.layers.{layer}" for layer in layers]:
            for half, size in (("linear_in", (rank, in_features)), ("linear_out", (out_features, rank))):
                whole = torch.randn(*over_layers, *experts, *size, generator=generator)
                adapter[f"{start}.{stored}.{half}.weight"] = whole * 0.1
            if magnitudes:
                adapter[f"{start}.{stored}.magnitude"] = torch.rand(*over_layers, out_features, generator=generator) + 1
    return adapter


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that writes a checkpoint of an adapter as a run does, into RUN = tmp_path/run."""

    def save_checkpoint(
        base: Base,
        *overrides: str,
        step: int = 100,
        change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] = lambda adapter: adapter,
    ) -> CommittedCheckpoint:
        config = _config(base.path, tmp_path, "lora.dim=4", "lora.alpha=12", *overrides)
        modules = resolve_targets(config.lora, base.shape).modules
        magnitudes = config.lora.kind == "dora"
        adapter = change(random_adapter(modules, config.lora.dim, base.shape, magnitudes=magnitudes))
        store = CheckpointStore(tmp_path / "run")
        staging = store.stage(step)
        written = save_tensors(adapter, staging / "adapter")
        return store.commit(
            staging,
            Manifest(
                run_id="20261130-120000-abcd",
                step=step,
                consumed_samples=8 * step,
                consumed_tokens=0,
                created="2026-11-30T12:00:00+00:00",
                base=base_identity(locate_base(config.model)),
                shape=base.shape,
                tokenizer_fingerprint="t" * 64,
                data=DataIdentity(fingerprint="d" * 64),
                lora=LoraSpec(settings=config.lora, modules=modules),
                layout=Layout(tensor=1, pipeline=1, context=1, expert=1, data=1),
                metrics={},
                optimizer={},
                versions={"ckptrain": "0.1.0"},
                config=flatten(config),
                files={f"adapter/{name}": digest for name, digest in written.files.items()},
                tensors={
                    name: TensorEntry(shape=tensor.shape, dtype=tensor.dtype, group="adapter")
                    for name, tensor in written.tensors.items()
                },
            ),
        )

    return save_checkpoint
