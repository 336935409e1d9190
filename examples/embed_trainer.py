"""python examples/embed_trainer.py [CONFIG] [key=value ...].

Hold a run open, and hand its adapter to a server every two steps: on-policy use, without a checkpoint.

The server here is a directory that is replaced whole, which vLLM's `/v1/load_lora_adapter` reads. Needs a CPU and about
four minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ckptrain

RUN_DIR = Path("runs/on-policy")
SERVED = Path("runs/on-policy-adapter")
EVERY_STEPS = 2


def tell(state: ckptrain.State, control: ckptrain.Control) -> None:
    """Tell of a step, and stop where the loss is good enough."""
    print(f"step {state.step} of {state.steps}: loss {state.loss:.4f}")
    if state.loss is not None and state.loss < 0.05:
        control.stop("the loss is low enough")


def main(config: str, overrides: list[str]) -> None:
    """Train in pieces, and export after each."""
    with ckptrain.Trainer(
        config, overrides, run_dir=RUN_DIR, callbacks=[tell, ckptrain.EarlyStopping(patience=3)]
    ) as trainer:
        print(trainer.plan().plan.kind)
        result = trainer.run_until(EVERY_STEPS)
        while result.status == "paused":
            trainer.export(SERVED, overwrite=True)
            result = trainer.run_until(result.step + EVERY_STEPS)
    print(f"{result.status} at step {result.step}, checkpoint {result.checkpoint}")


if __name__ == "__main__":
    given = sys.argv[1:]
    is_named = bool(given) and "=" not in given[0]
    main(given[0] if is_named else "examples/quickstart.yaml", given[1:] if is_named else given)
