"""Every command of README.md and docs/ is run, page by page, or is on a list that says why it cannot be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from support.documents import Block, Command, blocks, commands, inline_code, pages, read, words_of
from support.sandbox import MOST_PROCESSES, PROCESSES, SHELL, STATUSES, Ended, Sandbox

from ckptrain.cli.main import cli
from ckptrain.lifecycle.journal import read_journal

CANNOT_RUN: Mapping[tuple[str, ...], str] = {
    ("uv", "sync"): "installs packages into the environment that runs this test",
    ("uv", "build"): "takes the build backend from a registry; tests of the wheel are with the package",
    ("pip", "install"): "installs packages from a registry",
    ("srun",): "needs Slurm",
    ("sbatch",): "needs Slurm; tests/test_examples.py runs the script with stand-ins for srun and scontrol",
    ("torchrun",): "imports Megatron in every process, for minutes; tests/clusters/test_torchrun.py starts agents",
    ("kubectl",): "needs Kubernetes; tests/clusters/test_job_files.py reads the files",
    ("sky",): "needs a cloud; tests/clusters/test_job_files.py reads the file",
    ("vllm", "serve"): "needs vLLM and a GPU",
    ("curl",): "needs the server of the command before it",
    ("tensorboard",): "serves until it is stopped",
    ("pytest",): "is this",
    ("python", "tools/bench_scale.py"): "plans for thousands of ranks, for a minute; tests/test_bench_scale.py runs it",
    ("python", "tools/recipe_check.py"): "needs eight GPUs, or one; tests/test_recipe_check.py runs it on a tiny model",
    ("python", "tools/compare_curves.py"): "trains for a minute, or needs a GPU; tests/test_compare_curves.py runs it",
}
"""By the words that a command begins with. A ckptrain command in one of them is parsed, and planned where it trains."""


def commands_of(page: str) -> list[Command | Block]:
    """Return the commands and the Python blocks of a page, in its order."""
    found: list[Command | Block] = []
    for block in blocks(page):
        found += [block] if block.language == "python" else commands(block)
    return found


STARTS: Mapping[str, list[str]] = {
    "README.md": ["FreshStart", "AlreadyDone"],
    "docs/tutorial.md": ["FreshStart", "Resume"],
    "docs/how-to/resume.md": ["FreshStart", "AlreadyDone", "Resume"],
}
"""What the starts in runs/quickstart turn out to be, on the pages that are about it."""
WITHOUT_RUNS = ("README.md", "docs/tutorial.md")
"""The pages that begin with nothing, and run the quickstart."""
WITH_COMMANDS = [page for page in pages() if commands_of(page)]


def reason_not_to_run(words: tuple[str, ...]) -> str | None:
    """Return why a command cannot run here, None where it can."""
    listed = next((why for begin, why in CANNOT_RUN.items() if words[: len(begin)] == begin), None)
    if listed is None and words[:2] != ("ckptrain", "plan") and PROCESSES in words:
        number = int(words[words.index(PROCESSES) + 1])
        return f"starts {number} processes" if number > MOST_PROCESSES else None
    return listed


def ckptrain_words(words: tuple[str, ...]) -> list[str] | None:
    """Return the words of ckptrain's own command line in a command, or None where it has none."""
    if "ckptrain" in words:
        return list(words[words.index("ckptrain") + 1 :])
    return list(words[words.index("ckptrain.cli") + 1 :]) if "ckptrain.cli" in words else None


def parsed(words: list[str]) -> click.Context:
    """Parse a ckptrain command line as click does when it is run."""
    name, *rest = words
    context = cli.make_context("ckptrain", [name])
    command = cli.get_command(context, name)
    assert command is not None, f"ckptrain has no command {name}"
    return command.make_context(name, rest, parent=context)


def planned(command: Command, sandbox: Sandbox) -> Ended | None:
    """Plan what a command would train that cannot run here, after parsing it; None where it trains nothing."""
    words = ckptrain_words(command.words)
    if words is None:
        return None
    context = parsed([sandbox.stand_in(word) for word in words])
    if context.info_name not in ("run", "resume"):
        return None
    first = ("plan", *words[1:])
    processes = re.search(r"(?:--nproc-per-node|--ntasks-per-node)[ =](\d+)", " ".join(command.words))
    given = () if PROCESSES in words or processes is None else (PROCESSES, processes[1])
    return sandbox.run(words_of("ckptrain", *first, *given))


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_do_what_it_says(
    page: str, checkout: Sandbox, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In their order, in a directory in which the quickstart has run, unless the page begins with that."""
    found = commands_of(page)
    if "s3://" in read(page):
        request.getfixturevalue("object_store")
    sandbox = checkout.copy(tmp_path / "ckptrain", with_runs=page not in WITHOUT_RUNS)
    for command in found:
        if isinstance(command, Block):
            ended: Ended | None = sandbox.run_python(command.text, f"{page}:{command.line}")
            where, expected = f"{page}:{command.line}: a block of Python", 0
        elif reason_not_to_run(command.words) is None:
            ended = sandbox.run(command)
            where, expected = f"{command.where}: {command.text}", STATUSES[command.directive]
        else:
            ended = planned(command, sandbox)
            where, expected = f"{command.where}: the plan of {command.text}", 0
        if ended is not None:
            assert ended.status == expected, f"{where} ended with {ended.status}:\n{ended.output[-6000:]}"
    journal = read_journal(sandbox.directory / "runs/quickstart/journal.jsonl")
    plans = [entry["plan"] for entry in journal if entry["event"] == "plan"]
    assert plans == STARTS.get(page, plans)


def test_every_command_either_runs_or_is_listed() -> None:
    """What runs is ckptrain, a script of the project, or one of a few programs that every machine has."""
    for page in WITH_COMMANDS:
        for command in commands_of(page):
            if isinstance(command, Command) and reason_not_to_run(command.words) is None:
                runs = command.words[0] in ("ckptrain", *SHELL) or command.words[:1] == ("python",)
                assert runs, f"{command.where}: {command.words[0]} neither runs here nor is it in CANNOT_RUN"


def test_what_is_listed_is_in_a_document() -> None:
    """The list holds nothing that no page says any more."""
    said = [command.words for page in WITH_COMMANDS for command in commands_of(page) if isinstance(command, Command)]
    assert [begin for begin in CANNOT_RUN if not any(words[: len(begin)] == begin for words in said)] == []


@pytest.mark.parametrize("page", [page for page in pages() if page != "docs/errors.md"])  # it shows mistakes
def test_commands_in_the_prose_exist(page: str) -> None:
    """A command of ckptrain, with options that it has; a script that is there."""
    for code in inline_code(page):
        words = code.removeprefix("uv run ").split()
        if words[0] == "ckptrain" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            command = cli.commands.get(words[1])
            assert command is not None, f"{page}: `{code}`: ckptrain has no command {words[1]}"
            options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            given = {word.partition("=")[0].strip("[]") for word in words[2:] if word.strip("[").startswith("--")}
            assert given <= options | {"--help"}, f"{page}: `{code}`: {words[1]} has no {given - options}"
        elif words[0] in ("python", "python3") and len(words) > 1 and words[1].endswith(".py"):
            assert (Path(__file__).parents[2] / words[1]).is_file(), f"{page}: `{code}`"
