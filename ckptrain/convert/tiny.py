"""A tiny random model in Hugging Face's format, with a byte-level tokenizer and a chat template, made in a second.

What `ckptrain doctor` tries a run on, and the tests: nothing is downloaded for it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

VOCAB_SIZE = 264  # 256 bytes and 3 special tokens, rounded up to a multiple of 8 so that it is cut evenly
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer that has a token for every byte and ChatML's special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(specials + alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(directory)


def write_llama(directory: Path, **changes: Any) -> Path:
    """Write a random 4-layer Llama with grouped-query attention and llama3 rope scaling."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_parameters": LLAMA3_ROPE,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """Write short question-and-answer chats of different lengths."""
    draw = random.Random(seed)  # noqa: S311  which words, nothing secret
    words = ["red", "blue", "green", "one", "two", "three", "four", "left", "right", "up", "down", "yes", "no", "maybe"]
    with path.open("w") as file:
        for _ in range(count):
            question = " ".join(draw.choices(words, k=draw.randint(1, 6)))
            answer = question.upper()
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path
