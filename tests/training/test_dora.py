"""DoRA under Megatron: it starts as the base, in every layout from the same bits, and what it cannot do is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from support.launch import launch, run_training
from support.models import LENGTHS, packed, with_model
from support.restored import assert_same_end, equal, losses, run_straight_and_in_two, whole_tensors
from transformers import AutoModelForCausalLM

from ckptrain.checkpoint.integrity import open_checkpoint
from ckptrain.config.estimate import checkpoint_bytes, memory_estimate
from ckptrain.config.schema import RunConfig
from ckptrain.convert.to_peft import export_adapter
from ckptrain.errors import ConfigError
from ckptrain.training.start import survey_run

if TYPE_CHECKING:
    from ckptrain.training.setup import ModelSetup

DORA = ("lora.kind=dora", "lora.target_modules=[all-linear]")
# The first step of a warm-up has rate 0: what is saved after it is what the run started from.
SAVE_EVERY_STEP = ("checkpoint.every_steps=1", "checkpoint.keep_last=9", "optimizer.warmup_steps=1")
LAYOUTS = {"TP=2": (2, ["parallel.tensor=2"]), "PP=2": (2, ["parallel.pipeline=2"]), "DP=2": (2, [])}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_adapter_computes_the_base_to_the_last_bit(
    dtype: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """B is zero and each magnitude is the norm that it is divided by: the loss of the first step is the base's own."""
    first = []
    for kind in ("dora", "canonical"):
        config = tiny_config(*DORA, f"lora.kind={kind}", "train.steps=1", dtype=dtype)
        launch(1, lambda config=config, kind=kind: run_training(config, tmp_path / kind))
        first.append(losses(tmp_path / kind))
    assert first[0] == first[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts_start_from_the_same_bits(
    layout: str, dtype: str, tiny_config: Callable[..., RunConfig], tiny_llama: Path, tmp_path: Path
) -> None:
    """Magnitudes are the lengths of the base's rows under Hugging Face's names, in float32 whatever the model is."""
    world_size, overrides = LAYOUTS[layout]
    for name, (world, settings) in {"one": (1, []), "other": (world_size, overrides)}.items():
        config = tiny_config(*DORA, *SAVE_EVERY_STEP, "train.steps=2", *settings, dtype=dtype)
        launch(world, lambda config=config, name=name: run_training(config, tmp_path / name))
    one, other = (whole_tensors(tmp_path / name / "checkpoints/step-00000001", "adapter") for name in ("one", "other"))
    assert equal(one, other)
    export_adapter(tmp_path / "other/checkpoints/step-00000001", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=getattr(torch, dtype)).state_dict()
    found = load_file(tmp_path / "adapter/adapter_model.safetensors")
    magnitudes = {name: tensor for name, tensor in found.items() if "magnitude" in name}
    assert len(magnitudes) == 4 * 7
    for name, tensor in magnitudes.items():
        layer = name.removeprefix("base_model.model.").removesuffix("lora_magnitude_vector")
        torch.testing.assert_close(tensor, base[f"{layer}weight"].float().norm(dim=1), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_in_bfloat16(layout: str, tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Losses of one process and of two, to bfloat16's rounding; something is learnt."""
    world_size, overrides = LAYOUTS[layout]
    curves = []
    for name, (world, settings) in {"one": (1, []), "other": (world_size, overrides)}.items():
        config = tiny_config(*DORA, "lora.lora_B_init_method=normal", "train.steps=6", *settings, dtype="bfloat16")
        launch(world, lambda config=config, name=name: run_training(config, tmp_path / name))
        curves.append(losses(tmp_path / name))
    assert curves[0] == pytest.approx(curves[1], rel=1e-2)
    assert curves[0][-1] < curves[0][0] - 0.05


@pytest.mark.parametrize(("world", "tensor", "dtype"), [(1, 1, "bfloat16"), (2, 2, "float32")])
def test_a_resume_is_exact(
    world: int, tensor: int, dtype: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Magnitudes, their moments and what is trained after: a straight run and one in two halves end in the same bits."""
    config = tiny_config(*DORA, *SAVE_EVERY_STEP, "train.steps=3", f"parallel.tensor={tensor}", dtype=dtype)
    launch(world, lambda: run_straight_and_in_two(config, tmp_path))
    assert_same_end(tmp_path)
    name = "decoder.layers.self_attention.linear_proj.adapter.magnitude"
    held = whole_tensors(tmp_path / "straight/checkpoints/step-00000003", "adapter", "optimizer")
    before = whole_tensors(tmp_path / "straight/checkpoints/step-00000001", "adapter")
    assert held[name].dtype is torch.float32
    assert held[name].shape == held[f"optimizer.state.exp_avg.{name}"].shape == (4, 64)
    assert not held[name].equal(before[name]), "magnitudes learn"


def held_on_each_process(setup: ModelSetup) -> int:
    """Return how many values this process trains."""
    return sum(adapter.parameter.numel() for adapter in setup.adapters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_what_is_held_and_saved(
    dtype: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Values on a tensor parallel process, which has all magnitudes of o and down, and bytes in a checkpoint."""
    config = tiny_config(*DORA, "parallel.tensor=2", "train.steps=2", dtype=dtype)
    survey = survey_run(config, 2)
    memory = memory_estimate(config, survey.shape, survey.layout, survey.targets)
    assert with_model(config, held_on_each_process, 2) == [memory.gradients // 4] * 2
    launch(2, lambda: run_training(config, tmp_path))
    tensors = open_checkpoint(tmp_path / "checkpoints/step-00000002").manifest.tensors.values()
    saved = [
        sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in tensors if t.group == group)
        for group in ("adapter", "optimizer")
    ]
    size = checkpoint_bytes(config, survey.shape, survey.targets)
    assert saved == [size.adapter, size.optimizer]


def norms_counted(setup: ModelSetup) -> list[int]:
    """Return how often norms have been computed after each of two steps of three micro-batches and a look at one."""
    from ckptrain.megatron.dora import DoRAAdapter
    from ckptrain.megatron.optimizer import set_learning_rate
    from ckptrain.megatron.step import evaluate, train_step

    computed, counts = DoRAAdapter.norms, []
    calls = 0

    def counting(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return computed(*given)

    DoRAAdapter.norms = counting  # type: ignore[method-assign]  # in a process of its own
    set_learning_rate(setup.optimizer, 1e-2)
    batch = packed(LENGTHS)
    for _ in range(2):
        train_step(setup.model, setup.optimizer, [batch] * 3)
        counts.append(calls)
    evaluate(setup.model, [batch])
    return [*counts, calls]


def test_norms_are_computed_once_for_all_micro_batches_of_a_step(tiny_config: Callable[..., RunConfig]) -> None:
    """And anew after it: 4 layers of 7."""
    assert with_model(tiny_config(*DORA), norms_counted) == [[28, 56, 84]]


TAKEN_AWAY = 32


def norms_where_the_adapter_takes_rows_away(setup: ModelSetup) -> Any:
    """Return the norms of a layer whose first rows are s B A with the sign changed, and the true ones in float64."""
    from ckptrain.megatron.dora import DoRALinear

    layer = next(module for module in setup.model.modules() if isinstance(module, DoRALinear))
    [adapter], [rows] = layer.adapters.values(), layer.parts.rows_of(layer.to_wrap.weight).values()
    with torch.no_grad():
        adapter.linear_out.weight.normal_(generator=torch.Generator().manual_seed(1))
        product = adapter.alpha / adapter.dim * (adapter.linear_out.weight @ adapter.linear_in.weight)
        rows[:TAKEN_AWAY] = -product[:TAKEN_AWAY]
        layer._squares = layer._squares_of_base()
        [found] = layer.norms().values()
    return found.numpy(), (rows.double() + product.double()).norm(dim=1).numpy()


def test_norms_are_those_of_the_matrix_that_is_never_formed(tiny_config: Callable[..., RunConfig]) -> None:
    """To float32's rounding; where rows are taken away altogether, what is left is no NaN and small beside them."""
    config = tiny_config("lora.kind=dora", "lora.target_modules=[o_proj]")
    [(found, expected)] = with_model(config, norms_where_the_adapter_takes_rows_away)
    assert found[TAKEN_AWAY:] == pytest.approx(expected[TAKEN_AWAY:], rel=1e-5)
    assert max(expected[:TAKEN_AWAY]) < 1e-5
    assert all(0 < norm < 1e-2 for norm in found[:TAKEN_AWAY])


def test_dropout_is_refused(tiny_config: Callable[..., RunConfig]) -> None:
    """PEFT computes something else with it."""
    with pytest.raises(ConfigError, match=r"lora\.kind is dora and lora\.dropout is 0\.1"):
        tiny_config("lora.kind=dora", "lora.dropout=0.1")


def test_dropout_is_refused_where_the_kind_comes_from_a_run(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """`lora.kind: auto` says nothing of it."""
    launch(1, lambda: run_training(tiny_config(*DORA, "train.steps=1"), tmp_path))
    longer = tiny_config("lora.target_modules=[all-linear]", "lora.dropout=0.1", "train.steps=2")
    with pytest.raises(ConfigError, match=r"lora\.kind is dora and lora\.dropout is 0\.1"):
        survey_run(longer, 1, tmp_path)


def test_experts_are_refused_and_their_attention_is_not(
    tiny_config: Callable[..., RunConfig], experts: str, tmp_path: Path
) -> None:
    """PEFT has no DoRA of stacked experts."""
    with pytest.raises(
        ConfigError, match=r"PEFT has no DoRA of stacked experts; set lora\.target_modules=\[linear_qkv"
    ):
        survey_run(tiny_config(*DORA, pretrained=experts), 1)
    config = tiny_config(
        "lora.kind=dora", "lora.target_modules=[linear_qkv, linear_proj]", "train.steps=1", pretrained=experts
    )
    [result] = launch(1, lambda: run_training(config, tmp_path))
    assert result.step == 1


def test_rows_without_a_length_are_refused(
    tiny_config: Callable[..., RunConfig], tiny_llama: Path, tmp_path: Path
) -> None:
    """A pruned base: PEFT would divide zero by zero."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[5:8] = 0
    model.save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "base" / name).write_bytes((tiny_llama / name).read_bytes())
    for world, overrides in ((1, []), (2, ["parallel.pipeline=2"])):
        config = tiny_config(*DORA, *overrides, pretrained=str(tmp_path / "base"))
        with pytest.raises(ConfigError, match=r"lengths of the base's rows") as caught:
            launch(world, lambda config=config: run_training(config, tmp_path / "run"))
        assert "decoder.layers.2.mlp.linear_fc1 (adapter_up): 3 rows of its weight are zero" in str(caught.value)
