"""The launcher, with small programs in place of training."""

import multiprocessing
import os
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptrain.cli import launch as launcher
from ckptrain.cli.slurm import step_environment

_PROGRAM = """
import os, signal, sys, time
sys.path[:0] = [{source!r}]
import ckptrain.cli.launched as launched
launched._SETTLE_S = 0.4
rank = int(os.environ["RANK"])
{before}
with launched.as_rank(os.environ):
{body}
    sys.exit(0)
"""


class Launch:
    """A launcher in a process of its own, forked from this one, which has imported torch: that takes seconds."""

    def __init__(self, command: list[str], num_processes: int, directory: Path, *, capture: bool) -> None:
        self._printed = directory / "stdout", directory / "stderr"
        self._process = multiprocessing.get_context("fork").Process(
            target=self._go, args=(command, num_processes, directory, capture)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def _go(self, command: list[str], num_processes: int, directory: Path, capture: bool) -> None:
        os.setsid()
        os.chdir(directory)
        tempfile.tempdir = str(directory)  # a launcher that is killed leaves its directory
        for number, path in enumerate(self._printed, start=1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
        ):  # pytest may run under nohup, or in the background
            signal.signal(number, signal.SIG_DFL)
        for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
            os.environ.pop(name, None)
        done = launcher.launch(command, num_processes, capture_stdout=capture)
        if capture:
            sys.stdout.write("captured:" + done.stdout.decode())
            sys.stdout.flush()
        os._exit(done.exit_status)

    def signal(self, number: int) -> None:
        """Send a signal to the launcher alone."""
        os.kill(self.pid, number)

    def ended(self) -> tuple[int | None, str, str]:
        """Wait for the end; return exit status, stdout and stderr."""
        self._process.join(timeout=30)
        if self._process.exitcode is None:
            self._process.kill()
        stdout, stderr = (path.read_text() for path in self._printed)
        return self._process.exitcode, stdout, stderr


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Launch]:
    """Return a function that launches a program in two processes, from a launcher that can be sent signals."""
    import torch.distributed.launcher.api  # noqa: F401  # once, before any launcher is forked

    def start(program: str, *arguments: str, before: str = "", capture: bool = False) -> Launch:
        path = tmp_path / "program.py"
        body = textwrap.indent(textwrap.dedent(program), "    ")
        source = str(Path(__file__).parents[2])
        path.write_text(_PROGRAM.format(source=source, before=textwrap.dedent(before), body=body))
        return Launch([sys.executable, "-S", str(path), *arguments], 2, tmp_path, capture=capture)

    return start


def _wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 20
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"no {paths}"
        time.sleep(0.02)


_SAVES_WHEN_ASKED = """
asked = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda n, f: asked.append(n))
open(f"ready{rank}", "w").close()
while not asked:
    time.sleep(0.01)
time.sleep(0.6)  # the step and the save
open(f"saved{rank}", "w").write(",".join(signal.Signals(n).name for n in asked))
sys.exit(75)
"""


def test_each_process_has_the_environment_that_torchrun_gives(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """Ranks, world size, this machine's address, one port for all, a share of the cores; the launch is not inherited."""
    program = """
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
        open(f"env{rank}", "w").write(" ".join(os.environ[name] for name in names))
        sys.exit(int(launched.LAUNCH in os.environ))
    """
    assert launch(program).ended() == (0, "", "")
    first, second = ((tmp_path / f"env{rank}").read_text().split() for rank in range(2))
    assert first[:5] == ["0", "0", "2", "2", "127.0.0.1"]
    assert second[:5] == ["1", "1", "2", "2", "127.0.0.1"]
    assert first[5] == second[5]
    assert int(first[6]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_arguments_reach_the_processes_as_they_are(launch: Callable[..., Launch]) -> None:
    """What torch's launcher would put something else in the place of is not touched."""
    arguments = ["data.train=$$HOME", "run_dir=${local_rank}", "cost=3$"]
    status, stdout, _ = launch("if rank == 0: print(*sys.argv[1:], flush=True)", *arguments).ended()
    assert (status, stdout) == (0, " ".join(arguments) + "\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_launcher_lets_every_process_save(
    launch: Callable[..., Launch], tmp_path: Path, number: signal.Signals
) -> None:
    """Each gets it once, none is killed while it saves, and the exit status is theirs."""
    process = launch(_SAVES_WHEN_ASKED)
    _wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.signal(number)
    assert process.ended() == (75, "", "")
    expected = "SIGTERM" if number is signal.SIGHUP else number.name
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == [expected, expected]


def test_ctrl_c_in_a_terminal_reaches_each_process_once(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """A terminal sends SIGINT to the launcher's whole group; a second one would end a process without a save."""
    process = launch(_SAVES_WHEN_ASKED)
    _wait_for(tmp_path / "ready0", tmp_path / "ready1")
    os.killpg(process.pid, signal.SIGINT)
    assert process.ended()[0] == 75
    assert (tmp_path / "saved0").read_text() == "SIGINT"


def test_a_process_that_starts_after_a_signal_ends_at_once(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """The launcher does not know yet whom to pass it on to."""
    late = """
        open(f"late{rank}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    """
    process = launch("time.sleep(60)", before=late)
    _wait_for(tmp_path / "late0", tmp_path / "late1")
    process.signal(signal.SIGINT)
    time.sleep(0.2)
    (tmp_path / "go").touch()
    assert process.ended() == (128 + signal.SIGTERM, "", "")


def test_a_third_signal_kills(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """For processes that hang and hear nothing any more."""
    program = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"ready{rank}", "w").close()
        time.sleep(60)
    """
    process = launch(program)
    _wait_for(tmp_path / "ready0", tmp_path / "ready1")
    for _ in range(3):
        process.signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.ended() == (128 + signal.SIGKILL, "", "")


def test_the_status_of_the_first_failure_is_the_launchers(launch: Callable[..., Launch]) -> None:
    """What follows in the other processes is its consequence."""
    assert launch("time.sleep(0 if rank else 0.2)\nsys.exit(78 if rank else 1)").ended()[0] == 78


def test_a_process_killed_by_a_signal_is_told_and_takes_the_others_with_it(launch: Callable[..., Launch]) -> None:
    """The others hang, as in a collective; SIGKILL from outside is what running out of memory looks like."""
    program = """
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """
    status, stdout, stderr = launch(program).ended()
    assert (status, stdout) == (128 + signal.SIGKILL, "")
    assert "process 2 of 2 processes (rank 1) was killed by SIGKILL" in stderr
    assert "memory" in stderr


def test_a_process_that_fails_because_another_died_does_not_wait_for_it(launch: Callable[..., Launch]) -> None:
    """It has heard the agent's SIGTERM as a request to save, and would be killed for being there half a minute later."""
    program = """
        launched._SETTLE_S = 60
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, lambda n, f: None)
        time.sleep(1)
        sys.exit(1)
    """
    started = time.monotonic()
    status, _, stderr = launch(program).ended()
    assert time.monotonic() - started < 15
    assert status == 128 + signal.SIGKILL
    assert "(rank 1) was killed by SIGKILL" in stderr


def test_a_process_that_dies_after_its_end_is_not_taken_for_a_success(launch: Callable[..., Launch]) -> None:
    """A library that crashes while the interpreter closes takes the others with it, whatever they were doing."""
    program = """
        import atexit
        if rank:
            atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
            sys.exit(0)
        time.sleep(60)
    """
    status, _, stderr = launch(program).ended()
    assert status == 128 + signal.SIGSEGV
    assert "(rank 1) was killed by SIGSEGV" in stderr


def test_processes_that_wait_for_one_that_has_failed_are_ended(launch: Callable[..., Launch]) -> None:
    """Rank 1 fails alone, and rank 0 would wait in a collective for as long as its timeout is."""
    program = """
        if rank:
            print("error: out of memory", file=sys.stderr)
            sys.exit(1)
        time.sleep(60)
    """
    status, _, stderr = launch(program).ended()
    assert status == 1
    assert stderr == "process 2 of 2 processes (rank 1) ended first, with:\nerror: out of memory\n"


def test_rank_0_may_finish_its_last_lines_after_another_has_ended(launch: Callable[..., Launch]) -> None:
    """A stopped run ends with 75 everywhere, and rank 0 has a summary to print."""
    program = """
        if rank == 0:
            time.sleep(0.2)
            print("summary")
        sys.exit(75)
    """
    assert launch(program).ended() == (75, "summary\n", "")


def test_what_only_another_rank_knows_is_told(launch: Callable[..., Launch]) -> None:
    """Its traceback is shown, though rank 0 fails with the same status of its own."""
    program = """
        if rank:
            print("Traceback (most recent call last):\\nValueError: the cause", file=sys.stderr)
        time.sleep(0 if rank else 0.2)
        sys.exit(1)
    """
    status, _, stderr = launch(program).ended()
    assert status == 1
    assert "(rank 1) ended first, with:" in stderr
    assert "ValueError: the cause" in stderr


def test_a_fault_of_another_rank_is_told_with_where_its_traceback_is(launch: Callable[..., Launch]) -> None:
    """Rank 0 may have failed with the same status, and not know why."""
    program = """
        if rank:
            print("error (rank 1): no\\nThis is a fault in ckptrain; ...\\nlog: error.rank1.log", file=sys.stderr)
        time.sleep(0 if rank else 0.2)
        sys.exit(1)
    """
    status, _, stderr = launch(program).ended()
    assert status == 1
    assert stderr.endswith("log: error.rank1.log\n")


def test_an_error_that_all_ranks_share_is_told_once(launch: Callable[..., Launch]) -> None:
    """Rank 0 says it in full; the others' copies are left out, and so is what they print otherwise."""
    program = """
        print("greeting of a library")
        print("error: refused", file=sys.stderr)
        sys.exit(69)
    """
    assert launch(program).ended() == (69, "greeting of a library\n", "error: refused\n")


def test_what_rank_0_prints_can_be_captured(launch: Callable[..., Launch]) -> None:
    """For the one JSON object."""
    assert launch("print('{}') if rank == 0 else print('no')", capture=True).ended() == (0, "captured:{}\n", "")


def test_processes_are_asked_to_save_when_their_launcher_is_killed(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    """They ask the kernel for it; nobody is left to send them a signal."""
    process = launch(_SAVES_WHEN_ASKED)
    _wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.signal(signal.SIGKILL)
    _wait_for(tmp_path / "saved0", tmp_path / "saved1")
    assert process.ended()[0] == -signal.SIGKILL


def test_a_task_of_a_slurm_step_is_a_rank() -> None:
    """Slurm's names for what torchrun calls otherwise; every task works out the same address."""
    task = {
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[003-006,9],login1",
        "SLURM_JOB_ID": "1234567",
    }
    assert step_environment(task) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": "19567",
    }
    assert step_environment({**task, "SLURM_STEP_NODELIST": "node7"})["MASTER_ADDR"] == "node7"
    assert step_environment({**task, "MASTER_PORT": "4000"})["MASTER_PORT"] == "4000"


def test_a_slurm_batch_script_and_a_torchrun_under_slurm_are_left_alone() -> None:
    """The first can launch by itself, the second has said what it is."""
    assert step_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == {}
    assert step_environment({"RANK": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}) == {}
