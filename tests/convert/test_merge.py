"""A merged model is the base with the adapter in its weights: what PEFT's own merge gives, from files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny import write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.convert import directory as directory_module
from ckptrain.convert.merge import merge_adapter, merged
from ckptrain.convert.to_peft import export_adapter
from ckptrain.errors import CkptrainError, ConfigError, ProblemsError

BaseOf = Callable[[str], Any]
Save = Callable[..., CommittedCheckpoint]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
ALL_LINEAR = "lora.target_modules=[all-linear]"


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model as transformers loads it, in the type that is stored."""
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict())


@pytest.mark.parametrize(
    ("family", "kind"), [*((family, "lora") for family in FAMILIES), ("llama", "dora"), ("qwen2", "dora")]
)
def test_the_merged_weights_are_those_of_peft(
    base_of: BaseOf, save: Save, tmp_path: Path, family: str, kind: str
) -> None:
    """Exported, loaded by PEFT and merged there: the same weights up to the last bits of float32, in every family."""
    base = base_of(family)
    checkpoint = save(base, ALL_LINEAR, f"lora.kind={kind}")
    result = merge_adapter(checkpoint.path, tmp_path / "merged")
    export_adapter(checkpoint.path, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(base.load(), tmp_path / "adapter").merge_and_unload().state_dict()
    ours, before = state_of(tmp_path / "merged"), base.load().state_dict()
    assert ours.keys() == theirs.keys() == before.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0.0, atol=2e-6)
    changed = [name for name in ours if not torch.equal(ours[name], before[name])]
    assert len(changed) > 10
    assert result.merged == 4 * (3 * 4 + 4 if family == "qwen3_moe" else 7)
    assert not any("norm" in name or "embed" in name or "lm_head" in name or "mlp.gate." in name for name in changed)


def copy_of(base: Any, path: Path, **how: Any) -> Path:
    """Save a base again, in another type or in several files, with a tokenizer and generation settings."""
    model = base.load().to(how.pop("dtype", torch.float32))
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(path, **how)
    write_tokenizer(path)
    return path


@pytest.fixture
def copied(base_of: BaseOf, save: Save, tmp_path: Path) -> Callable[..., CommittedCheckpoint]:
    """Return a maker of a checkpoint that was trained on a copy of the tiny Llama."""

    def make(*overrides: str, **how: Any) -> CommittedCheckpoint:
        base = base_of("llama")
        path = copy_of(base, tmp_path / "base", **how)
        return save(type(base)(path=path, shape=base.shape), *overrides)

    return make


def test_a_base_in_several_files_stays_in_them(copied: Callable[..., CommittedCheckpoint], tmp_path: Path) -> None:
    """The index says where each weight is; tokenizer, template and generation settings come along; it loads."""
    merge_adapter(copied(max_shard_size="100KB").path, tmp_path / "merged")
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    base_files = {path.name for path in (tmp_path / "base").iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) > 3
    assert files == base_files | {"ckptrain_merge.json"}
    index = json.loads((tmp_path / "merged/model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((tmp_path / "base/model.safetensors.index.json").read_text())["weight_map"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.generation_config.max_new_tokens == 17
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert "<|im_start|>" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_half_precision_is_rounded_once(copied: Callable[..., CommittedCheckpoint], tmp_path: Path) -> None:
    """Of a bfloat16 base each weight is (W + s B A) in float32, rounded; adding in bfloat16 would give others."""
    checkpoint = copied(dtype=torch.bfloat16)
    merge_adapter(checkpoint.path, tmp_path / "merged")
    export_adapter(checkpoint.path, tmp_path / "adapter")
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    name = "model.layers.2.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
    update = 12 / 4 * (b @ a)
    weight = before[f"{name}.weight"]
    assert weight.dtype is after[f"{name}.weight"].dtype is torch.bfloat16
    assert torch.equal(after[f"{name}.weight"], (weight.float() + update).bfloat16())
    assert not torch.equal(after[f"{name}.weight"], weight + update.bfloat16())


def test_rows_with_magnitudes_are_rounded_once_too(copied: Callable[..., CommittedCheckpoint], tmp_path: Path) -> None:
    """Of a bfloat16 base: (m / n) (W + s B A) in float32, where PEFT's own merge would round several times."""
    checkpoint = copied("lora.kind=dora", dtype=torch.bfloat16)
    merge_adapter(checkpoint.path, tmp_path / "merged")
    export_adapter(checkpoint.path, tmp_path / "adapter")
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    name = "model.layers.1.self_attn.k_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{half}.weight"].double() for half in "AB")
    rows = before[f"{name}.weight"].double() + 12 / 4 * (b @ a)
    rows *= (adapter[f"base_model.model.{name}.lora_magnitude_vector"].double() / rows.norm(dim=1))[:, None]
    found = after[f"{name}.weight"]
    assert found.dtype is torch.bfloat16
    # float32 against float64 may round to the other neighbour where a number lies between two.
    assert (found != rows.bfloat16()).sum() <= 2
    torch.testing.assert_close(found.double(), rows, rtol=2**-8, atol=0.0)


def test_the_type_can_be_chosen(copied: Callable[..., CommittedCheckpoint], tmp_path: Path) -> None:
    """All weights get it, and config.json says so."""
    merge_adapter(copied().path, tmp_path / "merged", dtype="bfloat16")
    assert {tensor.dtype for tensor in state_of(tmp_path / "merged").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "bfloat16"


def test_merging_is_the_formula() -> None:
    """W + s B A, with numbers that can be checked by eye."""
    weight, a, b = torch.ones(2, 3), torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0], [10.0]])
    assert merged(weight, a, b, scale=2.0).tolist() == [[3.0, 5.0, 7.0], [21.0, 41.0, 61.0]]


def test_merging_dora_is_the_formula() -> None:
    """Each row of W + s B A, scaled to its magnitude: 3 and 4 have length 5."""
    weight, a, b = torch.tensor([[2.0, 2.0], [4.0, 4.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5], [1.0]])
    assert merged(weight, a, b, torch.tensor([10.0, 5.0]), scale=2.0).tolist() == [[6.0, 8.0], [3.0, 4.0]]


def refused(error: type[CkptrainError], words: str, checkpoint: CommittedCheckpoint, out: Path) -> None:
    """Expect a refusal that leaves nothing behind."""
    with pytest.raises(error, match=words):
        merge_adapter(checkpoint.path, out)
    assert [path for path in out.parent.iterdir() if out.name in path.name] == []


def test_another_base_is_refused(copied: Callable[..., CommittedCheckpoint], tmp_path: Path) -> None:
    """What lies under the base's name has other weights than the adapter was trained on."""
    checkpoint = copied()
    weights = load_file(tmp_path / "base/model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    refused(ConfigError, "is another model than .* was trained on", checkpoint, tmp_path / "merged")


def test_a_base_that_is_gone_is_refused(copied: Callable[..., CommittedCheckpoint], tmp_path: Path) -> None:
    """Unlike an export, a merge needs it."""
    checkpoint = copied()
    (tmp_path / "base").rename(tmp_path / "gone")
    refused(ConfigError, "cannot use the base model", checkpoint, tmp_path / "merged")


def test_a_base_without_an_adapted_layer_is_refused(
    copied: Callable[..., CommittedCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the adapter would be left out; every such weight is listed."""
    checkpoint = copied()
    weights = load_file(tmp_path / "base/model.safetensors")
    weights["model.layers.1.mlp.down.weight"] = weights.pop("model.layers.1.mlp.down_proj.weight")
    save_file(weights, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("ckptrain.convert.merge.base_of", lambda _: tmp_path / "base")
    words = r"model\.layers\.1\.mlp\.down_proj\.weight is adapted, and the base has no such weight"
    refused(ProblemsError, words, checkpoint, tmp_path / "merged")


def test_a_quantised_base_is_refused(
    copied: Callable[..., CommittedCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are not the weights."""
    checkpoint = copied()
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    monkeypatch.setattr("ckptrain.convert.merge.base_of", lambda _: tmp_path / "base")
    refused(ConfigError, "is quantised", checkpoint, tmp_path / "merged")


def test_what_is_at_out_is_kept(copied: Callable[..., CommittedCheckpoint], tmp_path: Path) -> None:
    """A directory is replaced only if it is an earlier merged model, only when asked, and only as it was written."""
    checkpoint, out = copied(), tmp_path / "merged"
    merge_adapter(checkpoint.path, out)
    with pytest.raises(CkptrainError, match="it exists"):
        merge_adapter(checkpoint.path, out)
    merge_adapter(checkpoint.path, out, overwrite=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CkptrainError, match=r"notes\.txt in it would be lost"):
        merge_adapter(checkpoint.path, out, overwrite=True)
    with pytest.raises(CkptrainError, match="not an earlier merged model"):
        merge_adapter(checkpoint.path, tmp_path / "base", overwrite=True)


def test_a_full_disk_leaves_nothing(
    copied: Callable[..., CommittedCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync fails: no merged model, and no half of one."""

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    checkpoint = copied()
    monkeypatch.setattr(directory_module, "fsync_file", full)
    refused(CkptrainError, "No space left on device", checkpoint, tmp_path / "merged")
