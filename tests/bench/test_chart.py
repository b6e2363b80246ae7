from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor

from pega_omni_plugin.bench.chart import (
    _FAILED,
    _LEFT,
    _LOWER,
    _P50,
    _P99,
    _RIGHT,
    _UNDERRUN,
    SIZE,
    Point,
    axis,
    draw_ramp,
)
from pega_omni_plugin.bench.report import summarise
from pega_omni_plugin.bench.requests import Record
from tests.bench.virtual_time import SECOND


def pixels(image: Image.Image, colour: str) -> int:
    counts = {rgb: count for count, rgb in image.getcolors(maxcolors=SIZE[0] * SIZE[1]) or []}
    return counts.get(ImageColor.getrgb(colour), 0)


def draw(*points: Point) -> Image.Image:
    return draw_ramp(points, "a model", "how", "concurrent streams")


@given(st.floats(1e-3, 1e7))
def test_axis_holds_the_largest_value_with_few_round_ticks(largest: float) -> None:
    top, ticks = axis(largest)
    assert top >= largest * 1.1
    assert 3 <= len(ticks) <= 8
    assert (ticks[0], ticks[-1]) == (0, top)
    assert float(f"{ticks[1]:.6e}".split("e")[0]) in (1, 2, 5)


def test_axis_of_nothing_but_zero() -> None:
    assert axis(0.0)[0] == 1.0


def column(image: Image.Image, colour: str) -> int:
    """Pixels of a colour above the middle of the only level."""
    x = (_LEFT + _RIGHT) // 2
    return sum(image.getpixel((x, y)) == ImageColor.getrgb(colour) for y in range(*_LOWER))


@pytest.mark.parametrize(("underrun", "failed"), [(0.0, 0.0), (0.25, 0.0), (0.5, 0.0), (0.0, 0.5), (0.25, 0.5)])
def test_bars_are_as_high_as_the_shares(underrun: float, failed: float) -> None:
    image = draw(Point(8, 10, 20, underrun, failed))
    full = _LOWER[1] - _LOWER[0]
    assert abs(column(image, _UNDERRUN) - underrun * full) <= 2
    assert abs(column(image, _FAILED) - failed * full) <= 2


def test_lines_join_the_levels_that_were_served() -> None:
    one = draw(Point(1, 10, 20, 0), Point(8, None, None, 0, 1.0))
    two = draw(Point(1, 10, 20, 0), Point(8, 10, 20, 0))
    assert two.size == SIZE and two.mode == "RGB"
    for colour in (_P50, _P99):
        between = (_RIGHT - _LEFT) // 2
        assert pixels(two, colour) - pixels(one, colour) > between


def test_point_of_a_summary() -> None:
    records = [Record(True, None, 0, 5.0, 9.0, 1.0, 3.0), Record(True, None, 0, 7.0, 9.0, 1.0, 0.0)]
    bad = Record(False, "x", 0)
    assert Point.of(8, summarise([*records, bad, bad], SECOND, 0)) == Point(8, 5.0, 7.0, 0.25, 0.5)
    assert Point.of(8, summarise([bad], SECOND, 0)) == Point(8, None, None, 0.0, 1.0)
