"""What is learnt under the chat templates of six families, token by token beside transformers and TRL."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import (
    DATE,
    FAMILIES,
    TOOL,
    as_dicts,
    has_tools,
    made_conversations,
    marked_text,
    tools_of,
    trained_tokenizer,
    unmarked_text,
)
from transformers import PreTrainedTokenizerBase

from ckptrain.data.chat import LossOn, Sample, encode, encode_batch, prompt_of
from ckptrain.data.records import Conversation, Message
from ckptrain.data.template import chat_template_of, with_chat_template
from ckptrain.errors import ConfigError, DataError

LOSSES: tuple[LossOn, ...] = ("assistant", "last_assistant", "completion", "all")
MADE = made_conversations(200)
WITHOUT_TOOLS = ("smollm2", "gemma")
TICKETS = Path(__file__).parents[2] / "examples" / "data"
CALL = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "é"}'}}
# The generation prompt of these is not the same words in every conversation, or no loop over the messages is seen.
HARD = {
    "switched by a word in a turn": (
        "{% set s = namespace(think=true) %}{% for m in messages %}{% if '/no_think' in m.content %}"
        "{% set s.think = false %}{% endif %}{% endfor %}{% for m in messages %}[{{ m.role }}]"
        "{% if m.role == 'assistant' and not s.think %}<>{% endif %}{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% if not s.think %}<>{% endif %}{% endif %}"
    ),
    "rewritten history, counted loop": (
        "{% for i in range(messages|length) %}{% set m = messages[i] %}[{{ m.role }}]"
        "{% if m.role == 'assistant' and loop.last %}<>{% endif %}{{ m.content|trim }}[end]"
        "{{ '\n' if loop.last and m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "written by a macro": (
        "{% macro turns() %}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}{% endmacro %}"
        "{{ turns() }}{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "the last turn ends otherwise": (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.last and not add_generation_prompt"
        " %}{{ m.content }}[return]{% else %}{{ m.content }}[end]{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "the prompt is written in the loop": (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}"
        "{% if loop.last and add_generation_prompt %}[assistant]{% endif %}{% endfor %}"
    ),
    "the whole ends behind the loop": (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% else %}{{ eos_token }}{% endif %}"
    ),
    "turns are kept apart": (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% if m.role == 'assistant' and not loop.last %}"
        "[next]{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "history has no thought, the prompt has": (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.last %}<>{% endif %}"
        "{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]<>{% endif %}"
    ),
}


def conversation(*turns: tuple[str, str], **settings: Any) -> Conversation:
    """Build a record of (role, content) turns."""
    messages = tuple(Message(role=role, content=content) for role, content in turns)
    return Conversation(where="data.jsonl:7", messages=messages, **settings)


TWICE = conversation(("user", "Hi"), ("assistant", " Hello! "), ("user", "Bye"), ("assistant", "Ciao."))
TOOL_USE = attrs.evolve(
    TWICE,
    messages=(
        Message(role="user", content="Look up é."),
        Message(role="assistant", content="", extra={"tool_calls": [CALL]}),
        Message(role="tool", content="a letter", extra={"tool_call_id": "call00001", "name": "look_up"}),
        Message(role="assistant", content="It is a letter."),
        *TWICE.messages[2:],
    ),
    tools=(TOOL,),
)


@pytest.fixture
def tokenizer_of(smollm2: PreTrainedTokenizerBase) -> Callable[[str], PreTrainedTokenizerBase]:
    """Return the tokenizer of a family: SmolLM2's own, small ones of the same kind for the others."""
    return lambda family: smollm2 if family == "smollm2" else trained_tokenizer(family)


def transformers_says(tokenizer: PreTrainedTokenizerBase, record: Conversation) -> tuple[list[int], list[int]] | None:
    """Return the tokens and the mask that transformers makes of a record, None where the template refuses it."""
    try:
        made: Any = tokenizer.apply_chat_template(
            as_dicts(record.messages),
            tools=tools_of(record),
            return_dict=True,
            return_assistant_tokens_mask=True,
            strftime_now=DATE.strftime,
        )
    except jinja2.TemplateError:
        return None
    return made["input_ids"], [0, *made["assistant_masks"][1:]]  # nothing predicts the first


def found_in(sample: Sample | DataError) -> tuple[list[int], list[int]] | None:
    """Return a sample as `transformers_says` tells what it expects."""
    if isinstance(sample, DataError):
        return None
    return sample.token_ids.tolist(), sample.learnt.astype(int).tolist()


def rendered(family: str, records: Sequence[Conversation]) -> list[Conversation]:
    """Leave out the tools that a family's template does not know; to the template they are nothing."""
    return [record for record in records if not (family in WITHOUT_TOOLS and has_tools(record))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learnt_tokens_are_those_that_transformers_marks(tokenizer_of: Any, family: str) -> None:
    """Tokens and mask agree; what a template refuses is refused."""
    tokenizer = with_chat_template(tokenizer_of(family), marked_text(family))
    records = rendered(family, MADE)
    expected = [transformers_says(tokenizer, record) for record in records]
    assert [found_in(sample) for sample in encode_batch(records, tokenizer, "assistant")] == expected
    assert sum(tokens is not None for tokens in expected) > 100


@pytest.mark.parametrize("loss_on", LOSSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_marks_the_same_tokens_are_learnt(tokenizer_of: Any, family: str, loss_on: LossOn) -> None:
    """Trimmed contents, tools in the last question, no generation prompt, rewritten history: nothing is marked."""
    marked, unmarked = (
        with_chat_template(tokenizer_of(family), text) for text in (marked_text(family), unmarked_text(family))
    )
    assert "generation %}" not in str(unmarked.chat_template)
    expected = [found_in(sample) for sample in encode_batch(MADE, marked, loss_on)]
    assert [found_in(sample) for sample in encode_batch(MADE, unmarked, loss_on)] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shipped_tickets_are_learnt_as_transformers_marks_them(tokenizer_of: Any, family: str) -> None:
    """The quick start's data, without marks."""
    lines = (TICKETS / "tickets_val.jsonl").read_text(encoding="utf-8").splitlines()
    lines += (TICKETS / "tickets_train.jsonl").read_text(encoding="utf-8").splitlines()[:64]
    records = [conversation(*((m["role"], m["content"]) for m in json.loads(line)["messages"])) for line in lines]
    marked = with_chat_template(tokenizer_of(family), marked_text(family))
    unmarked = with_chat_template(tokenizer_of(family), unmarked_text(family))
    expected = [transformers_says(marked, record) for record in records]
    assert [found_in(sample) for sample in encode_batch(records, unmarked, "assistant")] == expected
    assert None not in expected


def trl_labels(
    tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]], *, completion_only: bool, directory: Path
) -> tuple[list[list[int]], list[list[int]]]:
    """Let TRL prepare a dataset as its SFTTrainer does, and its collator make a batch of it."""
    from datasets import IterableDataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(directory), assistant_only_loss=True, max_length=None, bf16=False, use_cpu=True, report_to=[]
    )
    trainer: Any = types.SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=completion_only)
    dataset = IterableDataset.from_generator(lambda: iter(rows))
    prepared = list(SFTTrainer._prepare_dataset(trainer, dataset, tokenizer, config, False, None, "train"))
    columns = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in prepared]
    batch = DataCollatorForLanguageModeling(pad_token_id=0)(columns)
    lengths = [len(row["input_ids"]) for row in columns]
    tokens, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    assert all(set(row[length:]) <= {-100} for row, length in zip(labels, lengths, strict=True))
    return (
        [row[:length] for row, length in zip(tokens, lengths, strict=True)],
        [row[:length] for row, length in zip(labels, lengths, strict=True)],
    )


def assert_learns_the_labels(
    samples: list[Sample | DataError], tokens: list[list[int]], labels: list[list[int]]
) -> None:
    """Compare samples with what TRL takes its loss on."""
    found = [found_in(sample) for sample in samples]
    expected = [
        (row, [0, *(int(label != -100) for label in learnt[1:])]) for row, learnt in zip(tokens, labels, strict=True)
    ]
    assert found == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learnt_tokens_are_those_that_trl_takes_its_loss_on(tokenizer_of: Any, tmp_path: Path, family: str) -> None:
    """TRL's own preparation and collator, with assistant_only_loss; our side without the marks that TRL needs."""
    marked = with_chat_template(tokenizer_of(family), marked_text(family))
    unmarked = with_chat_template(tokenizer_of(family), unmarked_text(family))
    samples = [(record, sample) for record, sample in zip(MADE, encode_batch(MADE, unmarked, "assistant"), strict=True)]
    kept = [(record, sample) for record, sample in samples if isinstance(sample, Sample)]
    rows = [
        {
            "messages": as_dicts(record.messages),
            "tools": tools_of(record),
            "chat_template_kwargs": {"date_string": f"{DATE:%d %b %Y}"},
        }
        for record, _ in kept
    ]
    assert len(rows) > 100
    labels = trl_labels(marked, rows, completion_only=False, directory=tmp_path)
    assert_learns_the_labels([sample for _, sample in kept], *labels)


@pytest.mark.parametrize("family", ["smollm2", "qwen25", "llama3"])
def test_a_conversational_completion_is_learnt_as_trl_learns_it(tokenizer_of: Any, tmp_path: Path, family: str) -> None:
    """Answers in the prompt are given, those in the completion are learnt."""
    marked = with_chat_template(tokenizer_of(family), marked_text(family))
    unmarked = with_chat_template(tokenizer_of(family), unmarked_text(family))
    records, rows = [], []
    for record in MADE:
        split = max(index for index, message in enumerate(record.messages) if message.role == "user") + 1
        if has_tools(record) or transformers_says(marked, record) is None:
            continue
        turns = as_dicts(record.messages)
        kwargs = {"date_string": f"{DATE:%d %b %Y}"}
        rows.append({"prompt": turns[:split], "completion": turns[split:], "chat_template_kwargs": kwargs})
        records.append(attrs.evolve(record, num_prompt_messages=split))
    labels = trl_labels(marked, rows, completion_only=True, directory=tmp_path)
    assert_learns_the_labels(encode_batch(records, unmarked, "assistant"), *labels)
    assert_learns_the_labels(encode_batch(records, marked, "assistant"), *labels)


def by_prefixes(tokenizer: PreTrainedTokenizerBase, record: Conversation) -> list[tuple[int, int] | None]:
    """Find the turns by rendering up to them with transformers, None where the whole does not begin so."""
    turns = as_dicts(record.messages)

    def render(number: int, **settings: Any) -> str:
        return str(
            tokenizer.apply_chat_template(turns[:number], tokenize=False, strftime_now=DATE.strftime, **settings)
        )

    text, spans = render(len(turns)), []
    for index in range(1, len(turns), 2):
        before, through = render(index, add_generation_prompt=True), render(index + 1)
        is_prefix = text.startswith(through) and through.startswith(before)
        spans.append((len(before), len(through.rstrip())) if is_prefix else None)
    return spans


CONTENTS = st.lists(
    st.sampled_from(
        ["a", "é", "😀", " ", "\n", "<think>", "</think>", "\n\n", "/no_think", "<>", "[end]", "[assistant]"]
    ),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("text", [*map(unmarked_text, FAMILIES), *HARD.values()], ids=[*FAMILIES, *HARD])
@given(contents=st.lists(CONTENTS, min_size=2, max_size=6).filter(lambda contents: len(contents) % 2 == 0))
@settings(max_examples=60)
def test_where_the_whole_begins_with_a_turn_nothing_else_is_learnt(text: str, contents: list[str]) -> None:
    """The quick way and the ways for rewritten history agree with rendering turn by turn wherever that is possible."""
    tokenizer = with_chat_template(trained_tokenizer("qwen3"), text)
    record = conversation(*((("user", "assistant")[i % 2], content) for i, content in enumerate(contents)))
    template = chat_template_of(tokenizer, record)
    for turn, expected in zip(range(1, len(contents), 2), by_prefixes(tokenizer, record), strict=True):
        if expected is not None:
            assert template.locate_turns(record, turn, most=1)[1] == [expected]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("switched by a word in a turn", [" Hello! [end]", "Ciao.[end]"]),
        ("rewritten history, counted loop", ["Hello![end]", "<>Ciao.[end]"]),
        ("written by a macro", [" Hello! [end]", "Ciao.[end]"]),
        ("the last turn ends otherwise", [" Hello! [end]", "Ciao.[return]"]),
        ("the prompt is written in the loop", [" Hello! </s>", "Ciao.</s>"]),
        ("the whole ends behind the loop", [" Hello! [end]", "Ciao.[end]</s>"]),
        ("turns are kept apart", [" Hello! [end]", "Ciao.[end]"]),
        ("history has no thought, the prompt has", [" Hello! [end]", "Ciao.[end]"]),
    ],
)
def test_a_template_that_is_hard_to_follow_is_learnt_as_it_renders(kind: str, expected: list[str]) -> None:
    """Where one way of finding a turn fails another one does not."""
    tokenizer = with_chat_template(trained_tokenizer("qwen3"), HARD[kind])
    text, spans = chat_template_of(tokenizer, TWICE).locate_turns(TWICE, 0)
    assert [text[start:past] for start, past in spans] == expected


def test_qwen3_learns_the_thoughts_that_it_shows(tokenizer_of: Any, learnt_text: Any) -> None:
    """Earlier thoughts are dropped from the text, the last turn has one, empty or not."""
    tokenizer = with_chat_template(tokenizer_of("qwen3"), unmarked_text("qwen3"))
    thinking = conversation(
        ("user", "a?"),
        ("assistant", "<think>\nHm.\n</think>\n\nA."),
        ("user", "b?"),
        ("assistant", "<think>\nOh.\n</think>\n\nB."),
    )
    learnt = "A.<|im_end|><think>\nOh.\n</think>\n\nB.<|im_end|>"
    assert learnt_text(encode(thinking, tokenizer, "assistant"), tokenizer) == learnt
    learnt = " Hello! <|im_end|><think>\n\n</think>\n\nCiao.<|im_end|>"
    assert learnt_text(encode(TWICE, tokenizer, "assistant"), tokenizer) == learnt


EASY = ("the prompt is written in the loop", "the whole ends behind the loop", "history has no thought, the prompt has")


@pytest.mark.parametrize("kind", [*FAMILIES, *EASY])
def test_a_long_conversation_is_rendered_once(tokenizer_of: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Ten turns need no twenty renderings."""
    text = HARD[kind] if kind in EASY else unmarked_text(kind)
    tokenizer = with_chat_template(tokenizer_of(kind if kind in FAMILIES else "qwen3"), text)
    turns = [turn for number in range(10) for turn in (("user", f"{number}?"), ("assistant", f"{number}"))]
    record = conversation(*turns, tools=(TOOL,) if "tools" in text else ())
    expected = encode(record, tokenizer, "assistant")
    renderings: list[object] = []
    render = jinja2.Template.render
    monkeypatch.setattr(jinja2.Template, "render", lambda *a, **k: renderings.append(a) or render(*a, **k))
    assert encode(record, tokenizer, "assistant").learnt.tolist() == expected.learnt.tolist()
    assert len(renderings) == 1


@pytest.mark.parametrize("family", WITHOUT_TOOLS)
def test_tools_that_a_template_does_not_know_are_refused(tokenizer_of: Any, family: str) -> None:
    """Or the model would be trained on something else than the file says."""
    tokenizer = with_chat_template(tokenizer_of(family), "{# tools, tool_calls #}" + unmarked_text(family))
    with pytest.raises(DataError, match=r"data.jsonl:7 has tools and tool_calls, which(.|\n)*data.chat_template"):
        encode(TOOL_USE, tokenizer, "assistant")
    with pytest.raises(DataError, match="has tool_calls, which"):
        encode(attrs.evolve(TOOL_USE, tools=()), tokenizer, "all")
    with pytest.raises(DataError, match="has tools, which"):
        encode(attrs.evolve(TWICE, tools=(TOOL,)), tokenizer, "all")


@pytest.mark.parametrize("family", ["qwen25", "qwen3", "llama3", "mistral"])
def test_arguments_in_a_string_are_rendered_as_an_object(tokenizer_of: Any, learnt_text: Any, family: str) -> None:
    """As OpenAI writes them; a string that is no JSON stays what it is."""
    tokenizer = with_chat_template(tokenizer_of(family), unmarked_text(family))
    learnt = learnt_text(encode(TOOL_USE, tokenizer, "assistant"), tokenizer)
    assert '{"word": "é"}' in learnt
    assert "a letter" not in learnt.replace("It is a letter.", "")
    broken = {**CALL, "function": {"name": "look_up", "arguments": "{é"}}
    message = attrs.evolve(TOOL_USE.messages[1], extra={"tool_calls": [broken]})
    record = attrs.evolve(TOOL_USE, messages=(TOOL_USE.messages[0], message, *TOOL_USE.messages[2:]))
    assert "{é" in learnt_text(encode(record, tokenizer, "assistant"), tokenizer)


@pytest.mark.parametrize("family", ["qwen25", "qwen3", "llama3", "mistral"])
def test_a_question_with_tools_is_the_beginning_of_its_tokens(tokenizer_of: Any, family: str) -> None:
    """A model is asked with the tools that it was trained behind; a call is an answer too."""
    tokenizer = with_chat_template(tokenizer_of(family), unmarked_text(family))
    for length in (2, 4):
        record = attrs.evolve(TOOL_USE, messages=TOOL_USE.messages[:length])
        prompt, sample = prompt_of(record, tokenizer), encode(record, tokenizer, "last_assistant")
        assert sample.token_ids[: len(prompt.token_ids)].tolist() == list(prompt.token_ids)
        assert sample.learnt.tolist().index(True) == len(prompt.token_ids)
        assert "look_up" in prompt.text
        assert ("look_up" in prompt.reference) if length == 2 else prompt.reference == "It is a letter."


def test_a_date_does_not_hang_on_the_day(tokenizer_of: Any) -> None:
    """Llama 3.1 has a date of its own, 3.2 asks for today's; a resume tomorrow must train on the same tokens."""
    asks = unmarked_text("llama3")
    knows = asks.replace("strftime_now is defined", "false")
    for text in (asks, knows):
        tokenizer = with_chat_template(tokenizer_of("llama3"), text)
        assert "Today Date: 26 Jul 2024\n" in prompt_of(TWICE, tokenizer).text


def test_a_template_of_ones_own_takes_the_place_of_the_tokenizers(smollm2: PreTrainedTokenizerBase) -> None:
    """The tokenizer that was given keeps its own, and both encode."""
    own = smollm2.chat_template
    changed = with_chat_template(smollm2, "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert changed.decode(encode(TWICE, changed, "all").token_ids.tolist()) == "Hi\n Hello! \nBye\nCiao.\n"
    assert smollm2.chat_template == own


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ bos_token }}\n{% for m in messages %}", r"line 2: (.|\n)*endfor"),
        ("{{ 'a' | no_such_filter }}", "line 1: No filter named 'no_such_filter'"),
        (" \n", "found nothing in it"),
    ],
)
def test_a_template_that_is_none_is_told_with_its_line(
    smollm2: PreTrainedTokenizerBase, text: str, problem: str
) -> None:
    """Before anything is rendered."""
    with pytest.raises(ConfigError, match=rf"data.chat_template (.|\n)*{problem}"):
        with_chat_template(smollm2, text)


def test_a_tokenizers_own_template_that_is_none_is_told_with_the_line(tokenizer: PreTrainedTokenizerBase) -> None:
    """A model directory may be broken too."""
    tokenizer.chat_template = "{% for %}"
    with pytest.raises(DataError, match=r"data.jsonl:7 cannot be rendered(.|\n)*no Jinja template: line 1"):
        encode(TWICE, tokenizer, "assistant")


def test_a_template_for_tools_is_used_for_records_with_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    """Some tokenizers have several templates by name."""
    tokenizer.chat_template = {"default": unmarked_text("smollm2"), "tool_use": unmarked_text("qwen25")}
    assert "# Tools" in prompt_of(TOOL_USE, tokenizer).text
    assert "# Tools" not in prompt_of(TWICE, tokenizer).text
