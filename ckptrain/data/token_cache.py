"""The tokens of a source on disk: written once, mapped into memory by every process that trains on them.

    tokens.bin   int32 [tokens], sample after sample, in the order of the records
    learnt.bin   bool [tokens], whether the loss is taken on the token
    samples.bin  one entry a sample: where its tokens begin and end, how many are learnt, which file and line it was
    index.json   what the tokens were made from, and how many there are; written last

Nothing is cut or left out here, so that one cache serves every sequence length.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import attrs
import numpy as np
import numpy.typing as npt
import orjson

from ckptrain.data.chat import Sample

_TOKENS, _LEARNT, _SAMPLES, _INDEX = "tokens.bin", "learnt.bin", "samples.bin", "index.json"
_SAMPLE = np.dtype([("begin", "<i8"), ("end", "<i8"), ("num_learnt", "<i4"), ("file", "<i4"), ("line", "<i8")])


@attrs.frozen(kw_only=True, eq=False)
class TokenCache:
    """Samples of one source; N samples of T tokens."""

    tokens: npt.NDArray[np.int32]
    """[T], mapped from disk."""
    learnt: npt.NDArray[np.bool_]
    """[T], mapped from disk."""
    samples: npt.NDArray[np.void]
    """[N] of `begin`, `end`, `num_learnt`, `file`, `line`; mapped from disk."""
    places: tuple[str, ...]
    """For each file, what stands before the line's number where a sample is named: `data.jsonl:`, `data.csv:row `."""

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, [N]."""
        lengths: npt.NDArray[np.int64] = self.samples["end"] - self.samples["begin"]
        return lengths

    def where(self, index: int) -> str:
        """Return the file and line of a sample."""
        sample = self.samples[index]
        return f"{self.places[sample['file']]}{sample['line']}"

    def sample(self, index: int, num_tokens: int | None = None) -> Sample:
        """Return a sample, or its first `num_tokens` tokens, without copying them."""
        begin, end = int(self.samples["begin"][index]), int(self.samples["end"][index])
        if num_tokens is not None:
            end = min(end, begin + num_tokens)
        return Sample(where=self.where(index), token_ids=self.tokens[begin:end], learnt=self.learnt[begin:end])

    def learnt_within(self, index: int, num_tokens: int) -> int:
        """Return how many of a sample's first `num_tokens` tokens are learnt."""
        return self.sample(index, num_tokens).num_learnt


class TokenCacheWriter:
    """Writes a cache into an empty directory, batch after batch, in the memory of one batch."""

    def __init__(self, directory: Path, files: Sequence[Path], made_from: dict[str, Any]) -> None:
        """Take the files that the samples are from, which `Sample.where` begins with."""
        self._directory = directory
        self._files = [str(file) for file in files]
        self._made_from = made_from
        self._num_samples = 0
        self._num_tokens = 0
        self._file_of: dict[str, int] = {}
        self._separators = [""] * len(files)

    def __enter__(self) -> Self:
        self._tokens = (self._directory / _TOKENS).open("wb")
        self._learnt = (self._directory / _LEARNT).open("wb")
        self._samples = (self._directory / _SAMPLES).open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._tokens, self._learnt, self._samples):
            file.close()

    def add(self, samples: Sequence[Sample]) -> None:
        """Append samples."""
        if not samples:
            return
        entries = np.zeros(len(samples), dtype=_SAMPLE)
        entries["end"] = self._num_tokens + np.cumsum([sample.num_tokens for sample in samples])
        entries["begin"][0] = self._num_tokens
        entries["begin"][1:] = entries["end"][:-1]
        entries["num_learnt"] = [sample.num_learnt for sample in samples]
        places = [self._place(sample.where) for sample in samples]
        entries["file"], entries["line"] = np.array(places, dtype=np.int64).T
        self._tokens.write(np.concatenate([sample.token_ids for sample in samples]).astype("<i4").tobytes())
        self._learnt.write(np.concatenate([sample.learnt for sample in samples]).tobytes())
        self._samples.write(entries.tobytes())
        self._num_tokens = int(entries["end"][-1])
        self._num_samples += len(entries)

    def finish(self) -> None:
        """Write what makes the directory a cache, after everything else is on disk."""
        for file in (self._tokens, self._learnt, self._samples):
            _sync(file)
        index = {
            "made_from": self._made_from,
            "num_tokens": self._num_tokens,
            "num_samples": self._num_samples,
            "separators": self._separators,
        }
        with (self._directory / _INDEX).open("wb") as file:
            file.write(orjson.dumps(index, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
            _sync(file)

    def _place(self, where: str) -> tuple[int, int]:
        """Return the number of the file and the line that `where` ends with."""
        prefix = where.rstrip("0123456789")
        if prefix not in self._file_of:
            number = next(number for number, file in enumerate(self._files) if prefix.startswith(f"{file}:"))
            self._file_of[prefix] = number
            self._separators[number] = prefix.removeprefix(self._files[number])
        return self._file_of[prefix], int(where[len(prefix) :])


def open_token_cache(directory: Path, files: Sequence[Path]) -> TokenCache | None:
    """Map a cache into memory; None where there is none, or what is there is not whole.

    `files` are where the samples' files lie now, in the order in which they were written from.
    """
    try:
        index = orjson.loads((directory / _INDEX).read_bytes())
        num_tokens, num_samples = index["num_tokens"], index["num_samples"]
        return TokenCache(
            tokens=_mapped(directory / _TOKENS, np.dtype("<i4"), num_tokens),
            learnt=_mapped(directory / _LEARNT, np.dtype(np.bool_), num_tokens),
            samples=_mapped(directory / _SAMPLES, _SAMPLE, num_samples),
            places=tuple(f"{file}{separator}" for file, separator in zip(files, index["separators"], strict=True)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Map an array of `count` elements into memory.

    Raises:
        ValueError: the file has another size.
    """
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path} does not hold {count} elements")
    return np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype=dtype)  # an empty file has no map


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
