"""The models of bench_gpu.py: their shapes, what a token of LoRA training costs, random weights and data; the device.

Weights are random because speed and memory do not depend on them, and no download is then needed. A tokenizer has a
token for every byte, so a text of so many letters is as many tokens.
"""

from __future__ import annotations

import json
import random
import statistics
import string
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from tiny import VOCAB_SIZE, write_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 16, 32
LR, CLIP_GRAD = 1.0e-4, 1.0
_DEVIATION = 0.02
_MATRIX, _SMALL_MATRIX = 8192, 512
_BYTES = range(3, 259)
"""Token ids of the bytes in the tokenizer that `write_base` writes; those before are special."""


@attrs.frozen(kw_only=True)
class Shape:
    """The dimensions of a Llama, and the length of the sequences that it is trained on."""

    label: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tied_embeddings: bool
    head_dim: int = 64
    rope_theta: float = 500_000.0
    sequence_length: int = 4096
    trains_on_chats: bool = False
    """On packed conversations of a file, of which the answers are learnt, instead of full rows of random letters."""

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one layer by name, each (in_features, out_features)."""
        hidden, ffn, heads, kv = self.hidden_size, self.ffn_hidden_size, self.num_heads, self.num_kv_heads
        sizes = (
            (hidden, heads * self.head_dim),
            (hidden, kv * self.head_dim),
            (hidden, kv * self.head_dim),
            (heads * self.head_dim, hidden),
            (hidden, ffn),
            (hidden, ffn),
            (ffn, hidden),
        )
        return dict(zip(PROJECTIONS, sizes, strict=True))

    @property
    def multiplied_parameters(self) -> int:
        """Parameters that each token is multiplied with: linear layers and output layer, not the embedding lookup."""
        layer = sum(inputs * outputs for inputs, outputs in self.projections.values())
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    def adapter_parameters(self, rank: int = RANK) -> int:
        """Parameters of an A and a B of that rank for each of the seven projections of every layer."""
        return self.num_layers * rank * sum(inputs + outputs for inputs, outputs in self.projections.values())

    def flops_per_token(self, rank: int = RANK) -> float:
        """Floating point operations of a token in LoRA training on one full causal sequence, the base frozen.

        PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) counts 6 N a token for N parameters, as Megatron-LM
        does (Narayanan et al. 2021, arXiv:2104.04473, section 3): 2 forward, 2 for the gradient of the activations and
        2 for that of the weights. Frozen weights have none of the last: 4 N of the base and 6 N of the adapters. N
        leaves the embedding lookup out, and has the output layer also where it is tied to it.

        Attention has two products of 2 * heads * head_dim operations with each of on average sequence_length / 2
        keys, forward; backward is 2.5 times that, since the scores are computed again (Dao et al. 2022,
        arXiv:2205.14135). Elementwise work, norms, the softmax and the optimizer are not counted.
        """
        attention = 2 * (2 * self.sequence_length / 2 * self.num_heads * self.head_dim) * self.num_layers
        return 4 * self.multiplied_parameters + 6 * self.adapter_parameters(rank) + (1 + 2.5) * attention

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of transformers' LlamaConfig."""
        return {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": 2 * self.sequence_length,
            "rms_norm_eps": 1e-5,
            "initializer_range": _DEVIATION,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_cache": False,
        }


SHAPES: dict[str, Shape] = {
    "tiny": Shape(
        label="a tiny Llama",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=160,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        tied_embeddings=True,
        sequence_length=128,
    ),
    "tiny-chats": Shape(
        label="a tiny Llama on chats",
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=160,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        tied_embeddings=True,
        sequence_length=1024,
        trains_on_chats=True,
    ),
    "smollm2": Shape(
        label="SmolLM2-135M",
        num_layers=30,
        hidden_size=576,
        ffn_hidden_size=1536,
        num_heads=9,
        num_kv_heads=3,
        vocab_size=49_152,
        tied_embeddings=True,
        rope_theta=100_000.0,
        trains_on_chats=True,
    ),
    "1b": Shape(
        label="Llama-3.2-1B",
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128_256,
        tied_embeddings=True,
    ),
    "8b": Shape(
        label="Llama-3.1-8B",
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14_336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        tied_embeddings=False,
    ),
}
"""By what --models takes; the tiny ones are for a CPU."""


def device() -> str:
    """Return where contestants compute; a CPU is for trying this program out."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype() -> str:
    """Return the type of the base's weights."""
    return "bfloat16" if device() == "cuda" else "float32"


def memory() -> dict[str, int | None]:
    """Return the most bytes that torch had allocated and reserved since they were last reset; None without a GPU."""
    import torch

    if device() == "cpu":
        return {"peak_bytes": None, "reserved_bytes": None}
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def reset_memory() -> None:
    """Count the most memory from now on; what is cached and not in use goes back to the device."""
    import torch

    if device() == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def write_base(shape: Shape, directory: Path, *, device: str, dtype: str) -> None:
    """Write a Hugging Face directory of random weights, made on the device and in the type that they are trained in."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**shape.config))
    finally:
        torch.set_default_dtype(default)
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(directory, max_shard_size="5GB")
    write_tokenizer(directory)


def random_tokens(shape: Shape, rows: int, *, seed: int = 0) -> Tensor:
    """Draw token ids of full rows, [rows, sequence_length], among those of the bytes, as the texts have them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_BYTES.start, _BYTES.stop, (rows, shape.sequence_length), generator=generator)


def write_texts(shape: Shape, rows: int, path: Path) -> Path:
    """Write texts of more letters than a row has tokens, so that each, cut at its end, fills one row exactly."""
    draw = random.Random(0)
    letters = string.ascii_letters + string.digits + " .,"
    with path.open("w") as file:
        for _ in range(rows):
            text = "".join(draw.choices(letters, k=shape.sequence_length + 1))
            file.write(json.dumps({"prompt": text[:1], "completion": text[1:]}) + "\n")
    return path


def matrix_rate() -> dict[str, Any]:
    """Return what this machine is, and the rate of a bfloat16 matrix product of random values: everyone's ceiling."""
    import torch

    on = device()
    size = _MATRIX if on == "cuda" else _SMALL_MATRIX
    left, right = (torch.randn(size, size, device=on, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(13):
        started = time.perf_counter()
        for _ in range(4):
            torch.matmul(left, right)
        if on == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / 4)
    return {
        "device": torch.cuda.get_device_name() if on == "cuda" else "CPU",
        "torch": torch.__version__,
        "matrix_size": size,
        "matrix_tflops": 2 * size**3 / statistics.median(seconds[3:]) / 1e12,
    }
