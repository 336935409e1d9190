"""How is a report shown? One HTML file that needs no network: what it shows is escaped, and it may load nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import attrs

import ckptrain
from ckptrain.cli.report.charts import MOST_STARTS, charts_of, timeline_of
from ckptrain.cli.report.judged import BAD, GOOD, WARN, Continuation, worst
from ckptrain.cli.report.run import ReportedRun
from ckptrain.cli.report.story import Save, Start, number_of, text_of
from ckptrain.cli.wording import bytes_text, duration_text, plural

_MOST_SAVES, _MOST_ENTRIES, _MOST_CHECKPOINTS = 100, 200, 12
"""Lines of a table, the newest ones: more than anyone reads."""
_MOST_STARTS, _MOST_RESUMES = 20, 6
_LONGEST_VALUE = 4000

_STATES: Mapping[str, tuple[str, str]] = {
    "finished": (GOOD, "Finished"),
    "running": (GOOD, "Running"),
    "stopped": (WARN, "Stopped, saved"),
    "failed": (BAD, "Failed"),
    "died": (BAD, "Died"),
}
_VERDICTS: Mapping[str, str] = {
    "exact": "continued exactly",
    "continued": "continued",
    "differs": "differs",
    "unproven": "not proven",
}


def page_of(runs: Sequence[ReportedRun], now: datetime | None = None) -> str:
    """Return the HTML of a report on one run, or on several compared."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": _bytes, "duration": _duration, "shown": _shown, "count": _count, "figure": _figure}
    script, style = _asset("page.js"), _asset("page.css")
    return environment.get_template("page.html.j2").render(
        # Both are files of this package, and the only things that are put in as they are.
        script=Markup(script),  # noqa: S704
        style=Markup(style),  # noqa: S704
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=" and ".join(run.name for run in runs),
        made=(now or datetime.now(UTC)).isoformat(timespec="seconds").replace("+00:00", "Z"),
        version=ckptrain.__version__,
        runs=[_view(run) for run in runs],
        differences=_differences(runs),
        data={"charts": charts_of(runs), "timelines": [timeline_of(run.starts) for run in runs]},
    )


@functools.cache
def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _view(run: ReportedRun) -> dict[str, Any]:
    """Return a run as the template wants it."""
    state, starts = run.state, run.starts
    end = starts[-1].end if starts else None
    level, label = _STATES.get(end or "", (WARN, "Not started"))
    saves = [(start, save) for start in starts for save in start.saves]
    validation = run.measured.points("val_loss")
    return {
        "name": run.name,
        "run_dir": run.run_dir,
        "level": level,
        "label": label,
        "state": state,
        "phase": (state["phase"] or "").lower().replace("_", " "),
        "percent": _percent(state),
        "best": min(validation, key=lambda point: point[1]) if validation else None,
        "health": run.health,
        "health_level": worst(run.health),
        "resumes": run.resumes,
        **_resumes(run.resumes),
        "resumes_level": worst(run.resumes) if run.resumes else GOOD,
        "resumes_text": _resumes_text(run.resumes),
        "next": _next(state),
        "starts": starts,
        "trained": sum(start.lasted_s for start in starts),
        "lost_steps": sum(1 for stretch in run.measured.lost for row in stretch.rows if "loss" in row),
        "saves": [_save(start, save, run) for start, save in saves[-_MOST_SAVES:]],
        "saves_left_out": max(0, len(saves) - _MOST_SAVES),
        "saves_total": _saves_text([save for _, save in saves]),
        "starts_left_out": max(0, len(starts) - MOST_STARTS),
        "lineage": list(_lineage(run)),
        "config": _sections(run.config),
        "manifests": run.manifests,
        "samples": [
            {key: text_of(sample.get(key)) for key in ("step", "prompt", "reference", "answer")}
            for start in starts
            for sample in start.samples
        ],
        "journal": [_entry(entry) for entry in run.journal[-_MOST_ENTRIES:]],
        "journal_left_out": max(0, len(run.journal) - _MOST_ENTRIES),
        "changed": any(start.changes or start.notes for start in starts),
        "has_steps": bool(run.measured.kept),
    }


def _percent(state: Mapping[str, Any]) -> float | None:
    step, steps = number_of(state["step"]), number_of(state["steps"])
    return min(100.0, 100.0 * step / steps) if step is not None and steps else None


def _resumes(resumes: Sequence[Continuation]) -> dict[str, Any]:
    """Return the newest resumes and all that are not well, and apart from them the others."""
    told = [{**attrs.asdict(resume), "verdict": _VERDICTS[resume.verdict]} for resume in resumes]
    folded = [resume for resume in told[:-_MOST_RESUMES] if resume["level"] == GOOD]
    return {"resumes_shown": [resume for resume in told if resume not in folded], "resumes_folded": folded}


def _resumes_text(resumes: Sequence[Continuation]) -> str:
    if not resumes:
        return "Never resumed"
    proven = [resume for resume in resumes if resume.verdict in ("exact", "continued")]
    if len(proven) == len(resumes):
        exact = sum(resume.verdict == "exact" for resume in resumes)
        told = f", {exact} proven to the last bit" if exact else ""
        return f"{plural(len(resumes), 'resume')}, all continued{told}"
    return f"{len(proven)} of {plural(len(resumes), 'resume')} continued"


def _next(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a restart would do now, in the words of the plan."""
    following = state["next"]
    if following["error"] is not None:
        error = following["error"]
        first, *_ = error["message"].split("\n")
        return {"level": BAD, "title": "Refused", "text": first, "notes": error["problems"]}
    plan = following["plan"]
    titles = {
        "Resume": f"Resume at step {plan['first_step']}",
        "FreshStart": "Fresh start",
        "WarmStart": "Warm start",
        "AlreadyDone": "Nothing to do",
    }
    return {
        "level": GOOD,
        "title": titles.get(plan["plan"], plan["plan"]),
        "text": plan["reason"],
        "notes": plan["notes"],
    }


def _save(start: Start, save: Save, run: ReportedRun) -> dict[str, Any]:
    there = {checkpoint["step"]: checkpoint["health"] for checkpoint in run.state["checkpoints"]}
    kept = there.get(save.step, "removed since") if save.outcome == "committed" else save.message or ""
    level = GOOD if save.outcome == "committed" and kept != "damaged" else BAD
    return {"start": start.number, "save": save, "kept": kept, "level": level}


def _saves_text(saves: Sequence[Save]) -> str:
    done = [save for save in saves if save.outcome == "committed"]
    if not done:
        return "Nothing has been saved."
    written = sum(save.num_bytes or 0 for save in done)
    stalls = [save.stall_s for save in saves if save.stall_s is not None]
    told = f"{plural(len(done), 'save')}, {bytes_text(written)} written."
    if stalls:
        told += f" Training stood still for {duration_text(sum(stalls))} in all, {duration_text(max(stalls))} at most."
    return told


def _lineage(run: ReportedRun) -> Iterable[dict[str, Any]]:
    """Give where the run comes from and what came of it, in order."""
    if run.manifests:
        base = run.manifests[-1]["base"]
        facts = f"{bytes_text(base['num_bytes'])}, fingerprint {base['fingerprint'][:12]}"
        revision = f", revision {base['revision']}" if base["revision"] else ""
        yield {"kind": "base", "title": base["name"], "text": facts + revision, "level": GOOD}
    elif run.config:
        yield {"kind": "base", "title": run.config.get("model.pretrained"), "text": "no checkpoint yet", "level": WARN}
    adapter = next((start.source for start in run.starts if start.plan == "WarmStart"), None)
    if adapter is not None:
        yield {"kind": "adapter", "title": adapter, "text": "what it started from", "level": GOOD}
    trained = [start for start in run.starts if start.trains]
    if len(trained) > _MOST_STARTS:
        left_out = plural(len(trained) - _MOST_STARTS, "start")
        yield {"kind": "start", "title": f"{left_out} before", "text": "all are in the details", "level": GOOD}
    for start in trained[-_MOST_STARTS:]:
        level, end = _STATES.get(start.end, (WARN, start.end))
        made = [row["step"] for row in run.measured.made[start.number].values()]
        steps = f"steps {min(made):,} to {max(made):,}" if made else "no step recorded"
        came = f"from step {start.step:,}, " if start.plan == "Resume" else ""
        reason = f" ({start.end_reason})" if start.end_reason else ""
        title = f"Start {start.number}: {start.plan}"
        text = f"{came}{steps}, {duration_text(start.lasted_s)}; {end.lower()}{reason}"
        yield {"kind": "start", "title": title, "text": text, "level": level}
    for checkpoint in run.state["checkpoints"][-_MOST_CHECKPOINTS:]:
        whole = checkpoint["health"] == "whole"
        text = f"whole, {bytes_text(checkpoint['num_bytes'])}" if whole else "; ".join(checkpoint["problems"])
        yield {"kind": "checkpoint", "title": checkpoint["name"], "text": text, "level": GOOD if whole else BAD}
    for entry in run.journal:
        if entry.get("event") == "exported":
            text = f"{entry.get('form')} of {entry.get('source')}, {entry.get('time')}"
            yield {"kind": "export", "title": entry.get("out"), "text": text, "level": GOOD}


def _sections(config: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    sections: dict[str, list[tuple[str, str]]] = {}
    for key, value in config.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append((name, _shown(value)))
    return sections


def _differences(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Return the config keys that the runs do not agree on, with the value of each."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = [(key, [_shown(run.config.get(key)) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _entry(entry: Mapping[str, Any]) -> dict[str, str]:
    facts = {key: value for key, value in entry.items() if key not in ("time", "event", "values")}
    told = ", ".join(f"{key} {_shown(value)}" for key, value in facts.items() if value is not None)
    return {
        "time": str(entry.get("time", "")),
        "event": str(entry.get("event", "")),
        "facts": told if len(told) <= _LONGEST_VALUE else f"{told[:_LONGEST_VALUE]}...",
    }


def _shown(value: object) -> str:
    """Write a value of a config or of the journal."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "none"
    return str(value)


def _bytes(value: float | None) -> str:
    return "-" if value is None else bytes_text(value)


def _duration(value: float | None) -> str:
    return "-" if value is None else duration_text(value)


def _count(value: object) -> str:
    number = number_of(value)
    return str(value) if number is None else f"{number:,.0f}"


def _figure(value: object) -> str:
    number = number_of(value)
    return str(value) if number is None else f"{number:.4g}"
