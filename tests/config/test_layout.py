"""How many processes a model can be laid over, and what one step is then."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from ckptrain.config.layout import Layout, batch_arithmetic, layout_of
from ckptrain.config.schema import RunConfig
from ckptrain.config.shape import ModelShape
from ckptrain.errors import ConfigError

Build = Callable[..., RunConfig]


def refusal(config: RunConfig, shape: ModelShape, world_size: int) -> str:
    """Return why a layout is refused, a line a reason."""
    with pytest.raises(ConfigError) as caught:
        layout_of(config, shape, world_size)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_what_is_left_of_the_world_is_data_parallel(config: Build, dense: ModelShape, world_size: int) -> None:
    """Without other parallelism that is all of it."""
    layout = layout_of(config(), dense, world_size)
    assert layout == Layout(tensor=1, pipeline=1, context=1, expert=1, data=world_size)
    assert layout.world_size == world_size


def test_the_sizes_multiply_to_the_world(config: Build, dense: ModelShape) -> None:
    """Sixteen processes in four dimensions."""
    layout = layout_of(config("parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2"), dense, 16)
    assert (layout.data, layout.world_size) == (2, 16)


def test_a_world_that_does_not_divide_names_those_that_do(config: Build, dense: ModelShape) -> None:
    """Below and above what was started."""
    built = config("parallel.tensor=2")
    assert "3 processes cannot be laid out as tensor=2 x pipeline=1 x context=1" in refusal(built, dense, 3)
    assert "start 2 or 4" in refusal(built, dense, 3)
    assert "1 process cannot" in refusal(built, dense, 1)


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["parallel.tensor=16", "lora.dim=16"], 16, "does not divide the 8 attention heads"),
        (["parallel.pipeline=3"], 3, "does not divide the 4 layers"),
        (["train.global_batch_size=6"], 4, "not a multiple of 4 (micro_batch_size=1 x 4 data parallel processes)"),
        (["parallel.expert=2"], 2, "this model has no experts"),
        (["data.sequence_length=4096"], 1, "more than the 2048 positions"),
        (["parallel.tensor=2", "lora.dim=3"], 2, "set lora.dim to 2 or 4"),
        (["parallel.tensor=4", "lora.dim=2"], 4, "set lora.dim to 4 or 8"),
        (["parallel.tensor=2", "parallel.sequence=true", "data.sequence_length=9"], 2, "the 9 tokens of a micro-batch"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(
    config: Build, dense: ModelShape, overrides: list[str], world_size: int, expected: str
) -> None:
    """Before anything is loaded."""
    assert expected in refusal(config(*overrides), dense, world_size)


def test_all_reasons_are_told_together(config: Build, dense: ModelShape) -> None:
    """One start, one list."""
    built = config("parallel.tensor=3", "parallel.pipeline=3", "parallel.expert=2", "lora.dim=4")
    assert len(refusal(built, dense, 4).splitlines()) == 8


def test_the_rank_must_divide_only_where_it_is_split(config: Build, dense: ModelShape, moe: ModelShape) -> None:
    """A of linear_proj and linear_fc2 is split by its columns, and experts are not split."""
    odd = ["parallel.tensor=2", "lora.dim=3"]
    assert layout_of(config(*odd, "lora.target_modules=[o_proj, linear_fc2]"), dense, 2).tensor == 2
    experts = config(*odd, "parallel.sequence=true", "lora.target_modules=['*.experts.*']")
    assert layout_of(experts, moe, 2).tensor == 2


def test_experts_divide_the_processes_of_a_stage(config: Build, moe: ModelShape) -> None:
    """They take their processes from tensor, context and data parallelism."""
    assert layout_of(config("parallel.expert=4"), moe, 4).data == 4
    assert layout_of(config("parallel.expert=4", "parallel.tensor=2", "parallel.sequence=true"), moe, 4).data == 2
    assert "does not divide the 2 processes of a pipeline stage" in refusal(config("parallel.expert=4"), moe, 2)
    assert "does not divide the 8 experts" in refusal(config("parallel.expert=3"), moe, 3)
    assert "set parallel.sequence=true" in refusal(config("parallel.tensor=2"), moe, 2)
    olmoe = attrs.evolve(moe, architecture="OlmoeForCausalLM")
    assert "norms of q and k are over all" in refusal(config("parallel.tensor=2", "parallel.sequence=true"), olmoe, 2)


def test_tensor_parallelism_is_refused_where_megatron_refuses_it(config: Build, dense: ModelShape) -> None:
    """Over heads and key-value heads, against megatron-core's own configuration."""
    transformer_config = pytest.importorskip("megatron.core.transformer.transformer_config")
    built = config("lora.dim=12", "model.backend=transformer_engine", "train.global_batch_size=12")
    for heads, kv_heads in ((8, 2), (12, 4), (12, 6), (9, 3), (6, 1)):
        shape = attrs.evolve(dense, num_heads=heads, num_kv_heads=kv_heads, hidden_size=144, ffn_hidden_size=144)
        for tensor in (1, 2, 3, 4, 6, 12):
            ours = attrs.evolve(built, parallel=attrs.evolve(built.parallel, tensor=tensor))
            try:
                transformer_config.TransformerConfig(
                    num_layers=4,
                    hidden_size=144,
                    num_attention_heads=heads,
                    num_query_groups=kv_heads,
                    tensor_model_parallel_size=tensor,
                )
            except ValueError:
                assert "heads" in refusal(ours, shape, tensor)
            else:
                assert layout_of(ours, shape, tensor).tensor == tensor


def test_a_step_in_numbers(config: Build, dense: ModelShape) -> None:
    """Rows, micro-batches, tokens, and the share of a step that a pipeline stage waits."""
    built = config("train.global_batch_size=16", "train.micro_batch_size=2", "parallel.pipeline=2")
    arithmetic = batch_arithmetic(built, layout_of(built, dense, 4))
    assert arithmetic.rows_per_step == 16
    assert arithmetic.rows_per_micro_batch == 2
    assert arithmetic.micro_batches_per_rank == 4
    assert arithmetic.tokens_per_step_max == 16 * 1024
    assert arithmetic.tokens_per_micro_batch_max == 2 * 1024
    assert arithmetic.pipeline_bubble == pytest.approx(1 / 5)
