"""The launcher, with small programs in place of training."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptrain.cli.slurm import step_environment

_LAUNCHER = """
import sys, ckptrain.cli.launch as launch
launch._SETTLE_S, launch._TERMINATE_S = 0.4, 0.4
done = launch.launch([sys.executable, "-S", sys.argv[1]], int(sys.argv[2]), capture_stdout=len(sys.argv) > 3)
sys.stdout.buffer.write(b"captured:" + done.stdout if len(sys.argv) > 3 else b"")
sys.exit(done.exit_status)
"""

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Return a function that launches a program in processes, from a launcher that can be sent signals."""

    def start(program: str, num_processes: int = 2, *options: str) -> subprocess.Popen[str]:
        path = tmp_path / "program.py"
        path.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{textwrap.dedent(program)}")
        hidden = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, str(path), str(num_processes), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name not in hidden},
            start_new_session=True,
        )

    return start


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=30)
    return process.returncode, stdout, stderr


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
    time.sleep(1.0)  # the step and the save
    open(f"saved{rank}", "w").write(",".join(signal.Signals(n).name for n in asked))
    sys.exit(75)
"""


def test_each_process_has_the_environment_that_torchrun_gives(launch: Launch, tmp_path: Path) -> None:
    """Ranks, world size, an address, one port for all, and a share of the cores."""
    program = """
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
        open(f"env{rank}", "w").write(" ".join(os.environ[name] for name in names))
    """
    assert _ended(launch(program, 2)) == (0, "", "")
    first, second = ((tmp_path / f"env{rank}").read_text().split() for rank in range(2))
    assert first[:5] == ["0", "0", "2", "2", "127.0.0.1"]
    assert second[:5] == ["1", "1", "2", "2", "127.0.0.1"]
    assert first[5] == second[5]
    assert int(first[6]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_rank_0_can_listen_on_the_port_that_is_kept_for_it(launch: Launch) -> None:
    """The launcher's socket keeps the port from others, and must not keep it from rank 0."""
    program = """
        import socket
        address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        if rank == 0:
            with socket.create_server(("0.0.0.0", address[1])) as server:
                server.settimeout(20)
                server.accept()[0].sendall(b"x")
        else:
            for _ in range(400):
                try:
                    with socket.create_connection(address, timeout=20) as connection:
                        sys.exit(0 if connection.recv(1) == b"x" else 1)
                except ConnectionRefusedError:
                    time.sleep(0.05)
            sys.exit(1)
    """
    assert _ended(launch(program)) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_launcher_lets_every_process_save(
    launch: Launch, tmp_path: Path, number: signal.Signals
) -> None:
    """Each gets it once, none is killed while it saves, and the exit status is theirs."""
    process = launch(_SAVES_WHEN_ASKED)
    _wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(number)
    assert _ended(process) == (75, "", "")
    expected = "SIGTERM" if number is signal.SIGHUP else number.name
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == [expected, expected]


def test_ctrl_c_in_a_terminal_reaches_each_process_once(launch: Launch, tmp_path: Path) -> None:
    """A terminal sends SIGINT to the launcher's whole group; a second one would end a process without a save."""
    process = launch(_SAVES_WHEN_ASKED)
    _wait_for(tmp_path / "ready0", tmp_path / "ready1")
    os.killpg(process.pid, signal.SIGINT)
    assert _ended(process)[0] == 75
    assert (tmp_path / "saved0").read_text() == "SIGINT"


def test_a_third_signal_kills(launch: Launch, tmp_path: Path) -> None:
    """For processes that hang and hear nothing any more."""
    program = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"ready{rank}", "w").close()
        time.sleep(60)
    """
    process = launch(program)
    _wait_for(tmp_path / "ready0", tmp_path / "ready1")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert _ended(process)[0] == 128 + signal.SIGKILL


def test_the_status_of_the_first_failure_is_the_launchers(launch: Launch) -> None:
    """What follows in the other processes is its consequence."""
    assert _ended(launch("time.sleep(0 if rank else 0.3)\nsys.exit(78 if rank else 1)"))[0] == 78


def test_a_process_killed_by_a_signal_is_told_and_takes_the_others_with_it(launch: Launch) -> None:
    """The others hang, as in a collective; SIGKILL from outside is what running out of memory looks like."""
    program = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """
    status, stdout, stderr = _ended(launch(program))
    assert (status, stdout) == (128 + signal.SIGKILL, "")
    assert "process 2 of 2 processes (rank 1) was killed by SIGKILL" in stderr
    assert "memory" in stderr


def test_rank_0_may_finish_its_last_lines_after_another_has_ended(launch: Launch) -> None:
    """A stopped run ends with 75 everywhere, and rank 0 has a summary to print."""
    program = """
        if rank == 0:
            time.sleep(0.2)
            print("summary", flush=True)
        sys.exit(75)
    """
    assert _ended(launch(program)) == (75, "summary\n", "")


def test_what_only_another_rank_knows_is_told(launch: Launch) -> None:
    """Its traceback is shown, though rank 0 fails with the same status of its own."""
    program = """
        if rank:
            raise ValueError("the cause")
        time.sleep(0.3)
        sys.exit(1)
    """
    status, _, stderr = _ended(launch(program))
    assert status == 1
    assert "(rank 1) ended first, with:" in stderr
    assert "ValueError: the cause" in stderr


def test_an_error_that_all_ranks_share_is_told_once(launch: Launch) -> None:
    """Rank 0 says it in full; the others' copies are left out, and so is what they print otherwise."""
    program = """
        print("greeting of a library")
        print("error: refused", file=sys.stderr)
        sys.exit(69)
    """
    assert _ended(launch(program)) == (69, "greeting of a library\n", "error: refused\n")


def test_what_rank_0_prints_can_be_captured(launch: Launch) -> None:
    """For the one JSON object."""
    assert _ended(launch("print('{}') if rank == 0 else print('no')", 2, "capture"))[1] == "captured:{}\n"


def test_processes_end_when_their_launcher_is_killed(launch: Launch, tmp_path: Path) -> None:
    """They ask the kernel for it; nobody is left to send them a signal."""
    source = str(Path(__file__).parents[2])
    program = f"""
        sys.path[:0] = [{source!r}, *{sys.path!r}]
        from ckptrain.cli.launch import follow_launcher
        signal.signal(signal.SIGTERM, lambda n, f: (open(f"told{{rank}}", "w").close(), os._exit(0)))
        follow_launcher(os.environ)
        open(f"ready{{rank}}", "w").close()
        time.sleep(60)
    """
    process = launch(program)
    _wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.kill()
    _wait_for(tmp_path / "told0", tmp_path / "told1")
    _ended(process)


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
