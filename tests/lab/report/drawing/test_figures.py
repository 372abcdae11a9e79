"""Drawings: every chart becomes valid SVG that names all it shows, and every number stands in the table behind it."""

from __future__ import annotations

import html
import io
import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from PIL import Image

from maecho.lab.charts import Bubbles, Chart, Lines, Pictures, Scatter, Surface
from maecho.lab.report.drawing.drawn import COLOURS, Look, colours, thinned
from maecho.lab.report.drawing.figures import DRAWINGS, draw, svg_file
from maecho.lab.report.drawing.markup import Markup, element, join, text
from maecho.lab.report.drawing.png import png
from maecho.lab.report.drawing.scales import Scale, short
from support.pages import parse

HOSTILE = "</title><script>alert('1')</script>\x00\x1b[2J\u202e&\""
SAMPLES: list[Chart] = [
    Lines(HOSTILE, "step", "per cent", {"ours": [[0, 1.5], [10, 20.5]], HOSTILE: []}, {"ensemble": 3.5}),
    Lines("nothing", "step", "per cent", {}),
    Scatter("b", "x", HOSTILE, {"client 1": [[0.5, -1.0], [3, 4]], HOSTILE: [[2.0, 2.0]]}),
    Bubbles(HOSTILE, "class", "client", [[1, 0, 40], [2, 3, 0]]),
    Bubbles("none", "class", "client", [[0, 0]]),
    Surface(
        "d", HOSTILE, "v", [0.0, 1.0, 2.0], [0.0, 1.0], [[1, 2, 3], [4, 5, 600]], [[0, 0.5], [2, 1]], {HOSTILE: [1, 1]}
    ),
    Pictures("e", ["0", HOSTILE], {HOSTILE: [[[0, 255], [3, 4]], [[1, 2], [3, 4]]]}),
]
LOOKS = (Look(), Look(names=True, diagonal=True), Look(x="log", y="error", width=620, height=430))


@pytest.mark.parametrize("look", LOOKS, ids=["plain", "names", "scales"])
@pytest.mark.parametrize("chart", SAMPLES, ids=lambda chart: f"{type(chart).__name__}, {chart.title[:7]}")
def test_a_file_is_valid_and_holds_no_foreign_markup(chart: Chart, look: Look) -> None:
    written = svg_file(chart, look)
    root = ElementTree.fromstring(written.encode())
    tags = {one.tag.removeprefix("{http://www.w3.org/2000/svg}") for one in root.iter()}
    assert tags <= {"svg", "g", "title", "style", "text", "rect", "line", "path", "circle", "image"}
    assert root.get("role") == "img"
    assert root[0].text == html.unescape(text(chart.title))
    assert not re.findall(r"(?:href|src)=\"(?!data:)", written), "it needs no other file"
    places = re.findall(r' (?:x|y|r|cx|cy|x1|x2|y1|y2|width|height)="([^"]*)"', written)
    assert places
    assert all(math.isfinite(float(place)) for place in places)
    assert svg_file(chart, look) == written, "the same each time"


def test_every_kind_can_be_drawn() -> None:
    assert {type(chart) for chart in SAMPLES} == set(DRAWINGS)


def tips(chart: Chart, look: Look | None = None) -> list[str]:
    tree = parse(element("svg", draw(chart, look).content))
    return [str(one.attributes["data-tip"]) for one in tree.all(class_="mark")]


def test_every_point_says_what_it_is() -> None:
    lines = Lines("a", "step", "per cent", {"ours": [[0, 1.5], [10, 20.5]]}, {"ensemble": 3.5})
    assert tips(lines) == ["ensemble: 3.5", "ours, step 0: 1.5", "ours, step 10: 20.5"]
    scatter = Scatter("b", "bytes", "accuracy", {"a": [[0.5, -1.0]], "b": [[3, 4]]})
    assert tips(scatter, Look(names=True)) == ["a: bytes 0.5, accuracy -1", "b: bytes 3, accuracy 4"]
    assert tips(Bubbles("c", "class", "client", [[1, 0, 40000], [2, 3, 0]])) == [
        "client 0, class 0: 1", "client 0, class 2: 40,000", "client 1, class 0: 2", "client 1, class 1: 3"
    ]  # fmt: skip
    surface = Surface("d", "u", "v", [0.0, 1.0], [5.0], [[1, 2]], [], {})
    assert tips(surface) == ["u 0, v 5: 1", "u 1, v 5: 2"]
    assert tips(Pictures("e", ["0", "1"], {"drawn": [[[0]], [[9]]]})) == ["drawn, 0", "drawn, 1"]


def test_the_table_behind_a_picture_has_its_numbers() -> None:
    lines = draw(Lines("a", "step", "per cent", {"ours": [[0, 1.5], [10, 20.5]]}, {"ensemble": 3.5}))
    assert lines.heads == ("series", "step", "per cent")
    assert list(lines.rows) == [["ours", "0", "1.5"], ["ours", "10", "20.5"], ["ensemble", "", "3.5"]]
    bubbles = draw(Bubbles("c", "class", "client", [[1, 0], [2, 3]]))
    assert bubbles.heads == ("client \\ class", "0", "1")
    assert list(bubbles.rows) == [[0, 1, 0], [1, 2, 3]]
    surface = draw(Surface("d", "u", "v", [0.0, 1.0], [5.0, 6.0], [[1, 2], [3, 4]], [], {}))
    assert list(surface.rows) == [["5", "1", "2"], ["6", "3", "4"]]
    assert list(draw(Scatter("b", "x", "y", {"a": [[0.5, -1.0]]})).rows) == [["a", "0.5", "-1"]]
    assert list(draw(Pictures("e", ["0"], {"drawn": [[[0, 100]]]})).rows) == [["drawn", "0", "1 x 2", "50"]]


def test_a_long_series_stays_small() -> None:
    long = Lines("a", "step", "y", {"ours": [[k, math.sin(k)] for k in range(100_000)]})
    drawn = draw(long)
    assert len(drawn.content) < 60_000
    assert list(drawn.rows)[-1][1] == short(99_999), "the end is kept"
    assert thinned(range(5), 9) == [0, 1, 2, 3, 4]
    assert thinned(range(101), 3) == [0, 50, 100]


def test_discs_have_the_counts_as_areas() -> None:
    tree = parse(element("svg", draw(Bubbles("c", "class", "client", [[400, 100]])).content))
    large, small = (float(str(one.attributes["r"])) for one in tree.all("circle"))
    assert large == pytest.approx(2 * small, rel=0.01)


def test_a_scale_goes_from_end_to_end() -> None:
    linear = Scale.over([0, 10], 0, 100)
    assert (linear(0), linear(5), linear(10)) == pytest.approx((4, 50, 96))
    assert linear.ticks() == [0, 2, 4, 6, 8, 10]
    log = Scale.over([1, 100], 0, 100, "log")
    assert (log(1), log(10), log(100)) == pytest.approx((4, 50, 96))
    assert log.ticks() == [1, 2, 5, 10, 20, 50, 100]
    wide = Scale.over([1, 1e6], 0, 100, "log").ticks()
    assert wide == pytest.approx([1, 10, 100, 1e3, 1e4, 1e5, 1e6])
    error = Scale.over([80, 95], 0, 100, "error")
    assert error(90) == pytest.approx(50), "from 80 to 90 is as far as from 90 to 95"
    assert error.ticks() == [80, 90, 95]
    assert math.isfinite(Scale.over([0, 100], 0, 1, "error")(100))
    for values in ([], [3.0], [7.0, 7.0]):
        assert all(math.isfinite(Scale.over(values, 0, 100, kind)(3.0)) for kind in ("linear", "log", "error"))
        assert Scale.over(values, 0, 100).ticks()
    assert Scale.over([0.0, 1e-9], 0, 1, "log").ticks()


def test_heights_that_differ_much_are_coloured_by_their_logarithms() -> None:
    """A middle height has the colour of the middle on one of the two scales alone."""

    def fills(heights: list[float]) -> list[str]:
        surface = Surface("a", "u", "v", [0.0, 1.0, 2.0], [0.0], [heights], [], {})
        tree = parse(element("svg", draw(surface, Look()).content))
        return [str(one.attributes["fill"]) for one in tree.all("rect", class_="tile")]

    assert fills([0.1, 1.0, 10.0]) == fills([30.0, 60.0, 90.0])
    assert len(set(fills([0.1, 1.0, 10.0]))) == 3


def test_names_do_not_lie_on_each_other() -> None:
    groups = {f"group {k}": [[1.0, y]] for k, y in enumerate([1.0, 1.0, 1.01, 0.0, 0.0, 0.01])}
    tree = parse(element("svg", draw(Scatter("a", "x", "y", groups), Look(names=True)).content))
    heights = sorted(float(str(one.attributes["y"])) for one in tree.all("text", class_="name"))
    assert len(heights) == 6
    assert min(b - a for a, b in pairwise(heights)) >= 10.9


def test_known_columns_keep_their_colours() -> None:
    for others in (["x"], ["echo-chain, 2x weights", "y", "z"], ["fisher"] * 1):
        found = colours([*others, "ma-echo", "echo-chain"])
        assert (found["ma-echo"], found["echo-chain"]) == (0, 1)
        assert len(set(found.values())) == len(found)
    many = colours([f"column {k}" for k in range(40)])
    assert set(many.values()) == set(range(COLOURS))


def test_pixels_survive_png() -> None:
    image = [[0, 100, 255], [7, 8, 9]]
    with Image.open(io.BytesIO(png(image))) as read:
        assert read.mode == "L"
        assert [[read.getpixel((x, y)) for x in range(3)] for y in range(2)] == image
    with Image.open(io.BytesIO(png([]))) as read:
        assert read.size == (1, 1)


def test_texts_are_escaped_and_markup_is_not() -> None:
    assert text("<b> & \"'") == "&lt;b&gt; &amp; &quot;&#x27;"
    assert text(Markup("<b>")) == "<b>"
    assert element("p", "<", element("b", 1), None, class_="x", data_y='"', hidden=True, lang=None) == (
        '<p class="x" data-y="&quot;" hidden="">&lt;<b>1</b></p>'
    )
    assert element("circle", r=1.50001) == '<circle r="1.5"/>'
    assert isinstance(join("a", None, element("b")), Markup)


def test_a_legend_breaks_its_lines() -> None:
    series = {f"a series with a long name {k}": [[0.0, float(k)]] for k in range(9)}
    root = ElementTree.fromstring(svg_file(Lines("a", "x", "y", series)).encode())
    said = [one for one in root.iter() if one.get("class") == "legend"]
    assert [one.text for one in said] == list(series)
    assert len({one.get("y") for one in said}) > 1
    assert max(float(str(one.get("y"))) for one in said) < float(str(root.get("height")))
