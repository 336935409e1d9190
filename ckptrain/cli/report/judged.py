"""Is it healthy, and did the resumes really continue? Judgements on what a run has written, each with its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ckptrain.cli.report.measured import Measured, points_of
from ckptrain.cli.report.story import Start, number_of
from ckptrain.cli.wording import plural

GOOD, WARN, BAD = "good", "warn", "bad"
_SAME_LR = 1e-6
_ROUNDING = 1e-3
"""Losses that differ by less, as a share, are the same up to rounding: of another layout, or other kernels."""
_WORSE = 1.02
"""How many times its best the validation loss is where it is told that it has risen."""
_STALLED = 0.05


@attrs.frozen(kw_only=True)
class Remark:
    """One thing that is well or not."""

    level: str
    text: str


@attrs.frozen(kw_only=True)
class Continuation:
    """Whether one resume went on where its checkpoint was."""

    start: int
    step: int
    """Of the checkpoint."""
    verdict: str
    """exact, continued, differs, or unproven."""
    level: str
    checks: tuple[Remark, ...]


def continuations(starts: Sequence[Start], measured: Measured) -> list[Continuation]:
    """Judge every resume of a run."""
    return [_continuation(start, measured) for start in starts if start.plan == "Resume"]


def health(state: Mapping[str, Any], starts: Sequence[Start], measured: Measured) -> list[Remark]:
    """Judge a run as it is now; `state` is what `ckptrain status` reports of it."""
    found = [
        *_end(state, starts),
        *_numbers(measured),
        *_validation(measured),
        *_saving(starts),
        *_damage(state, starts),
    ]
    return found or [Remark(level=WARN, text="nothing has been measured yet")]


def worst(judged: Iterable[Remark | Continuation]) -> str:
    """Return the worst level of what was judged."""
    levels = {one.level for one in judged}
    return BAD if BAD in levels else WARN if WARN in levels else GOOD


def _continuation(start: Start, measured: Measured) -> Continuation:
    made = measured.made[start.number]
    checks = [*_receipt(start), *_steps(start, made), *_rate(start, made)]
    overlap, verdict = _overlap(start, measured, made)
    checks += overlap or _seam(start, measured, made)
    level = worst(checks)
    if start.receipt is None or not made:
        verdict, level = "unproven", BAD if level == BAD else WARN
    elif level != GOOD:
        verdict = "differs"
    return Continuation(start=start.number, step=start.step, verdict=verdict, level=level, checks=tuple(checks))


def _receipt(start: Start) -> Iterator[Remark]:
    receipt = start.receipt
    if receipt is None:
        yield Remark(level=WARN, text="it ended before anything was restored: there is no receipt")
        return
    ranks = receipt.get("tensors_per_rank")
    counts = [tuple(pair) for pair in ranks] if isinstance(ranks, list) else []
    whole = bool(counts) and all(len(pair) == 2 and pair[0] == pair[1] for pair in counts)
    where = "on every rank" if len(counts) > 1 else ""
    first = f"{counts[0][0]} of {counts[0][1]} tensors restored {where}".strip() if counts else "no tensors counted"
    yield Remark(level=GOOD if whole else BAD, text=first)
    # The count is not the step where an earlier resume left the moments out; a restore compares it with its manifest.
    optimizer = str(receipt.get("optimizer"))
    level = GOOD if optimizer.startswith("restored") else WARN
    yield Remark(level=level, text=f"optimizer {optimizer}, its step count {receipt.get('optimizer_step')}")
    rng = str(receipt.get("rng"))
    if rng.startswith("restored"):
        yield Remark(level=GOOD, text=f"random generators {rng}")
    elif (start.config or {}).get("lora.dropout") == 0:
        yield Remark(level=GOOD, text=f"random generators {rng}; nothing is drawn from them without dropout")
    else:
        yield Remark(level=WARN, text=f"random generators {rng}")


def _steps(start: Start, made: Mapping[int, Any]) -> Iterator[Remark]:
    if not made:
        yield Remark(level=WARN, text="no step of it is recorded yet")
        return
    every = _every_steps(start)
    expected, first = start.step - start.step % every + every, next(iter(made))
    level = GOOD if first == expected else WARN
    yield Remark(level=level, text=f"checkpoint of step {start.step:,}, then step {first:,}" + _at_every(every))


def _every_steps(start: Start) -> int:
    every = (start.config or {}).get("log.every_steps")
    return every if isinstance(every, int) and every > 0 else 1


def _at_every(every: int) -> str:
    return f" (one of {every} is recorded)" if every > 1 else ""


def _rate(start: Start, made: Mapping[int, Any]) -> Iterator[Remark]:
    promised = number_of((start.receipt or {}).get("next_learning_rate"))
    used = number_of(made.get(start.step + 1, {}).get("lr"))
    if promised is not None and used is not None:
        same = math.isclose(promised, used, rel_tol=_SAME_LR, abs_tol=1e-15)
        text = f"learning rate {used:.4g}, " + ("as the receipt said" if same else f"the receipt said {promised:.4g}")
        yield Remark(level=GOOD if same else BAD, text=text)


def _overlap(start: Start, measured: Measured, made: Mapping[int, Any]) -> tuple[list[Remark], str]:
    """Compare the steps that were made twice: before the run was cut off, and again after the resume."""
    lost = dict(
        point
        for stretch in measured.lost
        if stretch.lost_to == start.number
        for point in points_of(stretch.rows, "loss")
    )
    again = dict(points_of(made.values(), "loss"))
    both = [(step, lost[step], again[step]) for step in sorted(lost.keys() & again.keys())]
    if not both:
        return [], "continued"
    steps = f"{plural(len(both), 'step')} made again ({_range(both[0][0], both[-1][0])})"
    if all(before == after for _, before, after in both):
        return [Remark(level=GOOD, text=f"{steps} with the same loss to the last bit")], "exact"
    step, before, after = max(both, key=lambda values: abs(values[1] - values[2]))
    difference = f"differ by {abs(before - after):.2g} at most (step {step:,}: {before:.6g}, then {after:.6g})"
    if all(math.isclose(before, after, rel_tol=_ROUNDING) for _, before, after in both):
        return [Remark(level=GOOD, text=f"{steps}: losses {difference}, which is rounding")], "continued"
    reason = ": the config was changed" if any(change["noted"] for change in start.changes) else ""
    return [Remark(level=WARN, text=f"{steps}: losses {difference}{reason}")], "differs"


def _seam(start: Start, measured: Measured, made: Mapping[int, Any]) -> list[Remark]:
    """Where nothing was made twice, only the losses on both sides can be laid side by side."""
    before = [point for point in measured.points("loss") if point[0] <= start.step]
    after = points_of(made.values(), "loss")
    if not before or not after:
        return []
    text = f"no step was lost; loss {before[-1][1]:.4g} at step {before[-1][0]:,}, {after[0][1]:.4g} at {after[0][0]:,}"
    return [Remark(level=GOOD, text=text)]


def _range(first: float, last: float) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _end(state: Mapping[str, Any], starts: Sequence[Start]) -> Iterator[Remark]:
    if not starts:
        yield Remark(level=WARN, text="it has not been started")
        return
    last = starts[-1]
    if last.end == "failed":
        yield Remark(level=BAD, text=f"the last start failed: {last.end_reason or 'no reason is recorded'}")
    elif last.end == "died":
        yield Remark(level=BAD, text="the process of the last start died; what it had saved is there")
    elif last.end == "running" and state.get("next", {}).get("error") is not None:
        yield Remark(level=WARN, text="it is running, and a restart would be refused now")


def _numbers(measured: Measured) -> Iterator[Remark]:
    steps = [row for row in measured.kept if "loss" in row]
    wrong = [row["step"] for row in steps if number_of(row["loss"]) is None]
    if wrong:
        yield Remark(
            level=BAD, text=f"the loss was no number in {plural(len(wrong), 'step')}, first in step {wrong[0]:,}"
        )
    losses = measured.points("loss")
    if len(losses) >= 4:
        part = max(1, len(losses) // 10)
        first = sum(loss for _, loss in losses[:part]) / part
        last = sum(loss for _, loss in losses[-part:]) / part
        over = f" (means of {part} steps)" if part > 1 else ""
        fell = last < first
        text = f"the loss {'fell' if fell else 'did not fall: it went'} from {first:.4g} to {last:.4g}{over}"
        yield Remark(level=GOOD if fell else WARN, text=text)


def _validation(measured: Measured) -> Iterator[Remark]:
    losses = measured.points("val_loss")
    if len(losses) < 2:
        return
    step, best = min(losses, key=lambda point: point[1])
    last = losses[-1][1]
    if last > _WORSE * best:
        yield Remark(
            level=WARN, text=f"validation loss has risen from its best, {best:.4g} at step {step:,}, to {last:.4g}"
        )
    else:
        yield Remark(level=GOOD, text=f"validation loss {last:.4g}, best {best:.4g} at step {step:,}")


def _saving(starts: Sequence[Start]) -> Iterator[Remark]:
    saves = [save for start in starts for save in start.saves]
    failed = [save for save in saves if save.outcome == "failed"]
    done = [save for save in saves if save.outcome == "committed"]
    if failed:
        level = BAD if saves[-1].outcome == "failed" else WARN
        yield Remark(level=level, text=f"{len(failed)} of {len(saves)} saves failed: {failed[-1].message}")
    trained_s = sum(span.end_s - span.begin_s for start in starts for span in start.spans if span.phase == "TRAINING")
    stalled_s = sum((save.stall_s or 0.0) + save.waited_s for save in saves)
    if done and trained_s:
        share = stalled_s / (trained_s + stalled_s)
        yield Remark(
            level=WARN if share > _STALLED else GOOD,
            text=f"{plural(len(done), 'checkpoint')} saved, which stopped training for {share:.2%} of its time",
        )


def _damage(state: Mapping[str, Any], starts: Sequence[Start]) -> Iterator[Remark]:
    for checkpoint in state.get("checkpoints", ()):
        if checkpoint["health"] == "damaged":
            yield Remark(level=BAD, text=f"{checkpoint['name']} is damaged: {'; '.join(checkpoint['problems'])}")
    for start in starts:
        for damage in start.damage:
            text = f"{damage.get('checkpoint')} was damaged, and moved away before start {start.number}"
            yield Remark(level=WARN, text=text)
