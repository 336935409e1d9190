"""python examples/embed.py [CONFIG] [key=value ...].

Train from a program of your own: an observer is told of every step, and stops the run by a rule.

The rule here: stop when the validation loss has not fallen in two validations. The run then saves and ends as it does
for Ctrl-C, and another start would go on with it. Needs a CPU and about four minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ckptrain
from ckptrain.training.observers import Observer, StepRecord

RUN_DIR = Path("runs/embedded")
PATIENCE = 2


class StopWhenFlat(Observer):
    """Ask a run to stop when its validation loss no longer falls.

    Observers are told on rank 0 only, after the fact. What stops a run, on all its ranks, is the file `stop` in its
    directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.best = float("inf")
        self.flat = 0

    def on_step(self, record: StepRecord) -> None:
        """Tell of a step."""
        print(f"step {record.step}: loss {record.loss:.4f}, {record.tokens_per_s:.0f} tokens/s")

    def on_validation(self, step: int, val_loss: float) -> None:
        """Count the validations that were no better than the best before."""
        self.flat = 0 if val_loss < self.best else self.flat + 1
        self.best = min(self.best, val_loss)
        print(f"step {step}: validation loss {val_loss:.4f}, best {self.best:.4f}")
        if self.flat >= PATIENCE:
            (self.run_dir / "stop").touch()

    def on_stop(self, reason: str) -> None:
        """Tell why it stops."""
        print(f"stops: {reason}")


def main(config: str, overrides: list[str]) -> None:
    """Train, and look at how it ended."""
    settings = ["train.eval_every_steps=2", *overrides]
    result = ckptrain.run(config, settings, run_dir=RUN_DIR, observers=[StopWhenFlat(RUN_DIR)])
    print(f"{result.plan.kind}: {result.status} at step {result.step}, checkpoint {result.checkpoint}")


if __name__ == "__main__":
    given = sys.argv[1:]
    is_named = bool(given) and "=" not in given[0]
    main(given[0] if is_named else "examples/quickstart.yaml", given[1:] if is_named else given)
