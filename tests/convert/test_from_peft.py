"""PEFT adapters in: the same bits under Megatron's names, the same logits, and nothing passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support.launch import launch
from support.peft_adapters import EVERY, change_config, change_weights, same_tensors, share_a, write_peft

from ckptrain.checkpoint.integrity import CommittedCheckpoint, open_checkpoint, verify_files
from ckptrain.config.linear import weight_names
from ckptrain.convert.from_peft import Import, import_adapter
from ckptrain.convert.sources import open_source
from ckptrain.convert.to_peft import Export, export_adapter
from ckptrain.errors import CheckpointDamaged, CheckpointNotFound, CkptrainError, ConfigError, ProblemsError

BaseOf = Callable[[str], Any]
LAYER = "base_model.model.model.layers"


def there_and_back(peft: Path, tmp_path: Path, **how: Any) -> tuple[Import, Export]:
    """Import an adapter and export it again, both compared with the base under Megatron; in a process of its own."""

    def on_rank() -> tuple[Import, Export]:
        imported = import_adapter(peft, tmp_path / "imported", **how)
        return imported, export_adapter(tmp_path / "imported", tmp_path / "back", verify=True)

    [(imported, exported)] = launch(1, on_rank)
    return imported, exported


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shared", [False, True], ids=["canonical", "fused"])
def test_there_and_back_has_the_same_bits_and_the_same_logits(
    family: str, shared: bool, base_of: BaseOf, tmp_path: Path
) -> None:
    """The kind follows from the adapter; Megatron's logits with it are PEFT's."""
    peft = write_peft(tmp_path / "peft", base_of(family).load())
    if shared:
        change_weights(peft, share_a)
    imported, exported = there_and_back(peft, tmp_path)
    assert imported.kind == ("lora" if shared else "canonical")
    assert exported.gate is not None
    assert exported.gate.effect > 50 * exported.gate.allowed
    assert same_tensors(peft, exported.path)
    config = json.loads((exported.path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 12, sorted(EVERY))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_dora_there_and_back_has_the_same_bits_and_the_same_logits(
    family: str, base_of: BaseOf, tmp_path: Path
) -> None:
    """With magnitudes that are not the norms; Qwen2's biases are not scaled."""
    peft = write_peft(tmp_path / "peft", base_of(family).load(), use_dora=True)
    imported, exported = there_and_back(peft, tmp_path)
    assert imported.kind == "dora"
    assert any("lora.kind is auto: dora, because it has magnitudes" in note for note in imported.notes)
    assert exported.gate is not None
    assert exported.gate.difference < exported.gate.allowed / 5
    assert exported.gate.effect > 50 * exported.gate.allowed
    assert same_tensors(peft, exported.path)
    assert exported.tensors == 4 * 7 * 3
    assert json.loads((exported.path / "adapter_config.json").read_text())["use_dora"] is True


@pytest.mark.parametrize("targets", [["k_proj", "down_proj"], ["up_proj"]])
def test_dora_of_parts_in_some_layers_alone(targets: list[str], base_of: BaseOf, tmp_path: Path) -> None:
    """The other parts of a fused layer stay the base's."""
    peft = write_peft(tmp_path / "peft", base_of("qwen2").load(), targets, use_dora=True, layers_to_transform=[0, 3])
    imported, exported = there_and_back(peft, tmp_path)
    assert imported.kind == "dora"
    assert same_tensors(peft, exported.path)


def test_dora_of_the_attention_of_a_mixture_of_experts(base_of: BaseOf, tmp_path: Path) -> None:
    """The experts themselves have none."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    peft = write_peft(tmp_path / "peft", base_of("qwen3_moe").load(), targets, use_dora=True)
    imported, exported = there_and_back(peft, tmp_path)
    assert imported.kind == "dora"
    assert same_tensors(peft, exported.path)


@pytest.mark.parametrize("kind", ["lora", "canonical"])
def test_magnitudes_are_never_left_out(kind: str, base_of: BaseOf, tmp_path: Path) -> None:
    """Asked for as LoRA, which has no place for them; and DoRA is not made of what has none."""
    peft = write_peft(tmp_path / "peft", base_of("llama").load(), use_dora=True)
    with pytest.raises(ProblemsError, match=r"only DoRA holds; set lora\.kind=dora, or auto, which chooses it"):
        import_adapter(peft, tmp_path / "out", kind=kind)
    plain = write_peft(tmp_path / "plain", base_of("llama").load())
    with pytest.raises(ProblemsError, match=r"it has no magnitudes; set lora\.kind=canonical, or auto"):
        import_adapter(plain, tmp_path / "out", kind="dora")
    assert import_adapter(peft, tmp_path / "out", kind="dora").kind == "dora"


REFUSED_DORA: dict[str, tuple[Callable[..., Any], str]] = {
    "missing": (
        lambda tensors: {name: t for name, t in tensors.items() if "layers.2.self_attn.o_proj.lora_mag" not in name},
        r"layers\.2\.self_attn\.o_proj\.lora_magnitude_vector is missing",
    ),
    "there twice": (
        lambda tensors: {**tensors, f"{LAYER}.1.self_attn.o_proj.lora_magnitude_vector.default.weight": torch.ones(64)},
        r"lora_magnitude_vector\.default\.weight is there a second time, as .*o_proj\.lora_magnitude_vector",
    ),
    "of another width": (
        lambda tensors: {**tensors, f"{LAYER}.1.self_attn.o_proj.lora_magnitude_vector": torch.ones(48)},
        r"o_proj\.lora_magnitude_vector is \[48\], expected \[64\]",
    ),
    "of a layer without matrices": (
        lambda tensors: {**tensors, f"{LAYER}.1.self_attn.q_proj.lora_magnitude_vector": torch.ones(64)},
        r"q_proj\.lora_A\.weight is missing",
    ),
    "of an expert": (
        lambda tensors: {**tensors, f"{LAYER}.1.mlp.experts.0.up_proj.lora_magnitude_vector": torch.ones(32)},
        "the base has 0 experts",
    ),
}


@pytest.mark.parametrize("case", REFUSED_DORA)
def test_magnitudes_are_accounted_for(case: str, base_of: BaseOf, tmp_path: Path) -> None:
    """Every one is there, fits, and belongs to matrices."""
    change, words = REFUSED_DORA[case]
    base = base_of("llama").load()
    peft = change_weights(write_peft(tmp_path / "peft", base, ["o_proj"], use_dora=True), change)
    with pytest.raises(ProblemsError, match=words):
        import_adapter(peft, tmp_path / "out")


def test_dora_of_experts_is_refused(base_of: BaseOf, tmp_path: Path) -> None:
    """PEFT has none of stacked experts; a file that says so all the same is not read."""
    base = base_of("qwen3_moe")
    peft = change_config(write_peft(tmp_path / "peft", base.load(), ["o_proj"]), use_dora=True)
    at = f"{LAYER}.0.mlp.experts.1.up_proj"
    change_weights(
        peft,
        lambda tensors: {
            **tensors,
            f"{at}.lora_A.weight": torch.zeros(4, 64),
            f"{at}.lora_B.weight": torch.zeros(32, 4),
            f"{at}.lora_magnitude_vector": torch.ones(32),
        },
    )
    with pytest.raises(ProblemsError, match=r"experts\.1\.up_proj is adapted, .* has no DoRA of experts"):
        import_adapter(peft, tmp_path / "out")


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["up_proj"], ["o_proj", "down_proj"]])
def test_a_part_of_a_fused_layer_can_be_adapted_alone(targets: list[str], base_of: BaseOf, tmp_path: Path) -> None:
    """The usual q and v; what is not fused needs no kind of its own."""
    peft = write_peft(tmp_path / "peft", base_of("llama").load(), targets)
    imported, exported = there_and_back(peft, tmp_path)
    assert imported.kind == ("lora" if "o_proj" in targets else "canonical")
    assert exported.target_modules == tuple(sorted(targets))
    assert same_tensors(peft, exported.path)


def test_some_layers_alone(base_of: BaseOf, tmp_path: Path) -> None:
    """PEFT's layers_to_transform, which is in the names of the keys."""
    peft = write_peft(tmp_path / "peft", base_of("qwen3").load(), EVERY, layers_to_transform=[1, 3])
    _, exported = there_and_back(peft, tmp_path)
    assert same_tensors(peft, exported.path)


@pytest.mark.parametrize("kind", ["lora", "canonical"])
def test_experts_come_back_too(kind: str, base_of: BaseOf, tmp_path: Path) -> None:
    """Under the names that each expert has by itself, which PEFT reads and stacks."""
    base = base_of("qwen3_moe")
    generator, shape = torch.Generator().manual_seed(3), base.shape
    tensors = {}
    for layer in range(shape.num_layers):
        for expert in range(shape.num_experts):
            at = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}"
            for part, (rows, columns) in {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}.items():
                tensors[f"{at}.{part}.lora_A.weight"] = torch.randn(4, columns, generator=generator) * 0.1
                tensors[f"{at}.{part}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.1
    peft = tmp_path / "peft"
    LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["gate_proj", "up_proj", "down_proj"],
        base_model_name_or_path=str(base.path),
        task_type="CAUSAL_LM",
    ).save_pretrained(peft)
    if kind == "lora":
        share_a(tensors)
    save_file(tensors, peft / "adapter_model.safetensors", metadata={"format": "pt"})
    imported, exported = there_and_back(peft, tmp_path)
    assert imported.kind == kind
    assert same_tensors(peft, exported.path)


def test_an_imported_adapter_is_a_whole_checkpoint(base_of: BaseOf, tmp_path: Path) -> None:
    """It verifies, says what it is of, and has nothing that a resume needs."""
    peft = write_peft(tmp_path / "peft", base_of("llama").load())
    import_adapter(peft, tmp_path / "imported")
    checkpoint: CommittedCheckpoint = open_checkpoint(tmp_path / "imported")
    assert verify_files(checkpoint) == []
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.data, manifest.tokenizer_fingerprint) == (0, None, None)
    assert manifest.base.name == str(base_of("llama").path)
    assert (manifest.lora.settings.dim, manifest.lora.settings.alpha) == (4, 12)


def test_rslora_becomes_the_alpha_of_the_same_scale(base_of: BaseOf, tmp_path: Path) -> None:
    """Alpha over the root of the rank: 12 / 2 is 24 / 4, and the logits agree."""
    peft = write_peft(tmp_path / "peft", base_of("llama").load(), use_rslora=True)
    imported, exported = there_and_back(peft, tmp_path)
    assert imported.alpha == exported.alpha == 24
    odd = write_peft(tmp_path / "odd", base_of("llama").load(), r=5, use_rslora=True)
    with pytest.raises(ProblemsError, match="no whole alpha over the rank 5"):
        import_adapter(odd, tmp_path / "never")


def test_the_fused_kind_is_refused_where_it_cannot_hold_the_adapter(base_of: BaseOf, tmp_path: Path) -> None:
    """Averaging or choosing one of three A would be another adapter."""
    peft = write_peft(tmp_path / "peft", base_of("llama").load())
    with pytest.raises(
        ProblemsError, match=r"q_proj, k_proj, v_proj of layer 0 \(self_attention\) have an A of their own"
    ):
        import_adapter(peft, tmp_path / "out", kind="lora")
    assert not (tmp_path / "out").exists()
    change_weights(peft, share_a)
    assert import_adapter(peft, tmp_path / "apart", kind="canonical").kind == "canonical"
    assert import_adapter(peft, tmp_path / "fused", kind="lora").kind == "lora"


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "without alpha": ({"lora_alpha": None}, "lora_alpha is missing"),
    "without effect": ({"lora_alpha": 0}, "lora_alpha is 0, expected a number above 0"),
    "without rank": ({"r": None}, "r is missing"),
    "DoRA without magnitudes": ({"use_dora": True}, r"o_proj\.lora_magnitude_vector is missing"),
    "rank pattern": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is .*: a rank of its own"),
    "alpha pattern": ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern is .*: a scale of its own"),
    "biases": ({"bias": "all"}, "bias is \"all\", expected 'none'"),
    "whole layers": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \[\"lm_head\"\]: whole layers"),
    "PiSSA": ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa": it changes the base\'s weights'),
    "another method": ({"peft_type": "IA3"}, "peft_type is \"IA3\", expected 'LORA'"),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_what_makes_it_another_adapter_is_refused_by_name(case: str, base_of: BaseOf, tmp_path: Path) -> None:
    """Whatever the matrices are: read without it they would compute something else."""
    changes, words = REFUSED_CONFIGS[case]
    peft = change_config(write_peft(tmp_path / "peft", base_of("llama").load(), ["o_proj"]), **changes)
    with pytest.raises(ProblemsError, match=words):
        import_adapter(peft, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def without(part: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return what takes the matrices out whose key has a part."""
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def beside(key: str, *size: int) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return what puts a tensor beside the matrices."""
    return lambda tensors: {**tensors, key: torch.zeros(size)}


REFUSED_WEIGHTS: dict[str, tuple[Callable[..., Any], str]] = {
    "half missing": (
        without("layers.2.self_attn.o_proj.lora_B"),
        r"layers\.2\.self_attn\.o_proj\.lora_B\.weight is missing",
    ),
    "magnitudes": (
        beside(f"{LAYER}.0.self_attn.o_proj.lora_magnitude_vector", 64),
        r"lora_magnitude_vector is a magnitude of DoRA, and use_dora is not true",
    ),
    "output layer": (
        beside("base_model.model.lm_head.lora_A.weight", 4, 64),
        "is of the embedding or the output layer",
    ),
    "misspelt": (beside(f"{LAYER}.0.self_attn.o_porj.lora_A.weight", 4, 64), "did you mean o_proj"),
    "another base": (beside(f"{LAYER}.7.self_attn.o_proj.lora_A.weight", 4, 64), "the base has 4 layers"),
    "another width": (
        beside(f"{LAYER}.0.self_attn.o_proj.lora_A.weight", 4, 48),
        r"o_proj\.lora_A\.weight is \[4, 48\], expected \[4, 64\]",
    ),
    "another rank": (
        beside(f"{LAYER}.0.self_attn.o_proj.lora_A.weight", 8, 64),
        r"o_proj\.lora_A\.weight is \[8, 64\], expected \[4, 64\]",
    ),
    "another place": (beside(f"{LAYER}.0.mlp.q_proj.lora_A.weight", 4, 64), "the base has no such layer"),
    "an expert": (beside(f"{LAYER}.0.mlp.experts.0.up_proj.lora_A.weight", 4, 64), "the base has 0 experts"),
    "stacked experts": (beside(f"{LAYER}.0.mlp.experts.lora_A.weight", 4, 64), "experts that PEFT has stacked"),
    "whole numbers": (
        lambda tensors: {**tensors, f"{LAYER}.0.self_attn.o_proj.lora_A.weight": torch.zeros(4, 64, dtype=torch.int32)},
        "is I32, expected float32, bfloat16 or float16",
    ),
}


@pytest.mark.parametrize("case", REFUSED_WEIGHTS)
def test_every_key_is_accounted_for(case: str, base_of: BaseOf, tmp_path: Path) -> None:
    """What is missing, left over or of another form is listed; nothing is dropped with a warning."""
    change, words = REFUSED_WEIGHTS[case]
    peft = change_weights(write_peft(tmp_path / "peft", base_of("llama").load(), ["o_proj"]), change)
    with pytest.raises(ProblemsError, match=words):
        import_adapter(peft, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_none_are_refused(base_of: BaseOf, tmp_path: Path) -> None:
    """One NaN in a bfloat16 adapter."""

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        half[f"{LAYER}.3.self_attn.o_proj.lora_B.weight"][5, 1] = torch.nan
        return half

    peft = change_weights(write_peft(tmp_path / "peft", base_of("llama").load(), ["o_proj"]), spoil)
    with pytest.raises(CheckpointDamaged, match=r"layers\.3\.self_attn\.o_proj\.lora_B\.weight holds NaN"):
        import_adapter(peft, tmp_path / "out")


def test_a_file_that_is_cut_short_is_refused(base_of: BaseOf, tmp_path: Path) -> None:
    """At any place: within the numbers, within the header, before it."""
    peft = write_peft(tmp_path / "peft", base_of("llama").load(), ["o_proj"])
    path = peft / "adapter_model.safetensors"
    whole = path.read_bytes()
    for length in (len(whole) - 1, 300, 5, 0):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointDamaged, match="is damaged"):
            import_adapter(peft, tmp_path / "out")


def test_what_is_no_adapter_and_what_is_in_the_way_is_told(base_of: BaseOf, tmp_path: Path) -> None:
    """A directory of something else, weights in a pickle, a base that is not here, an output that exists."""
    with pytest.raises(CheckpointNotFound, match="no Hugging Face PEFT adapter"):
        import_adapter(tmp_path, tmp_path / "out")
    peft = write_peft(tmp_path / "peft", base_of("llama").load(), ["o_proj"])
    (tmp_path / "taken").mkdir()
    with pytest.raises(CkptrainError, match="it exists; name another OUT"):
        import_adapter(peft, tmp_path / "taken")
    change_config(peft, base_model_name_or_path="/nowhere/base")
    with pytest.raises(ConfigError, match="name it with --base"):
        import_adapter(peft, tmp_path / "out")
    assert import_adapter(peft, tmp_path / "out", base=str(base_of("llama").path)).tensors
    (peft / "adapter_model.safetensors").rename(peft / "adapter_model.bin")
    with pytest.raises(ProblemsError, match=r"it holds adapter_model\.bin: load it with PEFT"):
        import_adapter(peft, tmp_path / "again")


def test_a_fused_a_is_that_of_its_parts(base_of: BaseOf, tmp_path: Path) -> None:
    """Row for row: the first block of a fused B is the query heads of the first key-value head."""
    peft = change_weights(write_peft(tmp_path / "peft", base_of("llama").load()), share_a)
    source = open_source(peft)
    with source.layers() as read:
        lora_a, lora_b = (read(2)[name] for name in weight_names("decoder.layers.2.self_attention.linear_qkv"))
    tensors = load_file(peft / "adapter_model.safetensors")
    q, k = (tensors[f"{LAYER}.2.self_attn.{part}_proj.lora_B.weight"] for part in "qk")
    assert torch.equal(lora_a, tensors[f"{LAYER}.2.self_attn.q_proj.lora_A.weight"])
    assert torch.equal(lora_b[:16], q[:16])
    assert torch.equal(lora_b[16:24], k[:8])
