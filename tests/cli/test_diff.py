"""What `ckptrain diff` finds between two checkpoints, and what it does not read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import Result

from ckptrain.checkpoint import tensors as module

Ask = Callable[..., Result]
AskJson = Callable[..., dict[str, Any]]
Save = Callable[..., Any]

A = torch.linspace(-1, 1, 64).view(8, 8)
RNG = {"rng.rank00000.default": torch.arange(16, dtype=torch.uint8)}
NOTHING = {"same": 5, "changed": [], "not_compared": 0, "other_form": [], "only_in_a": [], "only_in_b": []}


def test_a_checkpoint_does_not_differ_from_itself(ask: Ask, ask_json: AskJson, run_dir: Path, save: Save) -> None:
    """A run stands for its newest."""
    checkpoint = save(50)
    report = ask_json("diff", checkpoint.path, run_dir)
    assert (report["facts"], report["config"], report["tensors"]) == ([], [], NOTHING)
    assert report["a"] == report["b"]
    assert "5 tensors equal" in ask("diff", checkpoint.path, run_dir).stdout


def test_what_the_manifests_say_otherwise_is_told_by_section(ask_json: AskJson, save: Save) -> None:
    """Position, base, adapter, layout, metrics and versions, each key by itself."""
    first = save(50, {"val_loss": 1.25})
    manifest = first.manifest
    second = save(
        75,
        {"loss": 2.0},
        base=attrs.evolve(manifest.base, fingerprint="f" * 64),
        lora=attrs.evolve(manifest.lora, modules=manifest.lora.modules[1:]),
        layout=attrs.evolve(manifest.layout, tensor=2),
        versions={**manifest.versions, "torch": "9.9"},
    )
    report = ask_json("diff", first.path, second.path)
    found = {(fact["section"], fact["key"]): (fact["a"], fact["b"]) for fact in report["facts"]}
    assert found == {
        ("position", "step"): (50, 75),
        ("position", "consumed_samples"): (400, 600),
        ("position", "consumed_tokens"): (50_000, 75_000),
        ("position", "optimizer.step"): (50, 75),
        ("base", "base.fingerprint"): (manifest.base.fingerprint, "f" * 64),
        ("lora", "lora.modules"): (list(manifest.lora.modules), list(manifest.lora.modules[1:])),
        ("layout", "layout.tensor"): (1, 2),
        ("metrics", "metrics.val_loss"): (1.25, None),
        ("metrics", "metrics.loss"): (None, 2.0),
        ("versions", "versions.torch"): (manifest.versions["torch"], "9.9"),
    }
    assert report["exit_status"] == 0


def test_a_config_key_comes_with_what_a_resume_would_say(ask: Ask, ask_json: AskJson, save: Save) -> None:
    """Refused, noted or free, by the table that decides it."""
    first = save(50)
    config = {**first.manifest.config, "train.seed": 7, "optimizer.lr": 0.5, "checkpoint.keep_last": 9}
    second = save(75, config=config)
    changes = {change["key"]: change for change in ask_json("diff", first.path, second.path)["config"]}
    assert {key: change["resume"] for key, change in changes.items()} == {
        "optimizer.lr": "noted",
        "train.seed": "refused",
        "checkpoint.keep_last": "free",
    }
    assert (changes["train.seed"]["a"], changes["train.seed"]["b"]) == (1234, 7)
    text = " ".join(ask("diff", first.path, second.path).stdout.split())
    assert "train.seed 1234 7 refused: it decides the order of the samples" in text
    assert "optimizer.lr 0.0001 0.5 noted: it changes the learning rate" in text


def test_a_changed_tensor_is_told_by_how_much(ask: Ask, ask_json: AskJson, save: Save) -> None:
    """Compared with torch; one that did not change is not listed, and the states of random generators only differ."""
    b = A + torch.randn(A.shape, generator=torch.Generator().manual_seed(5)) / 10
    other = {"rng.rank00000.default": torch.arange(1, 17, dtype=torch.uint8)}
    first = save(50, state={"adapter": {"weight": A, "still": A}, "optimizer": {"moment": A, **RNG}})
    second = save(75, state={"adapter": {"weight": b, "still": A}, "optimizer": {"moment": A, **other}})
    found = ask_json("diff", first.path, second.path)["tensors"]
    assert found["same"] == 2
    weight, rng = found["changed"]
    assert (weight["name"], weight["group"]) == ("weight", "adapter")
    difference = torch.linalg.vector_norm(b.double() - A.double()).item()
    assert weight["change"]["norm"] == pytest.approx(difference, rel=1e-12)
    relative = difference / torch.linalg.vector_norm(A.double()).item()
    assert weight["change"]["relative"] == pytest.approx(relative, rel=1e-12)
    assert weight["change"]["largest"] == (b.double() - A.double()).abs().max().item()
    assert rng == {"name": "rng.rank00000.default", "group": "rng", "change": None}
    text = " ".join(ask("diff", first.path, second.path).stdout.split())
    assert f"adapter: 1 tensor changed, by {relative:.3g} of their norm in A" in text
    assert f"{relative:.3g} {difference:.4g}" in text
    assert "rng: 1 tensor changed" in text


def test_tensors_of_one_side_only_and_of_another_form_are_named(ask: Ask, ask_json: AskJson, save: Save) -> None:
    """A shape or a type that differs leaves nothing to subtract."""
    first = save(50, state={"adapter": {"gone": A, "shape": A, "type": A, "same": A}})
    second = save(75, state={"adapter": {"new": A, "shape": A.view(4, 16), "type": A.bfloat16(), "same": A}})
    found = ask_json("diff", first.path, second.path)["tensors"]
    assert (found["only_in_a"], found["only_in_b"], found["same"], found["changed"]) == (["gone"], ["new"], 1, [])
    assert [tensor["name"] for tensor in found["other_form"]] == ["shape", "type"]
    text = " ".join(ask("diff", first.path, second.path).stdout.split())
    assert "shape: float32 8 x 8 in A, float32 4 x 16 in B" in text
    assert "only in A gone" in text
    assert "only in B new" in text


def refuse(*_arguments: object) -> None:
    """Stand for a reader that must not be called."""
    raise AssertionError("a tensor was read")


def test_files_with_equal_digests_are_not_read(ask_json: AskJson, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two saves of the same numbers are the same bytes."""
    first, second = save(50), save(75)
    monkeypatch.setattr(module, "read_each", refuse)
    assert ask_json("diff", first.path, second.path)["tensors"] == NOTHING


def test_no_tensors_leaves_out_what_must_be_read(
    ask: Ask, ask_json: AskJson, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says how many it left out, of those whose files differ."""
    first = save(50, state={"adapter": {"weight": A}, "optimizer": {"moment": A, **RNG}})
    second = save(75, state={"adapter": {"weight": A + 1}, "optimizer": {"moment": A, **RNG}})
    monkeypatch.setattr(module, "read_each", refuse)
    found = ask_json("diff", first.path, second.path, "--no-tensors")["tensors"]
    assert (found["same"], found["changed"], found["not_compared"]) == (2, [], 1)
    assert "1 tensor not compared: their files differ" in ask("diff", first.path, second.path, "--no-tensors").stdout


def test_only_tensors_in_files_that_differ_are_read(
    ask_json: AskJson, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that changed leaves the optimizer's files alone."""
    first = save(50, state={"adapter": {"weight": A}, "optimizer": {"moment": A, **RNG}})
    second = save(75, state={"adapter": {"weight": A + 1}, "optimizer": {"moment": A, **RNG}})
    asked: list[list[str]] = []
    real = module.read_each

    def read(checkpoint: Any, names: Any) -> Any:
        asked.append(list(names))
        return real(checkpoint, names)

    monkeypatch.setattr(module, "read_each", read)
    assert ask_json("diff", first.path, second.path)["tensors"]["same"] == 2
    assert asked == [["weight"], ["weight"]]


@pytest.mark.parametrize("side", [0, 1])
def test_a_changed_byte_is_refused_where_numbers_are_compared(ask: Ask, save: Save, side: int) -> None:
    """Exit status 65 and the checkpoint's name, whichever side it is on."""
    both = [save(50, state={"adapter": {"weight": A}}), save(75, state={"adapter": {"weight": A + 1}})]
    path = both[side].path / "adapter" / "__0_0.distcp"
    path.write_bytes(b"N" + path.read_bytes()[1:])
    result = ask("diff", both[0].path, both[1].path)
    assert result.exit_code == 65
    assert f"{both[side].path}: it is damaged" in result.stderr
    assert "adapter/__0_0.distcp has other contents" in result.stderr
    assert ask("diff", both[0].path, both[1].path, "--no-tensors").exit_code == 0


def test_a_long_list_is_told_by_what_only_one_side_has(ask: Ask, save: Save) -> None:
    """Hundreds of module names side by side tell nobody anything."""
    first = save(50)
    modules = first.manifest.lora.modules
    second = save(75, lora=attrs.evolve(first.manifest.lora, modules=(*modules[1:], "decoder.layers.9.new")))
    text = " ".join(ask("diff", first.path, second.path).stdout.split())
    assert f"{len(modules)} values, only here" in text
    assert modules[0] in text.replace(" ", "")
