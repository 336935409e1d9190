"""What a report shows of a run, also of one that is cut off, empty, damaged or hostile; looked at in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.told_runs import at, ended, record, saved, start, write_lines, write_steps

from ckptrain.lifecycle.journal import Journal

Ask = Callable[..., Result]
AskJson = Callable[..., dict[str, Any]]
Save = Callable[..., Any]

HOSTILE = "</script><img src=x onerror=alert(1)>'\"{{ 7*7 }}\u2028<b>"
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def tell_a_killed_run(run_dir: Path) -> None:
    """Write what a run leaves that was killed after step 6, and stopped after step 8, of which all were saved by 4."""
    metrics = run_dir / "metrics.jsonl"
    write_steps(metrics, done=0, to=6)
    write_steps(metrics, done=4, to=8)
    write_steps(metrics, done=8, to=10)
    journal = [
        *start(0, 0, config={"optimizer.lr": 1e-4}),
        *saved(10, 4),
        *start(60, 4, config={"optimizer.lr": 1e-4}),
        *saved(70, 8),
        {"time": at(80), "event": "stop_requested", "reason": "signal SIGTERM", "step": 8},
        *ended(81, "STOPPED", 8),
        *start(100, 8, config={"optimizer.lr": 2e-4}, notes=["the learning rate is another"]),
        *ended(130, "FINISHED", 10),
    ]
    write_lines(run_dir / "journal.jsonl", journal)
    # `lost_at` is the time of this test: what the journal tells was long ago, so it is put among its starts.
    lost = [
        json.loads(line) | {"lost_at": at(61)} for line in (run_dir / "metrics.lost.jsonl").read_text().splitlines()
    ]
    write_lines(run_dir / "metrics.lost.jsonl", lost)


def data_of(page: Path) -> dict[str, Any]:
    """Return the numbers that a page draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    values: dict[str, Any] = json.loads(found[1])
    return values


def opened(page: Path, *, width: int = 1400) -> tuple[str, str]:
    """Return the page after its script has run, and what the browser's console said."""
    assert CHROMIUM is not None
    profile = page.parent / "profile"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={profile}", f"--window-size={width},1000", page.absolute().as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return done.stdout, console


def assert_draws(page: Path, *, curves: int) -> None:
    """Open a page in a browser: nothing is complained of, and its curves are drawn.

    Where there is no browser, what it would need is looked at: its script is the one that the page allows, and the
    numbers of every curve are there.
    """
    text = page.read_text()
    if CHROMIUM is None:
        script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        assert [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() in text for one in script] == [True]
        series = [one for chart in data_of(page)["charts"] for one in chart["series"]]
        assert [len(one["x"]) == len(one["y"]) > 0 for one in series] == [True] * curves
        return
    shown, console = opened(page)
    assert console == ""
    assert len(re.findall(r'<path class="curve \w+" d="M', shown)) == curves


def test_a_killed_run_shows_its_starts_its_saves_and_that_it_went_on(ask_json: AskJson, run_dir: Path) -> None:
    """The steps that were made twice are compared, and the saves have size, stall and time until the commit."""
    tell_a_killed_run(run_dir)
    [run] = ask_json("report", run_dir)["runs"]
    ends = [(one["plan"], one["step"], one["end"], one["end_reason"]) for one in run["starts"]]
    assert ends == [
        ("FreshStart", 0, "died", None),
        ("Resume", 4, "stopped", "signal SIGTERM"),
        ("Resume", 8, "finished", None),
    ]
    assert [(one["start"], one["verdict"], one["level"]) for one in run["resumes"]] == [
        (2, "exact", "good"),
        (3, "continued", "good"),
    ]
    texts = [check["text"] for check in run["resumes"][0]["checks"]]
    assert "24 of 24 tensors restored" in texts
    assert "checkpoint of step 4, then step 5" in texts
    assert "2 steps made again (5 to 6) with the same loss to the last bit" in texts
    [save] = run["starts"][0]["saves"]
    assert (save["step"], save["outcome"], save["num_bytes"], save["stall_s"]) == (4, "committed", 5000, 0.25)
    # Three seconds from its beginning, although it was told two seconds later, after a step.
    assert (save["begin_s"], save["end_s"]) == (10.0, 13.0)
    assert [change["key"] for change in run["starts"][2]["changes"]] == ["optimizer.lr"]
    assert run["lost_steps"] == 2


def test_a_killed_run_is_drawn_with_what_was_lost(ask: Ask, run_dir: Path) -> None:
    """Every restart is marked, and the lost steps lie over those that count."""
    tell_a_killed_run(run_dir)
    assert ask("report", run_dir).exit_code == 0
    page = run_dir / "report.html"
    charts = {chart["id"]: chart for chart in data_of(page)["charts"]}
    assert [(one["kind"], one["x"]) for one in charts["loss"]["series"]] == [
        ("line", [*range(1, 11)]),
        ("lost", [5, 6]),
    ]
    assert [mark["x"] for mark in charts["loss"]["marks"]] == [4.5, 8.5]
    assert set(charts) == {"loss", "lr", "grad_norm", "tokens_per_s", "seconds"}
    assert_draws(page, curves=10)


@pytest.mark.parametrize(
    ("shift", "verdict", "level"), [(0.0, "exact", "good"), (1e-6, "continued", "good"), (0.5, "differs", "warn")]
)
def test_a_resume_is_judged_by_the_steps_that_were_made_twice(
    shift: float, verdict: str, level: str, ask_json: AskJson, run_dir: Path
) -> None:
    """To the last bit, up to rounding, or not."""
    write_steps(run_dir / "metrics.jsonl", done=0, to=6)
    write_steps(run_dir / "metrics.jsonl", done=4, to=8, shift=shift)
    write_lines(run_dir / "journal.jsonl", [*start(0, 0), *start(60, 4), *ended(90, "FINISHED", 8)])
    [run] = ask_json("report", run_dir)["runs"]
    assert [(one["verdict"], one["level"]) for one in run["resumes"]] == [(verdict, level)]


def test_a_learning_rate_that_the_receipt_did_not_say_is_told(ask_json: AskJson, run_dir: Path) -> None:
    """As it is where a schedule begins anew."""
    lines = [record(step, lr=1e-4 if step <= 4 else 3e-4) for step in range(1, 8)]
    write_lines(run_dir / "metrics.jsonl", lines)
    write_lines(run_dir / "journal.jsonl", [*start(0, 0), *start(60, 4), *ended(90, "FINISHED", 7)])
    [run] = ask_json("report", run_dir)["runs"]
    [resume] = run["resumes"]
    assert (resume["verdict"], resume["level"]) == ("differs", "bad")
    assert "learning rate 0.0003, the receipt said 0.0001" in [check["text"] for check in resume["checks"]]


@pytest.mark.parametrize(("dropout", "level"), [(0.0, "good"), (0.1, "warn")])
def test_generators_that_were_seeded_anew_matter_where_there_is_dropout(
    dropout: float, level: str, ask_json: AskJson, run_dir: Path
) -> None:
    """As under another layout; without dropout nothing is drawn from them."""
    write_steps(run_dir / "metrics.jsonl", done=0, to=8)
    then = start(60, 4, config={"lora.dropout": dropout})
    [receipt] = [entry for entry in then if entry["event"] == "receipt"]
    receipt["rng"] = "seeded from (seed, step, rank)"
    write_lines(run_dir / "journal.jsonl", [*start(0, 0), *then, *ended(90, "FINISHED", 8)])
    [run] = ask_json("report", run_dir)["runs"]
    assert [one["level"] for one in run["resumes"]] == [level]


def test_what_is_wrong_with_a_run_is_told_at_the_top(ask_json: AskJson, run_dir: Path, save: Save) -> None:
    """A loss that is no number, a save that failed, a validation loss that rises, a damaged checkpoint."""
    damaged = save(50)
    (damaged.path / "adapter" / ".metadata").unlink()
    lines = [record(step) for step in range(1, 20)] + [record(20) | {"loss": None}]
    write_lines(run_dir / "metrics.jsonl", [*lines, {"step": 10, "val_loss": 1.0}, {"step": 20, "val_loss": 1.5}])
    failed = [{"time": at(30), "event": "save_failed", "step": 20, "message": "the disk is full"}]
    error = [{"time": at(40), "event": "error", "kind": "TrainingDiverged", "message": "the loss is nan"}]
    write_lines(run_dir / "journal.jsonl", [*start(0, 0), *failed, *error, *ended(41, "FAILED", 20)])
    [run] = ask_json("report", run_dir)["runs"]
    bad = [remark["text"] for remark in run["health"] if remark["level"] == "bad"]
    assert "the last start failed: the loss is nan" in bad
    assert "the loss was no number in 1 step, first in step 20" in bad
    assert "1 of 1 saves failed: the disk is full" in bad
    assert any(text.startswith("step-00000050 is damaged: ") for text in bad)
    warned = [remark["text"] for remark in run["health"] if remark["level"] == "warn"]
    assert warned == ["validation loss has risen from its best, 1 at step 10, to 1.5"]


def test_a_run_without_steps_has_a_report(ask: Ask, run_dir: Path) -> None:
    """Nothing is drawn, and nothing is complained of."""
    assert ask("report", run_dir).exit_code == 0
    page = run_dir / "report.html"
    assert "No step has been recorded yet." in page.read_text()
    assert_draws(page, curves=0)


def test_half_written_lines_and_lines_of_another_version_are_passed_over(ask_json: AskJson, run_dir: Path) -> None:
    """A report is made while the run writes; what an entry does not say is left open."""
    tell_a_killed_run(run_dir)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "11", "loss": 1}\n{"loss": 2}\n{"step": 11, "loss": "x"}\n[]\n{"step": 12, "lo')
    with (run_dir / "journal.jsonl").open("ab") as file:
        file.write(b'{"event": "plan"}\n{"event": "saved", "seconds": "?"}\n{"event": "receipt"}\n{"time": 3}\n{"ev')
    [run] = ask_json("report", run_dir)["runs"]
    assert [one["plan"] for one in run["starts"]] == ["FreshStart", "Resume", "Resume", ""]
    assert run["starts"][1]["end"] == "stopped"


def test_nothing_from_a_run_becomes_part_of_the_page(ask: Ask, run_dir: Path) -> None:
    """Not from its samples, its config, its reasons, its host, its notes; what a person wrote is shown as it is."""
    sample = {"event": "sample", "step": 0, "prompt": HOSTILE, "reference": HOSTILE, "answer": HOSTILE}
    said = [{"time": HOSTILE, **sample}, {"time": at(3), "event": HOSTILE, HOSTILE: HOSTILE}]
    first = start(0, 0, config={"data.train": HOSTILE, HOSTILE: HOSTILE}, reason=HOSTILE, notes=[HOSTILE], host=HOSTILE)
    then = start(60, 4, config={"data.train": "other"}, checkpoint=HOSTILE)
    write_lines(run_dir / "journal.jsonl", [*first, *said, *then])
    write_steps(run_dir / "metrics.jsonl", done=0, to=6)
    hostile = run_dir.with_name("<img src=x onerror=alert(1)>")
    run_dir.rename(hostile)
    out = hostile.with_name("page.html")
    assert ask("report", hostile, "--out", out).exit_code == 0
    text = out.read_text()
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert "{{ 7*7 }}" in text
    assert "49" not in re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)[0]
    assert_draws(out, curves=5)


def test_a_report_loads_nothing_and_changes_nothing(ask: Ask, run_dir: Path, save: Save, tmp_path: Path) -> None:
    """No address is in it that a browser would load, and the run directory stays as it was."""
    save(4)
    tell_a_killed_run(run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    out = tmp_path / "page.html"
    assert ask("report", run_dir, "--out", out).exit_code == 0
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    addresses = re.findall(r"(?:src|href|url)\s*[=(]\s*['\"]?([^'\" >)]+)", out.read_text())
    assert [address for address in addresses if not address.startswith(("#", "data:"))] == []
    assert "default-src 'none'" in out.read_text()


def test_several_runs_are_laid_over_each_other(
    ask: Ask, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a table, and the config keys that differ; the page is written here, not into one of the runs."""
    tell_a_killed_run(run_dir)
    other = tmp_path / "other"
    shutil.copytree(run_dir, other)
    config = (other / "run.yaml").read_text()
    assert "  dim: 8\n" in config
    (other / "run.yaml").write_text(config.replace("  dim: 8\n", "  dim: 16\n"))
    monkeypatch.chdir(tmp_path)
    assert ask("report", run_dir, other).exit_code == 0
    page = tmp_path / "report.html"
    assert not (run_dir / "report.html").exists()
    [loss, *_] = data_of(page)["charts"]
    assert [one["run"] for one in loss["series"]] == [0, 0, 1, 1]
    assert re.search(
        r'<td class="code">lora.dim</td>\s*<td class="break">8</td><td class="break">16</td>', page.read_text()
    )
    assert_draws(page, curves=20)


def test_ten_thousand_steps_open_at_once(ask: Ask, run_dir: Path) -> None:
    """Below 2 MB and 2 s, with every spike there; saved two hundred times and resumed a hundred."""
    lines = [record(step, 1e3 if step == 7777 else None, peak_memory_bytes=10**9, mfu=0.4) for step in range(1, 10_001)]
    write_lines(run_dir / "metrics.jsonl", lines)
    journal = []
    for done in range(0, 10_000, 100):
        journal += [*start(done, done), *saved(done + 10, done + 50), *saved(done + 40, done + 100)]
    write_lines(run_dir / "journal.jsonl", [*journal, *ended(11_000, "FINISHED", 10_000)])
    assert ask("report", run_dir).exit_code == 0
    page = run_dir / "report.html"
    assert page.stat().st_size < 2_000_000
    faint = next(one for one in data_of(page)["charts"][0]["series"] if one["kind"] == "faint")
    assert max(faint["y"]) == 1000.0
    assert len(faint["x"]) < 2000
    if CHROMIUM is not None:
        shown, console = opened(page)
        assert console == ""
        assert 'class="curve faint"' in shown


def test_a_picture_is_drawn(ask_json: AskJson, run_dir: Path, tmp_path: Path) -> None:
    """Of the curves, also of a run that has none."""
    for name in ("none", "some"):
        path = tmp_path / f"{name}.png"
        assert ask_json("report", run_dir, "--png", path)["png"] == str(path)
        assert path.read_bytes().startswith(b"\x89PNG")
        tell_a_killed_run(run_dir)
    assert (tmp_path / "some.png").stat().st_size > 2 * (tmp_path / "none.png").stat().st_size


def test_without_matplotlib_a_picture_is_refused_with_the_way_to_it(
    ask: Ask, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is written; the page alone needs nothing more."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    result = ask("report", run_dir, "--png", run_dir / "curves.png")
    assert result.exit_code == 1
    assert "uv sync --extra report" in result.stderr
    assert not (run_dir / "report.html").exists()


def test_what_is_no_run_and_what_cannot_be_written_is_told(ask: Ask, run_dir: Path, tmp_path: Path) -> None:
    """With the path and what to do."""
    nothing = ask("report", run_dir, tmp_path / "nothing")
    assert nothing.exit_code == 2
    assert "run directory" in nothing.stderr
    misnamed = ask("report", run_dir, "--out", run_dir / "journal.jsonl")
    assert misnamed.exit_code == 2
    assert "expected a name that ends in .html" in misnamed.stderr
    unwritable = ask("report", run_dir, "--out", tmp_path / "no" / "page.html")
    assert unwritable.exit_code == 1
    assert "choose another place with --out" in unwritable.stderr


def test_exports_are_in_the_lineage_and_no_part_of_a_start(
    ask_json: AskJson, run_dir: Path, save: Save, tmp_path: Path
) -> None:
    """Whenever they are made: a start that ended long ago has not lasted until then."""
    tell_a_killed_run(run_dir)
    save(10)
    made = {"form": "PEFT adapter", "source": "run", "out": str(tmp_path / "adapter")}
    Journal(run_dir / "journal.jsonl").record("exported", **made)
    [run] = ask_json("report", run_dir)["runs"]
    assert [one["lasted_s"] for one in run["starts"]] == [15.0, 21.0, 30.0]
    lineage = re.findall(r'<span class="kind">(\w+)</span><span class="what"><b class="break">(.*?)</b>', read(run_dir))
    assert lineage[0] == ("base", str(tmp_path / "model"))
    assert lineage[-2:] == [("checkpoint", "step-00000010"), ("export", str(tmp_path / "adapter"))]


def read(run_dir: Path) -> str:
    """Return the page of a run."""
    return (run_dir / "report.html").read_text()
