"""Fused layers compute what megatron-core's layers and Megatron-Bridge's adapters compute one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from families import write_family
from support.launch import launch, run_training
from support.models import packed, packed_logits, with_model
from support.records import assert_same_run
from support.transformer_engine import like_transformer_engine
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ckptrain.config.schema import RunConfig
from ckptrain.data.batches import MicroBatch
from ckptrain.errors import ConfigError
from ckptrain.training.start import survey_run

if TYPE_CHECKING:
    from ckptrain.training.setup import ModelSetup

LENGTHS = (5, 40, 1, 27)
B_AT_RANDOM = "lora.lora_B_init_method=xavier"
ADAPTED = {
    "lora": [],
    "canonical": ["lora.kind=canonical"],
    "attention only": ["lora.target_modules=[linear_qkv, linear_proj]"],
    "MLP only": ["lora.target_modules=[linear_fc1, linear_fc2]"],
    "q, v and up": ["lora.kind=canonical", "lora.target_modules=[q_proj, v_proj, up_proj]"],
    "one layer": ["lora.target_modules=['*.layers.1.*.linear_fc2']"],
    "rank 3": ["lora.dim=3"],
}


def step(batch: MicroBatch, setup: ModelSetup) -> tuple[Any, dict[str, Tensor]]:
    """Take a step of two micro-batches; return what it did and the gradient of every adapter weight."""
    from ckptrain.megatron.step import train_step

    result = train_step(setup.model, setup.optimizer, [batch, packed((9, 11))])
    return result, {adapter.name: adapter.parameter.main_grad.clone() for adapter in setup.adapters}


def assert_same_step(found: tuple[Any, dict[str, Tensor]], expected: tuple[Any, dict[str, Tensor]]) -> None:
    """Compare loss, norm and every gradient."""
    assert abs(found[0].loss - expected[0].loss) < 1e-6
    assert abs(found[0].grad_norm - expected[0].grad_norm) < 1e-5 * expected[0].grad_norm
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        assert (found[1][name] - gradient).abs().max() < 3e-5 * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *((name, "none") for name in ADAPTED),
        *((name, again) for name in ("lora", "MLP only", "one layer") for again in ("selective", "full")),
    ],
)
def test_a_step_is_that_of_the_plain_layers(name: str, recompute: str, tiny_config: Callable[..., RunConfig]) -> None:
    """Loss and every gradient, whatever is adapted and whatever is computed again."""
    act = partial(step, packed(LENGTHS))
    common = [B_AT_RANDOM, *ADAPTED[name]]
    [expected] = with_model(tiny_config(*common, "lora.fused=never"), act)
    [found] = with_model(tiny_config(*common, "lora.fused=always", f"train.recompute={recompute}"), act)
    assert_same_step(found, expected)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["lora", "MLP only", "one layer"])
def test_plain_layers_that_compute_again_lose_no_gradient(
    name: str, recompute: str, tiny_config: Callable[..., RunConfig]
) -> None:
    """megatron-core would give none to what lies behind frozen weights only."""
    act = partial(step, packed(LENGTHS))
    common = [B_AT_RANDOM, *ADAPTED[name], "lora.fused=never"]
    [expected] = with_model(tiny_config(*common), act)
    [found] = with_model(tiny_config(*common, f"train.recompute={recompute}"), act)
    assert_same_step(found, expected)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Mistral, sliding window", "Qwen2", "Qwen2, sliding window"])
@pytest.mark.parametrize("kind", ["lora", "canonical"])
def test_families_have_the_logits_and_gradients_of_the_plain_layers(
    name: str, kind: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Biases of q, k and v, and windows of attention."""
    directory = str(write_family(tmp_path / "model", name))
    (found, logits), (expected, expected_logits) = (
        with_model(
            tiny_config(B_AT_RANDOM, f"lora.kind={kind}", f"lora.fused={choice}", pretrained=directory),
            partial(logits_and_step, packed(LENGTHS)),
        )[0]
        for choice in ("always", "never")
    )
    assert abs(expected_logits).max() > 0.1
    assert abs(logits - expected_logits).max() < 1e-5 * abs(expected_logits).max()
    assert_same_step(found, expected)


def test_layers_that_cannot_be_are_refused_before_anything_heavy(tiny_config: Callable[..., RunConfig]) -> None:
    """By the survey, which loads no model."""
    for asked in ("lora.fused=always", "model.fp8=rowwise"):
        with pytest.raises(ConfigError) as caught:
            survey_run(tiny_config(asked, "lora.kind=dora", "model.dtype=bfloat16"), 1)
        assert "DoRA" in caught.value.problems[0]


def logits_and_step(batch: MicroBatch, setup: ModelSetup) -> Any:
    """Look at the logits, then take a step."""
    logits = packed_logits(batch, setup)
    return step(batch, setup), logits


@pytest.mark.parametrize(
    ("overrides", "family", "reason"),
    [
        (["lora.kind=dora"], None, "magnitudes"),
        (["lora.dropout=0.1"], None, "dropout"),
        ([], "Qwen3", "norms q and k"),
        ([], "Gemma 2", "Gemma2ForCausalLM is none of"),
        ([], "Qwen3-MoE", "experts"),
    ],
)
def test_what_fused_layers_do_not_compute_is_refused_or_left_to_the_plain_ones(
    overrides: list[str], family: str | None, reason: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """`always` says what stands in the way, `auto` trains all the same."""
    model = {} if family is None else {"pretrained": str(write_family(tmp_path / "model", family))}
    with pytest.raises(ConfigError) as caught:
        with_model(tiny_config("lora.fused=always", *overrides, **model), lambda _: None)
    assert reason in caught.value.problems[0]
    [(result, _)] = with_model(tiny_config("lora.fused=auto", *overrides, **model), partial(step, packed(LENGTHS)))
    assert result.grad_norm > 0


def test_8_bits_leave_the_gradients_nearly_what_they_were(tiny_config: Callable[..., RunConfig]) -> None:
    """A step's loss and every gradient are close to those of the whole weights, and not the same."""
    act = partial(step, packed(LENGTHS))
    common = [B_AT_RANDOM, "model.dtype=bfloat16"]
    [expected] = with_model(tiny_config(*common, "lora.fused=never"), act)
    [found] = with_model(tiny_config(*common, "model.fp8=rowwise"), act)
    assert 0 < abs(found[0].loss - expected[0].loss) < 0.01 * expected[0].loss
    for name, gradient in expected[1].items():
        assert cosine_similarity(found[1][name].flatten(), gradient.flatten(), dim=0) > 0.98, name


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["lora.kind=dora", "model.dtype=bfloat16"], "set model.fp8=null"),
        (["lora.fused=never", "model.dtype=bfloat16"], "set lora.fused=auto, or model.fp8=null"),
        (["model.dtype=float32"], "set model.dtype=bfloat16, or model.fp8=null"),
    ],
)
def test_8_bits_are_refused_where_they_cannot_be(
    overrides: list[str], remedy: str, tiny_config: Callable[..., RunConfig]
) -> None:
    """They are for the fused layers in bfloat16 alone."""
    with pytest.raises(ConfigError) as caught:
        with_model(tiny_config("model.fp8=rowwise", *overrides), lambda _: None)
    assert remedy in " ".join(caught.value.problems)


def two_steps_and_logits(setup: ModelSetup) -> Any:
    """Look at the logits before and after a step."""
    from ckptrain.megatron.optimizer import set_learning_rate

    batch = packed(LENGTHS)
    before = packed_logits(batch, setup)
    set_learning_rate(setup.optimizer, 0.1)
    step(batch, setup)
    return before, packed_logits(batch, setup)


def test_a_step_of_the_optimizer_is_seen_at_once(tiny_config: Callable[..., RunConfig]) -> None:
    """What is computed after it is computed with what it changed."""
    (before, after), (_, expected) = (
        with_model(tiny_config(f"lora.fused={choice}", B_AT_RANDOM), two_steps_and_logits)[0]
        for choice in ("always", "never")
    )
    assert abs(after - before).max() > 0.01
    assert abs(after - expected).max() < 1e-4


def step_in_portions(batch: MicroBatch, setup: ModelSetup) -> Any:
    """Take a step with the loss that a GPU takes."""
    from megatron.core.utils import get_model_config

    from ckptrain.megatron.fused import loss

    get_model_config(setup.model).loss_in_portions, loss.ROWS = True, 16
    return step(batch, setup)


def test_a_step_with_the_loss_in_portions_is_that_with_torchs(tiny_config: Callable[..., RunConfig]) -> None:
    """The step takes learnt positions only, and their labels, whichever loss it is."""
    config = tiny_config(B_AT_RANDOM)
    [expected] = with_model(config, partial(step, packed(LENGTHS)))
    [found] = with_model(config, partial(step_in_portions, packed(LENGTHS)))
    assert_same_step(found, expected)


def only_step(batch: MicroBatch, setup: ModelSetup) -> Any:
    """Take a step of one micro-batch."""
    from ckptrain.megatron.step import train_step

    result = train_step(setup.model, setup.optimizer, [batch])
    return result, {adapter.name: adapter.parameter.main_grad.clone() for adapter in setup.adapters}


def step_as_on_a_gpu(batch: MicroBatch, setup: ModelSetup) -> Any:
    """Take a step so."""
    like_transformer_engine(setup)
    return only_step(batch, setup)


@pytest.mark.parametrize("lengths", [(5, 40, 1, 27), (16, 16, 16)], ids=["uneven", "even"])
def test_packed_and_even_batches_attend_as_they_do_without_transformer_engine(
    lengths: tuple[int, ...], tiny_config: Callable[..., RunConfig]
) -> None:
    """Angles by position in each sequence, and sequences of one length as an ordinary batch."""
    [expected] = with_model(tiny_config(B_AT_RANDOM, "lora.fused=never"), partial(only_step, packed(lengths)))
    [found] = with_model(tiny_config(B_AT_RANDOM, "lora.fused=always"), partial(step_as_on_a_gpu, packed(lengths)))
    assert_same_step(found, expected)


def test_the_loss_in_portions_is_torchs() -> None:
    """Losses, and the gradient of the hidden states, with a last portion that is not full; in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _LOSS], capture_output=True, text=True, check=False, env=_environment()
    )
    assert done.returncode == 0, done.stderr


_LOSS = """
import torch
from ckptrain.megatron.fused import loss
from torch.nn.functional import cross_entropy

loss.ROWS = 7
torch.manual_seed(0)
hidden, weight = torch.randn(24, 16, requires_grad=True), torch.randn(50, 16)
labels, given = torch.randint(0, 50, (24,)), torch.rand(24)
expected = cross_entropy(hidden @ weight.t(), labels, reduction="none")
[wanted] = torch.autograd.grad(expected, hidden, given)
found = loss.linear_cross_entropy(hidden, weight, labels)
[gradient] = torch.autograd.grad(found, hidden, given)
assert torch.allclose(found, expected, atol=1e-5)
assert torch.allclose(gradient, wanted, atol=1e-6)
with torch.no_grad():
    assert torch.allclose(loss.linear_cross_entropy(hidden, weight, labels), expected, atol=1e-5)
"""


def test_the_triton_kernels_compute_what_the_formulas_in_torch_compute() -> None:
    """Each of them, on odd sizes and rows that lie apart, by Triton's interpreter; in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _KERNELS],
        capture_output=True,
        text=True,
        check=False,
        env=_environment() | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


_KERNELS = """
import torch
from ckptrain.megatron.fused import kernels, triton_kernels

torch.manual_seed(0)
heads = kernels.Heads(groups=3, queries=2, head_dim=16)


def apart(rows, columns):
    return torch.randn(rows, columns + 8)[:, :columns]


def run(module):
    torch.manual_seed(1)
    found = []
    x, grad, beside, weight = apart(5, 48), apart(5, 48), apart(5, 48), torch.rand(48) + 0.5
    out = apart(5, 48)
    scale = module.norm(x, weight, 1e-5, out)
    found += [out, scale, module.norm_backward(grad, x, weight, scale, beside, room=8)]
    gate_up, active = apart(5, 2 * 1100), apart(5, 1100)
    module.swiglu(gate_up, active)
    grad = torch.randn(5, 1100)
    module.swiglu_backward(grad, gate_up)
    found += [active, grad, gate_up]
    angles, qkv, into = torch.randn(5, 8), apart(5, 12 * 16), apart(5, 12 * 16)
    parts = module.rotate(qkv, angles.cos(), angles.sin(), heads)
    module.rotate_backward(tuple(torch.randn_like(part) for part in parts), angles.cos(), angles.sin(), heads, into)
    found += [*parts, into]
    for columns in (None, torch.rand(48) + 0.5):
        rounded, scale = module.quantise(x, columns)
        # Triton's interpreter does not carry a rounded mantissa into the exponent.
        carried = rounded.float().abs().log2().frac() == 0
        found += [rounded.float().masked_fill(carried, 0), scale]
    module.copy_rows(x, out)
    turned = module.transposed(torch.arange(6 * 130, dtype=torch.uint8).view(6, 130))
    found += [out.clone(), turned.float(), torch.tensor([float(turned.is_contiguous())])]
    logits, labels = torch.randn(4, 9000) * 5, torch.tensor([0, 8191, 8192, 8999])
    found.append(module.cross_entropy(logits.clone(), labels, with_gradient=False))
    found += [module.cross_entropy(logits, labels, with_gradient=True), logits]
    return found


for number, (found, expected) in enumerate(zip(run(triton_kernels), run(kernels), strict=True)):
    assert found.shape == expected.shape
    assert expected.abs().max() > 0
    assert torch.allclose(found, expected, atol=5e-5, rtol=1e-5), number
"""


LAYOUTS = {
    "PP=2": (2, ["parallel.pipeline=2"]),
    "PP=2, canonical, computed again": (2, ["parallel.pipeline=2", "lora.kind=canonical", "train.recompute=full"]),
    "TP=2": (2, ["parallel.tensor=2"]),
    "TP=2, canonical": (2, ["parallel.tensor=2", "lora.kind=canonical"]),
    "TP=4": (4, ["parallel.tensor=4"]),
    "TP=2, MLP only": (2, ["parallel.tensor=2", "lora.target_modules=[linear_fc1, linear_fc2]"]),
    "TP=2 x DP=2, computed again": (4, ["parallel.tensor=2", "train.recompute=selective"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_the_run_of_one_process_with_plain_layers(
    name: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Losses, gradient norms, validation, and what was trained."""
    num_ranks, overrides = LAYOUTS[name]
    common = [B_AT_RANDOM, "train.steps=4", "train.eval_every_steps=2", "optimizer.lr=3e-3"]
    kinds = [override for override in overrides if override.startswith("lora")]
    single, run_dir = tmp_path / "single", tmp_path / "run"
    launch(1, lambda: run_training(tiny_config(*common, *kinds, "lora.fused=never"), single))
    launch(num_ranks, lambda: run_training(tiny_config(*common, *overrides, "lora.fused=always"), run_dir))
    assert_same_run(run_dir, single)
