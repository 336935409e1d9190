"""uv run python tools/chaos.py [--kills 200] [--seed 0] [--json OUT]

Kill training runs with SIGKILL at random moments and start them again until they are done; look after every kill.

Saves are synchronous or asynchronous, by one rank or by two; a checkpoint is saved after every step, and dropout is on.
After each kill every checkpoint must be whole, and none that was reported as saved lost; the start that follows must go
on from the newest; and a run must end with the bytes and the losses of one that nobody killed. The first promise that
is broken ends the test with status 1, and the run directory is kept.

The model is a tiny Llama with random weights, trained under Megatron on the CPU; everything else is what users run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
from killing import Mode, Tally, Trial
from promises import BrokenPromiseError
from tiny import write_chats, write_llama

from ckptrain.cli.quiet import quiet_libraries
from ckptrain.config.load import load_config

MODES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "sync-single": (1, ("checkpoint.asynchronous=false",)),
    "async-single": (1, ("checkpoint.asynchronous=true",)),
    "sync-tp2": (2, ("checkpoint.asynchronous=false", "parallel.tensor=2")),
    "async-dp2": (2, ("checkpoint.asynchronous=true",)),
}
"""World size and configuration, by name."""


def write_inputs(directory: Path) -> Path:
    """Write the model and the data, and return their directory."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    directory.mkdir()
    write_llama(
        directory / "model",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    write_chats(directory / "train.jsonl", 24)
    return directory


def mode_of(name: str, inputs: Path) -> Mode:
    """Return a mode by its name: as little work as there can be around the saves."""
    world_size, overrides = MODES[name]
    config = load_config(
        {
            "model": {"pretrained": str(inputs / "model"), "dtype": "float32", "verify": "never"},
            "lora": {"dim": 4, "alpha": 8, "dropout": 0.1},
            "data": {"train": str(inputs / "train.jsonl"), "sequence_length": 128},
            "optimizer": {"lr": 1.0e-2},
            "train": {"steps": 12, "micro_batch_size": 1, "global_batch_size": 2},
            "checkpoint": {"every_steps": 1, "keep_last": 2},
            "log": {"tensorboard": False},
        },
        overrides,
    )
    return Mode(name=name, world_size=world_size, config=config)


def shares(kills: int) -> list[int]:
    """Deal the kills to the modes."""
    return [(kills + index) // len(MODES) for index in range(len(MODES))]


def show(tallies: Sequence[Tally]) -> None:
    """Print the table."""
    first, *columns = (field.name for field in attrs.fields(Tally))
    print(f"\n{first:12}" + "".join(f"{column.replace('_', ' '):>13}" for column in columns))
    for tally in tallies:
        print(f"{tally.mode:12}" + "".join(f"{getattr(tally, column):13.0f}" for column in columns))


def main(arguments: Sequence[str] | None = None, disturb: Callable[[Path], object] = lambda _: None) -> int:
    """Kill in every mode, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="over all modes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, as far as the machine repeats itself")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    asked = parser.parse_args(arguments)
    quiet_libraries()
    begun = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="ckptrain-chaos-"))
    tallies: list[Tally] = []
    broken = None
    try:
        inputs = write_inputs(directory / "inputs")
        for name, kills in zip(MODES, shares(asked.kills), strict=True):
            trial = Trial(mode_of(name, inputs), directory, disturb)
            tallies.append(trial.tally)
            trial.kill(kills, asked.seed)
    except BrokenPromiseError as error:
        broken = str(error)
    seconds = time.monotonic() - begun
    show(tallies)
    print(f"\n{sum(tally.kills for tally in tallies)} kills in {seconds:.0f} s, seed {asked.seed}")
    if asked.json:
        modes = [attrs.asdict(tally) for tally in tallies]
        report = {"seed": asked.seed, "seconds": seconds, "broken_promise": broken, "modes": modes}
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    if broken is not None:
        print(f"\nBROKEN PROMISE: {broken}\nEverything is kept in {directory}", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
