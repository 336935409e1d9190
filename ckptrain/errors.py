"""What can go wrong, one class for each thing a caller can act on.

Every error says what, where, expected against found, and what to do. The command line turns one into a message without
a traceback and into its `exit_status`; a program that embeds ckptrain catches `CkptrainError`.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_DAMAGED = 65
EXIT_REFUSED = 69
EXIT_STOPPED_EARLY = 75
EXIT_BAD_CONFIG = 78


class CkptrainError(Exception):
    """Anything ckptrain refuses or fails to do; the message is complete, so no traceback is needed to act on it."""

    exit_status = EXIT_FAILURE


class ProblemsError(CkptrainError):
    """Several things wrong at once: they are found together and told together."""

    def __init__(self, summary: str, problems: Sequence[str]) -> None:
        self.summary = summary
        self.problems = tuple(problems)
        super().__init__("\n".join([summary, *(f"  - {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the constructor's arguments: the error of one rank is sent to the others."""
        return (type(self), (self.summary, self.problems))


def first_problems(problems: Sequence[str], most: int = 20) -> list[str]:
    """Return so many problems as can be read at once, and how many more there are."""
    left = len(problems) - most
    return [*problems[:most], *([f"and {left} more"] if left > 0 else [])]


class PackageMissing(ProblemsError):
    """A package that this needs is not installed, or is of a version that is known not to work."""


class RankFailed(CkptrainError):
    """A process of a launch failed in a way that is a fault in ckptrain; raised in all of them, with its rank.

    In that process the error itself is its `__cause__`.
    """


class RankLost(CkptrainError):
    """A process of a launch is gone, says nothing, does not get on, or has failed alone; raised in the others."""


class ConfigError(ProblemsError):
    """The configuration, or an input that it names (model, data file), cannot be used."""

    exit_status = EXIT_BAD_CONFIG


class DataError(ProblemsError):
    """A data file is malformed; each problem names the file and the line."""

    exit_status = EXIT_BAD_CONFIG


class StartRefused(ProblemsError):
    """What the configuration asks for contradicts what the run directory holds."""

    exit_status = EXIT_REFUSED


class ClaimLost(CkptrainError):
    """Another run has taken over the run directory, so this one may not commit any more."""

    exit_status = EXIT_REFUSED


class CheckpointDamaged(ProblemsError):
    """A checkpoint is not what its manifest says."""

    exit_status = EXIT_DAMAGED


class CheckpointNotFound(CkptrainError):
    """A path that should be a run or a checkpoint is neither."""

    exit_status = EXIT_USAGE


class RestoreMismatch(CkptrainError):
    """What came back from a checkpoint is not what the start plan promised."""

    exit_status = EXIT_DAMAGED


class SaveFailed(CkptrainError):
    """A checkpoint could not be written (disk full, read-only, gone); the previous one is untouched."""


class TrainingDiverged(CkptrainError):
    """The loss or the gradient norm is not finite."""


class PhaseError(CkptrainError):
    """A transition that the state machine does not have: a fault in ckptrain itself."""


class ModelMismatch(CkptrainError):
    """The model built under Megatron does not compute what the base model computes."""


class AdapterMismatch(ProblemsError):
    """What was made of an adapter for others does not compute what the adapter computes; nothing was written."""
