"""A picture of a load on a server, as SVG written by hand: browsers show it, no library draws it.

Above, how the latencies are distributed: each curve rises to the share of values that are at most as large.
Below, the same minutes from left to right: tokens per second, and how many requests were on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from mainspring.bench.load import Answer
from mainspring.bench.serve import TITLES, Measurement, milliseconds, tokens_per_second

WIDTH, HEIGHT, MARGIN = 960, 560, 56
INK, FAINT, BLUE, ORANGE = "#1f2937", "#e5e7eb", "#2563eb", "#d97706"
SHOWN = ("ttft", "itl", "e2el")
CUT = 0.995  # of a distribution: what lies beyond would make the rest a vertical line
MAX_POINTS = 400


class Panel(NamedTuple):
    """A rectangle with axes, in pixels."""

    x: float
    y: float
    width: float
    height: float
    most_x: float
    most_y: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.x + self.width * x / self.most_x, self.y + self.height * (1 - y / self.most_y)


def svg(measured: Measurement) -> str:
    """The whole picture."""
    answers = measured.completed
    parts = [_heading(measured)]
    width = (WIDTH - 2 * MARGIN - 2 * 48) / 3
    for i, name in enumerate(SHOWN):
        values = sorted(milliseconds(answers)[name])
        parts += _distribution(TITLES[name], values, MARGIN + i * (width + 48), 92, width, 168)
    parts += _over_time(answers, measured.duration_s, MARGIN, 340, WIDTH - 2 * MARGIN, 150)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _heading(measured: Measurement) -> str:
    answers, seconds = measured.completed, measured.duration_s
    written = sum(answer.output_tokens for answer in answers)
    what = f"{measured.model}, {measured.args.backend}"
    how = f"{len(answers)} requests in {seconds:.1f} s · {written / seconds:,.0f} tokens/s"
    return _text(MARGIN, 34, what, size=18, weight=600) + _text(MARGIN, 56, how, fill="#6b7280")


def _distribution(
    title: str, values_ms: Sequence[float], x: float, y: float, width: float, height: float
) -> list[str]:
    parts = [_text(x, y - 10, f"{title}, ms", weight=600)]
    if not values_ms:
        return [*parts, _text(x, y + height / 2, "no values", fill="#6b7280")]
    most = max(values_ms[min(len(values_ms) - 1, int(CUT * len(values_ms)))], 1e-6)
    panel = Panel(x, y, width, height, most * 1.05, 1.0)
    parts += _axes(panel, lambda share: f"{share:.0%}", (0.0, 0.5, 0.9, 1.0))
    points = [(0.0, 0.0)]
    for i in _some(len(values_ms)):
        if values_ms[i] > most:
            break
        points.append((values_ms[i], (i + 1) / len(values_ms)))
    parts.append(_line(panel, points, BLUE))
    median, late = (values_ms[math.ceil(share * len(values_ms)) - 1] for share in (0.5, 0.99))
    parts += [_dot(panel, median, 0.5), _dot(panel, min(late, most), 0.99)]
    beside = panel.at(median, 0.5)
    is_right = median > panel.most_x * 0.6
    where = (beside[0] - 8, "end") if is_right else (beside[0] + 8, "start")
    parts.append(_text(where[0], beside[1] + 16, f"p50 {median:,.4g}", anchor=where[1]))
    parts.append(_text(x + width, y - 10, f"p99 {late:,.4g}", anchor="end"))
    return parts


def _over_time(
    answers: Sequence[Answer], duration_s: float, x: float, y: float, width: float, height: float
) -> list[str]:
    rates = tokens_per_second(answers)
    live = _live(answers)
    parts = [
        _text(x, y - 10, "tokens per second", weight=600, fill=BLUE),
        _text(x + width, y - 10, "requests on their way", weight=600, fill=ORANGE, anchor="end"),
    ]
    if not rates:
        return [*parts, _text(x, y + height / 2, "no tokens", fill="#6b7280")]
    last_s = max(duration_s, float(len(rates)))
    panel = Panel(x, y, width, height, last_s, max(rates) * 1.1)
    parts += _axes(panel, lambda rate: f"{rate:,.4g}", _ticks(panel.most_y))
    parts.append(_text(x + width, y + height + 34, "seconds", anchor="end", fill="#6b7280"))
    steps = [point for i, rate in enumerate(rates) for point in ((i, rate), (i + 1, rate))]
    parts.append(_line(panel, [(0.0, 0.0), *steps, (len(rates), 0.0)], BLUE, fill=True))
    most_live = max(count for _, count in live)
    upper = panel._replace(most_y=most_live * 1.1)
    parts.append(_line(upper, live, ORANGE))
    for tick in _ticks(upper.most_y):
        if tick == int(tick):
            parts.append(_text(x + width + 6, upper.at(0, tick)[1] + 4, f"{tick:g}", fill=ORANGE))
    return parts


def _live(answers: Sequence[Answer]) -> list[tuple[float, float]]:
    """(second, requests on their way), as steps."""
    changes = sorted([(a.sent_s, 1) for a in answers] + [(a.ended_s, -1) for a in answers])
    points, now = [(0.0, 0.0)], 0
    for time_s, change in changes:
        points.append((time_s, float(now)))
        now += change
        points.append((time_s, float(now)))
    return points


# -- shapes --------------------------------------------------------------------------------------------------


def _axes(panel: Panel, name: Callable[[float], str], ticks: Iterable[float]) -> list[str]:
    parts = []
    for tick in ticks:
        left, height = panel.at(0, tick)
        parts.append(_rule(left, height, left + panel.width, height))
        parts.append(_text(left - 6, height + 4, name(tick), anchor="end", fill="#6b7280"))
    for tick in _ticks(panel.most_x):
        left, bottom = panel.at(tick, 0)
        parts.append(_rule(left, bottom, left, bottom + 4))
        parts.append(_text(left, bottom + 18, f"{tick:,.4g}", anchor="middle", fill="#6b7280"))
    return parts


def _ticks(most: float) -> list[float]:
    """Three to six round numbers from 0 to `most`."""
    step = 10 ** math.floor(math.log10(most / 3))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 5.5)
    return [i * step for i in range(int(most / step) + 1)]


def _some(count: int) -> list[int]:
    """At most `MAX_POINTS` indices below `count`, the last among them."""
    step = max(1, -(-count // MAX_POINTS))
    return sorted({*range(0, count, step), count - 1})


def _line(panel: Panel, points: Iterable[tuple[float, float]], colour: str, fill: bool = False) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (panel.at(*point) for point in points))
    inside = f'fill="{colour}" fill-opacity="0.15"' if fill else 'fill="none"'
    return f'<polyline points="{places}" {inside} stroke="{colour}" stroke-width="1.8"/>'


def _dot(panel: Panel, value: float, share: float) -> str:
    x, y = panel.at(value, share)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{BLUE}"/>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{FAINT}"/>'


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    weight: int = 400,
    anchor: str = "start",
    fill: str = INK,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
    )
