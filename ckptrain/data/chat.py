"""Turn a record into tokens and say which of them are learnt.

A conversation is rendered by the model's own chat template and the text is tokenised once, so that there are no token
boundaries which the model would not meet when it is asked. What is learnt is found as spans of characters and carried
over to the tokens by their offsets. A template with `{% generation %}` markers says itself where an assistant turn is;
for the others the conversation is rendered up to a turn, and up to its end, and the two must be the beginning of the
whole. The token that ends a turn (`<|im_end|>`) is learnt, the white space that follows it is not: a model must learn
to stop, and is never asked for what comes after.

A record of prompt and completion is plain text followed by the tokenizer's end-of-sequence token, without a template,
which is what TRL's SFTTrainer does (`prompt + completion` tokenised together, the special tokens of the tokenizer).
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from ckptrain.data.records import Conversation, Message, PromptCompletion, Record
from ckptrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["assistant", "last_assistant", "completion", "all"]
Span = tuple[int, int]

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates print today's date. Tokens that change overnight would make a resume train something else, so the date
# is fixed, to the one that Llama 3's template falls back to.
_TEMPLATE_DATE = dt.date(2024, 7, 26)


@attrs.frozen(kw_only=True, eq=False)
class Sample:
    """One record as tokens.

    `token_ids` is int32 [num_tokens]; `learnt` is bool [num_tokens] and marks the tokens that the loss is taken on,
    never the first one, which nothing predicts.
    """

    where: str
    token_ids: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.bool_]

    @property
    def num_tokens(self) -> int:
        """Tokens of the sample."""
        return len(self.token_ids)

    @property
    def num_learnt(self) -> int:
        """Tokens that the loss is taken on."""
        return int(self.learnt.sum())

    def truncated(self, num_tokens: int) -> Sample:
        """Return the first `num_tokens` tokens of the sample."""
        return attrs.evolve(self, token_ids=self.token_ids[:num_tokens], learnt=self.learnt[:num_tokens])


@attrs.frozen(kw_only=True)
class Prompt:
    """A question to the model, with the answer that the record has for it.

    `stop_token_id` is the token that ends the answer in the record. The tokenizer's `eos_token` is no substitute: many
    chat models end a turn with another token, and a tokenizer read from GGUF may name the wrong one.
    """

    token_ids: tuple[int, ...]
    text: str
    reference: str
    stop_token_id: int


def encode(record: Record, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> Sample:
    """Tokenise a record.

    Raises:
        DataError: the tokenizer or its chat template cannot be used for this record; `file:line` is named.
    """
    if isinstance(record, PromptCompletion):
        return _encode_plain(record, tokenizer, loss_on)
    text, spans = _render_with_spans(record, tokenizer, loss_on)
    token_ids, starts, ends = _tokenise(text, tokenizer, record.where, special_tokens=False)
    return _sample(record.where, token_ids, _covered(starts, ends, spans))


def prompt_of(record: Record, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return the question that a record asks: all that precedes its last assistant turn, or its prompt.

    Raises:
        DataError: as in `encode`.
    """
    sample = encode(record, tokenizer, "last_assistant")
    if sample.num_learnt == 0:
        raise DataError(f"{record.where} cannot be asked", ["the chat template leaves nothing of its answer"])
    if isinstance(record, PromptCompletion):
        text, reference = record.prompt, record.completion
        token_ids, _, _ = _tokenise(text, tokenizer, record.where, special_tokens=True)
        if token_ids[-1:] == [tokenizer.eos_token_id]:
            token_ids.pop()
    else:
        last = _assistant_turns(record)[-1]
        text = _render(record.messages[:last], tokenizer, record.where, generation_prompt=True)
        reference = record.messages[last].content
        token_ids, _, _ = _tokenise(text, tokenizer, record.where, special_tokens=False)
    stop_token_id = int(sample.token_ids[sample.learnt][-1])
    return Prompt(token_ids=tuple(token_ids), text=text, reference=reference, stop_token_id=stop_token_id)


def _encode_plain(record: PromptCompletion, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> Sample:
    text = record.prompt + record.completion
    token_ids, starts, ends = _tokenise(text, tokenizer, record.where, special_tokens=True)
    if tokenizer.eos_token_id is None:
        raise DataError(f"{record.where} cannot be tokenised", ["the tokenizer has no end-of-sequence token"])
    span = (0 if loss_on == "all" else len(record.prompt), len(text))
    learnt = _covered(starts, ends, [span])
    if token_ids[-1:] != [tokenizer.eos_token_id]:  # some tokenizers add it themselves
        token_ids.append(int(tokenizer.eos_token_id))
        learnt = np.append(learnt, [True])
    learnt[-1] = True
    return _sample(record.where, token_ids, learnt)


def _sample(where: str, token_ids: list[int], learnt: npt.NDArray[np.bool_]) -> Sample:
    learnt[:1] = False
    return Sample(where=where, token_ids=np.array(token_ids, dtype=np.int32), learnt=learnt)


def _tokenise(
    text: str, tokenizer: PreTrainedTokenizerBase, where: str, *, special_tokens: bool
) -> tuple[list[int], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the token ids, and the first and the past-the-last character of each token."""
    if not tokenizer.is_fast:
        raise DataError(
            f"{where} cannot be tokenised",
            [f"{type(tokenizer).__name__} does not tell where in the text a token is; use the fast tokenizer"],
        )
    encoding = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True, verbose=False)
    offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    return list(encoding["input_ids"]), offsets[:, 0], offsets[:, 1]


def _covered(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], spans: Sequence[Span]
) -> npt.NDArray[np.bool_]:
    """Mark the tokens that share a character with a span.

    A byte-level tokenizer may report a white-space token as an empty range at its end, so an empty range counts where
    it lies inside the span.
    """
    learnt = np.zeros(len(starts), dtype=np.bool_)
    for first, past in spans:
        learnt |= (ends > first) & (starts < past)
    return learnt


def _render_with_spans(
    record: Conversation, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn
) -> tuple[str, list[Span]]:
    """Render a conversation and find the characters that are learnt."""
    if loss_on == "all":
        text = _render(record.messages, tokenizer, record.where)
        return text, [(0, len(text))]
    if _GENERATION_MARKER.search(_template(tokenizer, record.where)):
        text, spans = _rendering(record.messages, tokenizer, record.where, markers=True)
    else:
        text = _render(record.messages, tokenizer, record.where)
        turns = _assistant_turns(record)
        wanted = {"assistant": turns, "last_assistant": turns[-1:], "completion": turns[:1]}[loss_on]
        spans = [_turn_span(record, turn, text, tokenizer) for turn in wanted]
    if loss_on == "last_assistant":
        spans = spans[-1:]
    elif loss_on == "completion":
        spans = [(first, len(text.rstrip())) for first, _ in spans[:1]]
    return text, spans


def _turn_span(record: Conversation, turn: int, text: str, tokenizer: PreTrainedTokenizerBase) -> Span:
    """Find one assistant turn in the rendered text: what the generation prompt is followed by, to the end of the turn.

    Raises:
        DataError: the conversation up to the turn is not rendered to the beginning of the whole.
    """
    before = _render(record.messages[:turn], tokenizer, record.where, generation_prompt=True)
    through = _render(record.messages[: turn + 1], tokenizer, record.where)
    if not (text.startswith(through) and through.startswith(before)):
        raise DataError(
            f"{record.where} cannot be tokenised turn by turn",
            [
                f"the chat template renders messages[{turn}] differently when later turns follow or when it is asked"
                " for, so its tokens cannot be told apart; set data.loss_on=last_assistant, mark the turns in the"
                " template with {% generation %}, or set data.loss_on=all"
            ],
        )
    return len(before), len(through.rstrip())


def _assistant_turns(record: Conversation) -> list[int]:
    return [index for index, message in enumerate(record.messages) if message.role == "assistant"]


def _template(tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise DataError(
            f"{where} is a conversation, which this tokenizer cannot render",
            ["it has no chat template; use an instruction-tuned model, or records of {prompt, completion}"],
        ) from error


def _render(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, where: str, *, generation_prompt: bool = False
) -> str:
    text, _ = _rendering(messages, tokenizer, where, generation_prompt=generation_prompt)
    return text


def _rendering(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    generation_prompt: bool = False,
    markers: bool = False,
) -> tuple[str, list[Span]]:
    """Render messages as `tokenizer.apply_chat_template` does; with `markers`, also the spans that generation made.

    It goes one level below `apply_chat_template`, which tells tokens only, and which does not take an empty list.
    """
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    variables: dict[str, Any] = {**tokenizer.special_tokens_map, "strftime_now": _TEMPLATE_DATE.strftime}
    try:
        rendered: Any = render_jinja_template(  # a pair of lists, though annotated as a string
            conversations=[[{"role": message.role, "content": message.content} for message in messages]],
            chat_template=_template(tokenizer, where),
            add_generation_prompt=generation_prompt,
            return_assistant_tokens_mask=markers,
            **variables,
        )
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        roles = ", ".join(message.role for message in messages) or "none"
        raise DataError(
            f"{where} cannot be rendered", [f"the chat template refuses the turns ({roles}): {error}"]
        ) from error
    texts, spans = rendered
    return texts[0], [(int(first), int(past)) for first, past in spans[0]] if markers else []
