"""What a row says in each form: the record that is made of it, and how one that is malformed is told."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from support.datasets_on_disk import GSM8K_ROWS, SQUAD_ROWS

from ckptrain.config.schema import RecordFormat
from ckptrain.data.formats import FORMS, RowReader, detect_format
from ckptrain.data.records import Conversation, Malformed, Message, PromptCompletion, Record
from ckptrain.errors import ConfigError

USER = {"role": "user", "content": "hello"}
ASSISTANT = {"role": "assistant", "content": "hi"}
CALL = {"name": "add", "arguments": {"a": 1}}
CALLED = [{"type": "function", "function": CALL}]


def read(row: dict[str, Any], record_format: RecordFormat = "auto", **columns: str) -> Record:
    """Read one row."""
    return RowReader(record_format, columns).read("f:1", row)


def turns(row: dict[str, Any], record_format: RecordFormat = "auto", **columns: str) -> list[tuple[str, str]]:
    """Return who says what in a row."""
    record = read(row, record_format, **columns)
    assert isinstance(record, Conversation)
    return [(message.role, message.content) for message in record.messages]


def problem(row: dict[str, Any], record_format: RecordFormat = "auto", **columns: str) -> str:
    """Return why a row is malformed."""
    with pytest.raises(Malformed) as caught:
        read(row, record_format, **columns)
    return str(caught.value)


def test_every_format_of_a_config_is_read() -> None:
    """What a config may ask for is what there is."""
    assert {*FORMS, "auto"} == set(typing.get_args(RecordFormat))


def test_a_conversation_is_read_with_its_place() -> None:
    """Columns that the form does not have are left alone."""
    user, assistant = Message(role="user", content="hello"), Message(role="assistant", content="hi")
    record = read({"messages": [USER, ASSISTANT], "source": "forum"})
    assert record == Conversation(where="f:1", messages=(user, assistant))


def test_plain_prompts_and_completions_are_read() -> None:
    """Text that no template touches, white space and all."""
    assert read({"prompt": "2 + 2 =", "completion": " 4"}) == PromptCompletion(where="f:1", prompt="2 + 2 =", completion=" 4")  # fmt: skip


def test_turns_of_a_prompt_are_given() -> None:
    """The conversational form of TRL: what stands in the prompt is not learnt, also if the assistant says it."""
    record = read({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT], "tools": [{"type": "function"}]})
    assert isinstance(record, Conversation)
    assert [message.role for message in record.messages] == ["user", "assistant", "user", "assistant"]
    assert (record.num_prompt_messages, record.tools) == (3, ({"type": "function"},))


@pytest.mark.parametrize(
    "call",
    [
        {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "x1", "type": None, "function": {"name": "add", "arguments": {"a": 1, "b": None}}},
        {"id": "x1", "name": "add", "arguments": {"a": 1}},
    ],
)
def test_calls_of_tools_are_read_as_objects(call: dict[str, Any]) -> None:
    """As OpenAI writes them, as Arrow fills them up, and bare; without content the assistant says nothing."""
    answer = {"role": "tool", "content": "2", "tool_call_id": "x1", "name": "add", "tool_calls": None}
    record = read({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer, ASSISTANT]})
    assert isinstance(record, Conversation)
    _, asked, answered, last = record.messages
    assert asked.as_dict() == {"role": "assistant", "content": "", "tool_calls": [{"id": "x1", **CALLED[0]}]}
    assert answered.as_dict() == {"role": "tool", "content": "2", "tool_call_id": "x1", "name": "add"}
    assert last.extra == {}


def test_an_assistant_that_calls_may_leave_its_content_out() -> None:
    """The key may be missing altogether; reasoning is kept."""
    turn = {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "I must add."}
    record = read({"messages": [USER, turn]})
    assert isinstance(record, Conversation)
    assert record.messages[1].extra == {"tool_calls": CALLED, "reasoning_content": "I must add."}


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "default": None}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]])
@pytest.mark.parametrize("row", [{"messages": [USER, ASSISTANT]}, {"conversations": [{"from": "gpt", "value": "x"}]}])
def test_tools_are_read_from_objects_and_from_text(row: dict[str, Any], tools: object) -> None:
    """Parquet has them as text, where functions have different parameters; nulls are what Arrow fills in."""
    record = read({**row, "tools": tools})
    assert isinstance(record, Conversation)
    assert record.tools == ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools_are_none(tools: object) -> None:
    """However a file writes that there are none."""
    record = read({"messages": [ASSISTANT], "tools": tools})
    assert isinstance(record, Conversation)
    assert record.tools == ()


def test_parts_of_text_are_joined_and_metadata_is_left_alone() -> None:
    """Vision templates write text in parts; an id and a time say nothing to learn, and a weight of 1 is none."""
    parts = [{"type": "text", "text": "he", "image": None}, {"type": "text", "text": "llo"}]
    row = {"messages": [{"role": "user", "content": parts, "id": 7, "timestamp": "now"}, {**ASSISTANT, "weight": 1}]}
    assert turns(row) == [("user", "hello"), ("assistant", "hi")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [("user", "Add.\n1 2"), ("assistant", "3")]),
        ({"instruction": "Hi.", "input": "", "output": "3"}, [("user", "Hi."), ("assistant", "3")]),
        ({"instruction": "", "input": "Hi.", "output": "3"}, [("user", "Hi."), ("assistant", "3")]),
        (
            {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]], "input": None},
            [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
        ),
        ({"instruction": "c", "output": "d", "system": "", "history": None}, [("user", "c"), ("assistant", "d")]),
    ],
)
def test_alpaca_is_read(row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """The input on a line of its own, what was said before, and the system's words where there are some."""
    assert turns(row) == turns(row, "alpaca") == expected


def test_sharegpt_is_read() -> None:
    """Each speaker has a role; calls are JSON, one or several; the system may stand apart."""
    said = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "2"},
        {"from": "function_call", "value": json.dumps([CALL, CALL])},
        {"from": "tool", "value": "3"},
        {"from": "gpt", "value": "a", "weight": None},
    ]
    record = read({"conversations": said, "system": "s"})
    assert isinstance(record, Conversation)
    assert [(message.role, message.content) for message in record.messages] == [
        ("system", "s"), ("user", "q"), ("assistant", ""), ("tool", "2"), ("assistant", ""), ("tool", "3"), ("assistant", "a")
    ]  # fmt: skip
    assert record.messages[2].extra == {"tool_calls": CALLED}
    assert record.messages[4].extra == {"tool_calls": CALLED * 2}


def test_sharegpt_with_roles_is_read_as_messages() -> None:
    """Both ways to write a turn are found under `conversations`."""
    assert turns({"conversations": [USER, ASSISTANT]}) == turns({"messages": [USER, ASSISTANT]})


def test_squad_is_read_as_nemo_rl_reads_it() -> None:
    """Context, question, and the first of the answers."""
    row = SQUAD_ROWS[3]
    assert turns(row) == turns(row, "squad") == [
        ("system", row["context"]), ("user", row["question"]), ("assistant", row["answers"]["text"][0])
    ]  # fmt: skip


def test_gsm8k_is_read_as_nemo_rl_reads_it_and_whole_if_asked() -> None:
    """The number alone by default; the worked answer as input and output."""
    row = {"question": "1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}
    assert turns(row, "gsm8k") == [("user", "1 + 1?"), ("assistant", "2")]
    assert turns(row, "input_output", input="question", output="answer")[1] == ("assistant", row["answer"])


def test_openmathinstruct_learns_the_answer_that_is_chosen() -> None:
    """The expected one by default, as NeMo-RL's class has it; the solution, as its recipe has it."""
    row = {"problem": "p", "generated_solution": "so 2", "expected_answer": "2", "problem_source": "math"}
    assert turns(row) == turns(row, "openmathinstruct2") == [("user", "p"), ("assistant", "2")]
    assert turns(row, "openmathinstruct2", answer="generated_solution") == [("user", "p"), ("assistant", "so 2")]
    assert problem({"problem": "p"}, "openmathinstruct2").startswith("answer (the column expected_answer) missing")


def test_tulu_ends_with_the_assistant() -> None:
    """As NeMo-RL insists."""
    assert turns({"messages": [USER, ASSISTANT]}, "tulu3_sft_mixture") == [("user", "hello"), ("assistant", "hi")]
    assert "expected the last to be the assistant's, found user" in problem(
        {"messages": [USER, ASSISTANT, USER]}, "tulu3_sft_mixture"
    )


def test_columns_may_be_called_otherwise() -> None:
    """They may even be exchanged, and what has been renamed does not stand for itself any more."""
    row = {"a": "q", "b": "x", "input": "other"}
    assert turns(row, "input_output", input="a", output="b") == [("user", "q"), ("assistant", "x")]
    assert turns({"input": "x", "output": "q"}, input="output", output="input") == [("user", "q"), ("assistant", "x")]
    assert read({"question": "q", "answer": "a"}, prompt="question", completion="answer") == PromptCompletion(
        where="f:1", prompt="q", completion="a"
    )


def test_a_column_that_is_not_there_is_told_with_its_name() -> None:
    """Both names, and what the row has."""
    assert problem({"q": "x", "output": "y"}, "input_output", input="question") == (
        "expected the column 'question', which columns.input names; found the keys 'q', 'output'"
    )


@pytest.mark.parametrize("record_format", ["auto", "input_output"])
def test_a_name_that_the_format_does_not_have_is_refused(record_format: RecordFormat) -> None:
    """With those that it has."""
    with pytest.raises(ConfigError, match=r"columns\.promt: the format input_output has input, output, system"):
        read({"input": "a", "output": "b", "c": "d"}, record_format, promt="c")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("messages prompt prompt_id", "messages"),
        ("conversations id", "sharegpt"),
        ("prompt completion input output", "prompt_completion"),
        ("prompt chosen", "prompt_completion"),
        ("instruction output input", "alpaca"),
        ("id title context question answers", "squad"),
        ("input output", "input_output"),
        ("problem generated_solution expected_answer problem_source", "openmathinstruct2"),
    ],
)
def test_the_keys_of_a_row_tell_its_format(keys: str, expected: str) -> None:
    """The most telling first."""
    assert detect_format(dict.fromkeys(keys.split())) == expected


def test_a_format_is_not_guessed() -> None:
    """A question and an answer may be learnt in two ways, so a person must say which; others are told what is known."""
    assert "set format to gsm8k to learn the number" in problem(GSM8K_ROWS[0])
    assert "found the keys 'text'; set format" in problem({"text": "x"})
    assert "found the keys 'problem', 'answer'" in problem({"problem": "p", "answer": "a"})
    assert "({messages}, {conversations}, {prompt, completion}," in problem({})


def test_rows_of_a_source_must_be_alike() -> None:
    """The first row decides."""
    reader = RowReader("auto", {})
    reader.read("f:1", {"messages": [ASSISTANT]})
    with pytest.raises(Malformed, match="messages missing, found the keys 'prompt', 'completion'"):
        reader.read("f:2", {"prompt": "a", "completion": "b"})


def assistant(**keys: Any) -> dict[str, Any]:
    """Return a row whose last turn is an assistant's with these keys."""
    return {"messages": [USER, {**ASSISTANT, **keys}]}


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hello"}, "messages: expected a list of {role, content}, found a string"),
    ({"messages": []}, "messages: the list is empty"),
    ({"messages": [USER]}, "messages: no assistant turn, so there is nothing to learn from"),
    ({"messages": ["hello"]}, "messages[0]: expected {role, content}, found a string"),
    ({"messages": [USER, {"role": "assistant"}]}, "messages[1]: content missing, found the keys 'role'"),
    ({"messages": [USER, {"content": "x"}]}, "messages[1]: role missing, found the keys 'content'"),
    ({"messages": [{"role": "human", "content": "x"}]}, "messages[0].role: expected one of system, developer, user, assistant, tool; found 'human'"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role: expected one of"),
    (assistant(content=None), "messages[1].content: expected a string, found null"),
    (assistant(content=""), "messages[1].content: the text is empty"),
    (assistant(content=[]), "messages[1].content: expected a string or a list of text parts, found an empty list"),
    (assistant(content=["x"]), "messages[1].content[0]: expected {type: text, text}, found a string"),
    (assistant(content=[{"type": "image"}]), "messages[1].content[0].type: expected 'text', found 'image'"),
    (assistant(content="\ud800"), "messages[1].content: half a surrogate pair at character 0 is not text"),
    (assistant(audio={"id": "x"}), "messages[1]: 'audio' would not be trained; a turn has role, content, tool_calls"),
    (assistant(weight=0), "messages[1].weight: expected 1, found 0"),
    (assistant(tool_calls=[{}]), "messages[1].tool_calls[0]: name missing, found an empty object"),
    (assistant(tool_calls=["x"]), "messages[1].tool_calls[0]: expected {name, arguments}, found a string"),
    (assistant(tool_calls=[{"function": "x"}]), "messages[1].tool_calls[0].function: expected {name, arguments}, found a string"),
    (assistant(tool_calls=[{"name": "f", "arguments": "{"}]), "messages[1].tool_calls[0].arguments: not JSON"),
    (assistant(tool_calls=[{"name": "f", "arguments": "[1]"}]), "messages[1].tool_calls[0].arguments: expected an object, found a list"),
    (assistant(tool_calls=[{"name": "f", "arguments": {"a": ["\udfff"]}}]), "tool_calls[0].arguments.a[0]: half a surrogate pair"),
    (assistant(tool_calls=[{"name": "f", "arguments": {"\udfff": 1}}]), "half a surrogate pair"),
    (assistant(reasoning_content=["x"]), "messages[1].reasoning_content: expected a string, found a list"),
    ({"messages": [{**USER, "tool_calls": [CALL]}, ASSISTANT]}, "messages[0].tool_calls: only a turn of assistant has one, this is of user"),
    ({"messages": [ASSISTANT], "tools": {"a": 1}}, "tools: expected a list of functions, found an object"),
    ({"messages": [ASSISTANT], "tools": "{"}, "tools: not JSON"),
    ({"messages": [ASSISTANT], "tools": [1]}, "tools[0]: expected an object, found a number"),
    ({"messages": [ASSISTANT], "message_loss_mask": [1]}, "message_loss_mask: there are no masks here"),
    ({"prompt": "x"}, "completion missing, found the keys 'prompt'"),
    ({"prompt": "x", "completion": True}, "completion: expected a string, found a boolean"),
    ({"prompt": "", "completion": "y"}, "prompt: the text is empty"),
    ({"prompt": "a", "completion": "\ud800"}, "completion: half a surrogate pair"),
    ({"prompt": [USER], "completion": "x"}, "expected two strings or two lists of turns, found a list as prompt and a string as completion"),
    ({"prompt": [USER, ASSISTANT], "completion": [USER]}, "completion: no assistant turn"),
    ({"prompt": [USER], "completion": [{"role": "assistant"}]}, "completion[0]: content missing"),
    ({"input": "a", "output": None}, "output: expected a string, found null"),
    ({"input": 3, "output": "x"}, "input: expected a string, found a number"),
    ({"input": "a", "output": "x", "system": 3}, "system: expected a string, found a number"),
    ({"instruction": "", "input": "", "output": "x"}, "instruction: the text is empty"),
    ({"instruction": "a", "output": ""}, "output: the text is empty"),
    ({"instruction": "a", "output": "x", "history": "x"}, "history: expected a list of [asked, answered], found a string"),
    ({"instruction": "a", "output": "x", "history": [["x"]]}, "history[0]: expected [asked, answered], found a list of 1"),
    ({"instruction": "a", "output": "x", "history": [["x", None]]}, "history[0][1]: expected a string, found null"),
    ({"conversations": {}}, "conversations: expected a list of {from, value}, found an object"),
    ({"conversations": []}, "conversations: the list is empty"),
    ({"conversations": ["x"]}, "conversations[0]: expected {role, content}, found a string"),
    ({"conversations": [{"from": "human"}]}, "conversations[0]: value missing, found the keys 'from'"),
    ({"conversations": [{"from": "narrator", "value": "x"}]}, "conversations[0].from: expected one of human, user, gpt"),
    ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "conversations[0].from: expected one of human, user, gpt"),
    ({"conversations": [{"from": "gpt", "value": ""}]}, "conversations[0].value: the text is empty"),
    ({"conversations": [{"from": "function_call", "value": "add(1)"}]}, "conversations[0].value: expected a call as JSON, {name, arguments}"),
    ({"conversations": [{"from": "system", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "c"}, "begins with a system turn as well"),
    ({**SQUAD_ROWS[0], "answers": {"text": [], "answer_start": []}}, "answers.text: the list is empty: the question has no answer to learn"),
    ({**SQUAD_ROWS[0], "answers": [{"text": "x"}]}, "answers: expected {text: [...]}, found a list"),
    ({**SQUAD_ROWS[0], "context": None}, "context: expected a string, found null"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), MALFORMED, ids=[expected[:60] for _, expected in MALFORMED])
def test_a_malformed_row_is_told_with_its_key_and_what_was_found(row: dict[str, Any], expected: str) -> None:
    """The place in the row, expected and found, for everything a row can get wrong."""
    assert expected in problem(row)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("so it is 2", "answer: expected a number after '####', found none in 'so it is 2'"),
        ("2 ####  ", "answer after ####: the text is empty"),
        (2, "answer: expected a string, found a number"),
    ],
)
def test_an_answer_of_gsm8k_without_its_number_is_malformed(answer: object, expected: str) -> None:
    """NeMo-RL would train an empty answer."""
    assert problem({"question": "q", "answer": answer}, "gsm8k") == expected
