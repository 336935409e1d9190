"""How large a checkpoint is, and about how much memory a process takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from ckptrain.config.base import locate_base
from ckptrain.config.estimate import Memory, adapter_tensors, checkpoint_bytes, memory_estimate
from ckptrain.config.layout import Layout, layout_of
from ckptrain.config.modules import FUSED
from ckptrain.config.schema import LoraConfig, ModelConfig, RunConfig
from ckptrain.config.shape import ModelShape, read_shape, shape_of
from ckptrain.config.targets import resolve_targets

Build = Callable[..., RunConfig]


LLAMA_1B = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
}
# What torch had allocated at most on one H200 (torch 2.11, Transformer Engine 2.20.2), in GiB, with rank 16 on all
# linear layers and rows of 4096 tokens, all learnt. What measures one again, by shape, micro-batch and overrides:
#     python3 tools/step_gpu.py 1b fused:4 full:8:train.recompute=full plain:4:lora.fused=never
PEAKS_GIB = [
    (LLAMA_1B, 1, [], 6.276),
    (LLAMA_1B, 4, [], 15.906),
    (LLAMA_1B, 4, ["train.recompute=full"], 4.752),
    (LLAMA_8B, 1, [], 27.914),
    (LLAMA_8B, 2, [], 39.581),
    (LLAMA_8B, 4, [], 62.915),
    (LLAMA_8B, 4, ["model.fp8=rowwise"], 56.380),
    (LLAMA_8B, 4, ["train.recompute=full"], 21.906),
]
# The same, in a process that had measured fused:1 before, and with it some 70 MiB that no later variant gave back.
LATER_PEAKS_GIB = [
    (LLAMA_1B, 2, [], 9.549),
    (LLAMA_1B, 4, [], 15.966),
    (LLAMA_1B, 8, [], 28.821),
    (LLAMA_1B, 4, ["lora.kind=canonical"], 16.064),
    (LLAMA_1B, 4, ["train.recompute=selective"], 8.112),
    (LLAMA_1B, 4, ["train.recompute=full"], 4.820),
    (LLAMA_1B, 8, ["train.recompute=full"], 6.981),
    (LLAMA_1B, 4, ["model.fp8=rowwise"], 15.056),
    (LLAMA_1B, 4, ["lora.fused=never"], 21.950),
    (LLAMA_1B, 4, ["lora.fused=never", "train.recompute=full"], 5.546),
]


def estimated_gib(config: Build, model: dict[str, Any], micro_batch_size: int, overrides: list[str]) -> float:
    """Return the estimate for what was measured."""
    shape = shape_of({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192, **model}, "measured")
    built = config(
        "lora.dim=16",
        "data.sequence_length=4096",
        f"train.micro_batch_size={micro_batch_size}",
        f"train.global_batch_size={micro_batch_size}",
        *overrides,
    )
    memory = memory_estimate(built, shape, layout_of(built, shape, 1), resolve_targets(built.lora, shape))
    return memory.total / 2**30


@pytest.mark.parametrize(("model", "micro_batch_size", "overrides", "peak_gib"), PEAKS_GIB)
def test_the_estimate_is_what_a_gpu_had_allocated(
    config: Build, model: dict[str, Any], micro_batch_size: int, overrides: list[str], peak_gib: float
) -> None:
    """Within 0.3 %: every tensor is counted, only the allocator's rounding and small vectors are not."""
    estimate = estimated_gib(config, model, micro_batch_size, overrides)
    assert estimate == pytest.approx(peak_gib, rel=0.003)


@pytest.mark.parametrize(("model", "micro_batch_size", "overrides", "peak_gib"), LATER_PEAKS_GIB)
def test_the_estimate_tells_what_a_setting_changes(
    config: Build, model: dict[str, Any], micro_batch_size: int, overrides: list[str], peak_gib: float
) -> None:
    """Against micro-batch 4 without settings, in which what the process holds anyway cancels out: within 40 MiB."""
    plain = next(peak for _, size, words, peak in LATER_PEAKS_GIB if (size, words) == (4, []))
    change = estimated_gib(config, model, micro_batch_size, overrides) - estimated_gib(config, model, 4, [])
    assert change == pytest.approx(peak_gib - plain, abs=40 / 1024)


def peft_model(shape: ModelShape, **settings: Any) -> Any:
    """Return a Llama of this shape with PEFT's adapters of rank 4 on all linear layers, without numbers."""
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    hf_config = transformers.LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
    )
    config = peft.LoraConfig(r=4, target_modules="all-linear", **settings)
    with torch.device("meta"):
        return peft.get_peft_model(transformers.LlamaForCausalLM(hf_config), config)


def test_the_adapters_of_a_fused_layer_are_those_of_peft_stacked(dense: ModelShape) -> None:
    """PEFT has q, k and v apart: the same inputs, and outputs that add up."""
    model = peft_model(dense)
    theirs = {name.partition("base_model.model.")[2]: tensor.shape for name, tensor in model.named_parameters()}
    lora = LoraConfig(dim=4)
    ours = adapter_tensors(dense, lora, resolve_targets(lora, dense))
    places = {"self_attention": "self_attn", "mlp": "mlp"}
    for name, (rows, columns) in ours.items():
        _, _, layer, place, short, *_, matrix, _ = name.split(".")
        prefix = f"model.layers.{layer}.{places[place]}"
        letter = "lora_A" if matrix == "linear_in" else "lora_B"
        shapes = [theirs[f"{prefix}.{part}.{letter}.default.weight"] for part in FUSED[short]]
        if letter == "lora_A":
            assert set(shapes) == {(rows, columns)}
        else:
            assert (sum(shape[0] for shape in shapes), shapes[0][1]) == (rows, columns)
    num_parts = sum(len(parts) for parts in FUSED.values())
    assert len([name for name in theirs if ".lora_" in name]) == dense.num_layers * num_parts * 2
    assert len(ours) == dense.num_layers * 4 * 2


def test_dora_has_the_parameters_of_peft(config: Build, dense: ModelShape) -> None:
    """Name for name as many values; magnitudes are float32 beside bfloat16 matrices, and then have no masters."""
    model = peft_model(dense, use_dora=True)
    theirs = {name: tensor.numel() for name, tensor in model.named_parameters() if tensor.requires_grad}
    built = config("lora.kind=dora", "lora.dim=4", "model.dtype=bfloat16")
    targets = resolve_targets(built.lora, dense)
    ours = {name: math.prod(size) for name, size in adapter_tensors(dense, built.lora, targets).items()}
    assert sorted(ours.values()) == sorted(theirs.values())
    magnitudes = sum(count for name, count in theirs.items() if "magnitude" in name)
    matrices = sum(theirs.values()) - magnitudes
    size = checkpoint_bytes(built, dense, targets)
    assert (size.adapter, size.optimizer) == (2 * matrices + 4 * magnitudes, 12 * matrices + 8 * magnitudes)


def test_every_expert_has_an_adapter_of_its_own(moe: ModelShape) -> None:
    """Named by its global number."""
    lora = LoraConfig(dim=2, target_modules=("linear_fc1", "linear_fc2"))
    tensors = adapter_tensors(moe, lora, resolve_targets(lora, moe))
    assert len(tensors) == 4 * 8 * 2 * 2
    prefix = "decoder.layers.3.mlp.experts.local_experts.7"
    assert tensors[f"{prefix}.linear_fc1.adapter.linear_in.weight"] == (2, 64)
    assert tensors[f"{prefix}.linear_fc1.adapter.linear_out.weight"] == (64, 2)
    assert tensors[f"{prefix}.linear_fc2.adapter.linear_in.weight"] == (2, 32)


def test_a_checkpoint_of_smollm2_has_the_bytes_of_its_tensors(config: Build, smollm2_file: Path) -> None:
    """Adapter, two moments, and masters where the adapter is bfloat16."""
    shape = read_shape(locate_base(ModelConfig(pretrained=str(smollm2_file))))
    built = config()
    targets = resolve_targets(built.lora, shape)
    values = sum(math.prod(dims) for dims in adapter_tensors(shape, built.lora, targets).values())
    # 8 x ((576 + 960) + (576 + 576) + (576 + 3072) + (1536 + 576)) in each of 30 layers
    assert values == 30 * 8 * (1536 + 1152 + 3648 + 2112)
    size = checkpoint_bytes(built, shape, targets)
    assert (size.adapter, size.optimizer, size.total) == (2 * values, 12 * values, 14 * values)
    exact = checkpoint_bytes(config("model.dtype=float32"), shape, targets)
    assert (exact.adapter, exact.optimizer) == (4 * values, 8 * values)


def test_one_process_holds_the_whole_base(config: Build, dense: ModelShape) -> None:
    """Two bytes a parameter in bfloat16 (the last norm, a vector, is not counted)."""
    built = config()
    targets = resolve_targets(built.lora, dense)
    memory = memory_estimate(built, dense, layout_of(built, dense, 1), targets)
    assert memory.base_weights == 2 * (dense.num_parameters - dense.hidden_size)
    size = checkpoint_bytes(built, dense, targets)
    assert (memory.adapter, memory.optimizer) == (size.adapter, size.optimizer)
    assert memory.gradients == 2 * memory.adapter
    # A and B beside each weight, and the corner between them: each layer has 8 x (in + out + 8) for four weights.
    ins_and_outs = (64 + 128) + (64 + 64) + (64 + 256) + (128 + 64)
    assert memory.adapter_copy == 2 * 4 * 8 * (ins_and_outs + 4 * 8)
    assert memory.total == sum(attrs.astuple(memory))


def test_the_peak_is_in_the_loss_or_in_a_layer(config: Build, dense: ModelShape) -> None:
    """What only one of them takes is never counted beside what only the other takes."""
    layout = Layout(tensor=1, pipeline=1, context=1, expert=1, data=1)
    built = config("train.recompute=full")
    targets = resolve_targets(built.lora, dense)
    in_layer, in_loss = (
        memory_estimate(built, attrs.evolve(dense, vocab_size=size), layout, targets) for size in (256, 100_000)
    )
    assert (in_layer.logits, in_loss.layer) == (0, 0)
    assert in_layer.layer > 0
    # 1024 rows of logits; and 4 tensors as large as the hidden states.
    assert in_loss.logits == 1024 * 100_000 * 2 + 4 * 1024 * 64 * 2
    assert in_loss.activations == in_layer.activations


def test_each_kind_of_parallelism_takes_its_share_off(config: Build, dense: ModelShape) -> None:
    """Tensor splits weights and adapters, pipeline splits layers, context splits tokens, sequence the rest of them."""
    found: dict[str, Memory] = {}
    layouts: dict[str, list[str]] = {
        "one": [],
        "tensor": ["parallel.tensor=2"],
        "sequence": ["parallel.tensor=2", "parallel.sequence=true"],
        "pipeline": ["parallel.pipeline=2"],
        "context": ["parallel.context=2"],
    }
    for name, overrides in layouts.items():
        built = config("lora.fused=never", *overrides)
        world_size = built.parallel.tensor * built.parallel.pipeline * built.parallel.context
        layout = layout_of(built, dense, world_size)
        found[name] = memory_estimate(built, dense, layout, resolve_targets(built.lora, dense))
    one, tensor, pipeline, context = (found[name] for name in ("one", "tensor", "pipeline", "context"))
    assert tensor.adapter * 2 == pipeline.adapter * 2 == one.adapter
    assert tensor.base_weights < 0.51 * one.base_weights
    assert one.activations > tensor.activations > found["sequence"].activations
    assert context.activations * 2 == one.activations
    # All but the images under the adapters and the factors of the norms.
    assert found["sequence"].activations * 2 == pytest.approx(one.activations, rel=0.05)
    # The first of two stages holds half the layers, for two micro-batches.
    angles = 1024 * dense.head_dim * 4
    assert pipeline.activations - 2 * angles == one.activations - angles


def test_whole_logits_are_split_over_tensor_parallel_processes(config: Build, dense: ModelShape) -> None:
    """In the model's 2 bytes, in float32 for the softmax, and in 2 again as their gradient."""
    shape = attrs.evolve(dense, vocab_size=100_000)
    built = config("parallel.tensor=2")
    memory = memory_estimate(built, shape, layout_of(built, shape, 2), resolve_targets(built.lora, shape))
    assert memory.logits == 1024 * 50_000 * (2 + 4 + 2) + 4 * 1024 * 64 * 2


def test_attention_that_writes_its_scores_keeps_them(config: Build, dense: ModelShape) -> None:
    """Two of every head and pair of tokens of a row, in every layer, in the model's 2 bytes: [heads, length, length]."""
    built, layout = config("data.sequence_length=128"), Layout(tensor=1, pipeline=1, context=1, expert=1, data=1)
    targets = resolve_targets(built.lora, dense)
    kept = {
        architecture: memory_estimate(
            built, attrs.evolve(dense, architecture=architecture), layout, targets
        ).activations
        for architecture in ("Gemma3ForCausalLM", "Gemma2ForCausalLM")
    }
    scores = 2 * dense.num_layers * 2 * dense.num_heads * 128 * 128
    assert kept["Gemma2ForCausalLM"] - kept["Gemma3ForCausalLM"] == scores


def test_expert_parallelism_splits_the_experts(config: Build, moe: ModelShape) -> None:
    """Weights and adapters of the experts, and nothing else."""
    whole, split = (config(f"parallel.expert={expert}", "lora.target_modules=['*.experts.*']") for expert in (1, 4))
    targets = resolve_targets(whole.lora, moe)
    one = memory_estimate(whole, moe, layout_of(whole, moe, 4), targets)
    four = memory_estimate(split, moe, layout_of(split, moe, 4), targets)
    assert one.base_weights - four.base_weights == 2 * moe.num_layers * moe.expert_parameters * 3 // 4
    assert four.adapter * 4 == one.adapter
