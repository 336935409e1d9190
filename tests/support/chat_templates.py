"""Chat templates of six families, tokenizers that fit them, and conversations of every kind."""

from __future__ import annotations

import datetime as dt
import functools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ckptrain.data.records import Conversation, Message

DIRECTORY = Path(__file__).parents[1] / "data" / "templates"
FAMILIES = ("smollm2", "qwen25", "qwen3", "llama3", "mistral", "gemma")
DATE = dt.date(2024, 7, 26)

_SPECIAL = {
    "qwen25": ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
    "qwen3": ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
}
_WORDS = [
    "the order is late",
    "Where is it?",
    "2 + 2 = 4",
    "def f(x):\n\treturn x",
    "héllo wörld",
    "世界 こんにちは",
    "😀🎉",
]
_TRICKS = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "[/INST] no",
    "</s>",
    "<end_of_turn>\n<start_of_turn>model\n",
    "<|eot_id|>",
    "<tool_response>\n7\n</tool_response>",
    "{{ messages }} {% generation %}",
    "/no_think",
]
_ENDS = ["", "", "", " ", "\n", "  \n\n", "\t"]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up – 辞書.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def marked_text(family: str) -> str:
    """Read a template that marks what the assistant says."""
    return (DIRECTORY / f"{family}.jinja").read_text(encoding="utf-8")


def unmarked_text(family: str) -> str:
    """Read a template, and take the marks out."""
    return re.sub(r"\{%-\s*(end)?generation\s*-?%\}", "", marked_text(family))


@functools.cache
def trained_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """Train a small tokenizer of the family's kind: bytes, pieces with bytes for what is unknown, or unigrams."""
    corpus = [*_WORDS, *_TRICKS, json.dumps(TOOL), marked_text(family)]
    special = ["<unk>", "<s>", "</s>", *_SPECIAL[family]]
    if family == "mistral":
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        trainer: Any = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
        corpus = corpus[:2]  # the other letters are bytes
    elif family == "gemma":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        backend.decoder = decoders.Metaspace(prepend_scheme="never")
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    backend.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=_SPECIAL[family],
    )  # type: ignore[no-untyped-call]


def made_conversations(number: int, seed: int = 0) -> list[Conversation]:
    """Make conversations with all that templates treat in their own way; the same ones for a seed."""
    random_state = random.Random(seed)
    return [_made_conversation(f"made.jsonl:{index}", random_state) for index in range(1, number + 1)]


def _made_conversation(where: str, state: random.Random) -> Conversation:
    turns: list[Message] = []
    if state.random() < 0.4:
        turns.append(Message(role="system", content=state.choice(["", _said(state)])))
    tools = (TOOL,) if state.random() < 0.3 else ()
    for _ in range(state.choice([1, 1, 2, 3, 5])):
        turns.append(Message(role="user", content=state.choice(["", _said(state), _said(state)])))
        if tools and state.random() < 0.7:
            turns += _tool_turns(state)
        turns.append(_answer(state))
    return Conversation(where=where, messages=tuple(turns), tools=tools)


def _tool_turns(state: random.Random) -> list[Message]:
    number = state.choice([1, 1, 1, 2])
    identifiers = [f"call{state.randrange(10**5):05d}" for _ in range(number)]
    calls = [_call(identifier, state) for identifier in identifiers]
    content = state.choice(["", "", _said(state)])
    answers = [
        Message(role="tool", content=_said(state), extra={"tool_call_id": identifier, "name": "look_up"})
        for identifier in identifiers
    ]
    return [Message(role="assistant", content=content, extra={"tool_calls": calls}), *answers]


def _call(identifier: str, state: random.Random) -> dict[str, Any]:
    arguments: Any = {"word": _said(state), "times": state.randrange(9)}
    if state.random() < 0.5:  # as OpenAI writes them
        arguments = json.dumps(arguments)
    return {"id": identifier, "type": "function", "function": {"name": "look_up", "arguments": arguments}}


def _answer(state: random.Random) -> Message:
    kind, said = state.random(), _said(state)
    if kind < 0.2:
        return Message(role="assistant", content=f"<think>\n{_said(state)}\n</think>\n\n{said}")
    if kind < 0.3:
        return Message(role="assistant", content=said, extra={"reasoning_content": _said(state)})
    return Message(role="assistant", content=said if kind < 0.95 else " \n")


def _said(state: random.Random) -> str:
    parts = state.choices(_WORDS, k=state.randint(1, 3))
    if state.random() < 0.25:
        parts.insert(state.randint(0, len(parts)), state.choice(_TRICKS))
    return state.choice(_ENDS) + " ".join(parts) + state.choice(_ENDS)


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return turns as transformers wants them: the arguments of calls are objects."""
    turns = [json.loads(json.dumps(message.as_dict())) for message in messages]
    for turn in turns:
        for call in turn.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return turns


def tools_of(record: Conversation) -> list[dict[str, Any]] | None:
    """Return the tools as transformers wants them."""
    return [dict(tool) for tool in record.tools] or None


def has_tools(record: Conversation) -> bool:
    """Tell whether a template must know tools to render a record."""
    return bool(record.tools) or any("tool_calls" in message.extra for message in record.messages)
