"""The gate: three numbers for a right adapter, and no wrong one gets through it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import launch

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.slices import SliceReader
from ckptrain.convert import merge as merge_module
from ckptrain.convert import to_peft as export_module
from ckptrain.convert.merge import merge_adapter
from ckptrain.convert.to_peft import export_adapter
from ckptrain.errors import AdapterMismatch, ConfigError

BaseOf = Callable[[str], Any]
Save = Callable[..., CommittedCheckpoint]
ALL_LINEAR = "lora.target_modules=[all-linear]"


@pytest.mark.parametrize("kind", ["lora", "canonical", "dora"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_a_right_export_and_a_right_merge_get_through(
    family: str, kind: str, base_of: BaseOf, save: Save, tmp_path: Path
) -> None:
    """Logits agree to float32's rounding, the effect is large, and both are written beside what they are about.

    Qwen2 has biases, which DoRA does not scale; of a mixture of experts it adapts the attention alone.
    """
    has_dora_experts = kind == "dora" and family == "qwen3_moe"
    targets = "lora.target_modules=[linear_qkv, linear_proj]" if has_dora_experts else ALL_LINEAR
    checkpoint = save(base_of(family), targets, f"lora.kind={kind}")

    def on_rank() -> tuple[Any, Any]:
        exported = export_adapter(checkpoint.path, tmp_path / "adapter", verify=True)
        return exported.gate, merge_adapter(checkpoint.path, tmp_path / "merged", verify=None).gate

    [gates] = launch(1, on_rank)
    for gate, path in zip(gates, ("adapter/ckptrain_export.json", "merged/ckptrain_merge.json"), strict=True):
        assert gate.difference < gate.allowed / 5
        assert gate.effect > 50 * gate.allowed
        written = json.loads((tmp_path / path).read_text())["gate"]
        assert written["checked"]
        assert (written["difference"], written["effect"]) == (gate.difference, gate.effect)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_in_16_bits_gets_through_by_its_own_tolerance(
    dtype: str, base_of: BaseOf, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was trained in float32 has lost digits, more than float32 may; another order of rows is caught all the same."""
    checkpoint = save(base_of("llama"), ALL_LINEAR)

    def on_rank(out: str) -> Any:
        return export_adapter(checkpoint.path, tmp_path / out, dtype=dtype, verify=True).gate

    [gate] = launch(1, lambda: on_rank("adapter"))
    [exact] = launch(1, lambda: export_adapter(checkpoint.path, tmp_path / "exact", verify=True).gate)
    assert 3 * exact.difference < gate.difference < gate.allowed / 5
    assert gate.allowed > 50 * exact.allowed
    from ckptrain.convert import unfuse

    right = unfuse.unfuse_rows
    spoilt = lambda short, matrix, shape: swap_gate_and_up(short, right(short, matrix, shape))  # noqa: E731
    monkeypatch.setattr(unfuse, "unfuse_rows", spoilt)
    with pytest.raises(AdapterMismatch, match=r"differ by .* from those under Megatron"):
        launch(1, lambda: on_rank("wrong"))


def swap_gate_and_up(short: str, rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the parts of a fused layer in another order."""
    return rows[::-1] if short == "linear_fc1" else rows


def swap_key_and_value(short: str, rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return them with two of the same shape exchanged."""
    return (rows[0], rows[2], rows[1]) if short == "linear_qkv" else rows


@pytest.mark.parametrize("spoil", [swap_gate_and_up, swap_key_and_value])
def test_rows_in_another_order_are_caught(
    spoil: Callable[..., Any], base_of: BaseOf, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every name and shape is right, and the numbers are not: nothing is written."""
    from ckptrain.convert import unfuse

    right = unfuse.unfuse_rows
    monkeypatch.setattr(unfuse, "unfuse_rows", lambda short, matrix, shape: spoil(short, right(short, matrix, shape)))
    checkpoint = save(base_of("llama"), ALL_LINEAR)
    for verb in (export_adapter, merge_adapter):
        with pytest.raises(AdapterMismatch, match=r"differ by .* from those under Megatron"):
            launch(1, lambda verb=verb: verb(checkpoint.path, tmp_path / "out", verify=True))
        assert not (tmp_path / "out").exists()


def test_a_layer_that_is_read_for_another_is_caught(
    base_of: BaseOf, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared shares nothing with what was exported but the files, so a fault in reading them shows."""
    right = SliceReader.read

    def of_the_layer_before(self: SliceReader, name: str, index: int | None = None) -> torch.Tensor:
        return right(self, name, index if index is None else max(index - 1, 0))

    checkpoint = save(base_of("llama"))
    monkeypatch.setattr(SliceReader, "read", of_the_layer_before)
    with pytest.raises(AdapterMismatch, match="differ by"):
        launch(1, lambda: export_adapter(checkpoint.path, tmp_path / "out", verify=True))
    assert not (tmp_path / "out").exists()


def test_a_lost_alpha_is_caught(base_of: BaseOf, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other exporters have written 0 or 32 where they did not know it."""
    right = export_module._peft_config
    for alpha, words in ((0, "which is nothing"), (32, "differ by")):
        monkeypatch.setattr(
            export_module, "_peft_config", lambda *args, alpha=alpha: {**right(*args), "lora_alpha": alpha}
        )
        checkpoint = save(base_of("llama"), step=100 + alpha)
        with pytest.raises(AdapterMismatch, match=words):
            launch(1, lambda checkpoint=checkpoint: export_adapter(checkpoint.path, tmp_path / "out", verify=True))


def test_keys_that_peft_drops_are_caught(
    base_of: BaseOf, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config leaves a layer out: its matrices would be passed over, with a warning at most."""
    right = export_module._peft_config

    def without_down(*args: Any) -> dict[str, Any]:
        config = right(*args)
        return {**config, "target_modules": [name for name in config["target_modules"] if name != "down_proj"]}

    monkeypatch.setattr(export_module, "_peft_config", without_down)
    checkpoint = save(base_of("llama"), ALL_LINEAR)
    with pytest.raises(AdapterMismatch, match=r"down_proj\.lora_A\.\S* was dropped by PEFT"):
        launch(1, lambda: export_adapter(checkpoint.path, tmp_path / "out", verify=True))


def swap_magnitudes(adapter: dict[str, torch.Tensor], one: str, other: str) -> dict[str, torch.Tensor]:
    """Exchange the magnitudes of two layers."""
    names = [next(name for name in adapter if f".{layer}.magnitude" in name) for layer in (one, other)]
    return {**adapter, names[0]: adapter[names[1]], names[1]: adapter[names[0]]}


@pytest.mark.parametrize("layers", [("adapter_k", "adapter_v"), ("adapter_gate", "adapter_up")])
def test_magnitudes_of_another_layer_are_caught(
    layers: tuple[str, str], base_of: BaseOf, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two vectors of the same shape exchanged on the way out: nothing is written."""
    from ckptrain.convert.checkpoint_source import CheckpointSource

    checkpoint = save(base_of("qwen2"), ALL_LINEAR, "lora.kind=dora")
    right = CheckpointSource.layers

    @contextlib.contextmanager
    def swapped(source: CheckpointSource) -> Iterator[Any]:
        with right(source) as read:
            yield lambda layer: swap_magnitudes(read(layer), *layers)

    for module, verb in ((export_module, export_adapter), (merge_module, merge_adapter)):

        def attempt(module: Any = module, verb: Any = verb) -> None:
            compare = module._compare

            def compare_unspoilt(*args: Any, **how: Any) -> Any:
                monkeypatch.setattr(CheckpointSource, "layers", right)
                return compare(*args, **how)

            monkeypatch.setattr(module, "_compare", compare_unspoilt)
            monkeypatch.setattr(CheckpointSource, "layers", swapped)
            verb(checkpoint.path, tmp_path / "out", verify=True)

        with pytest.raises(AdapterMismatch, match=r"differ by .* from those under Megatron"):
            launch(1, attempt)
        assert not (tmp_path / "out").exists()


def test_magnitudes_alone_are_an_effect(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """B is zero and the rows have other lengths than the base's: not called an adapter that does nothing."""

    def without_b(adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(t) if "linear_out" in name else t for name, t in adapter.items()}

    checkpoint = save(base_of("llama"), "lora.kind=dora", change=without_b)
    [result] = launch(1, lambda: export_adapter(checkpoint.path, tmp_path / "out", verify=True))
    assert result.gate.effect > 50 * result.gate.allowed
    assert "no more than the lengths of the base's rows" in result.warning


def test_a_scale_that_is_off_is_caught_in_a_merge(
    base_of: BaseOf, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alpha without the rank under it."""
    right = merge_module.merged
    monkeypatch.setattr(
        merge_module, "merged", lambda weight, a, b, m, scale: right(weight, a, b, m, scale=scale * a.shape[0])
    )
    checkpoint = save(base_of("qwen3"))
    with pytest.raises(AdapterMismatch, match="differ by"):
        launch(1, lambda: merge_adapter(checkpoint.path, tmp_path / "out", verify=True))


def test_an_adapter_that_does_nothing_gets_through_with_a_warning(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """Before its first step B is zero, and no effect is the right effect."""

    def untrained(adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(t) if "linear_out" in name else t for name, t in adapter.items()}

    checkpoint = save(base_of("llama"), change=untrained)
    [result] = launch(1, lambda: export_adapter(checkpoint.path, tmp_path / "out", verify=True))
    assert result.gate.effect == 0.0
    assert "changes nothing" in result.warning


def test_without_the_base_an_export_says_that_it_was_not_compared(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """By default it is compared where that is possible; asked for, its absence is an error."""
    base = base_of("qwen2")
    checkpoint = save(base)
    hidden = base.path.rename(base.path.with_name("hidden"))
    try:
        result = export_adapter(checkpoint.path, tmp_path / "out", verify=None)
        with pytest.raises(ConfigError, match="cannot use the base model"):
            export_adapter(checkpoint.path, tmp_path / "other", verify=True)
    finally:
        hidden.rename(base.path)
    assert result.gate is None
    assert "does not exist" in result.gate_reason
    assert not (tmp_path / "other").exists()
