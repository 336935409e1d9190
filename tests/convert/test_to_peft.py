"""An exported adapter computes what the Megatron model computes, says where it comes from, and is there whole or not."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor

from ckptrain.checkpoint.integrity import CommittedCheckpoint
from ckptrain.checkpoint.sharded import load_tensors
from ckptrain.config.shape import ModelShape
from ckptrain.convert import directory as directory_module
from ckptrain.convert.to_peft import export_adapter
from ckptrain.errors import CheckpointDamaged, CheckpointNotFound, CkptrainError, ConfigError, ProblemsError

BaseOf = Callable[[str], Any]
Save = Callable[..., CommittedCheckpoint]

_FILES = {"adapter_config.json", "adapter_model.safetensors", "ckptrain_export.json"}
_SCALE = 12 / 4  # alpha / dim of every checkpoint here
_TOKENS = torch.arange(0, 240, 5)[None]


def _read(checkpoint: CommittedCheckpoint) -> dict[str, Tensor]:
    """Read the adapter of a checkpoint: a tensor for each layer, under the layer's number."""
    stored = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in checkpoint.manifest.tensors.items()
    }
    load_tensors(stored, checkpoint.path / "adapter")
    adapter = {}
    for name, tensor in stored.items():
        if name.split(".")[2].isdigit():
            adapter[name] = tensor
        else:
            for layer in range(checkpoint.manifest.shape.num_layers):
                adapter[name.replace("decoder.layers.", f"decoder.layers.{layer}.")] = tensor[layer]
    return adapter


@torch.no_grad()
def _merge(model: Any, checkpoint: CommittedCheckpoint) -> Any:
    """Add (alpha / dim) B A to a Hugging Face model, from the definition of Megatron's fused layers, row by row."""
    adapter, shape = _read(checkpoint), checkpoint.manifest.shape
    for name in [name for name in adapter if ".linear_in." in name]:
        module = name.removesuffix(".adapter.linear_in.weight")
        delta = _SCALE * (adapter[name.replace("linear_in", "linear_out")] @ adapter[name])
        layer = model.model.layers[int(name.split(".")[2])]
        short = module.rpartition(".")[2]
        if short == "linear_proj":
            layer.self_attn.o_proj.weight += delta
        elif short == "linear_qkv":
            _add_qkv(layer.self_attn, delta, shape)
        elif ".experts." in module and short == "linear_fc1":
            layer.mlp.experts.gate_up_proj += delta
        elif ".experts." in module:
            layer.mlp.experts.down_proj += delta
        elif short == "linear_fc1":
            layer.mlp.gate_proj.weight += delta[: shape.ffn_hidden_size]
            layer.mlp.up_proj.weight += delta[shape.ffn_hidden_size :]
        else:
            layer.mlp.down_proj.weight += delta
    return model


def _add_qkv(attention: Any, delta: Tensor, shape: ModelShape) -> None:
    """Add the rows of linear_qkv: for each key-value head its query heads, its key, its value."""
    size, shared, row = shape.head_dim, shape.num_heads // shape.num_kv_heads, 0
    for group in range(shape.num_kv_heads):
        heads = [(attention.q_proj, group * shared + head) for head in range(shared)]
        for projection, head in [*heads, (attention.k_proj, group), (attention.v_proj, group)]:
            projection.weight[head * size : (head + 1) * size] += delta[row : row + size]
            row += size


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    return model(input_ids=_TOKENS).logits


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


_SOME_LAYERS = "lora.target_modules=['*.layers.1.*.linear_qkv','*.layers.2.*.linear_fc2']"


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", "lora.target_modules=[all-linear]"),
        ("mistral", "lora.target_modules=[all-linear]"),
        ("qwen2", "lora.target_modules=[all-linear]"),
        ("qwen3", "lora.target_modules=[all-linear]"),
        ("qwen3_moe", "lora.target_modules=[all-linear]"),
        ("llama", _SOME_LAYERS),
        ("llama", "lora.target_modules=[linear_proj]"),
        ("qwen3_moe", _SOME_LAYERS),
        ("qwen3_moe", "lora.target_modules=[linear_fc1]"),
        ("qwen3_moe", "lora.target_modules=['*.layers.3.*.linear_fc1']"),
        ("qwen3_moe", "lora.target_modules=[linear_fc2]"),
    ],
)
def test_peft_computes_the_merged_model(base_of: BaseOf, save: Save, tmp_path: Path, family: str, targets: str) -> None:
    """PEFT's logits are those of the base with (alpha / dim) B A added to its weights, in every family and choice."""
    base = base_of(family)
    checkpoint = save(base, targets)
    export_adapter(checkpoint.path, tmp_path / "out")
    adapted = _logits(PeftModel.from_pretrained(base.load(), tmp_path / "out"))
    merged = _logits(_merge(base.load(), checkpoint))
    largest = merged.abs().max().item()
    assert (merged - _logits(base.load())).abs().max().item() > 1e-2 * largest  # the adapter does something
    torch.testing.assert_close(adapted, merged, rtol=0.0, atol=1e-5 * largest)


def test_only_the_chosen_layers_are_adapted(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """PEFT adapts exactly the layers that were trained: no others that would start from random values."""
    base = base_of("llama")
    result = export_adapter(save(base, _SOME_LAYERS).path, tmp_path / "out")
    model = PeftModel.from_pretrained(base.load(), tmp_path / "out")
    adapted = {name.removeprefix("base_model.model.") for name, m in model.named_modules() if hasattr(m, "lora_A")}
    assert adapted == {
        *(f"model.layers.1.self_attn.{part}_proj" for part in "qkv"),
        "model.layers.2.mlp.down_proj",
    }
    assert set(result.target_modules) == adapted


def test_the_config_is_what_peft_writes_itself(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """adapter_config.json has every key of this version of PEFT; rank, alpha and dropout are the run's."""
    base = base_of("llama")
    result = export_adapter(save(base, "lora.dropout=0.125").path, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    expected = LoraConfig(
        r=4,
        lora_alpha=12,
        lora_dropout=0.125,
        target_modules=["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
        base_model_name_or_path=str(base.path),
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    expected.save_pretrained(tmp_path / "peft")
    theirs = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    theirs["target_modules"] = sorted(theirs["target_modules"])
    assert written == theirs
    assert (result.rank, result.alpha, list(result.target_modules)) == (4, 12, theirs["target_modules"])


def test_the_base_is_not_needed(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """An export works where the base model is gone: the manifest has its dimensions."""
    base = base_of("qwen2")
    checkpoint = save(base)
    hidden = base.path.rename(base.path.with_name("hidden"))
    try:
        result = export_adapter(checkpoint.path, tmp_path / "out")
    finally:
        hidden.rename(base.path)
    assert result.base == str(base.path)
    assert result.tensors == 4 * 7 * 2


def test_the_same_checkpoint_gives_the_same_bytes(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """Two exports are equal in every byte of every file: no set orders, no times."""
    checkpoint = save(base_of("llama"))
    for name in ("a", "b"):
        export_adapter(checkpoint.path, tmp_path / name)
    assert _files(tmp_path / "a") == _files(tmp_path / "b")
    assert _files(tmp_path / "a").keys() == _FILES


def test_the_export_says_where_it_comes_from(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """ckptrain_export.json names run, step, base and the LoRA settings, and holds the digest of the manifest."""
    checkpoint = save(base_of("llama"), step=250)
    result = export_adapter(tmp_path / "run", tmp_path / "out")  # a run: its newest checkpoint
    told = json.loads((tmp_path / "out" / "ckptrain_export.json").read_text())
    assert (told["run_id"], told["step"]) == (checkpoint.manifest.run_id, 250) == (result.run_id, result.step)
    assert told["base"]["fingerprint"] == checkpoint.manifest.base.fingerprint
    assert told["lora"]["settings"]["alpha"] == 12
    assert told["effect"] == result.effect
    assert told["manifest_sha256"] == hashlib.sha256((checkpoint.path / "manifest.json").read_bytes()).hexdigest()


def test_effect_is_the_norm_of_what_is_added(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """The norm that comes from [rank, rank] products is that of the matrices (alpha / dim) B A themselves."""
    checkpoint = save(base_of("llama"))
    result = export_adapter(checkpoint.path, tmp_path / "out")
    adapter = _read(checkpoint)
    norms = [
        _SCALE * torch.linalg.norm(adapter[name.replace("linear_in", "linear_out")].double() @ adapter[name].double())
        for name in adapter
        if ".linear_in." in name
    ]
    assert math.isclose(result.effect, float(sum(norms)), rel_tol=1e-6)
    assert result.warning is None


def test_an_adapter_without_effect_is_told(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """B is zero before the first step: the export is right, and a warning says that it changes nothing."""

    def untrained(adapter: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor * (0.0 if "linear_out" in name else 1.0) for name, tensor in adapter.items()}

    result = export_adapter(save(base_of("llama"), change=untrained).path, tmp_path / "out")
    assert result.effect == 0.0
    assert "changes nothing" in str(result.warning)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_are_rounded_once_to_the_dtype_asked_for(
    base_of: BaseOf, save: Save, tmp_path: Path, dtype: str
) -> None:
    """A bfloat16 adapter is exact in float32; float32 weights are rounded to nearest in the others."""
    trained = torch.bfloat16 if dtype == "float32" else torch.float32
    checkpoint = save(
        base_of("llama"), change=lambda adapter: {name: tensor.to(trained) for name, tensor in adapter.items()}
    )
    result = export_adapter(checkpoint.path, tmp_path / "out", dtype=dtype)
    name = "layers.0.self_attention.linear_proj.adapter.linear_in.weight"
    stored = _read(checkpoint)[f"decoder.{name}"]
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    tensor = written["base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"]
    assert tensor.dtype is getattr(torch, dtype)
    assert torch.equal(tensor, stored.to(getattr(torch, dtype)))
    assert (result.tensors, result.num_bytes) == (
        len(written),
        (tmp_path / "out" / "adapter_model.safetensors").stat().st_size,
    )


def _refused(
    error: type[CkptrainError], words: str, call: Callable[[], object], untouched: Path, before: dict[str, bytes] | None
) -> None:
    """Check that a call fails with these words, leaves `untouched` as it was, and nothing beside it."""
    with pytest.raises(error, match=words):
        call()
    assert (_files(untouched) if untouched.is_dir() else None) == before
    assert not [path for path in untouched.parent.iterdir() if path.name.startswith(".writing-")]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(base_of: BaseOf, save: Save, tmp_path: Path, bad: float) -> None:
    """A diverged adapter is named, and nothing is written."""

    def spoil(adapter: dict[str, Tensor]) -> dict[str, Tensor]:
        adapter["decoder.layers.mlp.linear_fc2.adapter.linear_out.weight"][2, 3, 1] = bad
        return adapter

    checkpoint, out = save(base_of("llama"), change=spoil), tmp_path / "out"
    words = r"decoder\.layers\.2\.mlp\.linear_fc2\.adapter\.linear_out\.weight holds NaN or infinity"
    _refused(ProblemsError, words, lambda: export_adapter(checkpoint.path, out), out, None)


def test_weights_too_large_for_float16_are_refused(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """What float16 would turn into infinity is an error that names the remedy, and float32 takes it."""

    def enlarge(adapter: dict[str, Tensor]) -> dict[str, Tensor]:
        adapter["decoder.layers.mlp.linear_fc2.adapter.linear_in.weight"][0, 0, 0] = 1e6
        return adapter

    checkpoint, out = save(base_of("llama"), change=enlarge), tmp_path / "out"
    words = "too large for torch.float16: export as float32"
    _refused(ProblemsError, words, lambda: export_adapter(checkpoint.path, out, dtype="float16"), out, None)
    export_adapter(checkpoint.path, out)


def test_a_flipped_bit_is_refused(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """The files are compared with their digests before anything is made of them."""
    checkpoint, out = save(base_of("llama")), tmp_path / "out"
    [data] = (checkpoint.path / "adapter").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    _refused(CheckpointDamaged, "has other contents", lambda: export_adapter(checkpoint.path, out), out, None)


def test_a_checkpoint_that_lacks_a_module_is_refused(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """Less than the manifest promises is never exported as if it were all."""

    def lose(adapter: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor[:3] if "mlp.linear_fc1" in name else tensor for name, tensor in adapter.items()}

    checkpoint, out = save(base_of("llama"), change=lose), tmp_path / "out"
    words = r"layers\.mlp\.linear_fc1\.adapter\.linear_in\.weight is \[3, 4, 64\], expected \[4, 4, 64\]"
    _refused(CheckpointDamaged, words, lambda: export_adapter(checkpoint.path, out), out, None)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """A path that is neither a run nor a checkpoint is told so."""
    with pytest.raises(CheckpointNotFound):
        export_adapter(tmp_path, tmp_path / "out")


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    """The message lists the types that there are."""
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        export_adapter(tmp_path, tmp_path / "out", dtype="int8")


def test_an_existing_directory_is_left_alone(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """An earlier export is replaced only when that is asked for, and then wholly."""
    base, out = base_of("llama"), tmp_path / "out"
    first, second = save(base, step=1), save(base, "lora.target_modules=[linear_proj]", step=2)
    export_adapter(first.path, out)
    _refused(CkptrainError, "it exists", lambda: export_adapter(second.path, out), out, _files(out))
    assert export_adapter(second.path, out, overwrite=True).step == 2
    assert json.loads(_files(out)["ckptrain_export.json"])["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run", "train.jsonl"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"thesis.txt": b"years"}, "not an earlier export"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "not an earlier export"),
        ({"ckptrain_export.json": b"not JSON"}, "not an earlier export"),
        (
            {"ckptrain_export.json": b'{"format": "ckptrain-export-1"}', "notes.md": b"mine"},
            "notes.md in it would be lost",
        ),
    ],
)
def test_what_is_not_an_export_is_never_overwritten(
    base_of: BaseOf, save: Save, tmp_path: Path, content: dict[str, bytes], words: str
) -> None:
    """Even with overwrite, someone else's directory stays, and so do files that someone has added to an export."""
    checkpoint, out = save(base_of("llama")), tmp_path / "out"
    out.mkdir()
    for name, data in content.items():
        (out / name).write_bytes(data)
    _refused(CkptrainError, words, lambda: export_adapter(checkpoint.path, out, overwrite=True), out, content)


def test_an_empty_directory_may_be_overwritten(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """There is nothing to lose in it."""
    out = tmp_path / "out"
    out.mkdir()
    export_adapter(save(base_of("llama")).path, out, overwrite=True)
    assert _files(out).keys() == _FILES


@pytest.mark.parametrize(
    "where", ["run/checkpoints/step-00000100", "run/checkpoints/step-00000100/peft", "run/checkpoints/x"]
)
def test_an_export_never_lands_among_checkpoints(base_of: BaseOf, save: Save, tmp_path: Path, where: str) -> None:
    """A file more would make a checkpoint damaged, and a directory named like one would be taken for one."""
    checkpoint = save(base_of("llama"))
    with pytest.raises(CkptrainError, match="where only checkpoints may be"):
        export_adapter(checkpoint.path, tmp_path / where, overwrite=True)


def test_a_failed_write_leaves_what_was_there(
    base_of: BaseOf, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up in the middle of replacing an export leaves the earlier one, and no remains."""
    checkpoint, out = save(base_of("llama")), tmp_path / "out"
    export_adapter(checkpoint.path, out)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(directory_module, "fsync_file", full)
    words = "No space left on device; nothing of it is left there"
    _refused(CkptrainError, words, lambda: export_adapter(checkpoint.path, out, overwrite=True), out, _files(out))


def test_a_replacement_that_fails_halfway_is_taken_back(tmp_path: Path) -> None:
    """Where the second rename fails, the first is undone: the earlier export is under its name again."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError):
        directory_module._move(tmp_path / "gone", out, overwrite=True)
    assert _files(out) == {"adapter_config.json": b"{}"}
    assert list(tmp_path.iterdir()) == [out]


def test_what_appears_while_an_export_is_written_is_not_replaced(tmp_path: Path) -> None:
    """Two exports to one place at once: the second finds the first there, and leaves it."""
    out = tmp_path / "out"
    with (
        pytest.raises(CkptrainError, match="cannot write"),
        directory_module.published(out, overwrite=False) as staging,
    ):
        (staging / "adapter_config.json").write_text("second")
        out.mkdir()
        (out / "adapter_config.json").write_text("first")
    assert _files(out) == {"adapter_config.json": b"first"}
    assert list(tmp_path.iterdir()) == [out]


def test_a_place_that_cannot_be_written_is_told(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """A file where a directory has to be: the message names the place and the reason."""
    (tmp_path / "file").write_text("")
    checkpoint = save(base_of("llama"))
    with pytest.raises(CkptrainError, match=r"cannot write .*file/out: .* see that .*file is a directory"):
        export_adapter(checkpoint.path, tmp_path / "file" / "out")


def test_the_tool_exports_a_run(base_of: BaseOf, save: Save, tmp_path: Path) -> None:
    """tools/export_adapter.py CKPT OUT is `ckptrain export`: the same files, and its exit status."""
    checkpoint = save(base_of("llama"))
    tool = Path(__file__).parents[2] / "tools" / "export_adapter.py"
    command = [sys.executable, str(tool), str(tmp_path / "run"), str(tmp_path / "out"), "--no-verify", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tool.parents[1])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == checkpoint.step
    export_adapter(checkpoint.path, tmp_path / "same")
    assert _files(tmp_path / "out") == _files(tmp_path / "same")
