"""python examples/pipeline.py CONFIG RUN_DIR ADAPTER [key=value ...].

A pipeline of three processes: train, export, check. What is done is skipped, so it can be started again after anything.

Each stage says by itself whether its work is done: training by RUN/result.json, whose step is compared with what is
asked for by the start itself; the export by the directory, which is there complete or not at all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

STOPPED_EARLY = 75
"""Exit status of a run that was asked to stop: the scheduler is to start this pipeline again."""


def stage(name: str, *command: str) -> None:
    """Run a stage, and end with its exit status where it has not done its work."""
    print(f"{name}: {' '.join(command)}", flush=True)
    status = subprocess.run(  # noqa: S603  # the words are ours
        [sys.executable, "-m", *command], check=False
    ).returncode
    if status != 0:
        print(f"{name}: exit status {status}" + (", start again to go on" if status == STOPPED_EARLY else ""))
        sys.exit(status)


def main(config: str, run_dir: Path, adapter: Path, overrides: list[str]) -> None:
    """Go through the stages."""
    # A start of a run that is done says so in a second: nothing needs to be decided here.
    stage("train", "ckptrain.cli", "run", config, "--run-dir", str(run_dir), *overrides)
    result = json.loads((run_dir / "result.json").read_text())
    exported = adapter / "ckptrain_export.json"
    if exported.is_file() and json.loads(exported.read_text())["step"] == result["step"]:
        print("export: done already")
    else:
        again = ["--overwrite"] if exported.is_file() else []
        stage("export", "ckptrain.cli", "export", result["last_checkpoint"], str(adapter), "--no-verify", *again)
    print(f"check: {'weights are there' if (adapter / 'adapter_model.safetensors').is_file() else 'no weights'}")
    print(f"step {result['step']}, loss {result['loss']:.4f}, adapter in {adapter}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
