"""Render a conversation by its model's chat template, and find where in the text its assistant turns are.

A template with `{% generation %}` markers says itself what an assistant turn is. In the others a turn is what the
template writes behind the generation prompt, through the token that ends the turn and without the white space that
follows. Three ways find it:

1. `_by_prefix`: the conversation rendered up to the turn, and through the turn, is the beginning of the whole. This is
   what the other two must agree with, but it renders twice a turn, and templates that rewrite history (Qwen 3 drops
   earlier thoughts), or put the tools into the last question (Mistral), do not keep the beginning.
2. `_by_stand_in`: what stands before and behind a stand-in for the turn's content stands there in the whole too.
3. `find_by_loop`: the template's own loop over the messages, compiled once more with a mark where a message begins,
   tells where each turn is in a single rendering. Behind which words the learnt part begins is found once for a
   template, on conversations made up for it, by the first two ways; if they disagree with it, it is not used. It comes
   first where the generation prompt is always the same, and last for the other templates.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from jinja2 import Template, TemplateError, TemplateSyntaxError

from ckptrain.data.records import Conversation, Message
from ckptrain.data.turn_marks import Span, compiled_by_turn, has_fixed_generation_prompt, without_marks
from ckptrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
# Some templates print today's date. Tokens that change overnight would make a resume train something else, so the date
# is fixed, to the one that Llama 3's template falls back to.
_TEMPLATE_DATE = dt.date(2024, 7, 26)
_STAND_IN = "\ud802"  # a lone surrogate: no text has one


def with_chat_template(tokenizer: PreTrainedTokenizerBase, text: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer with another chat template (`data.chat_template`); the one given keeps its own.

    Raises:
        ConfigError: the text is blank or no Jinja template; the line is named.
    """
    if not text.strip():
        raise ConfigError("data.chat_template cannot be used", ["expected a Jinja template, found nothing in it"])
    try:
        _compiled(text)
    except TemplateSyntaxError as error:
        raise ConfigError(
            "data.chat_template is no Jinja template", [f"line {error.lineno}: {error.message}"]
        ) from error
    changed = copy.copy(tokenizer)
    changed.chat_template = text
    return changed


def chat_template_of(tokenizer: PreTrainedTokenizerBase, record: Conversation) -> ChatTemplate:
    """Return the template that renders a record.

    Raises:
        DataError: the tokenizer has none, or it would leave out the tools or the tool calls of the record.
    """
    try:
        text = str(tokenizer.get_chat_template(tools=record.tools or None))
    except ValueError as error:
        raise DataError(
            f"{record.where} is a conversation, which this tokenizer cannot render",
            ["it has no chat template; use an instruction-tuned model, or records of {prompt, completion}"],
        ) from error
    try:
        template = _chat_template(text, tuple(tokenizer.special_tokens_map.items()))
    except TemplateSyntaxError as error:
        raise DataError(
            f"{record.where} cannot be rendered",
            [f"the tokenizer's chat template is no Jinja template: line {error.lineno}: {error.message}"],
        ) from error
    used = {
        "tools": bool(record.tools),
        "tool_calls": any(message.extra.get("tool_calls") for message in record.messages),
    }
    unknown = [name for name, is_used in used.items() if is_used and name not in template.mentions]
    if unknown:
        raise DataError(
            f"{record.where} has {' and '.join(unknown)}, which the chat template does not render",
            [
                "the model would be trained on something else than the record says; use a model whose template knows"
                f" {' and '.join(unknown)}, give one as data.chat_template, or take them out of the record"
            ],
        )
    return template


@attrs.frozen(kw_only=True, eq=False)
class ChatTemplate:
    """A compiled chat template.

    `by_turn` is the template with a mark at each message, None where it has no loop over the messages that can be
    marked. `headers` are the words that an assistant turn begins with and that the model is given, not taught: for the
    role of the message before it all that were found, the longest first. `trusts_loop` says that nothing in a
    conversation but its roles decides which of them it is, so that nothing else need be rendered.
    """

    text: str
    compiled: Template
    variables: Mapping[str, Any]
    has_markers: bool
    mentions: frozenset[str]
    by_turn: Template | None = None
    trusts_loop: bool = False
    headers: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)

    def render(self, record: Conversation, end: int | None = None, *, generation_prompt: bool = False) -> str:
        """Render the first `end` messages of a record, all if left out.

        Raises:
            DataError: the template refuses them.
        """
        return self._rendered(self.compiled, record, end, generation_prompt=generation_prompt)

    def locate_turns(self, record: Conversation, first: int, most: int | None = None) -> tuple[str, list[Span]]:
        """Render a record and find the assistant turns from messages[first] on, at most so many.

        Returns:
            The text, and the first and the past-the-last character of each turn that the template renders.

        Raises:
            DataError: the template refuses the record, or a turn cannot be told apart.
        """
        if self.has_markers:
            text, spans = self._render_with_markers(record)
            return text, spans[self._num_spans_before(record, first, len(spans)) :][:most]
        text, bodies = self.render_by_turn(record) if self.headers else (self.render(record), [])
        turns = _assistant_turns(record)
        spans = []
        for turn in [turn for turn in turns if turn >= first][:most]:
            body = bodies[turns.index(turn)] if len(bodies) == len(turns) else None
            span = self.find_by_loop(record, turn, text, body) if self.trusts_loop else None
            span = span or self.find_turn(record, turn, text) or self.find_by_loop(record, turn, text, body)
            if span is None:
                raise _cannot_tell(record, turn)
            spans.append(span)
        return text, spans

    def find_turn(self, record: Conversation, turn: int, text: str) -> Span | None:
        """Find a turn by the slow ways."""
        return _by_prefix(self, record, turn, text) or _by_stand_in(self, record, turn, text)

    def find_by_loop(self, record: Conversation, turn: int, text: str, body: Span | None) -> Span | None:
        """Find a turn by where the template's loop wrote it."""
        if body is None or turn == 0:
            return None
        start, end = body
        for header in self.headers.get(record.messages[turn - 1].role, ()):
            if text.startswith(header, start, end):
                is_last = turn == len(record.messages) - 1  # what is written behind the loop belongs to it
                return start + len(header), _stripped(text, len(text) if is_last else end)
        return None

    def render_by_turn(self, record: Conversation) -> tuple[str, list[Span]]:
        """Render a record and tell what the loop wrote for each assistant message, nothing where it cannot be told."""
        if self.by_turn is None:
            return self.render(record), []
        return without_marks(self._rendered(self.by_turn, record))

    def _render_with_markers(
        self, record: Conversation, end: int | None = None, *, generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals(record, end):
            rendered: Any = render_jinja_template(  # a pair of lists, though annotated as a string
                conversations=[_as_dicts(record.messages[:end])],
                tools=_tools(record),
                chat_template=self.text,
                add_generation_prompt=generation_prompt,
                return_assistant_tokens_mask=True,
                **self.variables,
            )
        texts, spans = rendered
        return texts[0], [(int(start), int(past)) for start, past in spans[0]]

    def _num_spans_before(self, record: Conversation, turn: int, num_spans: int) -> int:
        """Count the marked spans that belong to earlier turns: one for each, unless the template marks otherwise.

        Some mark thought and answer apart, or what ends the whole.
        """
        turns = _assistant_turns(record)
        earlier = turns.index(turn)
        if earlier == 0 or num_spans == len(turns):
            return earlier
        _, spans = self._render_with_markers(record, turn, generation_prompt=True)
        return len(spans)

    def _rendered(
        self, compiled: Template, record: Conversation, end: int | None = None, *, generation_prompt: bool = False
    ) -> str:
        with _refusals(record, end):
            return compiled.render(
                messages=_as_dicts(record.messages[:end]),
                tools=_tools(record),
                documents=None,
                add_generation_prompt=generation_prompt,
                **self.variables,
            )


def _cannot_tell(record: Conversation, turn: int) -> DataError:
    is_last = turn == _assistant_turns(record)[-1]
    return DataError(
        f"{record.where} cannot be tokenised turn by turn",
        [
            f"the chat template renders messages[{turn}] differently when later turns follow or when it is asked for,"
            f" so its tokens cannot be told apart; {'' if is_last else 'set data.loss_on=last_assistant, '}mark the"
            " turns with {% generation %} in a copy of the template and give it as data.chat_template, or set"
            " data.loss_on=all"
        ],
    )


def _by_prefix(template: ChatTemplate, record: Conversation, turn: int, text: str) -> Span | None:
    """Find a turn that the whole begins with: what the generation prompt is followed by, to the end of the turn."""
    through = text if turn == len(record.messages) - 1 else template.render(record, turn + 1)
    if not text.startswith(through):
        return None
    asked = template.render(record, turn, generation_prompt=True)
    return (len(asked), len(through.rstrip())) if through.startswith(asked) else None


def _by_stand_in(template: ChatTemplate, record: Conversation, turn: int, text: str) -> Span | None:
    """Find a turn by what is rendered around it, with a stand-in for its content.

    What the template writes between the generation prompt and the content (an empty thought, a space) is learnt where
    the whole has it too; what it writes behind the content is learnt without white space at its end.
    """
    messages = list(record.messages)
    messages[turn] = attrs.evolve(messages[turn], content=_STAND_IN)
    changed = attrs.evolve(record, messages=tuple(messages))
    asked = template.render(changed, turn, generation_prompt=True)
    through = template.render(changed, turn + 1)
    before, _, behind = template.render(changed).partition(_STAND_IN)
    lead, found, tail = through[len(asked) :].partition(_STAND_IN)
    if not (through.startswith(asked) and found):
        return None
    unasked = template.render(changed, turn)
    header = asked[len(unasked) :] if asked.startswith(unasked) else ""
    if before.endswith(header + lead):
        start = len(before) - len(lead)
    elif any(before.endswith(header[:length]) for length in range(len(header), 0, -1)):
        start = len(before)  # the turn as a part of history begins with less than one that is asked for
    else:
        return None
    tail = tail.rstrip()
    if not (text.startswith(before[:start]) and text.endswith(behind) and behind.startswith(tail)):
        return None
    return start, _stripped(text, len(text) - len(behind) + len(tail))


@functools.lru_cache(maxsize=16)
def _chat_template(text: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Compile a template and learn what its assistant turns look like."""
    compiled = _compiled(text)
    words = set(re.findall(r"\w+", _COMMENT.sub("", text)))
    template = ChatTemplate(
        text=text,
        compiled=compiled,
        variables={**dict(special_tokens), "strftime_now": _TEMPLATE_DATE.strftime},
        has_markers=_GENERATION_MARKER.search(text) is not None,
        mentions=frozenset(words & {"tools", "tool_calls"}),
    )
    if template.has_markers:
        return template
    template = attrs.evolve(
        template,
        by_turn=compiled_by_turn(compiled.environment, text),
        trusts_loop=has_fixed_generation_prompt(compiled.environment, text),
    )
    return attrs.evolve(template, headers=_headers(template))


def _compiled(text: str) -> Template:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(text)  # type: ignore[no-any-return]  # its filters and tags are what templates use


def _headers(template: ChatTemplate) -> dict[str, tuple[str, ...]]:
    """Find what assistant turns begin with; nothing where finding them by the loop would differ from the slow ways."""
    found: dict[str, set[str]] = {}
    expected: list[tuple[Conversation, int, str, Span, Span]] = []
    for record in _MADE_UP:
        turns = _assistant_turns(record)
        try:
            text, bodies = template.render_by_turn(record)
            if len(bodies) != len(turns):
                return {}
            spans = [template.find_turn(record, turn, text) for turn in turns]
        except DataError:  # many templates know no tools; what they cannot render is not asked for either
            continue
        for turn, body, span in zip(turns, bodies, spans, strict=True):
            if span is None:
                continue
            found.setdefault(record.messages[turn - 1].role, set()).add(text[body[0] : span[0]])
            expected.append((record, turn, text, body, span))
    headers = {role: tuple(sorted(words, key=len, reverse=True)) for role, words in found.items()}
    template = attrs.evolve(template, headers=headers)
    agree = all(template.find_by_loop(*case[:4]) == case[4] for case in expected)
    return headers if agree else {}


_Turn = tuple[str, str, dict[str, Any]]


def _made_up(*turns: _Turn) -> Conversation:
    messages = tuple(Message(role=role, content=content, extra=extra) for role, content, extra in turns)
    return Conversation(where="a conversation made up for the chat template", messages=messages)


_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": {"word": "this"}}}
_ONCE: tuple[_Turn, ...] = (("user", "A question?", {}), ("assistant", "An answer.", {}))
_MORE: tuple[_Turn, ...] = (("user", "Another?", {}), ("assistant", "Another one.", {}))
_WITH_TOOL: tuple[_Turn, ...] = (
    ("user", "A question?", {}),
    ("assistant", "", {"tool_calls": [_CALL]}),
    ("tool", "That.", {"name": "look_up", "tool_call_id": _CALL["id"]}),
    ("assistant", "It is that.", {}),
)
# A turn may look different at the end and as a part of history.
_MADE_UP = (_made_up(*_ONCE), _made_up(*_ONCE, *_MORE), _made_up(*_WITH_TOOL), _made_up(*_WITH_TOOL, *_MORE))


def _stripped(text: str, end: int) -> int:
    """Return where text[:end] ends without the white space at its end."""
    return len(text[:end].rstrip())


def _assistant_turns(record: Conversation) -> list[int]:
    return [index for index, message in enumerate(record.messages) if message.role == "assistant"]


def _tools(record: Conversation) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in record.tools] or None


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates take them: the arguments of a tool call are an object, not JSON in a string."""
    turns = [message.as_dict() for message in messages]
    for turn in turns:
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_with_parsed_arguments(call) for call in turn["tool_calls"]]
    return turns


def _with_parsed_arguments(call: Any) -> Any:
    """Parse the arguments of a tool call: templates apply tojson, which would quote a string once more."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments)}}
    except ValueError:
        return call


@contextlib.contextmanager
def _refusals(record: Conversation, end: int | None) -> Iterator[None]:
    """Tell what a template refuses with the line of the record."""
    try:
        yield
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        roles = ", ".join(message.role for message in record.messages[:end]) or "none"
        raise DataError(
            f"{record.where} cannot be rendered", [f"the chat template refuses the turns ({roles}): {error}"]
        ) from error
