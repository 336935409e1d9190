"""python examples/embed_own.py [CONFIG] [key=value ...].

Train on rows that this program makes, by a loss of its own: additions, with labels that are smoothed by a tenth.

Neither is in the configuration. The rows are compared by content when the run goes on, the loss by its name: start it
twice, and change one of them in between. Needs a CPU and about two minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import ckptrain

if TYPE_CHECKING:
    from torch import Tensor

RUN_DIR = Path("runs/additions")
SMOOTHING = 0.1


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token: a tenth of it asks for all tokens alike."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits, labels, reduction="none", label_smoothing=SMOOTHING)


def additions(first: int, past: int) -> list[dict[str, str]]:
    """Return rows of the format prompt_completion."""
    return [{"prompt": f"{n} + {n + 1} = ", "completion": str(2 * n + 1)} for n in range(first, past)]


def main(config: str, overrides: list[str]) -> None:
    """Train, with validation on additions that are not trained on; its loss is cross-entropy."""
    with ckptrain.Trainer(
        config,
        overrides,
        run_dir=RUN_DIR,
        train=additions(0, 200),
        validation=additions(200, 210),
        loss=ckptrain.Loss(smoothed, name=f"smoothed-{SMOOTHING}"),
        callbacks=[ckptrain.EarlyStopping(patience=3)],
    ) as trainer:
        print(trainer.plan().plan.reason)
        result = trainer.run()
    print(f"{result.status} at step {result.step}, loss {result.loss}, validation {result.val_loss_after}")


if __name__ == "__main__":
    given = sys.argv[1:]
    is_named = bool(given) and "=" not in given[0]
    main(given[0] if is_named else "examples/quickstart.yaml", given[1:] if is_named else given)
