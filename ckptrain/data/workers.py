"""Processes that tokenise: each takes batches of records on its standard input and gives samples on its output.

They are programs of their own, neither forked from the training process, which holds threads and perhaps a GPU, nor
started by `multiprocessing`, which would run the script again that called ckptrain.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

from ckptrain.data.chat import LossOn, Sample, encode_batch
from ckptrain.data.records import Record
from ckptrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AHEAD = 2
"""Batches that a worker may have waiting: it never starves, and memory stays that of a few batches."""

# A launcher or a terminal sends them to every process of a run; a worker ends with its input, or is killed.
_FOR_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

type Batch = tuple[Record, ...]
type Encoded = list[Sample | DataError]


class TokeniserWorkers:
    """A few processes with a copy of the tokenizer."""

    def __init__(self, count: int, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> None:
        self._count = count
        self._task = pickle.dumps((tokenizer, loss_on))

    def __enter__(self) -> Self:
        # Cores are used by having several processes, not by threads in each.
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        }
        environment["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no torch, see `main`
        self._processes = [
            subprocess.Popen(
                # -P: modules are those of this process, and no file of the working directory is taken for one.
                [sys.executable, "-P", "-m", "ckptrain.data.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for _ in range(self._count)
        ]
        # A thread for each worker writes a batch and waits for what becomes of it.
        self._threads = [ThreadPoolExecutor(max_workers=1) for _ in range(self._count)]
        for process, thread in zip(self._processes, self._threads, strict=True):
            thread.submit(_send, process, self._task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill() if error is not None else _stdin(process).close()
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def encode(self, batches: Iterable[Batch]) -> Iterator[Encoded]:
        """Yield what becomes of each batch, in their order.

        Raises:
            DataError: a worker died.
        """
        waiting: deque[Future[Encoded]] = deque()
        for number, batch in enumerate(batches):
            turn = number % self._count
            waiting.append(self._threads[turn].submit(_ask, self._processes[turn], batch))
            if len(waiting) == _AHEAD * self._count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _ask(process: subprocess.Popen[bytes], batch: Batch) -> Encoded:
    try:
        _send(process, pickle.dumps(batch))
        assert process.stdout is not None
        answer: Encoded = pickle.load(process.stdout)  # noqa: S301  # from our own process
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(
            "cannot tokenise", [f"a worker ended with status {process.wait()} ({error}); set data.workers=0 to see why"]
        ) from error
    return answer


def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
    _stdin(process).write(data)
    _stdin(process).flush()


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def main() -> None:
    """Be a worker, until the input ends."""
    for number in _FOR_THE_RUN:
        signal.signal(number, signal.SIG_IGN)
    # transformers imports torch where it finds it, which no tokenizer needs: that would be most of a worker's start,
    # and four fifths of its memory.
    sys.modules["torch"] = None  # type: ignore[assignment]
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
        tokenizer, loss_on = pickle.load(sys.stdin.buffer)  # noqa: S301  # from the process that started this one
        with contextlib.suppress(EOFError):
            while True:
                batch = pickle.load(sys.stdin.buffer)  # noqa: S301
                answers.write(pickle.dumps(encode_batch(batch, tokenizer, loss_on)))
                answers.flush()


if __name__ == "__main__":
    main()
