"""What a person sees of a run, from events as a run sends them."""

import io
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from ckptrain.cli.ending import show_end
from ckptrain.cli.forecast import Rhythm
from ckptrain.cli.progress import Progress, Quiet
from ckptrain.training.observers import SampleAnswer, StepRecord

PLAN = {
    "plan": "Resume",
    "reason": "[RUN] holds step-00000008",
    "notes": ["lr 1 there, 2 now", "another layout"],
    "checkpoint": "/runs/tickets/checkpoints/step-00000008",
    "restore_optimizer": True,
    "restore_rng": False,
}
FACTS = {"run_dir": "/runs/tickets", "steps": 12, "base": "[tiny]", "adapters": "lora of rank 8", "processes": 2}


def _rhythm(printed_every: int = 1, steps: int = 12) -> Rhythm:
    return Rhythm(steps=steps, printed_every=printed_every, saved_every=4)


def _sample(step: int, answer: str) -> SampleAnswer:
    prompt = "<|im_start|>user\nWhere is my [/lamp]?<|im_end|>\n<|im_start|>assistant\n"
    return SampleAnswer(step=step, prompt=prompt, reference="late", answer=answer)


def _step(step: int, **changes: Any) -> StepRecord:
    record = StepRecord(
        step=step,
        loss=2.0,
        lr=1e-4,
        grad_norm=0.5,
        tokens=1000,
        learnt_tokens=300,
        padding_share=0.0,
        tokens_per_s=1234.0,
        seconds=0.8,
        data_s=0.0,
        tflops_per_s=0.012,
    )
    return attrs.evolve(record, **changes)


def _session(console: Console, every_steps: int = 1) -> None:
    """Send what a run of steps 9 to 12 sends, that has the sample answered twice."""
    with Progress(console, _rhythm(every_steps), name="tickets") as told:
        told.on_plan(PLAN, FACTS)
        told.on_progress("base: logits agree with Hugging Face")
        told.on_validation(8, 2.5)
        told.on_sample(_sample(8, "I am sorry"))
        for step in range(9, 13):
            told.on_step(_step(step))
        told.on_validation(12, 0.25)
        told.on_sample(_sample(12, "late"))
        told.on_saved(12, Path("/runs/tickets/checkpoints/step-00000012"), 24_400_000, 0.41)
        told.on_end()


def _plain(every_steps: int = 1) -> list[str]:
    file = io.StringIO()
    _session(Console(file=file, width=40), every_steps)
    return file.getvalue().splitlines()


def _terminal() -> str:
    file = io.StringIO()
    _session(Console(file=file, width=100, force_terminal=True, color_system=None))
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_a_file_gets_one_line_for_each_event_without_control_codes() -> None:
    """Lines are searched: none is wrapped, whatever the width, and each begins with what it is about."""
    lines = _plain()
    assert "\x1b" not in "".join(lines)
    assert lines[0] == "start        Resume: [RUN] holds step-00000008"
    assert lines[1] == "takes        adapters, optimizer, data position, step from step-00000008; random states anew"
    assert lines[2] == "differs      lr 1 there, 2 now"
    assert lines[3] == "             another layout"
    assert lines[4] == "base         [tiny], lora of rank 8, 2 processes"
    assert lines[5] == "run          /runs/tickets"
    assert "base         logits agree with Hugging Face" in lines
    assert "step         9/12  loss 2.0000  lr 1.00e-04  grad 0.5  1.23k tokens/s  0.8 s" in lines
    assert "saved        step-00000012: 24.4 MB in 0.41 s" in lines


def test_a_file_gets_a_step_line_as_often_as_asked_and_one_for_the_last_step() -> None:
    """`log.every_steps` is for people as well as for metrics.jsonl."""
    steps = [line.split()[1] for line in _plain(every_steps=5) if line.startswith("step ")]
    assert steps == ["10/12", "12/12"]


@pytest.mark.parametrize(
    ("mfu", "told"), [(0.4162, "412 TFLOP/s (MFU 41.6%)  19.2 GB"), (None, "1.23k tokens/s  412 TFLOP/s  19.2 GB")]
)
def test_a_step_on_a_gpu_says_what_it_does_and_holds(mfu: float | None, told: str) -> None:
    """The share of the peak where the peak is known."""
    file = io.StringIO()
    with Progress(Console(file=file, width=40), _rhythm(steps=1)) as progress:
        progress.on_step(_step(1, tflops_per_s=411.7, mfu=mfu, peak_memory_bytes=19_200_000_000))
    assert told in file.getvalue()


def test_the_answer_before_and_after_are_told_with_the_wanted_one() -> None:
    """The question is shown without the template's markers, the second answer beside the first."""
    lines = _plain()
    assert "sample       user Where is my [/lamp]?" in lines
    assert lines[-4:-1] == ["wanted       late", "before       I am sorry", "after        late"]
    assert "validation   loss 0.2500 after step 12, 2.5000 at first" in lines


def test_a_terminal_shows_the_plan_in_a_panel_and_the_answers_side_by_side() -> None:
    """What starts, why, what is taken from where, and what differs; brackets in texts are no markup."""
    text = _terminal()
    panel = [line for line in text.splitlines() if line.startswith("│ ")]
    for words in (
        "start      Resume: [RUN] holds step-00000008",
        "takes      adapters, optimizer, data position, step from step-00000008; random states anew",
        "differs    lr 1 there, 2 now",
        "base       [tiny], lora of rank 8, 2 processes",
    ):
        assert any(words in line for line in panel)
    row = next(line for line in text.splitlines() if "I am sorry" in line and "│" in line)
    assert [cell.strip() for cell in row.strip("│ \r").split("│")] == ["late", "I am sorry", "late"]


def test_a_resume_that_changes_nothing_says_so() -> None:
    """Nobody has to wonder whether it was looked at."""
    file = io.StringIO()
    with Progress(Console(file=file, width=40), _rhythm()) as told:
        told.on_plan({**PLAN, "notes": [], "restore_rng": True}, FACTS)
    assert "differs      nothing that the numbers depend on" in file.getvalue().splitlines()


def test_a_recorded_session_has_steps_as_lines_and_no_panel() -> None:
    """A picture for the documentation is made of it."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True, record=True)
    with Progress(console, _rhythm(2), live=False) as told:
        told.on_plan(PLAN, FACTS)
        for step in range(9, 13):
            told.on_step(_step(step))
    text = console.export_text()
    assert "━" not in text
    assert re.findall(r"step +(\d+)/12", text) == ["10", "12"]


def test_a_step_that_fails_leaves_no_panel_behind() -> None:
    """The cursor is visible again before the error is told."""
    file = io.StringIO()
    with pytest.raises(ZeroDivisionError), Progress(Console(file=file, force_terminal=True), _rhythm(steps=3)) as told:
        told.on_step(_step(1))
        told.on_step(_step(1 // 0))
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_a_quiet_run_tells_what_is_wrong_and_nothing_else() -> None:
    """The end is told by the command."""
    file = io.StringIO()
    told = Quiet(Console(file=file, width=40))
    told.on_plan(PLAN, FACTS)
    told.on_step(_step(9))
    told.on_warning("the disk is slow")
    told.on_save_failed(12, "no space")
    assert file.getvalue().splitlines() == ["warning      the disk is slow", "not saved    step 12: no space"]


@pytest.mark.parametrize(
    ("environment", "has_colour"), [({"FORCE_COLOR": "1"}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_a_pipe_gets_lines_whatever_the_environment_says_of_colour(
    environment: dict[str, str], has_colour: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FORCE_COLOR colours them, and makes nothing move."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with (tmp_path / "log").open("w") as file:
        _session(Console(file=file, width=40))
    text = (tmp_path / "log").read_text()
    assert ("\x1b[" in text) == has_colour
    assert not re.search(r"\x1b\[[0-9;?]*[A-HJKhl]", text)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert "step         9/12  loss 2.0000  lr 1.00e-04  grad 0.5  1.23k tokens/s  0.8 s" in plain


def _end(num_processes: int = 1, **changes: object) -> str:
    report = {
        "status": "finished",
        "step": 24,
        "steps": 24,
        "run_dir": "runs/my tickets",
        "plan": {"reason": "step-00000024 is at step 24"},
        "checkpoint": "/runs/step-00000024",
        "val_loss_before": 2.5,
        "val_loss_after": 0.25,
        "stop_reason": None,
        **changes,
    }
    file = io.StringIO()
    show_end(report, num_processes, Console(file=file, width=40))
    return file.getvalue()


def test_the_end_of_a_run_has_the_losses_the_checkpoint_and_the_next_commands() -> None:
    """Commands can be pasted: a path with a space is quoted."""
    text = _end()
    assert "step 24 of 24" in text
    assert "loss 2.5000 -> 0.2500" in text
    assert "ckptrain export 'runs/my tickets' ADAPTER-DIRECTORY" in text
    assert "ckptrain resume 'runs/my tickets' train.steps=48\n" in text


def test_the_end_of_a_stopped_run_says_why_and_how_to_go_on() -> None:
    """With as many processes as it had."""
    text = _end(2, status="stopped", step=7, val_loss_after=None, stop_reason="signal SIGTERM")
    assert "after step 7 of 24: signal SIGTERM; saved" in text
    assert "ckptrain resume 'runs/my tickets' --nproc-per-node 2" in text
    assert "export" not in text


def test_a_run_that_is_done_already_gives_the_plans_reason() -> None:
    """It did nothing, and that is what it says."""
    assert "step-00000024 is at step 24" in _end(status="already_done", val_loss_before=None, val_loss_after=None)
