"""What `ckptrain inspect` tells of a checkpoint, and what it says of the numbers in it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor

Ask = Callable[..., Result]
AskJson = Callable[..., dict[str, Any]]
Save = Callable[..., Any]

STACKED = "decoder.layers.mlp.linear_fc1.adapter.linear_out.weight"


def test_everything_that_a_manifest_says_is_in_the_answer(ask_json: AskJson, save: Save) -> None:
    """Sizes are those on disk; without --norms nothing is said of the numbers."""
    checkpoint = save(50, {"val_loss": 1.25})
    manifest = checkpoint.manifest
    report = ask_json("inspect", checkpoint.path)
    assert (report["exit_status"], report["path"]) == (0, str(checkpoint.path))
    assert (report["run_id"], report["step"], report["consumed_tokens"]) == ("abcd", 50, 50_000)
    assert report["base"]["fingerprint"] == manifest.base.fingerprint
    assert report["lora"]["settings"]["dim"] == manifest.lora.settings.dim
    assert report["layout"] == {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "data": 1, "world_size": 1}
    assert report["metrics"] == {"val_loss": 1.25}
    assert report["config"] == manifest.config
    on_disk = {path: path.stat().st_size for path in checkpoint.path.rglob("*") if path.is_file()}
    assert {checkpoint.path / name: file["num_bytes"] for name, file in report["files"].items()} == {
        path: size for path, size in on_disk.items() if path.name != "manifest.json"
    }
    assert report["num_bytes"] == sum(file["num_bytes"] for file in report["files"].values())
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert tensors.keys() == manifest.tensors.keys()
    assert tensors["rng.rank00000.default"] == {
        "name": "rng.rank00000.default", "group": "rng", "dtype": "uint8", "shape": [16], "num_bytes": 16, "values": None
    }  # fmt: skip
    assert {tensor["num_bytes"] for tensor in report["tensors"] if tensor["group"] == "adapter"} == {1024, 2048}
    assert report["remarks"] is None


def test_the_page_groups_tensors_by_what_they_are(ask: Ask, run_dir: Path, save: Save) -> None:
    """A run stands for its newest checkpoint; what all names of a kind begin with is said once."""
    save(25)
    save(50, {"val_loss": 1.25})
    result = ask("inspect", run_dir)
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for words in (
        "step-00000050",
        "50, 400 samples, 50,000 tokens",
        "run abcd, saved 2026-01-02",
        "rank 8, alpha 32",
        "tensor 1 x pipeline 1 x data 1, 1 process",
        "val_loss 1.2500",
        "adapter: 2 tensors, 3.07 kB",
        "bfloat16 8 x 64 1.02 kB decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight",
        "optimizer.state.exp_avg: 2 tensors, 6.14 kB",
        "rng: 1 tensor, 16 bytes",
        "4 files",
        "adapter/.metadata",
    ):
        assert words in text, words


def test_norms_are_those_of_the_tensors_that_were_saved(ask: Ask, ask_json: AskJson, save: Save) -> None:
    """Compared with torch; the states of random generators are no numbers."""
    a, b = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)), torch.full((128, 8), 0.5).bfloat16()
    state = {"adapter": {"in": a, "out": b}, "optimizer": {"rng.rank00000.default": torch.arange(9).byte()}}
    checkpoint = save(50, state=state)
    report = ask_json("inspect", checkpoint.path, "--norms")
    values = {tensor["name"]: tensor["values"] for tensor in report["tensors"]}
    assert values["in"]["norm"] == pytest.approx(torch.linalg.vector_norm(a.double()).item(), rel=1e-12)
    assert values["in"]["largest"] == a.abs().max().item()
    assert (values["out"]["norm"], values["out"]["num_not_finite"]) == (16.0, 0)  # sqrt(1024 * 0.25)
    assert values["rng.rank00000.default"] is None
    assert report["remarks"] == []
    text = " ".join(ask("inspect", checkpoint.path, "--norms").stdout.split())
    assert "bfloat16 128 x 8 16 0.5 out" in text


@pytest.mark.parametrize(
    ("b_matrices", "remark"),
    [
        ({"first": torch.zeros(4, 2), "second": torch.zeros(4, 2)}, "every linear_out weight is zero"),
        ({"first": torch.zeros(4, 2), "second": torch.ones(4, 2)}, "first.adapter.linear_out.weight is all zero: that"),
        ({"first": torch.tensor([[math.nan, math.inf]])}, "has 2 values that are NaN or infinite"),
    ],
)
def test_an_adapter_that_does_nothing_or_cannot_be_used_is_pointed_out(
    ask: Ask, ask_json: AskJson, save: Save, b_matrices: dict[str, Tensor], remark: str
) -> None:
    """In the page and in JSON; the checkpoint itself is intact, so the exit status is 0."""
    names = {f"{name}.adapter.linear_out.weight": tensor for name, tensor in b_matrices.items()}
    checkpoint = save(50, state={"adapter": {**names, "first.adapter.linear_in.weight": torch.ones(2, 4)}})
    report = ask_json("inspect", checkpoint.path, "--norms")
    assert report["exit_status"] == 0
    assert len(report["remarks"]) == 1
    assert remark in report["remarks"][0]
    assert remark in " ".join(ask("inspect", checkpoint.path, "--norms").stdout.split())


def test_layers_whose_adapters_do_nothing_are_named(ask_json: AskJson, save: Save) -> None:
    """All layers are in one tensor, so a pipeline stage that was never trained does not show in its norm."""
    b = torch.ones(4, 16, 2)
    b[2:] = 0
    report = ask_json("inspect", save(50, state={"adapter": {STACKED: b}}).path, "--norms")
    assert report["remarks"] == [f"{STACKED} is all zero in layer 2, 3: those adapters change nothing"]


def test_a_changed_byte_is_refused_where_it_would_be_read(ask: Ask, save: Save) -> None:
    """Exit status 65 and the file's name; what the manifest says can be told all the same."""
    checkpoint = save(50)
    path = checkpoint.path / "adapter" / "__0_0.distcp"
    path.write_bytes(b"N" + path.read_bytes()[1:])
    assert ask("inspect", checkpoint.path).exit_code == 0
    result = ask("inspect", checkpoint.path, "--norms")
    assert result.exit_code == 65
    assert "adapter/__0_0.distcp has other contents" in result.stderr


def test_a_path_that_is_no_checkpoint_is_a_usage_error(ask: Ask, tmp_path: Path, save: Save) -> None:
    """And a checkpoint that lacks a file is a damaged one."""
    assert ask("inspect", tmp_path / "nothing").exit_code == 2
    checkpoint = save(50)
    (checkpoint.path / "adapter" / "__0_0.distcp").unlink()
    result = ask("inspect", checkpoint.path)
    assert result.exit_code == 65
    assert "adapter/__0_0.distcp is missing" in result.stderr
