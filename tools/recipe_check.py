"""uv run python tools/recipe_check.py RECIPE [KEY=VALUE ...] [--base DIR] [--data FILE] [--json OUT]

Run a recipe of tools/recipe_bounds.yaml and check what must hold of it: loss at some steps, memory, time of a step. The
exit status is 0 where all holds, 1 where something does not, and that of the run where it did not end.

    uv run python tools/recipe_check.py tulu3_lora          Llama-3.1-8B on the Tulu 3 mixture, eight GPUs
    uv run python tools/recipe_check.py tulu3_lora_1b       the shape of Llama-3.2-1B, random weights, one GPU
    uv run python tools/recipe_check.py tulu3_lora_tiny     a tiny model, on a CPU

A run that was made already is read by `--read RUN`, without running anything. Memory is what torch has allocated at
most on rank 0, which is less than what nvidia-smi shows.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml
from bench_start import write_base
from tiny import write_chats

ROOT = Path(__file__).parents[1]
BOUNDS = Path(__file__).with_name("recipe_bounds.yaml")
_CHECK = re.compile(
    r"(?:(?P<key>\w+)@(?P<step>\d+)|max (?P<most>\w+)|mean (?P<mean>\w+) from (?P<first>\d+)) < (?P<bound>[\d.e+-]+)"
)
_CONVERSATIONS = 2000


@attrs.frozen(kw_only=True)
class Recipe:
    """What to run, and what must hold of it."""

    config: str
    checks: tuple[str, ...] = attrs.field(converter=tuple)
    processes: int
    overrides: tuple[str, ...] = attrs.field(converter=tuple)
    shape: str | None = None
    """Of a base with random weights, trained on made-up conversations; None is what the config names."""


@attrs.frozen(kw_only=True)
class Finding:
    """One check with what was found."""

    check: str
    found: float | None
    """None where metrics.jsonl does not have it, which is a failure."""
    holds: bool


def recipes() -> dict[str, Recipe]:
    """Return the recipes by name."""
    return {name: Recipe(**said) for name, said in yaml.safe_load(BOUNDS.read_text(encoding="utf-8")).items()}


def judge(checks: Sequence[str], steps: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Hold the checks against what was measured at each step.

    Raises:
        ValueError: a check is none.
    """
    return [_finding(check, steps) for check in checks]


def _finding(check: str, steps: Mapping[int, Mapping[str, Any]]) -> Finding:
    said = _CHECK.fullmatch(check)
    if said is None:
        raise ValueError(f"{check!r} is no check: expected `KEY@STEP < BOUND`, `max KEY < BOUND` or"
                         " `mean KEY from STEP < BOUND`")  # fmt: skip
    if said["key"]:
        found = _value(steps.get(int(said["step"]), {}), said["key"])
    else:
        first = int(said["first"] or 1)
        key = said["most"] or said["mean"]
        values = [_value(values, key) for step, values in steps.items() if step >= first]
        known = [value for value in values if value is not None]
        of_all = max if said["most"] else statistics.fmean
        found = of_all(known) if known and len(known) == len(values) else None
    return Finding(check=check, found=found, holds=found is not None and found < float(said["bound"]))


def _value(values: Mapping[str, Any], key: str) -> float | None:
    if key == "peak_memory_gb":
        num_bytes = values.get("peak_memory_bytes")
        return None if num_bytes is None else num_bytes / 1e9
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def steps_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return what a run's metrics.jsonl has of each step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def table(findings: Sequence[Finding]) -> str:
    """Return the findings, a line each."""
    width = max(len(finding.check) for finding in findings)
    return "\n".join(
        f"{finding.check:{width}}  {'not measured' if finding.found is None else f'{finding.found:12.4f}'}"
        f"  {'holds' if finding.holds else 'DOES NOT HOLD'}"
        for finding in findings
    )


def run(recipe: Recipe, run_dir: Path, work: Path, asked: argparse.Namespace) -> int:
    """Run a recipe as a person does, and return its exit status; a run that is there already goes on."""
    words = [*recipe.overrides, "log.every_steps=1"]
    base = asked.base
    if base is None and recipe.shape is not None:
        base = write_base(work / "base", recipe.shape, "float32" if recipe.shape == "tiny" else "bfloat16")
    if base is not None:
        words.append(f"model.pretrained={json.dumps(str(base))}")
    data = asked.data
    if data is None and recipe.shape is not None:
        data = write_chats(work / "conversations.jsonl", _CONVERSATIONS)
    if data is not None:
        words += [f"data.train={json.dumps(str(data))}", "data.split_validation_size=16"]
    command = [sys.executable, "-m", "ckptrain.cli", "run", str(ROOT / recipe.config), *words, *asked.overrides]
    command += ["--run-dir", str(run_dir), "--nproc-per-node", str(asked.processes or recipe.processes)]
    print(" ".join(command), file=sys.stderr)
    return subprocess.run(command, check=False).returncode


def main(words: list[str] | None = None) -> int:
    """Run or read, judge, print."""
    known = recipes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=known)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the configuration, after those of the recipe")
    parser.add_argument("--base", type=Path, help="in the place of the config's model, or of random weights")
    parser.add_argument("--data", type=Path, help="in the place of the config's data, or of made-up conversations")
    parser.add_argument("--processes", type=int, help="in the place of the recipe's")
    parser.add_argument("--check", action="append", metavar="CHECK", help="in the place of the recipe's checks")
    parser.add_argument("--run-dir", type=Path, help="keep the run here; otherwise it is gone afterwards")
    parser.add_argument("--read", type=Path, metavar="RUN", help="run nothing, read this run")
    parser.add_argument("--json", type=Path, help="write the findings here too")
    asked = parser.parse_intermixed_args(words)
    recipe = known[asked.recipe]
    with tempfile.TemporaryDirectory() as name:
        run_dir = asked.read or asked.run_dir or Path(name) / "run"
        if asked.read is None and (status := run(recipe, run_dir, Path(name), asked)) != 0:
            return status
        steps = steps_of(run_dir)
    findings = judge(asked.check or recipe.checks, steps)
    print(table(findings))
    if asked.json:
        report = {
            "recipe": asked.recipe,
            "findings": [attrs.asdict(finding) for finding in findings],
            "steps": [{"step": step, **values} for step, values in sorted(steps.items())],
        }
        asked.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(finding.holds for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
