"""What does a comparison look like? One SVG: of each pair of curves the losses, the gradient norms, the differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from compare_curves_case import Curve

WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 330, 210, 62, 62, 78, 84
"""Pixels: of a panel, what is left of and above the first, what is between two."""
OURS, THEIRS, BAND = "#c2410c", "#1d4ed8", "#93c5fd"
STYLE = (
    "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.axis{stroke:#888;fill:none}.grid{stroke:#e5e5e5}"
    f".ours{{stroke:{OURS};fill:none;stroke-width:1.5}}.theirs{{stroke:{THEIRS};fill:none;stroke-width:4;opacity:.45}}"
    f".band{{fill:{BAND};opacity:.5}}.ours-dot{{fill:{OURS}}}.theirs-dot{{fill:{THEIRS};opacity:.45}}"
)
type Points = Sequence[tuple[float, float]]


class Panel:
    """A pair of axes in which curves are drawn."""

    def __init__(self, title: str, column: int, row: int, shown: Sequence[Points], *, log: bool = False) -> None:
        self._x, self._y = LEFT + column * (WIDTH + GAP_X), TOP + row * (HEIGHT + GAP_Y)
        self._log = log
        every = [point for points in shown for point in points]
        self._last = max(x for x, _ in every) or 1.0
        values = [self._value(y) for _, y in every]
        low, high = (math.floor(min(values)), math.ceil(max(values))) if log else (min(values), max(values))
        self._low, self._high = low, high if high > low else low + 1
        self.parts = [f'<text class="title" x="{self._x}" y="{self._y - 10}">{escape(title)}</text>', *self._axes()]

    def _value(self, y: float) -> float:
        return math.log10(max(y, 1e-9)) if self._log else y

    def _place(self, x: float, y: float) -> str:
        share = (self._value(y) - self._low) / (self._high - self._low)
        return f"{self._x + WIDTH * x / self._last:.1f},{self._y + HEIGHT * (1 - share):.1f}"

    def _axes(self) -> list[str]:
        parts = []
        count = min(4, round(self._high - self._low)) if self._log else 4
        for index in range(count + 1):
            value = self._low + (self._high - self._low) * index / count
            y = self._y + HEIGHT * (1 - index / count)
            parts.append(f'<line class="grid" x1="{self._x}" x2="{self._x + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
            text = f"{10**value:.0e}" if self._log else f"{value:.3g}"
            parts.append(f'<text x="{self._x - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for step in (0, self._last):
            at = self._x + WIDTH * step / self._last
            parts.append(f'<text x="{at:.1f}" y="{self._y + HEIGHT + 16}" text-anchor="middle">{step:g}</text>')
        parts.append(f'<text x="{self._x + WIDTH / 2}" y="{self._y + HEIGHT + 16}" text-anchor="middle">step</text>')
        parts.append(f'<rect class="axis" x="{self._x}" y="{self._y}" width="{WIDTH}" height="{HEIGHT}"/>')
        return parts

    def line(self, points: Points, look: str) -> None:
        """Draw a curve."""
        self.parts.append(f'<polyline class="{look}" points="{" ".join(self._place(*point) for point in points)}"/>')

    def dots(self, points: Points, look: str, radius: float) -> None:
        """Draw points."""
        for point in points:
            x, y = self._place(*point).split(",")
            self.parts.append(f'<circle class="{look}" cx="{x}" cy="{y}" r="{radius}"/>')

    def band(self, low: Points, high: Points) -> None:
        """Fill what lies between two curves."""
        around = " ".join(self._place(*point) for point in [*low, *reversed(high)])
        self.parts.append(f'<polygon class="band" points="{around}"/>')


def draw(title: str, pairs: Mapping[str, tuple[Curve, Sequence[Curve]]]) -> str:
    """Draw pairs of curves by their names, one in a row: ours, and theirs by seed, of which the first is compared."""
    parts = []
    for row, (name, (ours, theirs)) in enumerate(pairs.items()):
        parts += _losses(name, row, ours, theirs) + _norms(row, ours, theirs[0]) + _differences(row, ours, theirs[0])
    width, height = LEFT + 3 * WIDTH + 2 * GAP_X + 24, TOP + len(pairs) * (HEIGHT + GAP_Y) - 30
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    band = '<tspan fill="#3b82f6">  ▒ its seeds</tspan>' if any(len(theirs) > 1 for _, theirs in pairs.values()) else ""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="{LEFT}" y="24">{escape(title)}: <tspan fill="{OURS}" font-weight="bold">— ckptrain</tspan>'
            f'<tspan fill="{THEIRS}" font-weight="bold">  ▬ Transformers + PEFT</tspan>{band}; dots: validation</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _losses(name: str, row: int, ours: Curve, theirs: Sequence[Curve]) -> list[str]:
    lines = [_steps(curve.losses) for curve in (ours, *theirs)]
    dots = [list(curve.validation.items()) for curve in (ours, theirs[0])]
    panel = Panel(f"{name}: loss, nats", 0, row, [*lines, *dots])
    if len(theirs) > 1:
        by_step = list(zip(*(curve.losses for curve in theirs), strict=True))
        panel.band(_steps([min(losses) for losses in by_step]), _steps([max(losses) for losses in by_step]))
    panel.line(lines[1], "theirs")
    panel.line(lines[0], "ours")
    panel.dots(dots[1], "theirs-dot", 5.5)
    panel.dots(dots[0], "ours-dot", 2.5)
    return panel.parts


def _norms(row: int, ours: Curve, theirs: Curve) -> list[str]:
    lines = [_steps(curve.grad_norms) for curve in (theirs, ours)]
    panel = Panel("gradient norm, before clipping", 1, row, lines, log=True)
    panel.line(lines[0], "theirs")
    panel.line(lines[1], "ours")
    return panel.parts


def _differences(row: int, ours: Curve, theirs: Curve) -> list[str]:
    apart = _steps([abs(one - other) for one, other in zip(ours.losses, theirs.losses, strict=True)])
    dots = [(step, abs(loss - theirs.validation[step])) for step, loss in ours.validation.items()]
    panel = Panel("difference of the losses, nats", 2, row, [apart, dots], log=True)
    panel.line(apart, "ours")
    panel.dots(dots, "ours-dot", 2.5)
    return panel.parts


def _steps(values: Sequence[float]) -> Points:
    return list(enumerate(values, start=1))
