"""FLOPs of training by hand, against what torch counts, and peaks by the names that drivers give."""

from __future__ import annotations

import attrs
import pytest

from ckptrain.config.flops import causal_pairs, peak_flops_per_s, training_flops
from ckptrain.config.schema import LoraConfig
from ckptrain.config.shape import ModelShape
from ckptrain.config.targets import resolve_targets

LLAMA_1B = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=16,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128_256,
    max_positions=131_072,
    tied_embeddings=True,
)
LLAMA_8B = attrs.evolve(
    LLAMA_1B, num_layers=32, hidden_size=4096, ffn_hidden_size=14_336, head_dim=128, tied_embeddings=False
)
RANK_16 = LoraConfig(dim=16, kind="lora")


def giga_flops_per_token(shape: ModelShape, lora: LoraConfig, sequence_length: int) -> float:
    """Return 10^9 FLOPs of a token."""
    return training_flops(shape, lora, resolve_targets(lora, shape)).of_token(sequence_length) / 1e9


@pytest.mark.parametrize(
    ("shape", "linear", "adapters", "pairs"),
    [
        # 16 layers of 60.8M weights and 263M of the output layer; 9.7M of adapters; 2048.5 tokens seen on average
        pytest.param(LLAMA_1B, 4 * 1.235746816, 6 * 0.009699328, 12 * 16 * 2048 * 2048.5e-9, id="Llama-3.2-1B"),
        # 32 layers of 218M and 525M; 35.7M
        pytest.param(LLAMA_8B, 4 * 7.504658432, 6 * 0.035651584, 12 * 32 * 4096 * 2048.5e-9, id="Llama-3.1-8B"),
    ],
)
def test_a_token_of_a_known_model_costs_what_it_costs_by_hand(
    shape: ModelShape, linear: float, adapters: float, pairs: float
) -> None:
    """At a length of 4096, in 10^9 FLOPs: 5.81 and 33.5."""
    assert giga_flops_per_token(shape, RANK_16, 4096) == pytest.approx(linear + adapters + pairs, rel=1e-6)


def test_known_models_are_near_four_flops_a_parameter() -> None:
    """And attention's, as others quote them: 5.9 (1B) and 35.9 (8B), with the 8B's input embedding and flash's own."""
    assert giga_flops_per_token(LLAMA_1B, RANK_16, 4096) == pytest.approx(5.9, rel=0.02)
    recomputed = 2 / 12 * 12 * 32 * 4096 * 2048.5e-9  # flash attention computes the scores again
    embedding = 4 * LLAMA_8B.embedding_parameters / 1e9
    assert giga_flops_per_token(LLAMA_8B, RANK_16, 4096) + recomputed + embedding == pytest.approx(35.9, rel=0.01)


def test_of_experts_those_count_that_a_token_visits() -> None:
    """Two of eight, with their adapters; the router is a layer like any other."""
    lora = LoraConfig(dim=4, kind="lora")
    shape = attrs.evolve(
        LLAMA_1B, architecture="Qwen3MoeForCausalLM", num_experts=8, moe_ffn_hidden_size=512, experts_per_token=2
    )
    found = training_flops(shape, lora, resolve_targets(lora, shape))
    attention, expert = 2048 * 3072 + 2048 * 2048, 3 * 2048 * 512
    adapters = 4 * (2048 + 3072 + 2 * 2048 + 2 * (2048 + 1024 + 512 + 2048))
    assert found.per_token == 16 * (4 * (attention + 2048 * 8 + 2 * expert) + 6 * adapters)


def test_an_adapter_that_is_not_there_costs_nothing() -> None:
    """Of fewer modules fewer FLOPs, of a higher rank more."""
    alone = LoraConfig(dim=16, kind="lora", target_modules=("linear_qkv",))
    assert giga_flops_per_token(LLAMA_1B, alone, 128) < giga_flops_per_token(LLAMA_1B, RANK_16, 128)
    wider = attrs.evolve(RANK_16, dim=32)
    assert giga_flops_per_token(LLAMA_1B, RANK_16, 128) < giga_flops_per_token(LLAMA_1B, wider, 128)


def test_a_step_of_real_sequences_counts_each_ones_own_length() -> None:
    """Two of 10 tokens attend to half of what one of 20 attends to, nearly; 5 learnt tokens have logits."""
    found = training_flops(LLAMA_1B, RANK_16, resolve_targets(RANK_16, LLAMA_1B))
    assert (causal_pairs(10), causal_pairs(20)) == (55, 210)
    step = found.of(tokens=20, learnt_tokens=5, attended_pairs=110)
    assert step == 20 * found.per_token + 5 * 4 * 2048 * 128_256 + 110 * 12 * 16 * 2048


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
    ],
)
def test_a_known_gpu_has_the_peak_of_its_data_sheet(name: str, tflops: float) -> None:
    """The dense one, by the name that the driver gives."""
    assert peak_flops_per_s(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA A10G", "Tesla T4", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""])
def test_an_unknown_gpu_or_a_slice_of_one_has_no_peak(name: str) -> None:
    """A number that is not known is not told: no name is taken for another that begins alike."""
    assert peak_flops_per_s(name) is None
