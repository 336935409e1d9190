"""Tokens and what is learnt of them, compared with what transformers makes of the same conversation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import trained_tokenizer
from tokenizers import (  # type: ignore[import-untyped]
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ckptrain.data.chat import LossOn, Sample, _covered, encode, encode_batch, prompt_of
from ckptrain.data.records import Conversation, Message, PromptCompletion, Record
from ckptrain.data.template import with_chat_template
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


@functools.cache
def train_trimming() -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer that adds <s> and </s> and trims white space from offsets, as RoBERTa's does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(["question answer\n\n"], trainer)
    backend.post_processor = processors.RobertaProcessing(sep=("</s>", 1), cls=("<s>", 0), trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]


def test_a_tokenizer_that_adds_its_own_ends_gets_no_second_one(learnt_text: LearntText) -> None:
    """<s> belongs to the prompt, </s> is learnt, and white space inside a completion is, whatever its offsets say."""
    trimming = train_trimming()
    record = PromptCompletion(where="data.jsonl:1", prompt="question", completion=" \n\n answer")
    sample = encode(record, trimming, "assistant")
    assert trimming.decode(sample.token_ids.tolist()) == "<s>question \n\n answer</s>"
    assert learnt_text(sample, trimming) == " \n\n answer</s>"
    prompt = prompt_of(record, trimming)
    assert trimming.decode(list(prompt.token_ids)) == "<s>question"


def test_a_template_that_asks_otherwise_than_it_answers_is_refused(unmarked: PreTrainedTokenizerBase) -> None:
    """A model that is asked behind <think> must not learn an answer without it unawares."""
    template = str(unmarked.chat_template)
    tokenizer = with_chat_template(unmarked, template.removesuffix("{% endif %}") + "<think>{% endif %}")
    with pytest.raises(DataError, match=r"data.jsonl:7 cannot(.|\n)*messages\[2\](.|\n)*data.loss_on=last_assistant"):
        encode(TICKET, tokenizer, "assistant")
    with pytest.raises(DataError, match=r"messages\[4\](.|\n)*apart; mark the turns with {% generation %}"):
        encode(TICKET, tokenizer, "last_assistant")
    assert encode(TICKET, tokenizer, "all").num_learnt > 0


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


ANSWERS = conversation(("system", "Be short."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"))
BATCH: list[Record] = [
    *CONVERSATIONS,
    PromptCompletion(where="data.jsonl:1", prompt="The capital of France is", completion=" Paris."),
    attrs.evolve(TICKET, tools=({"type": "function", "function": {"name": "f"}},)),
    PromptCompletion(where="data.jsonl:2", prompt="😀", completion=""),
]


@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant", "completion", "all"])
def test_a_batch_is_what_its_records_are_one_by_one(smollm2: PreTrainedTokenizerBase, loss_on: LossOn) -> None:
    """Chats, plain text and refused records keep their places."""
    batch = encode_batch(BATCH, smollm2, loss_on)
    assert len(batch) == len(BATCH)
    for record, found in zip(BATCH, batch, strict=True):
        if isinstance(record, Conversation) and record.tools:
            assert isinstance(found, DataError)
            with pytest.raises(DataError) as raised:
                encode(record, smollm2, loss_on)
            assert str(raised.value) == str(found)
        else:
            expected = encode(record, smollm2, loss_on)
            assert isinstance(found, Sample)
            assert found.where == record.where
            assert found.token_ids.tolist() == expected.token_ids.tolist()
            assert found.learnt.tolist() == expected.learnt.tolist()
    assert encode_batch([], smollm2, loss_on) == []


def test_a_batch_of_chats_is_one_call_of_the_tokenizer(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer's threads work on all of them at the same time."""
    calls: list[int] = []
    original = type(tokenizer).__call__

    def counted(self: Any, texts: Any, **settings: Any) -> Any:
        calls.append(len(texts))
        return original(self, texts, **settings)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    encode_batch([*CONVERSATIONS, *CONVERSATIONS], tokenizer, "assistant")
    assert calls == [2 * len(CONVERSATIONS)]


@pytest.mark.parametrize(
    ("loss_on", "learnt"), [("assistant", "Ciao."), ("last_assistant", "Ciao."), ("completion", "Ciao."), ("all", None)]
)
@pytest.mark.parametrize("kind", ["marked", "unmarked"])
def test_turns_of_the_prompt_are_not_learnt(
    request: pytest.FixtureRequest, learnt_text: LearntText, kind: str, loss_on: LossOn, learnt: str | None
) -> None:
    """A record of prompt and completion may have answers in its prompt; loss on all means all of it."""
    tokenizer = request.getfixturevalue(kind)
    sample = encode(attrs.evolve(TICKET, num_prompt_messages=4), tokenizer, loss_on)
    if learnt is None:
        assert sample.num_learnt == sample.num_tokens - 1
    else:
        assert learnt_text(sample, tokenizer) == f"{learnt}<|im_end|>"


@pytest.mark.parametrize("kind", ["marked", "unmarked"])
def test_a_record_whose_answers_are_all_given_has_nothing_to_learn(request: pytest.FixtureRequest, kind: str) -> None:
    """It is counted elsewhere, and no error here."""
    record = attrs.evolve(ANSWERS, num_prompt_messages=3)
    for loss_on in ("assistant", "last_assistant", "completion"):
        assert encode(record, request.getfixturevalue(kind), loss_on).num_learnt == 0


def test_thought_and_answer_that_are_marked_apart_belong_to_one_turn(
    tokenizer: PreTrainedTokenizerBase, learnt_text: LearntText
) -> None:
    """The last turn is all that the template marks of it, and what is given before is not learnt."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}"
        "{% generation %}<think>{{ m.reasoning_content }}</think>{% endgeneration %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% else %}"
        "{% generation %}<|endoftext|>{% endgeneration %}{% endif %}"
    )
    thoughts = [attrs.evolve(m, extra={"reasoning_content": "Hm."}) for m in TICKET.messages]
    record = attrs.evolve(TICKET, messages=tuple(thoughts))
    last = "<think>Hm.</think>Ciao.<|im_end|><|endoftext|>"
    assert learnt_text(encode(record, tokenizer, "assistant"), tokenizer).endswith(f"Hello!<|im_end|>{last}")
    assert learnt_text(encode(record, tokenizer, "last_assistant"), tokenizer) == last
    prompted = attrs.evolve(record, num_prompt_messages=3)
    assert learnt_text(encode(prompted, tokenizer, "assistant"), tokenizer) == last


@given(
    text=st.text(st.sampled_from("ab \n\t😀é世<|im_end>"), max_size=40),
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=3),
    kind=st.sampled_from(["smollm2", "trimming", "mistral", "gemma", "llama3"]),
)
@settings(max_examples=300)
def test_the_learnt_tokens_are_those_that_share_a_character_with_a_span(
    smollm2: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]], kind: str
) -> None:
    """What the tokenizer is asked for agrees with all of its offsets, for every kind of tokenizer."""
    own = {"smollm2": lambda: smollm2, "trimming": train_trimming}
    backend = own.get(kind, lambda: trained_tokenizer(kind))()
    encoding = backend(text, return_offsets_mapping=True, add_special_tokens=kind == "trimming")
    spans = [(start, min(past, len(text))) for start, past in spans if start < min(past, len(text))]
    expected = [any(end > a and start < b for a, b in spans) for start, end in encoding["offset_mapping"]]
    assert _covered(encoding.encodings[0], spans).tolist() == expected
