"""A picture of a ramp: first audio and underruns against load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from pega_omni_plugin.bench.report import Summary, figure

SIZE = (1200, 760)
_SCALE = 2  # drawn larger and reduced, for smooth lines
_LEFT, _RIGHT = 96, 1160
_UPPER, _LOWER = (132, 460), (556, 670)  # top and bottom of the two panels
_INK, _MUTED, _GRID = "#1f2430", "#667085", "#e4e7ec"
_P50, _P99, _UNDERRUN, _FAILED = "#1d5fbf", "#d9730d", "#c0362c", "#475467"


@dataclass(frozen=True, slots=True)
class Point:
    """One level: ms to first audio (``None`` when nothing was served), shares of the requests as 0 to 1."""

    level: float
    p50_ms: float | None
    p99_ms: float | None
    underrun_share: float
    failed_share: float = 0.0

    @classmethod
    def of(cls, level: float, summary: Summary) -> Point:
        ttfp, whole = summary.ttfp_ms, summary.requests
        p50, p99 = (ttfp.p50, ttfp.p99) if ttfp else (None, None)
        return cls(level, p50, p99, summary.underruns / whole, summary.failed / whole)


def draw_ramp(points: Sequence[Point], title: str, subtitle: str, level_name: str) -> Image.Image:
    """Draw the levels, evenly spaced, in the order given: times above, underruns below. RGB, 1200 x 760."""
    canvas = _Canvas()
    canvas.text((_LEFT, 28), title, 26, _INK)
    canvas.text((_LEFT, 64), subtitle, 16, _MUTED)
    step = (_RIGHT - _LEFT) / len(points)
    columns = [_LEFT + step * (index + 0.5) for index in range(len(points))]

    times = [value for point in points for value in (point.p50_ms, point.p99_ms) if value is not None]
    top, ticks = axis(max(times, default=1.0))
    _panel(canvas, _UPPER, "time to first audio (ms)", top, ticks)
    p50s, p99s = [point.p50_ms for point in points], [point.p99_ms for point in points]
    _line(canvas, columns, p99s, top, _P99)
    _line(canvas, columns, p50s, top, _P50)
    for x, p50, p99 in zip(columns, p50s, p99s, strict=True):
        _values(canvas, x, p50, p99, top)
    _key(canvas, _UPPER, _RIGHT - 150, "p50", _P50)
    _key(canvas, _UPPER, _RIGHT - 64, "p99", _P99)

    _panel(canvas, _LOWER, "not clean (% of requests)", 100.0, (0.0, 50.0, 100.0))
    for x, point in zip(columns, points, strict=True):
        _bar(canvas, x, min(step * 0.4, 64), point)
        canvas.text((x, _LOWER[1] + 10), f"{point.level:g}", 16, _INK, "mt")
    _key(canvas, _LOWER, _RIGHT - 274, "underrun > 1 ms", _UNDERRUN)
    _key(canvas, _LOWER, _RIGHT - 64, "failed", _FAILED)
    canvas.text(((_LEFT + _RIGHT) / 2, _LOWER[1] + 40), level_name, 16, _MUTED, "mt")
    return canvas.finish()


def axis(largest: float) -> tuple[float, tuple[float, ...]]:
    """Top of an axis from 0 that holds ``largest`` with room for its label, and 4 to 7 ticks on 1, 2 or 5 times ten."""
    wanted = largest * 1.15 or 1.0
    power = 10.0 ** math.floor(math.log10(wanted / 4))
    tick = next(factor * power for factor in (1, 2, 5, 10) if wanted / (factor * power) <= 6)
    count = math.ceil(wanted / tick)
    return count * tick, tuple(index * tick for index in range(count + 1))


class _Canvas:
    """Pillow in units of the finished picture."""

    def __init__(self) -> None:
        self._image = Image.new("RGB", (SIZE[0] * _SCALE, SIZE[1] * _SCALE), "white")
        self._draw = ImageDraw.Draw(self._image)

    def text(self, at: tuple[float, float], text: str, size: int, colour: str, anchor: str = "la") -> None:
        font = ImageFont.load_default(size * _SCALE)
        self._draw.text(
            (at[0] * _SCALE, at[1] * _SCALE),
            text,
            fill=colour,
            font=font,
            anchor=anchor,
            stroke_width=3 * _SCALE,  # lines end before the text
            stroke_fill="white",
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: int) -> None:
        scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
        self._draw.line(scaled, fill=colour, width=width * _SCALE, joint="curve")

    def dot(self, at: tuple[float, float], colour: str) -> None:
        centre = (at[0] * _SCALE, at[1] * _SCALE)
        self._draw.circle(centre, 6 * _SCALE, fill=colour, outline="white", width=2 * _SCALE)

    def box(self, corners: tuple[float, float, float, float], colour: str) -> None:
        x0, y0, x1, y1 = (value * _SCALE for value in corners)
        self._draw.rectangle((x0, y0, x1, y1), fill=colour)

    def finish(self) -> Image.Image:
        return self._image.reduce(_SCALE)


def _height(value: float, top: float, panel: tuple[int, int]) -> float:
    return panel[1] - value / top * (panel[1] - panel[0])


def _panel(canvas: _Canvas, panel: tuple[int, int], name: str, top: float, ticks: Sequence[float]) -> None:
    canvas.text((_LEFT, panel[0] - 26), name, 16, _INK, "la")
    for tick in ticks:
        y = _height(tick, top, panel)
        canvas.line([(_LEFT, y), (_RIGHT, y)], _MUTED if tick == 0 else _GRID, 1)
        canvas.text((_LEFT - 10, y), figure(tick), 14, _MUTED, "rm")


def _line(canvas: _Canvas, columns: Sequence[float], values: Sequence[float | None], top: float, colour: str) -> None:
    points = [(x, _height(v, top, _UPPER)) for x, v in zip(columns, values, strict=True) if v is not None]
    if len(points) > 1:
        canvas.line(points, colour, 3)
    for point in points:
        canvas.dot(point, colour)


def _values(canvas: _Canvas, x: float, p50: float | None, p99: float | None, top: float) -> None:
    if p50 is None or p99 is None:
        canvas.text((x, _UPPER[1] - 10), "nothing served", 14, _MUTED, "mb")
        return
    canvas.text((x, _height(p99, top, _UPPER) - 12), figure(p99), 14, _P99, "mb")
    canvas.text((x, _height(p50, top, _UPPER) + 12), figure(p50), 14, _P50, "mt")


def _bar(canvas: _Canvas, x: float, width: float, point: Point) -> None:
    underrun, failed = point.underrun_share * 100, point.failed_share * 100
    middle, end = _height(underrun, 100.0, _LOWER), _height(underrun + failed, 100.0, _LOWER)
    if underrun:
        canvas.box((x - width / 2, middle, x + width / 2, _LOWER[1]), _UNDERRUN)
    if failed:
        canvas.box((x - width / 2, end, x + width / 2, middle), _FAILED)
    canvas.text((x, end - 4), figure(underrun + failed), 14, _INK if underrun + failed else _MUTED, "mb")


def _key(canvas: _Canvas, panel: tuple[int, int], x: float, name: str, colour: str) -> None:
    canvas.dot((x, panel[0] - 18), colour)
    canvas.text((x + 14, panel[0] - 18), name, 16, _INK, "lm")
