"""What the estimate says that layers keep for the backward pass is what autograd keeps for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models import packed, with_model
from torch.autograd.graph import saved_tensors_hooks

from ckptrain.config.fusion import LOSS_ROWS
from ckptrain.config.schema import RunConfig

if TYPE_CHECKING:
    from ckptrain.training.setup import ModelSetup

TOKENS = 128
LOCAL = ("model.backend=local", "train.global_batch_size=1")


def bytes_kept(setup: ModelSetup) -> int:
    """Return the bytes that the decoder's layers save in the forward pass of one sequence; weights are not among them.

    Of a view all that it is a view of is kept.
    """
    from megatron.core.utils import get_attr_wrapped_model

    from ckptrain.megatron.step import train_step

    weights = {weight.untyped_storage().data_ptr() for weight in setup.model.parameters()}
    kept: dict[int, int] = {}
    within: list[Any] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def enter(*_: Any) -> None:
        within.append(saved_tensors_hooks(note, lambda tensor: tensor))
        within[-1].__enter__()

    for layer in get_attr_wrapped_model(setup.model, "decoder").layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(lambda *_: within.pop().__exit__())
    train_step(setup.model, setup.optimizer, [packed((TOKENS,))])
    return sum(kept.values())


def estimated(config: RunConfig) -> int:
    """Return the term of the estimate for it."""
    from ckptrain.config.estimate import memory_estimate
    from ckptrain.training.start import survey_run

    survey = survey_run(config, 1)
    return memory_estimate(survey.config, survey.shape, survey.layout, survey.targets).activations


@pytest.mark.parametrize(
    "overrides",
    [[], ["train.recompute=selective"], ["lora.kind=canonical"], ["lora.dim=3"], ["model.dtype=bfloat16"]],
    ids=lambda overrides: " ".join(overrides) or "lora",
)
def test_fused_layers_keep_what_is_estimated(overrides: list[str], tiny_config: Callable[..., RunConfig]) -> None:
    """To the byte: inputs, q, k, v, what attention gives, gate and up, images under the adapters, factors of norms."""
    config = tiny_config(*LOCAL, "lora.fused=always", *overrides)
    [found] = with_model(config, bytes_kept)
    assert found == estimated(config)


@pytest.mark.parametrize(
    "overrides",
    [[], ["lora.kind=canonical"], ["lora.kind=dora"], ["lora.target_modules=[linear_qkv]"]],
    ids=lambda overrides: " ".join(overrides) or "lora",
)
def test_plain_layers_keep_what_is_estimated(overrides: list[str], tiny_config: Callable[..., RunConfig]) -> None:
    """But for the first layer's input, which has no gradient, and vectors of DoRA."""
    config = tiny_config(*LOCAL, "lora.fused=never", *overrides)
    [found] = with_model(config, bytes_kept)
    assert abs(found - estimated(config)) < 0.02 * found


def test_the_loss_has_the_rows_that_are_estimated() -> None:
    """The plan loads no torch, so it has the number itself."""
    from ckptrain.megatron.fused.loss import ROWS

    assert ROWS == LOSS_ROWS
