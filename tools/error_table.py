"""uv run python tools/error_table.py [--check]

Write docs/errors.md: every kind of error with its exit status, what it was really said when it was provoked, the cause
and the cure, and every text that is raised as that kind. With --check nothing is written; the exit code is 1 where the
file is not what would be.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
from error_examples import Example, provoke_all

import ckptrain
from ckptrain import errors
from ckptrain.cli.outcome import EXIT_INTERRUPTED

DOCUMENT = Path(__file__).parents[1] / "docs/errors.md"
PACKAGE = Path(ckptrain.__file__).parent
_FAULT = "a fault"


@attrs.frozen(kw_only=True)
class Kind:
    """What a kind of error comes from, and what to do about it."""

    cause: str
    cure: str
    exit_status: int | None = None
    """Of what is not an error of ckptrain's own; the class says it otherwise."""


KINDS: Mapping[str, Kind] = {
    "ConfigError": Kind(
        cause="The configuration, or something that it names (base model, adapter, data, layout), cannot be used. All"
        " problems are told at once, with the line or the override that each is from.",
        cure="Change the keys that are named. `ckptrain explain SECTION` lists what there is, `ckptrain plan` says"
        " whether it would start.",
    ),
    "DataError": Kind(
        cause="Rows of a data file are not what its format asks for; file and line are named.",
        cure="Correct the rows, or say what they are: data.format, and columns of a source. `ckptrain data CONFIG"
        " --show 3` shows what is learnt.",
    ),
    "StartRefused": Kind(
        cause="What is asked for contradicts what the run directory holds, another run is at work in it, or the disk"
        " has no room for a checkpoint.",
        cure="Each line ends with what to do: set the key back, or use another --run-dir.",
    ),
    "ClaimLost": Kind(
        cause="The process was suspended or cut off from the disk for so long that another start took the run over. It"
        " may not commit any more; what it had committed is there.",
        cure="Nothing, if the other run is the one that is wanted. Otherwise stop that one and start again.",
    ),
    "CheckpointDamaged": Kind(
        cause="Files of a checkpoint are not what its manifest says: a disk fault, a copy cut short, a change by hand.",
        cure="A start goes on from the checkpoint before and moves the damaged one to quarantine/"
        " (checkpoint.on_damaged=fallback). `ckptrain verify RUN` tells which are whole.",
    ),
    "CheckpointNotFound": Kind(
        cause="A path that should be a run, a checkpoint or an adapter is none.",
        cure="Give the run directory, or RUN/checkpoints/step-00000100. `ckptrain status RUN` lists them.",
    ),
    "RestoreMismatch": Kind(
        cause="What came back from a checkpoint is not what the plan promised; the run stops before it learns from it.",
        cure="Start from the checkpoint before; if `ckptrain verify` finds this one whole, report it.",
    ),
    "SaveFailed": Kind(
        cause="A checkpoint could not be written: the disk is full, gone, or read-only. The one before is untouched,"
        " and a run goes on to the next save; at its last save the error ends it.",
        cure="Free some space or mend the disk, and run the same command again.",
    ),
    "TrainingDiverged": Kind(
        cause="The loss or the gradient norm is not a number any more. Nothing is saved of it.",
        cure="Go on from the last good checkpoint with a lower optimizer.lr, a longer warm-up, or a smaller clip_grad.",
    ),
    "ModelMismatch": Kind(
        cause="The base under Megatron is not what Hugging Face has: weights are missing or NaN, or its logits differ.",
        cure="See that the base's files are whole and of one model. If they are, report it: nothing should be trained"
        " on it, and model.verify=never only hides it.",
    ),
    "AdapterMismatch": Kind(
        cause="What was made of an adapter for others does not compute what was trained; nothing was written.",
        cure="See that the base is the one that the adapter was trained on (--base). If it is, report it.",
    ),
    "PackageMissing": Kind(
        cause="A package that this command needs is not installed in this Python, or too old to work. pip installs"
        " ckptrain without torch and Megatron, so that it changes none that is there.",
        cure="Run the command that is shown for each. `ckptrain doctor` shows what is there, and what would be used.",
    ),
    "RankFailed": Kind(
        cause="In one process of a launch something failed that is no error of yours. All processes end with it.",
        cure="The traceback is in RUN/error.log, or RUN/error.rankN.log of the process that is named. Report it with"
        " `ckptrain doctor --json`.",
    ),
    "RankLost": Kind(
        cause="A process of a launch was killed, hangs, or has failed alone, so that others would wait for it for"
        " ever. `train.timeout_minutes` is for how long they wait where nothing tells them.",
        cure="Look at the log of the process and the host that are named, and start again: the run goes on from its"
        " last checkpoint. Where a step is merely slow, set train.timeout_minutes higher.",
    ),
    "PhaseError": Kind(
        cause="A step of a run was done out of turn: a fault in ckptrain.",
        cure="Report it with the log that is named and `ckptrain doctor --json`.",
    ),
    "CkptrainError": Kind(
        cause="Anything else that is refused or cannot be done; mostly a path that cannot be read or written.",
        cure="The message says what to do.",
    ),
    "UsageError": Kind(
        cause="The command line is not one: a missing argument, an option that does not go with another.",
        cure="`ckptrain COMMAND --help`.",
        exit_status=errors.EXIT_USAGE,
    ),
    "OSError": Kind(
        cause="The operating system refuses something: no space, no permission, too many open files.",
        cure="It is said for each; what was committed before is untouched.",
        exit_status=errors.EXIT_FAILURE,
    ),
    "OutOfMemoryError": Kind(
        cause="The memory of the GPU, or of the machine, does not suffice.",
        cure="`ckptrain plan` estimates what a run takes; docs/memory.md says which key saves how much.",
        exit_status=errors.EXIT_FAILURE,
    ),
    "ModuleNotFoundError": Kind(
        cause="A package is missing that another one needs, mostly one that Megatron-Bridge would bring along.",
        cure="Install it, or all that ckptrain is tested with, as the message says.",
        exit_status=errors.EXIT_FAILURE,
    ),
    "Interrupted": Kind(
        cause="Ctrl-C before the run had begun to train. After that it saves, and ends with 75.",
        cure="Run it again.",
        exit_status=EXIT_INTERRUPTED,
    ),
    _FAULT: Kind(
        cause="Anything that is not listed above: a fault in ckptrain, or in a library below it.",
        cure="The traceback is in the log whose path is printed (RUN/error.log, RUN/error.rankN.log of another process,"
        " or error.log in ~/.local/state/ckptrain where there is no run). Report it with `ckptrain doctor --json`.",
        exit_status=errors.EXIT_FAILURE,
    ),
}


def classes() -> dict[str, type[errors.CkptrainError]]:
    """Return the errors that a caller may catch, by name; what only groups them is left out."""
    found = (value for value in vars(errors).values() if isinstance(value, type))
    kinds = {kind.__name__: kind for kind in found if issubclass(kind, errors.CkptrainError)}
    del kinds["ProblemsError"]
    return kinds


def texts() -> dict[str, list[str]]:
    """Return every text that is raised as each class, with ... for what is filled in, as the source has them."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in classes()
                and node.args
            ):
                summary, *details = [" ".join(_text(argument).split()) for argument in _literals(node.args)] or [""]
                if summary.strip(". "):
                    found.setdefault(node.func.id, []).append("; ".join([summary, *details]))
    return {name: sorted(set(held)) for name, held in found.items()}


def _literals(arguments: Sequence[ast.expr]) -> Iterator[ast.expr]:
    """Yield the text of a call, and those of a list of problems that stands in it."""
    yield arguments[0]
    if len(arguments) > 1 and isinstance(arguments[1], ast.List):
        yield from (one for one in arguments[1].elts if isinstance(one, ast.JoinedStr | ast.Constant))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    return "..."


def document(examples: Sequence[Example]) -> str:
    """Return docs/errors.md."""
    lines = [
        "# Errors",
        "",
        "Written by `uv run python tools/error_table.py`, which makes each of them happen on a tiny model.",
        "",
        "A command that fails prints what is wrong, where, and what to do, on stderr, then where more about it is"
        " written: the run's journal, or a log with the traceback where it is a fault in ckptrain. `--debug`, before or"
        " after the command, or `CKPTRAIN_DEBUG=1` shows the traceback of any error. With `--json` it is one object on"
        " stdout: `error` with `kind`, `message`, `problems` and `log`, and `exit_status`. In Python they are the"
        " classes of `ckptrain.errors`, all of them a `CkptrainError`.",
        "",
        "| kind | exit status | what it is |",
        "|---|---|---|",
    ]
    lines += [
        f"| [{name}](#{_anchor(name)}) | {_status(name)} | {_first(kind.cause)} |" for name, kind in KINDS.items()
    ]
    found = texts()
    for name, kind in KINDS.items():
        lines += [
            "",
            f"## {name}",
            "",
            f"Exit status {_status(name)}. {kind.cause}",
            "",
            f"**What to do:** {kind.cure}",
        ]
        for example in _of(name, examples):
            lines += ["", f"{example.title}:", "", "```text", example.message, "```"]
        if found.get(name):
            lines += ["", "Everything that is said so:", ""]
            lines += [f"- {_escaped(text)}" for text in found[name]]
    return "\n".join(lines) + "\n"


def _of(name: str, examples: Sequence[Example]) -> list[Example]:
    usage = ("MissingParameter", "NoSuchCommand", "BadParameter")
    if name == _FAULT:
        return [example for example in examples if example.kind not in {*KINDS, *usage}]
    return [example for example in examples if example.kind == name or (name == "UsageError" and example.kind in usage)]


def _status(name: str) -> int:
    kind = KINDS[name]
    return classes()[name].exit_status if kind.exit_status is None else kind.exit_status


def _first(text: str) -> str:
    return text.partition(". ")[0].removesuffix(".")


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _escaped(text: str) -> str:
    """Write a text so that Markdown shows it as it is."""
    return f"`{text.replace('`', chr(39))}`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or check it; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether the file is current")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ckptrain-errors-") as work:
        text = document(provoke_all(Path(work)))
    if asked.check:
        current = DOCUMENT.exists() and DOCUMENT.read_text() == text
        print(f"{DOCUMENT} is {'current' if current else 'not current'}")
        return int(not current)
    DOCUMENT.write_text(text)
    print(f"wrote {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
