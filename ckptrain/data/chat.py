"""Turn a record into tokens and say which of them are learnt.

A conversation is rendered by the model's own chat template and the text is tokenised once, so that there are no token
boundaries which the model would not meet when it is asked. What is learnt is found as spans of characters (`template`
says how) and carried over to the tokens by their offsets. The token that ends a turn (`<|im_end|>`) is learnt, the
white space that follows it is not: a model must learn to stop, and is never asked for what comes after.

A record of prompt and completion is plain text followed by the tokenizer's end-of-sequence token, without a template,
which is what TRL's SFTTrainer does (`prompt + completion` tokenised together, the special tokens of the tokenizer).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np
import numpy.typing as npt

from ckptrain.data.records import Conversation, PromptCompletion, Record
from ckptrain.data.template import chat_template_of
from ckptrain.data.turn_marks import Span
from ckptrain.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["assistant", "last_assistant", "completion", "all"]


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


@attrs.frozen(kw_only=True)
class _Draft:
    """A record as text, with the characters that are learnt."""

    index: int
    where: str
    text: str
    spans: Sequence[Span]


def encode(record: Record, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> Sample:
    """Tokenise a record.

    Raises:
        DataError: the tokenizer or its chat template cannot be used for this record; `file:line` is named.
    """
    (sample,) = encode_batch([record], tokenizer, loss_on)
    if isinstance(sample, DataError):
        raise sample
    return sample


def encode_batch(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, loss_on: LossOn
) -> list[Sample | DataError]:
    """Tokenise records, each to what `encode` makes of it, or to the error that it raises.

    The tokenizer is called once for all conversations and once for all records of prompt and completion, and works on
    all of them at the same time.
    """
    results: dict[int, Sample | DataError] = {}
    chats: list[_Draft] = []
    texts: list[_Draft] = []
    for index, record in enumerate(records):
        try:
            _check_tokenizer(record, tokenizer)
            if isinstance(record, PromptCompletion):
                start = 0 if loss_on == "all" else len(record.prompt)
                text = record.prompt + record.completion
                texts.append(_Draft(index=index, where=record.where, text=text, spans=[(start, len(text))]))
            else:
                text, spans = _render_with_spans(record, tokenizer, loss_on)
                chats.append(_Draft(index=index, where=record.where, text=text, spans=spans))
        except DataError as error:
            results[index] = error
    for draft, token_ids, learnt in _tokenise(chats, tokenizer, special_tokens=False):
        results[draft.index] = _sample(draft.where, token_ids, learnt)
    for draft, token_ids, learnt in _tokenise(texts, tokenizer, special_tokens=True):
        results[draft.index] = _ended_sample(draft.where, token_ids, learnt, int(tokenizer.eos_token_id))
    return [results[index] for index in range(len(records))]


def prompt_of(record: Record, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return the question that a record asks: all that precedes its last assistant turn, or its prompt.

    Raises:
        DataError: as in `encode`.
    """
    sample = encode(record, tokenizer, "last_assistant")
    if sample.num_learnt == 0:
        raise DataError(f"{record.where} cannot be asked", ["the chat template leaves nothing of its answer"])
    learnt_ids = sample.token_ids[sample.learnt].tolist()
    if isinstance(record, PromptCompletion):
        text, reference = record.prompt, record.completion
        token_ids = _token_ids(text, tokenizer, special_tokens=True)
        if token_ids[-1:] == [tokenizer.eos_token_id]:
            token_ids.pop()
    else:
        last = _assistant_turns(record)[-1]
        text = chat_template_of(tokenizer, record).render(record, last, generation_prompt=True)
        token_ids = _token_ids(text, tokenizer, special_tokens=False)
        # A turn of tool calls has no content of its own, so what the template makes of them is the answer.
        reference = record.messages[last].content or str(tokenizer.decode(learnt_ids))
    return Prompt(token_ids=tuple(token_ids), text=text, reference=reference, stop_token_id=learnt_ids[-1])


def _check_tokenizer(record: Record, tokenizer: PreTrainedTokenizerBase) -> None:
    problem = None
    if not tokenizer.is_fast:
        problem = f"{type(tokenizer).__name__} does not tell where in the text a token is; use the fast tokenizer"
    elif isinstance(record, PromptCompletion) and tokenizer.eos_token_id is None:
        problem = "the tokenizer has no end-of-sequence token"
    if problem is not None:
        raise DataError(f"{record.where} cannot be tokenised", [problem])


def _render_with_spans(
    record: Conversation, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn
) -> tuple[str, list[Span]]:
    """Render a conversation and find the characters that are learnt."""
    template = chat_template_of(tokenizer, record)
    turns = [turn for turn in _assistant_turns(record) if turn >= record.num_prompt_messages]
    if loss_on == "all" or not turns:
        text = template.render(record)
        return text, [(0, len(text))] if loss_on == "all" else []
    if loss_on == "completion":
        text, spans = template.locate_turns(record, turns[0], most=1)
        return text, [(start, len(text.rstrip())) for start, _ in spans]
    return template.locate_turns(record, turns[-1] if loss_on == "last_assistant" else turns[0])


def _assistant_turns(record: Conversation) -> list[int]:
    return [index for index, message in enumerate(record.messages) if message.role == "assistant"]


def _token_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])


def _tokenise(
    drafts: Sequence[_Draft], tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool
) -> Iterator[tuple[_Draft, list[int], npt.NDArray[np.bool_]]]:
    """Yield each draft with its token ids and which of them are learnt."""
    if not drafts:
        return
    batch = tokenizer(
        [draft.text for draft in drafts],
        add_special_tokens=special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    for draft, token_ids, encoding in zip(drafts, batch["input_ids"], batch.encodings, strict=True):
        yield draft, token_ids, _covered(encoding, draft.spans)


def _covered(encoding: Encoding, spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Mark the tokens that share a character with a span.

    The tokenizer is asked for the first token of the first and of the last character, which costs much less than all
    offsets. Where it cannot tell, they are looked at: a byte-level tokenizer may report a white-space token as an empty
    range at its end, which counts where it lies inside the span.
    """
    learnt = np.zeros(len(encoding), dtype=np.bool_)
    for start, past in spans:
        first = encoding.char_to_token(start) if start < past else None
        last = encoding.char_to_token(past - 1) if start < past else None
        if first is None or last is None:
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            learnt |= (offsets[:, 1] > start) & (offsets[:, 0] < past)
            continue
        while (chars := encoding.token_to_chars(last + 1)) and chars[0] < past:
            last += 1  # a character may be several tokens
        learnt[first : last + 1] = True
    return learnt


def _ended_sample(where: str, token_ids: list[int], learnt: npt.NDArray[np.bool_], eos_token_id: int) -> Sample:
    """Make a sample that ends with the end-of-sequence token, which some tokenizers add themselves."""
    if token_ids[-1:] != [eos_token_id]:
        token_ids, learnt = [*token_ids, eos_token_id], np.append(learnt, [True])
    learnt[-1] = True
    return _sample(where, token_ids, learnt)


def _sample(where: str, token_ids: list[int], learnt: npt.NDArray[np.bool_]) -> Sample:
    learnt[:1] = False
    return Sample(where=where, token_ids=np.array(token_ids, dtype=np.int32), learnt=learnt)
