"""What does a row say? From the columns of a row to a record, in each of the forms that people have.

messages             {messages: [{role, content, ...}], tools?}
prompt_completion    {prompt, completion}: text that no chat template touches; or lists of turns, with tools?
input_output         {input, output, system?}: what a user asks, what the assistant answers
alpaca               {instruction, input?, output, system?, history?: [[asked, answered], ...]}
sharegpt             {conversations: [{from, value}], system?, tools?}; turns of {role, content} as well
squad                {context, question, answers: {text: [...]}}: context as the system's turn, the first text learnt
tulu3_sft_mixture    {messages}, of which the last must be the assistant's
openmathinstruct2    {problem, answer}: the answer is the column expected_answer, if `columns` names no other
gsm8k                {question, answer}: of the answer what follows `####`, the number

Alpaca's input follows its instruction on a new line, as LLaMA-Factory has it. The known datasets are read as NeMo-RL
reads them. To learn how GSM8K's answers are worked out, read it as input_output with the columns {input: question,
output: answer}. Columns that a form does not have are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ckptrain.config.schema import RecordFormat
from ckptrain.data.records import Malformed, Message, PromptCompletion, Record, keys_of, kind_of, shown
from ckptrain.data.turns import conversation, read_tool_calls, read_turn, read_turns, text_of
from ckptrain.errors import ConfigError

_Values = Mapping[str, Any]

_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
_CALLS = ("function_call", "tool_call")


@attrs.frozen(kw_only=True)
class Form:
    """One form of rows: the names of its columns, and how a row becomes a record.

    `known_by` are the columns that tell it where the format is auto; empty where they do not. `columns` are those that
    the known dataset calls otherwise.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    known_by: tuple[str, ...] = ()
    columns: Mapping[str, str] = attrs.field(factory=dict)
    parse: Callable[[str, _Values], Record]

    @property
    def names(self) -> tuple[str, ...]:
        """What the form calls its columns."""
        return self.required + self.optional


class RowReader:
    """Makes records of the rows of one source; what `auto` means is decided by the first row that tells.

    Raises:
        ConfigError: `columns` names what the form does not have.
    """

    def __init__(self, record_format: RecordFormat, columns: Mapping[str, str]) -> None:
        self._columns = dict(columns)
        self._form: Form | None = None
        if record_format != "auto":
            self._choose(record_format)

    def read(self, where: str, row: _Values) -> Record:
        """Make a record of a row.

        Raises:
            Malformed: the row is none.
            ConfigError: as for the class, where the format is auto.
        """
        if self._form is None:
            self._choose(detect_format(self._renamed(row, self._columns)))
        assert self._form is not None
        values = self._renamed(row, self._columns)
        for name, column in self._form.columns.items():
            if name not in self._columns and column in row:
                values[name] = row[column]
        missing = [
            f"{name} (the column {self._form.columns[name]})" if name in self._form.columns else name
            for name in self._form.required
            if name not in values
        ]
        if missing:
            raise Malformed(f"{' and '.join(missing)} missing, found {keys_of(row)}")
        return self._form.parse(where, values)

    def _choose(self, record_format: RecordFormat) -> None:
        form = FORMS[record_format]
        for name in self._columns:
            if name not in form.names:
                raise ConfigError(
                    "cannot use the columns of a source",
                    [f"columns.{name}: the format {record_format} has {', '.join(form.names)}"],
                )
        self._form = form

    @staticmethod
    def _renamed(row: _Values, columns: Mapping[str, str]) -> dict[str, Any]:
        """Return the row with the form's names in the place of the file's columns."""
        for name, column in columns.items():
            if column not in row:
                raise Malformed(f"expected the column {column!r}, which columns.{name} names; found {keys_of(row)}")
        taken = set(columns.values())
        kept = {name: value for name, value in row.items() if name not in taken}
        return {**kept, **{name: row[column] for name, column in columns.items()}}


def detect_format(row: _Values) -> RecordFormat:
    """Return the form that a row's keys tell.

    A row of {question, answer} tells none: whether the whole answer is to be learnt, or the number at its end as in
    gsm8k, is not for a program to guess.

    Raises:
        Malformed: they tell none.
    """
    for name, form in FORMS.items():
        if form.known_by and all(key in row for key in form.known_by):
            return name
    if "prompt" in row or "completion" in row:
        return "prompt_completion"
    known = ", ".join("{" + ", ".join(form.known_by) + "}" for form in FORMS.values() if form.known_by)
    hint = (
        "; set format to gsm8k to learn the number after ####, or to input_output with columns {input: question,"
        " output: answer} to learn all of it"
        if {"question", "answer"} <= row.keys()
        else "; set format, and columns where they are called otherwise"
    )
    raise Malformed(f"expected the keys of a format ({known}); found {keys_of(row)}{hint}")


def _messages(where: str, row: _Values) -> Record:
    if row.get("message_loss_mask") is not None:
        raise Malformed(
            "message_loss_mask: there are no masks here; data.loss_on chooses the turns that are learnt, and the prompt"
            " of {prompt, completion} those that are not"
        )
    return conversation(where, read_turns("messages", row["messages"]), row.get("tools"))


def _prompt_completion(where: str, row: _Values) -> Record:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) != isinstance(completion, list):
        raise Malformed(
            f"expected two strings or two lists of turns, found {kind_of(prompt)} as prompt and {kind_of(completion)}"
            " as completion"
        )
    if isinstance(prompt, list):
        given = read_turns("prompt", prompt)
        return conversation(where, given + read_turns("completion", completion), row.get("tools"), len(given))
    return PromptCompletion(where=where, prompt=text_of("prompt", prompt), completion=text_of("completion", completion))


def _input_output(where: str, row: _Values) -> Record:
    turns = [_asked("input", row["input"]), _answered("output", row["output"])]
    return conversation(where, (*_system(row), *turns))


def _alpaca(where: str, row: _Values) -> Record:
    asked = [text_of(key, row[key], may_be_empty=True) for key in ("instruction", "input") if row.get(key) is not None]
    turns = [*_system(row), *_history(row.get("history"))]
    turns += [_asked("instruction", "\n".join(filter(None, asked))), _answered("output", row["output"])]
    return conversation(where, tuple(turns))


def _history(value: object) -> list[Message]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise Malformed(f"history: expected a list of [asked, answered], found {kind_of(value)}")
    turns = []
    for index, pair in enumerate(value):
        name = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            found = f"a list of {len(pair)}" if isinstance(pair, list) else kind_of(pair)
            raise Malformed(f"{name}: expected [asked, answered], found {found}")
        turns += [_asked(f"{name}[0]", pair[0]), _answered(f"{name}[1]", pair[1])]
    return turns


def _sharegpt(where: str, row: _Values) -> Record:
    said = row["conversations"]
    if not isinstance(said, list):
        raise Malformed(f"conversations: expected a list of {{from, value}}, found {kind_of(said)}")
    if not said:
        raise Malformed("conversations: the list is empty")
    turns = [_said(f"conversations[{index}]", turn) for index, turn in enumerate(said)]
    system = _system(row)
    if system and turns[0].role == "system":
        raise Malformed("system: the conversation begins with a system turn as well")
    return conversation(where, (*system, *turns), row.get("tools"))


def _said(name: str, turn: object) -> Message:
    if not isinstance(turn, dict) or turn.get("from") is None:
        return read_turn(name, turn)
    if "value" not in turn:
        raise Malformed(f"{name}: value missing, found {keys_of(turn)}")
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise Malformed(f"{name}.from: expected one of {', '.join(_SPEAKERS)}; found {shown(speaker)}")
    role, place = _SPEAKERS[speaker], f"{name}.value"
    said: dict[str, Any]
    if speaker in _CALLS:
        said = {"tool_calls": _calls(place, turn["value"])}
    else:
        said = {"content": text_of(place, turn["value"], may_be_empty=role != "assistant")}
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return read_turn(name, {**others, "role": role, **said})


def _calls(name: str, value: object) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise Malformed(f"{name}: expected a call as JSON, {{name, arguments}}: {error}") from error
    return read_tool_calls(name, value)


def _squad(where: str, row: _Values) -> Record:
    answers = row["answers"]
    texts = answers.get("text") if isinstance(answers, dict) else None
    if not isinstance(texts, list):
        raise Malformed(f"answers: expected {{text: [...]}}, found {kind_of(answers)}")
    if not texts:
        raise Malformed("answers.text: the list is empty: the question has no answer to learn")
    context = Message(role="system", content=text_of("context", row["context"], may_be_empty=True))
    return conversation(where, (context, _asked("question", row["question"]), _answered("answers.text[0]", texts[0])))


def _tulu(where: str, row: _Values) -> Record:
    turns = read_turns("messages", row["messages"])
    if turns[-1].role != "assistant":
        raise Malformed(f"messages: expected the last to be the assistant's, found {turns[-1].role}")
    return conversation(where, turns)


def _openmathinstruct(where: str, row: _Values) -> Record:
    return conversation(where, (_asked("problem", row["problem"]), _answered("answer", row["answer"])))


def _gsm8k(where: str, row: _Values) -> Record:
    worked, mark, rest = text_of("answer", row["answer"]).partition("####")
    if not mark:
        raise Malformed(f"answer: expected a number after '####', found none in {worked[-40:]!r}")
    number = rest.partition("####")[0].strip()
    return conversation(where, (_asked("question", row["question"]), _answered("answer after ####", number)))


def _asked(name: str, value: object) -> Message:
    return Message(role="user", content=text_of(name, value))


def _answered(name: str, value: object) -> Message:
    return Message(role="assistant", content=text_of(name, value))


def _system(row: _Values) -> tuple[Message, ...]:
    """Return the system's turn, where the row has one that says something."""
    text = row.get("system")
    return (Message(role="system", content=text_of("system", text)),) if text is not None and text != "" else ()


# `auto` takes the first whose `known_by` a row has.
FORMS: dict[RecordFormat, Form] = {
    "messages": Form(required=("messages",), optional=("tools",), known_by=("messages",), parse=_messages),
    "sharegpt": Form(
        required=("conversations",), optional=("system", "tools"), known_by=("conversations",), parse=_sharegpt
    ),
    "prompt_completion": Form(
        required=("prompt", "completion"),
        optional=("tools",),
        known_by=("prompt", "completion"),
        parse=_prompt_completion,
    ),
    "alpaca": Form(
        required=("instruction", "output"),
        optional=("input", "system", "history"),
        known_by=("instruction", "output"),
        parse=_alpaca,
    ),
    "squad": Form(
        required=("context", "question", "answers"), known_by=("context", "question", "answers"), parse=_squad
    ),
    "input_output": Form(
        required=("input", "output"), optional=("system",), known_by=("input", "output"), parse=_input_output
    ),
    "openmathinstruct2": Form(
        required=("problem", "answer"),
        known_by=("problem", "generated_solution", "expected_answer"),
        columns={"answer": "expected_answer"},
        parse=_openmathinstruct,
    ),
    "tulu3_sft_mixture": Form(required=("messages",), parse=_tulu),
    "gsm8k": Form(required=("question", "answer"), parse=_gsm8k),
}
