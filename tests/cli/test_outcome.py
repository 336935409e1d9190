"""How a command ends: words, one JSON object, a status; and where each of them goes."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import orjson
import pytest
from click.testing import CliRunner

from ckptrain.cli.error_log import keep_logs_in
from ckptrain.cli.group import debug_option
from ckptrain.cli.main import Commands, cli
from ckptrain.cli.outcome import DEBUG, Answer, failure_of, wants
from ckptrain.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    RankFailed,
    SaveFailed,
    StartRefused,
    TrainingDiverged,
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep logs away from the user's, and return where they go."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/ckptrain"


def _group(act: Callable[[], Answer]) -> Commands:
    """Return a command line with one command, which does `act`."""
    group = Commands()

    @group.command()
    @click.option("--json", "as_json", is_flag=True, expose_value=False)
    def go() -> Answer:
        return act()

    return group


def _raise(error: BaseException) -> Callable[[], Answer]:
    def act() -> Answer:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("bad", ["one"]), 78),
        (StartRefused("no", ["one"]), 69),
        (CheckpointDamaged("broken", ["one"]), 65),
        (CheckpointNotFound("where"), 2),
        (SaveFailed("full"), 1),
        (TrainingDiverged("NaN"), 1),
        (click.UsageError("what"), 2),
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "No space left on device", "/run/journal.jsonl"), 1),
        (ZeroDivisionError("division by zero"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_status(error: BaseException, status: int) -> None:
    """The table of the documentation, with and without --json."""
    group = _group(_raise(error))
    assert CliRunner().invoke(group, ["go"]).exit_code == status
    result = CliRunner().invoke(group, ["go", "--json"])
    assert result.exit_code == status
    assert orjson.loads(result.stdout)["exit_status"] == status


def test_an_error_of_ckptrain_is_a_message_without_a_traceback() -> None:
    """All of its problems, on stderr alone."""
    result = CliRunner().invoke(_group(_raise(ConfigError("bad config", ["first", "second"]))), ["go"])
    assert result.stdout == ""
    assert result.stderr == "error: bad config\n  - first\n  - second\n"


def test_a_fault_of_ckptrain_is_told_as_one_and_its_traceback_goes_to_a_log(state: Path) -> None:
    """Nobody should look for the reason in their configuration, nor read forty lines of Python."""
    group = _group(_raise(ZeroDivisionError("division by zero")))
    result = CliRunner().invoke(group, ["go"])
    first, second, third = result.stderr.splitlines()
    assert first == "error: ZeroDivisionError: division by zero"
    assert second.startswith("This is a fault in ckptrain")
    assert third == f"log: {state / 'error.log'}"
    CliRunner().invoke(group, ["go"])
    log = (state / "error.log").read_text()
    assert log.count("Traceback (most recent call last)") == 2  # the one before is kept
    assert "raise error" in log


@pytest.mark.parametrize("words", [["--debug", "go"], ["go", "--debug"]])
def test_debug_shows_the_traceback_of_any_error_before_or_after_the_command(
    words: list[str], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a fault, and of what is told in full by its message; the other ranks of a launch are asked for theirs too."""
    for error in (ZeroDivisionError("division by zero"), ConfigError("bad config", ["first"])):
        monkeypatch.setenv(DEBUG, "0")
        group = _group(_raise(error))
        group.params.append(debug_option())
        result = CliRunner().invoke(group, words)
        assert "Traceback (most recent call last)" in result.stderr
        assert "raise error" in result.stderr
        assert os.environ[DEBUG] == "1"


def test_debug_may_be_asked_for_by_the_environment(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a job script that is not to be changed; anything but 1 is no."""
    group = _group(_raise(ConfigError("bad config", ["first"])))
    for value, shown in (("1", True), ("0", False)):
        monkeypatch.setenv(DEBUG, value)
        assert ("Traceback" in CliRunner().invoke(group, ["go"]).stderr) == shown


def test_a_word_after_two_dashes_is_no_flag() -> None:
    """It is the name of a file, say."""
    assert wants("--debug", ["run", "--debug"])
    assert not wants("--debug", ["run", "--", "--debug"])


def test_each_rank_keeps_its_traceback_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 3 alone fails, its traceback is what a user needs; with --json the path is in the object."""

    def act() -> Answer:
        keep_logs_in(tmp_path)
        raise RankFailed("rank 3: ZeroDivisionError: division by zero") from ZeroDivisionError("division by zero")

    monkeypatch.setenv("RANK", "3")
    result = CliRunner().invoke(_group(act), ["go"])
    assert result.stderr.splitlines()[0] == "error (rank 3): rank 3: ZeroDivisionError: division by zero"
    assert result.stderr.splitlines()[2] == f"log: {tmp_path / 'error.rank3.log'}"
    assert "ZeroDivisionError: division by zero" in (tmp_path / "error.rank3.log").read_text()
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(_group(act), ["go", "--json"])
    assert orjson.loads(result.stdout)["error"]["log"] == str(tmp_path / "error.log")


def test_an_error_of_a_run_is_told_with_where_its_journal_is(tmp_path: Path) -> None:
    """What went before is there; a command that is about no run, or has not begun it, has none."""

    def act() -> Answer:
        keep_logs_in(tmp_path)
        (tmp_path / "journal.jsonl").write_text("{}")
        raise TrainingDiverged("the loss of step 3 is nan")

    def refused() -> Answer:
        keep_logs_in(tmp_path)
        raise StartRefused("no", ["one"])

    result = CliRunner().invoke(_group(act), ["go"])
    assert "log:" not in CliRunner().invoke(_group(refused), ["go"]).stderr
    assert result.stderr == f"error: the loss of step 3 is nan\nlog: {tmp_path / 'journal.jsonl'}\n"
    assert "log:" not in CliRunner().invoke(_group(_raise(TrainingDiverged("nan"))), ["go"]).stderr


def test_a_traceback_that_can_be_kept_nowhere_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, say."""
    monkeypatch.setattr("ckptrain.cli.error_log._directories", lambda _: iter(()))
    result = CliRunner().invoke(_group(_raise(ZeroDivisionError("division by zero"))), ["go"])
    assert "Traceback (most recent call last)" in result.stderr


def test_a_full_disk_is_told_with_the_file_and_what_to_do() -> None:
    """It is no fault of ckptrain, so there is no traceback."""
    result = CliRunner().invoke(_group(_raise(OSError(errno.ENOSPC, "No space left on device", "/run/x"))), ["go"])
    assert result.stderr == "error: No space left on device (/run/x); free some space and run it again\n"


def test_running_out_of_memory_is_told_with_what_to_make_smaller() -> None:
    """The error of torch is known by its name, since torch is not loaded to look at it."""
    kind = type("OutOfMemoryError", (RuntimeError,), {})
    failure = failure_of(kind("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert "train.micro_batch_size" in failure.message
    assert "2.00 GiB" in failure.message
    assert not failure.is_fault


def test_a_package_that_is_missing_is_told_with_what_to_install() -> None:
    """Of those that Megatron-Bridge brings along, say, where it was installed without them."""
    failure = failure_of(ModuleNotFoundError("No module named 'einops'", name="einops"))
    assert failure.message.startswith("the Python package einops is needed here and not installed")
    assert "pip install 'ckptrain[megatron]'" in failure.message
    assert not failure.is_fault
    assert failure_of(ModuleNotFoundError("No module named 'ckptrain.x'", name="ckptrain.x")).is_fault


def test_with_json_whatever_else_prints_goes_to_stderr() -> None:
    """A library's greeting on stdout, from Python or from C, must not break the one object."""
    code = (
        "import os, ckptrain.cli.main as m\nfrom ckptrain.cli.outcome import Answer\nfrom ckptrain.cli.options import json_option\n"
        "@m.cli.command()\n@json_option()\ndef go():\n"
        "    print('hello from Python'); os.write(1, b'hello from C\\n'); os.system('echo hello from a child')\n"
        "    return Answer(report={'found': 1}, exit_status=75)\n"
        "m.cli.main(['go', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == '{"found":1,"exit_status":75}\n'
    assert sorted(done.stderr.splitlines()) == ["hello from C", "hello from Python", "hello from a child"]
    assert done.returncode == 75


def test_a_usage_error_with_json_is_one_object_too() -> None:
    """It is found before the command is known to want JSON."""
    result = CliRunner().invoke(cli, ["plan", "--json"])
    assert result.exit_code == 2
    error = orjson.loads(result.stdout)["error"]
    assert "CONFIG|RUN" in error["message"]
    assert "ckptrain plan --help" in error["message"]


def test_other_ranks_give_the_first_line_of_an_error_and_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells it in full; eight copies of a list help nobody."""
    monkeypatch.setenv("RANK", "3")
    result = CliRunner().invoke(_group(_raise(ConfigError("bad config", ["first"]))), ["go", "--json"])
    assert (result.stdout, result.stderr) == ("", "error (rank 3): bad config\n")
    assert result.exit_code == 78


def test_a_reader_that_goes_away_is_not_an_error_to_explain() -> None:
    """`ckptrain explain | head -1` ends quietly."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptrain.cli", "explain"], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    os.close(read)
    _, stderr = process.communicate()
    assert stderr == ""
