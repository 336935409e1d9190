"""Property: whatever the heads, groups, ranks and targets, PEFT to ckptrain to PEFT is the identity."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from safetensors.torch import save_file
from support.peft_adapters import EVERY, same_tensors

from ckptrain.convert.from_peft import import_adapter
from ckptrain.convert.sources import open_source
from ckptrain.convert.to_peft import export_adapter

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@attrs.frozen(kw_only=True)
class Case:
    """A base's dimensions, and an adapter for it."""

    layers: int
    heads: int
    groups: int
    head_dim: int
    hidden: int
    ffn: int
    rank: int
    alpha: int
    targets: tuple[str, ...]
    adapted: tuple[int, ...]
    """Layers that have the adapter."""
    shared: bool
    """Whether the parts of a fused layer have one A."""
    dtype: str
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw dimensions that a Llama can have."""
    layers, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    adapted = draw(st.one_of(st.just(set(range(layers))), st.sets(st.integers(0, layers - 1), min_size=1)))
    return Case(
        layers=layers,
        heads=groups * draw(st.integers(1, 4)),
        groups=groups,
        head_dim=2 * draw(st.integers(1, 4)),
        hidden=8 * draw(st.integers(1, 4)),
        ffn=draw(st.integers(1, 20)),
        rank=draw(st.integers(1, 9)),
        alpha=draw(st.integers(1, 64)),
        targets=tuple(sorted(draw(st.sets(st.sampled_from(EVERY), min_size=1)))),
        adapted=tuple(sorted(adapted)),
        shared=draw(st.booleans()),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        seed=draw(st.integers(0, 1000)),
    )


def write_base(directory: Path, case: Case) -> Path:
    """Write what a conversion needs of a base: its dimensions, and something to tell it from others by."""
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": case.hidden,
        "intermediate_size": case.ffn,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.groups,
        "head_dim": case.head_dim,
        "vocab_size": 32,
        "max_position_embeddings": 64,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(case.hidden)}, directory / "model.safetensors")
    return directory


def write_adapter(directory: Path, base: Path, case: Case) -> Path:
    """Write an adapter as PEFT would, without a model."""
    query, key_value = case.heads * case.head_dim, case.groups * case.head_dim
    sizes = {
        "q_proj": ("self_attn", case.hidden, query),
        "k_proj": ("self_attn", case.hidden, key_value),
        "v_proj": ("self_attn", case.hidden, key_value),
        "o_proj": ("self_attn", query, case.hidden),
        "gate_proj": ("mlp", case.hidden, case.ffn),
        "up_proj": ("mlp", case.hidden, case.ffn),
        "down_proj": ("mlp", case.ffn, case.hidden),
    }
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DTYPES[case.dtype])

    tensors: dict[str, torch.Tensor] = {}
    for layer in case.adapted:
        for part in case.targets:
            place, in_features, out_features = sizes[part]
            at = f"base_model.model.model.layers.{layer}.{place}"
            group = next((parts for parts in FUSED if part in parts), (part,))
            drawn = next((f"{at}.{p}.lora_A.weight" for p in group if f"{at}.{p}.lora_A.weight" in tensors), None)
            fresh = draw(case.rank, in_features)
            tensors[f"{at}.{part}.lora_A.weight"] = tensors[drawn].clone() if case.shared and drawn else fresh
            tensors[f"{at}.{part}.lora_B.weight"] = draw(out_features, case.rank)
    LoraConfig(
        r=case.rank,
        lora_alpha=case.alpha,
        target_modules=list(case.targets),
        layers_to_transform=None if len(case.adapted) == case.layers else list(case.adapted),
        base_model_name_or_path=str(base),
        task_type="CAUSAL_LM",
    ).save_pretrained(directory)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def expected_kind(case: Case) -> str:
    """Return the fused kind where every fused layer is adapted whole and its parts share an A."""
    for parts in FUSED:
        found = [part for part in parts if part in case.targets]
        # Matrices of one row and one column can be drawn alike, but not here: they have at least eight columns.
        if found and (len(found) < len(parts) or not case.shared):
            return "canonical"
    return "lora"


@settings(max_examples=60)
@given(case=cases())
def test_there_and_back_is_the_identity(case: Case) -> None:
    """Keys, bits, rank, scale and targets; the kind is the one that can hold the adapter."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        base = write_base(root / "base", case)
        peft = write_adapter(root / "peft", base, case)
        imported = import_adapter(peft, root / "imported")
        exported = export_adapter(root / "imported", root / "back", dtype=case.dtype)
        assert imported.kind == expected_kind(case)
        assert same_tensors(peft, root / "back")
        config: dict[str, Any] = json.loads((root / "back/adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (case.rank, case.alpha)
        if len(case.adapted) == case.layers:
            assert exported.target_modules == case.targets
        assert open_source(root / "imported").facts.lora == open_source(peft).facts.lora
