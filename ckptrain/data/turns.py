"""What do the turns of a conversation say? From plain values to messages that a chat template can render.

What is set and not understood is refused: it would train something else than the file says. Null values are what
Arrow fills in where rows have different keys, so a null says nothing, at any depth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckptrain.data.records import ROLES, Conversation, Malformed, Message, keys_of, kind_of, shown

_ALWAYS = ("role", "content")
# What chat templates use besides role and content, and who may say it.
_EXTRA = {
    "tool_calls": ("assistant",),
    "reasoning_content": ("assistant",),
    "thinking": ("assistant",),
    "tool_call_id": ("tool",),
    "name": ROLES,
}
_NOTHING: tuple[object, ...] = (None, "", [], {})
# What describes a turn and is no part of it.
_METADATA = frozenset(
    {"id", "message_id", "parent_id", "turn_id", "turn_identifier", "timestamp", "created_at", "date"}
)
_METADATA |= {"model", "source", "language", "lang", "country", "token_count", "num_tokens", "toxic", "redacted"}


def conversation(where: str, turns: tuple[Message, ...], tools: object = None, num_prompt: int = 0) -> Conversation:
    """Put turns together; the first `num_prompt` are given.

    Raises:
        Malformed: there is nothing to learn from, or the tools are not read.
    """
    if all(turn.role != "assistant" for turn in turns[num_prompt:]):
        place = "completion" if num_prompt else "messages"
        raise Malformed(f"{place}: no assistant turn, so there is nothing to learn from")
    return Conversation(where=where, messages=turns, tools=read_tools(tools), num_prompt_messages=num_prompt)


def read_turns(name: str, value: object) -> tuple[Message, ...]:
    """Read a list of {role, content, ...}, which is not empty.

    Raises:
        Malformed: `name` and the place in it are told.
    """
    if not isinstance(value, list):
        raise Malformed(f"{name}: expected a list of {{role, content}}, found {kind_of(value)}")
    if not value:
        raise Malformed(f"{name}: the list is empty")
    return tuple(read_turn(f"{name}[{index}]", turn) for index, turn in enumerate(value))


def read_turn(name: str, turn: object) -> Message:
    """Read one {role, content, ...}.

    Raises:
        Malformed: `name` and the key are told.
    """
    if not isinstance(turn, dict):
        raise Malformed(f"{name}: expected {{role, content}}, found {kind_of(turn)}")
    more = {key: turn[key] for key in turn if key not in _ALWAYS and turn[key] not in _NOTHING}
    missing = [key for key in _ALWAYS if key not in turn and not (key == "content" and "tool_calls" in more)]
    if missing:
        raise Malformed(f"{name}: {' and '.join(missing)} missing, found {keys_of(turn)}")
    role = turn["role"]
    if role not in ROLES:
        raise Malformed(f"{name}.role: expected one of {', '.join(ROLES)}; found {shown(role)}")
    extra = _read_more(name, role, more) if more else {}
    return Message(role=role, content=_content(name, turn.get("content"), role, "tool_calls" in extra), extra=extra)


def text_of(name: str, value: object, *, may_be_empty: bool = False) -> str:
    """Return a value that must be text.

    Raises:
        Malformed: it is not, or is empty where it may not be.
    """
    if not isinstance(value, str):
        raise Malformed(f"{name}: expected a string, found {kind_of(value)}")
    if not value and not may_be_empty:
        raise Malformed(f"{name}: the text is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair; tokenizers crash on it
        raise Malformed(f"{name}: half a surrogate pair at character {error.start} is not text") from error
    return value


def read_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Read the functions that a model may call: a list of JSON schemas, or JSON text of one, or a list of such texts.

    Raises:
        Malformed: it is neither.
    """
    if value is None or value == "":
        return ()
    listed = _parsed("tools", value) if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise Malformed(f"tools: expected a list of functions, found {kind_of(listed)}")
    return tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(listed))


def read_tool_calls(name: str, value: object) -> list[dict[str, Any]]:
    """Read calls of functions: {name, arguments}, bare or under `function` as OpenAI has them, one or a list of them.

    Arguments come back as objects also where they are JSON text: templates write them out themselves.

    Raises:
        Malformed: a call has no name, or arguments that are no object.
    """
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise Malformed(f"{name}: the list is empty")
    return [_tool_call(f"{name}[{index}]", call) for index, call in enumerate(calls)]


def _read_more(name: str, role: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Read what a turn says besides role and content."""
    unused = sorted(more.keys() - {"weight"} - _EXTRA.keys() - _METADATA)
    if unused:
        raise Malformed(
            f"{name}: {', '.join(map(repr, unused))} would not be trained; a turn has role, content,"
            f" {', '.join(_EXTRA)}"
        )
    if more.get("weight", 1) != 1 and (role == "assistant" or more["weight"] != 0):
        raise Malformed(
            f"{name}.weight: expected 1, found {more['weight']!r}; turns have no weights here: give a turn that is not"
            " to be learnt in the prompt of {prompt, completion}"
        )
    for key in more:
        if key in _EXTRA and role not in _EXTRA[key]:
            raise Malformed(f"{name}.{key}: only a turn of {' or '.join(_EXTRA[key])} has one, this is of {role}")
    return {key: _read_extra(f"{name}.{key}", key, more[key]) for key in _EXTRA if key in more}


def _content(name: str, value: object, role: str, calls_tools: bool) -> str:
    if calls_tools and value is None:
        return ""
    if isinstance(value, list) and value:
        value = "".join(_part(f"{name}.content[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, list):
        raise Malformed(f"{name}.content: expected a string or a list of text parts, found an empty list")
    return text_of(f"{name}.content", value, may_be_empty=role != "assistant" or calls_tools)


def _part(name: str, part: object) -> str:
    if not isinstance(part, dict):
        raise Malformed(f"{name}: expected {{type: text, text}}, found {kind_of(part)}")
    if part.get("type") != "text":
        raise Malformed(f"{name}.type: expected 'text', found {shown(part.get('type'))}: only text is trained here")
    return text_of(f"{name}.text", part.get("text"), may_be_empty=True)


def _read_extra(name: str, key: str, value: object) -> Any:
    return read_tool_calls(name, value) if key == "tool_calls" else text_of(name, value, may_be_empty=True)


def _tool_call(name: str, call: object) -> dict[str, Any]:
    call = _cleaned(name, call)
    if not isinstance(call, dict):
        raise Malformed(f"{name}: expected {{name, arguments}}, found {kind_of(call)}")
    function = call.pop("function") if "function" in call else call
    if not isinstance(function, dict):
        raise Malformed(f"{name}.function: expected {{name, arguments}}, found {kind_of(function)}")
    if "name" not in function:
        raise Malformed(f"{name}: name missing, found {keys_of(function)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(f"{name}.arguments", arguments) if arguments else {}
    if not isinstance(arguments, dict):
        raise Malformed(f"{name}.arguments: expected an object, found {kind_of(arguments)}")
    plain = {"name": text_of(f"{name}.name", function["name"]), "arguments": arguments}
    return {"type": "function", **({"id": call["id"]} if "id" in call else {}), "function": plain}


def _tool(name: str, tool: object) -> Mapping[str, Any]:
    tool = _cleaned(name, _parsed(name, tool) if isinstance(tool, str) else tool)
    if not isinstance(tool, dict):
        raise Malformed(f"{name}: expected an object, found {kind_of(tool)}")
    return tool


def _cleaned(name: str, value: object) -> Any:
    """Return a value without the nulls of its objects; every text in it must be text."""
    if isinstance(value, dict):
        said = {text_of(f"a key of {name}", key, may_be_empty=True): held for key, held in value.items()}
        return {key: _cleaned(f"{name}.{key}", held) for key, held in said.items() if held is not None}
    if isinstance(value, list):
        return [_cleaned(f"{name}[{index}]", item) for index, item in enumerate(value)]
    return text_of(name, value, may_be_empty=True) if isinstance(value, str) else value


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text_of(name, text))
    except json.JSONDecodeError as error:
        raise Malformed(f"{name}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise Malformed(f"{name}: nested too deeply") from error
