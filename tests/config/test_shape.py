"""The dimensions of a base model, against the libraries that build it."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptrain.config.base import Base, locate_base
from ckptrain.config.gguf_header import read_gguf_header
from ckptrain.config.schema import ModelConfig
from ckptrain.config.shape import REFUSED, SUPPORTED, read_shape, shape_of
from ckptrain.errors import ConfigError

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# What transformers has to be told of a family besides, so that no default of a large model is built.
PARTICULAR: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": EXPERTS,
    "OlmoeForCausalLM": {**EXPERTS, "pad_token_id": 0},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Gemma2ForCausalLM": {"head_dim": 16},
    "Gemma3ForCausalLM": {"head_dim": 16},
}


def test_smollm2_has_the_published_number_of_parameters(smollm2_file: Path) -> None:
    """A real model, from its GGUF header."""
    shape = read_shape(locate_base(ModelConfig(pretrained=str(smollm2_file))))
    assert shape.num_parameters == 134_515_008
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (30, 576, 9, 3)
    assert shape.vocab_size == 49_152
    assert shape.tied_embeddings


def test_the_header_says_what_the_gguf_package_reads(smollm2_file: Path) -> None:
    """Every key and every tensor, in a fraction of the time."""
    gguf = pytest.importorskip("gguf")
    start = time.process_time()
    header = read_gguf_header(smollm2_file)
    assert time.process_time() - start < 0.5
    reader = gguf.GGUFReader(smollm2_file)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for name, field in fields.items():
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        assert header.metadata[name] == (len(field.data) if is_array else field.contents())
    shapes = {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reader.tensors}
    assert header.tensors == shapes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_the_parameters_are_counted_as_transformers_builds_them(architecture: str, tied: bool, tmp_path: Path) -> None:
    """Each architecture, from the config.json that transformers itself writes."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config_name = architecture.replace("Gemma3ForCausalLM", "Gemma3TextConfig").replace("ForCausalLM", "Config")
    sizes = {**SIZES, **PARTICULAR.get(architecture, {})}
    config = getattr(transformers, config_name)(**sizes, tie_word_embeddings=tied, architectures=[architecture])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    shape = read_shape(Base(name="small", kind="directory", path=tmp_path, revision=None))
    assert shape.num_parameters == model.num_parameters()
    assert shape.architecture == architecture
    assert shape.head_dim == model.model.layers[0].self_attn.head_dim


def test_an_architecture_not_supported_is_refused_with_those_that_are() -> None:
    """Also a config that names none."""
    for named in (["BloomForCausalLM"], None, ["LlamaForCausalLM", "Other"]):
        with pytest.raises(ConfigError, match="supported are LlamaForCausalLM, MistralForCausalLM"):
            shape_of({**SIZES, "architectures": named}, "x")


@pytest.mark.parametrize("architecture", REFUSED)
def test_an_architecture_that_people_will_try_is_refused_with_the_reason(architecture: str) -> None:
    """Transformers has each of them, so the name is a real one."""
    assert hasattr(pytest.importorskip("transformers"), architecture)
    with pytest.raises(ConfigError) as caught:
        shape_of({**SIZES, "architectures": [architecture]}, "x")
    assert caught.value.problems[0].startswith(f"it is a {architecture}: {REFUSED[architecture]}; supported are ")


def test_what_a_gemma_leaves_out_is_as_transformers_has_it() -> None:
    """Output and input embeddings are one unless it is said; the width of a head must be said."""
    config = {**SIZES, "architectures": ["Gemma2ForCausalLM"]}
    assert shape_of({**config, "head_dim": 16}, "x").tied_embeddings
    with pytest.raises(ConfigError, match="head_dim: expected a positive whole number, it is missing"):
        shape_of(config, "x")


def test_the_experts_of_gpt_oss_are_not_for_peft() -> None:
    """Those of the others are; a dense model has none."""
    shapes = {
        name: shape_of({**SIZES, **PARTICULAR.get(name, {}), "architectures": [name]}, "x").adapts_experts
        for name in SUPPORTED
    }
    assert [name for name, adapts in shapes.items() if adapts] == ["Qwen3MoeForCausalLM", "OlmoeForCausalLM"]


def test_missing_and_impossible_keys_are_named_together() -> None:
    """A config.json cut short, or with text for a number."""
    config = {**SIZES, "architectures": ["MistralForCausalLM"], "vocab_size": "many", "hidden_act": "gelu"}
    del config["num_key_value_heads"], config["hidden_size"]
    with pytest.raises(ConfigError) as caught:
        shape_of(config, "x")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "hidden_size",
        "num_key_value_heads",
        "vocab_size",
        "hidden_act is 'gelu'",
    ]


@pytest.mark.parametrize(
    ("architecture", "extra", "expected"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias is true"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias is true"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, "the weights are quantised (fp8)"),
        ("Qwen3MoeForCausalLM", {**EXPERTS, "mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ("Qwen3MoeForCausalLM", {**EXPERTS, "decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("OlmoeForCausalLM", {**EXPERTS, "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("GptOssForCausalLM", {**PARTICULAR["GptOssForCausalLM"], "attention_bias": False}, "attention_bias is false"),
        ("Gemma2ForCausalLM", {"head_dim": 16, "hidden_activation": "gelu"}, "expected 'gelu_pytorch_tanh'"),
        ("Gemma2ForCausalLM", {"head_dim": 16, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"head_dim": 16, "attn_logit_softcapping": 5.0}, "attn_logit_softcapping is 5.0"),
        ("Gemma3ForCausalLM", {"head_dim": 16, "layer_types": ["chunked_attention"] * 3}, "has chunked_attention"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "su"}}, "rope_type is 'su'; ckptrain knows default, linear"),
        ("LlamaForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("LlamaForCausalLM", {"rope_scaling": "linear"}, "rope_scaling: expected an object, found 'linear'"),
        ("MistralForCausalLM", {"rope_parameters": {"rope_type": "yarn"}}, "conversion of Mistral fails on"),
        (
            "Gemma3ForCausalLM",
            {"head_dim": 16, "rope_parameters": {"full_attention": {"rope_type": "proportional"}}},
            "rope_type is 'proportional'",
        ),
        ("Qwen3MoeForCausalLM", {}, "num_experts: expected a positive whole number, it is missing"),
    ],
)
def test_what_has_no_place_under_megatron_is_refused(architecture: str, extra: dict[str, Any], expected: str) -> None:
    """Refused before hours of training on something else than the base."""
    with pytest.raises(ConfigError) as caught:
        shape_of({**SIZES, "architectures": [architecture], **extra}, "x")
    assert expected in caught.value.problems[0]


def test_a_model_not_downloaded_says_how_to_get_it() -> None:
    """Nothing is fetched here."""
    with pytest.raises(ConfigError, match="hf download org/name"):
        read_shape(Base(name="org/name", kind="hub", path=None, revision=None))


def test_a_broken_config_json_is_named(model_dir: Path) -> None:
    """Not JSON, or not an object."""
    base = locate_base(ModelConfig(pretrained=str(model_dir)))
    for text, expected in (("{", "not JSON"), ("[]", "expected a JSON object, found a list")):
        (model_dir / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=expected):
            read_shape(base)


def gguf_file(path: Path, architecture: str, **keys: int) -> Path:
    """Write a GGUF file with the gguf package, the format's own writer."""
    gguf, numpy = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        writer.add_uint32(f"{architecture}.{key.replace('__', '.')}", value)
    writer.add_tensor("token_embd.weight", numpy.zeros((32, 16), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_of_another_family_or_with_keys_missing_is_refused(tmp_path: Path) -> None:
    """By what its header says."""
    with pytest.raises(ConfigError, match="its GGUF architecture is gemma, supported are llama, qwen2, qwen3"):
        read_shape(locate_base(ModelConfig(pretrained=str(gguf_file(tmp_path / "a.gguf", "gemma")))))
    path = gguf_file(tmp_path / "b.gguf", "llama", block_count=2, expert_count=8)
    with pytest.raises(ConfigError) as caught:
        read_shape(locate_base(ModelConfig(pretrained=str(path))))
    found = "\n".join(caught.value.problems)
    assert "llama.attention.head_count: expected a positive whole number, it is missing" in found
    assert "mixture-of-experts models are not read from GGUF files" in found


def test_a_small_gguf_gives_its_shape(tmp_path: Path) -> None:
    """Heads of their own width, an untied or a tied output."""
    path = gguf_file(
        tmp_path / "q.gguf",
        "qwen3",
        block_count=2,
        embedding_length=16,
        feed_forward_length=24,
        attention__head_count=4,
        attention__head_count_kv=2,
        attention__key_length=8,
        context_length=64,
    )
    shape = read_shape(locate_base(ModelConfig(pretrained=str(path))))
    assert (shape.head_dim, shape.vocab_size, shape.qk_norm, shape.tied_embeddings) == (8, 32, True, True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_gguf_is_a_config_error_and_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    """Cut anywhere, or with bytes changed anywhere."""
    path = tmp_path / "whole.gguf"
    if not path.exists():
        gguf_file(path, "llama", block_count=2, context_length=64)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(ConfigError):
        read_gguf_header(damaged)


def test_a_file_that_is_not_gguf_says_how_it_starts(tmp_path: Path) -> None:
    """A Git LFS pointer is the usual one."""
    path = tmp_path / "pointer.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="it starts with b'vers', expected b'GGUF'"):
        read_gguf_header(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="damaged or not GGUF"):
        read_gguf_header(path)


def test_kv_heads_left_out_of_a_llama_are_as_many_as_heads() -> None:
    """As LlamaConfig has it; for other families the key is required."""
    config = json.loads(json.dumps({**SIZES, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": None}))
    assert shape_of(config, "x").num_kv_heads == 6
