"""Recorded layers: what is replayed is what the layers compute one by one, in micro-batches of few shapes.

There are no CUDA graphs on a CPU. A stand-in runs the recorded work again at each replay, on the tensors that it was
recorded with; tests/gpu/test_fused.py compares real graphs with the layers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from forked import launch
from hypothesis import given
from hypothesis import strategies as st
from support.models import packed, with_model
from support.transformer_engine import like_transformer_engine

from ckptrain.config.fusion import LayerChoice, with_graphs
from ckptrain.config.layout import Layout
from ckptrain.config.schema import RunConfig
from ckptrain.data.shapes import of_few_shapes, rounded_up
from ckptrain.errors import ConfigError
from ckptrain.training.start import survey_run

if TYPE_CHECKING:
    from ckptrain.training.setup import ModelSetup

ROW = 64
BATCHES = ((5, 40, 1, 27), (64, 64), (5, 40, 1, 26), (64, 64), (50, 3), (5, 40, 1, 27), (20, 20, 20), (64, 64))
ALONE = Layout(**{field.name: 1 for field in attrs.fields(Layout)})


@given(st.integers(1, 10**6))
def test_little_is_added_to_the_tokens(num_tokens: int) -> None:
    """Less than an eighth, and there are eight lengths between a number and its double."""
    length = rounded_up(num_tokens)
    assert num_tokens <= length < num_tokens * 1.125 + 1
    assert len({rounded_up(number) for number in range(4096, 8192)}) <= 9


@given(st.lists(st.integers(1, ROW), min_size=1, max_size=40))
def test_a_micro_batch_keeps_its_samples_and_gets_padding(lengths: list[int]) -> None:
    """The first sequences are those that were there; what follows is not learnt, no sequence is above a row."""
    batch = packed(tuple(lengths))
    found = of_few_shapes(batch, ROW)
    if set(lengths) == {ROW}:
        assert found is batch
        return
    tokens = batch.tokens.shape[1]
    found_lengths = found.cu_seqlens.diff()
    assert found.cu_seqlens.tolist()[: len(lengths) + 1] == batch.cu_seqlens.tolist()
    assert found.cu_seqlens[-1] == found.tokens.shape[1] == rounded_up(tokens)
    assert max(found_lengths) <= found.max_seqlen == ROW
    assert len(found_lengths) & (len(found_lengths) - 1) == 0
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(getattr(found, name)[:, :tokens], getattr(batch, name))
    assert not found.loss_mask[:, tokens:].any()
    expected = torch.cat([torch.arange(length) for length in found_lengths.tolist()])
    assert torch.equal(found.position_ids[0], expected)


@pytest.mark.parametrize(
    ("overrides", "choice", "layout", "engine", "reason"),
    [
        ([], True, {}, True, "they can record these layers"),
        (["train.cuda_graphs=never"], True, {}, True, "train.cuda_graphs is never"),
        ([], False, {}, True, "the layers are plain"),
        ([], True, {}, False, "megatron-core's own layers read lengths on the host"),
        (["train.recompute=full"], True, {}, True, "train.recompute is full"),
        ([], True, {"tensor": 2}, True, "several processes compute the model"),
        ([], True, {"data": 2}, True, "they can record these layers"),
    ],
)
def test_graphs_are_used_where_they_can_be(
    overrides: list[str],
    choice: bool,
    layout: dict[str, int],
    engine: bool,
    reason: str,
    tiny_config: Callable[..., RunConfig],
) -> None:
    """And the journal says why not."""
    found = with_graphs(
        LayerChoice(fused=choice, reason=""),
        tiny_config(*overrides),
        attrs.evolve(ALONE, **layout),
        transformer_engine=engine,
    )
    assert found.graphs_reason == reason
    assert found.graphs == (reason == "they can record these layers")


def test_graphs_that_cannot_be_are_refused_before_the_base_is_loaded(tiny_config: Callable[..., RunConfig]) -> None:
    """Whoever insists on them is told what is in the way."""
    with pytest.raises(ConfigError, match=r"(?s)train.cuda_graphs is always.*train.recompute is full.*auto"):
        survey_run(tiny_config("train.cuda_graphs=always", "train.recompute=full"), 1)


class Rerun:
    """Runs the recorded work again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = torch.enable_grad()(work)  # a replay knows nothing of autograd


def record(recorded: list[str], work: Callable[[], None], _: Any) -> Rerun:
    """Stand in for a recording: the forward pass has an output at once, the backward pass must not add anything."""
    recorded.append(work.__name__)
    if work.__name__ == "_compute":
        work()
    return Rerun(work)


def steps(setup: ModelSetup, *, graphs: bool, always: bool = True, is_room: bool = True, is_idle: bool = True) -> Any:
    """Take a step of each batch, and of the first two together; return losses, gradients, and what was recorded."""
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    from ckptrain.megatron.fused import graph
    from ckptrain.megatron.fused.choice import adapters_changed
    from ckptrain.megatron.step import evaluate, train_step

    like_transformer_engine(setup)
    recorded: list[str] = []
    if graphs:
        graph.record, graph.is_room, graph.is_idle = partial(record, recorded), lambda: is_room, lambda: is_idle
        torch.cuda.graph_pool_handle = lambda: None
        decoder = get_attr_wrapped_model(setup.model, "decoder")
        decoder.forward = graph.GraphedDecoder(decoder, lambda: adapters_changed(setup.model), always=always)
        config = get_model_config(setup.model)
        config.few_shapes, config.seq_length = True, ROW
    found = []
    for batch in [*([packed(lengths)] for lengths in BATCHES), [packed(BATCHES[0]), packed(BATCHES[1])]]:
        result = train_step(setup.model, setup.optimizer, batch)
        gradients = {adapter.name: adapter.parameter.main_grad.clone() for adapter in setup.adapters}
        found.append((result, gradients, evaluate(setup.model, [packed((9, 11))])))
    return found, recorded


@pytest.mark.parametrize("overrides", [[], ["train.recompute=selective", "lora.kind=canonical"]])
def test_replayed_steps_are_those_of_the_layers(overrides: list[str], tiny_config: Callable[..., RunConfig]) -> None:
    """Losses, gradients, validation, over steps that change the adapters; each shape is recorded once."""
    config = tiny_config("lora.lora_B_init_method=xavier", "lora.fused=always", *overrides)
    [(expected, _)] = with_model(config, partial(steps, graphs=False))
    [(found, recorded)] = with_model(config, partial(steps, graphs=True))
    assert recorded == ["_compute", "_differentiate"] * 2
    for (result, gradients, validation), (wanted, wanted_gradients, wanted_validation) in zip(
        found, expected, strict=True
    ):
        assert abs(result.loss - wanted.loss) < 1e-6
        assert result.learnt_tokens == wanted.learnt_tokens
        assert abs(result.grad_norm - wanted.grad_norm) < 1e-5 * wanted.grad_norm
        assert abs(validation[0] - wanted_validation[0]) < 1e-6
        for name, gradient in wanted_gradients.items():
            assert (gradients[name] - gradient).abs().max() < 3e-5 * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        ({"is_room": False}, 0),
        ({"always": False, "is_idle": False}, 0),
        ({"always": False}, 2),
    ],
    ids=["no room", "a GPU that is busy", "a GPU that waits"],
)
def test_shapes_are_recorded_where_it_is_worth_it(
    given: dict[str, bool], recorded: int, tiny_config: Callable[..., RunConfig]
) -> None:
    """What a micro-batch has taken is taken once more by its graph, so there must be room, and something to be had."""
    config = tiny_config("lora.fused=always")
    [(found, events)] = with_model(config, partial(steps, graphs=True, **given))
    assert len(events) == 2 * recorded
    assert all(result.grad_norm > 0 for result, _, _ in found)


def what_is_left(config: RunConfig) -> list[str]:
    """Take steps with a model, and return what of it is there when nobody has it any more."""
    import ckptrain.megatron.entered  # noqa: F401  # before the first import of megatron
    from ckptrain.lifecycle.phases import Lifecycle, Phase
    from ckptrain.megatron.fused.choice import release_graphs
    from ckptrain.megatron.fused.graph import GraphedDecoder
    from ckptrain.megatron.step import evaluate
    from ckptrain.megatron.world import open_process_group
    from ckptrain.training.observers import Observer
    from ckptrain.training.setup import model_parallel, set_up_model
    from ckptrain.training.start import survey_run

    def take_steps() -> None:
        lifecycle = Lifecycle()
        lifecycle.advance(Phase.PLANNED)
        setup = set_up_model(survey, lifecycle, Observer())
        _, recorded = steps(setup, graphs=True)
        assert recorded
        release_graphs(setup.model)
        evaluate(setup.model, [packed((9, 11))])

    survey = survey_run(config, 1)
    with open_process_group(), model_parallel(survey):
        take_steps()
    gc.collect()
    kinds = (GraphedDecoder, torch.nn.Parameter)
    return [type(left).__name__ for left in gc.get_objects() if isinstance(left, kinds)]


def test_nothing_is_left_of_a_model_that_is_given_up(tiny_config: Callable[..., RunConfig]) -> None:
    """Its graphs hold the memory of a micro-batch, and a process may train one model after the other."""
    config = tiny_config("lora.fused=always")
    [left] = launch(1, partial(what_is_left, config))
    assert left == []
