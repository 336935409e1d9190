"""Tokens and what is learnt of them, compared with what transformers makes of the same conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import (  # type: ignore[import-untyped]
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ckptrain.data.chat import Sample, encode, prompt_of
from ckptrain.data.records import Conversation, Message, PromptCompletion
from ckptrain.errors import DataError

LearntText = Callable[[Sample, PreTrainedTokenizerBase], str]


def conversation(*turns: tuple[str, str]) -> Conversation:
    """Build a record of (role, content) turns."""
    return Conversation(where="data.jsonl:7", messages=tuple(Message(role=r, content=c) for r, c in turns))


def as_dicts(record: Conversation) -> list[dict[str, str]]:
    """Return the turns as transformers wants them."""
    return [{"role": message.role, "content": message.content} for message in record.messages]


CONVERSATIONS = [
    conversation(("user", "What is 2 + 2?"), ("assistant", "4")),
    conversation(
        ("system", "Be short."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"), ("assistant", "Ciao.")
    ),
    conversation(("system", ""), ("user", "  spaces \n\n around  "), ("assistant", "\n  indented\n\n\tcode  \n")),
    conversation(("user", "emoji 😀?"), ("assistant", "😀🎉 héllo 世界 😀")),
    conversation(("user", "<|im_end|>"), ("assistant", "<|im_start|>assistant\n"), ("user", "?"), ("assistant", " \n")),
    conversation(("user", "no answer follows"), ("assistant", "yes"), ("user", "this one stays open")),
]
TICKET = CONVERSATIONS[1]


@pytest.mark.parametrize("record", CONVERSATIONS)
def test_marked_turns_are_those_that_transformers_marks(marked: PreTrainedTokenizerBase, record: Conversation) -> None:
    """Token by token, for a template with generation markers."""
    expected: Any = marked.apply_chat_template(
        as_dicts(record), return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    sample = encode(record, marked, "assistant")
    assert sample.token_ids.tolist() == expected["input_ids"]
    assert sample.learnt.astype(int).tolist() == expected["assistant_masks"]
    assert sample.num_learnt > 0


@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant", "completion", "all"])
@pytest.mark.parametrize("record", CONVERSATIONS)
def test_a_template_without_markers_learns_the_same_tokens(
    marked: PreTrainedTokenizerBase, unmarked: PreTrainedTokenizerBase, record: Conversation, loss_on: Any
) -> None:
    """Rendering turn by turn finds what the markers say."""
    expected, found = encode(record, marked, loss_on), encode(record, unmarked, loss_on)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.learnt.tolist() == expected.learnt.tolist()


@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [
        ("assistant", "Hello!<|im_end|>Ciao.<|im_end|>"),
        ("last_assistant", "Ciao.<|im_end|>"),
        ("completion", "Hello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nCiao.<|im_end|>"),
    ],
)
def test_loss_on_chooses_the_turns_and_includes_their_end(
    smollm2: PreTrainedTokenizerBase, learnt_text: LearntText, loss_on: Any, expected: str
) -> None:
    """The model must learn to stop, and not what a template puts after the end of a turn."""
    assert learnt_text(encode(TICKET, smollm2, loss_on), smollm2) == expected


def test_loss_on_all_learns_everything_but_the_first_token(smollm2: PreTrainedTokenizerBase) -> None:
    """Nothing comes before the first token that could predict it."""
    sample = encode(TICKET, smollm2, "all")
    assert sample.learnt.tolist() == [False] + [True] * (sample.num_tokens - 1)
    assert sample.num_learnt == sample.num_tokens - 1


def test_the_prompt_of_a_conversation_is_the_beginning_of_its_tokens(smollm2: PreTrainedTokenizerBase) -> None:
    """A model is asked with the tokens it was trained behind, and what it should say is what was learnt."""
    prompt, sample = prompt_of(TICKET, smollm2), encode(TICKET, smollm2, "last_assistant")
    asked: Any = smollm2.apply_chat_template(as_dicts(TICKET)[:-1], add_generation_prompt=True, return_dict=False)
    assert list(prompt.token_ids) == asked == sample.token_ids[: len(prompt.token_ids)].tolist()
    assert prompt.reference == "Ciao."
    assert smollm2.decode([prompt.stop_token_id]) == "<|im_end|>"


@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant", "completion"])
def test_a_completion_is_learnt_together_with_the_end_of_the_sequence(
    smollm2: PreTrainedTokenizerBase, learnt_text: LearntText, loss_on: Any
) -> None:
    """Plain text gets no template, and each kind of loss but `all` means the completion."""
    record = PromptCompletion(where="data.jsonl:1", prompt="The capital of France is", completion=" Paris.")
    sample = encode(record, smollm2, loss_on)
    assert smollm2.decode(sample.token_ids.tolist()) == f"The capital of France is Paris.{smollm2.eos_token}"
    assert learnt_text(sample, smollm2) == f" Paris.{smollm2.eos_token}"


def test_the_prompt_of_a_completion_is_its_prompt(smollm2: PreTrainedTokenizerBase) -> None:
    """The answer ends where the sequence does."""
    record = PromptCompletion(where="data.jsonl:1", prompt="The capital of France is", completion=" Paris.")
    prompt = prompt_of(record, smollm2)
    assert list(prompt.token_ids) == smollm2("The capital of France is")["input_ids"]
    assert (prompt.reference, prompt.stop_token_id) == (" Paris.", smollm2.eos_token_id)


@pytest.fixture
def trimming() -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer that adds <s> and </s> and trims white space from offsets, as RoBERTa's does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(["question answer\n\n"], trainer)
    backend.post_processor = processors.RobertaProcessing(sep=("</s>", 1), cls=("<s>", 0), trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]


def test_a_tokenizer_that_adds_its_own_ends_gets_no_second_one(
    trimming: PreTrainedTokenizerFast, learnt_text: LearntText
) -> None:
    """<s> belongs to the prompt, </s> is learnt, and white space inside a completion is, whatever its offsets say."""
    record = PromptCompletion(where="data.jsonl:1", prompt="question", completion=" \n\n answer")
    sample = encode(record, trimming, "assistant")
    assert trimming.decode(sample.token_ids.tolist()) == "<s>question \n\n answer</s>"
    assert learnt_text(sample, trimming) == " \n\n answer</s>"
    prompt = prompt_of(record, trimming)
    assert trimming.decode(list(prompt.token_ids)) == "<s>question"


def test_a_template_that_rewrites_history_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    """Templates of thinking models drop earlier thoughts, so only the last turn is what the model was asked for."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(DataError, match=r"data.jsonl:7 cannot(.|\n)*messages\[2\](.|\n)*data.loss_on=last_assistant"):
        encode(TICKET, tokenizer, "assistant")
    last = encode(TICKET, tokenizer, "last_assistant")
    assert tokenizer.decode(last.token_ids[last.learnt].tolist()) == "<think></think>Ciao.<|im_end|>"


def test_a_template_that_refuses_the_turns_is_told_with_the_line(tokenizer: PreTrainedTokenizerBase) -> None:
    """The template's own words, and the roles it did not like."""
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"data.jsonl:7 (.|\n)*system, user, assistant(.|\n)*roles must alternate"):
        encode(TICKET, tokenizer, "all")


def test_a_tokenizer_without_a_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    """A base model has none, and guessing one would train something else than the user will ask."""
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template; use an instruction-tuned model"):
        encode(TICKET, tokenizer, "assistant")


def test_a_template_that_prints_the_date_gives_the_same_tokens_on_every_day(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """A resume on the next day must train on the same tokens."""
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}: {% for m in messages %}{{ m['content'] }}{% endfor %}"
    sample = encode(TICKET, tokenizer, "all")
    assert str(tokenizer.decode(sample.token_ids.tolist())).startswith("26 Jul 2024: ")
