"""Charts as data: they survive JSON, and what is no chart is refused in one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from maecho import InputError
from maecho.lab import charts
from maecho.lab.charts import Bubbles, Chart, Lines, Pictures, Scatter, Surface

SAMPLES: list[Chart] = [
    Lines("a", "step", "per cent", {"ours": [[0, 1.5], [1, 2.5]], "none": []}, {"ensemble": 3.5}),
    Lines("a", "step", "per cent", {}),
    Scatter("b", "x", "y", {"client 1": [[0.5, -1.0]]}),
    Bubbles("c", "class", "client", [[1, 0], [2, 3]]),
    Surface("d", "u", "v", [0.0, 1.0], [0.0], [[1.0, 2.0]], [[0.0, 0.5]], {"W": [1.0, 1.0]}),
    Pictures("e", ["0", "1"], {"drawn": [[[0, 255], [3, 4]], [[1, 2], [3, 4]]]}),
]  # fmt: skip


@pytest.mark.parametrize("chart", SAMPLES, ids=lambda chart: type(chart).__name__)
def test_a_chart_survives_json(chart: Chart) -> None:
    assert charts.read(json.loads(json.dumps(charts.write(chart)))) == chart


def test_every_kind_has_a_sample() -> None:
    assert {type(chart) for chart in SAMPLES} == set(charts.KINDS.values())


LINES = charts.write(SAMPLES[0])
SURFACE = charts.write(SAMPLES[4])
BAD: list[tuple[Any, str]] = [
    ([], "a chart must be a table with a kind, got list"),
    ({}, "a chart must be of the kind lines, scatter, bubbles, surface, pictures, got None"),
    ({"kind": "pie"}, "a chart must be of the kind lines, scatter, bubbles, surface, pictures, got 'pie'"),
    ({"kind": ["lines"]}, "a chart must be of the kind lines"),
    ({**LINES, "colour": "red"}, "a chart of the kind lines must have no 'colour', got one"),
    ({**LINES, "series": {"ours": [[0, "1"]]}}, "a chart of the kind lines must be whole, got: Expected `float`"),
    ({k: v for k, v in LINES.items() if k != "y"}, "must be whole, got: Object missing required field `y`"),
    ({**LINES, "series": {"ours": [[0, 1, 2]]}}, "series 'ours' must be pairs of x and y, got 3 numbers"),
    ({**LINES, "series": {"ours": [[0, float("nan")]]}}, "series 'ours' must be finite, got nan"),
    ({**LINES, "levels": {"top": float("inf")}}, "levels 'top' must be finite, got inf"),
    ({**charts.write(SAMPLES[2]), "groups": {"a": [[1.0]]}}, "groups 'a' must be pairs of x and y, got 1 numbers"),
    ({**charts.write(SAMPLES[3]), "counts": [[1], [1, 2]]}, "counts must have rows of one length, got several"),
    ({**charts.write(SAMPLES[3]), "counts": [[-1]]}, "counts must be at least 0, got a negative one"),
    ({**SURFACE, "xs": [0.0]}, "values must be 1 rows of 1 numbers, got 1 of 2"),
    ({**SURFACE, "values": [[1.0, float("nan")]]}, "values must be finite, got nan"),
    ({**SURFACE, "points": {"W": [1.0]}}, "points 'W' must be pairs of x and y, got 1 numbers"),
    ({**charts.write(SAMPLES[3]), "counts": [[1, 0], [2, -3]]}, "counts must be at least 0, got a negative one"),
    ({**charts.write(SAMPLES[5]), "columns": ["0"]}, "rows 'drawn' must have 1 images, got 2"),
    ({**charts.write(SAMPLES[5]), "rows": {"a": [[[256]], [[0]]]}}, "rows 'a' must have grey values from 0 to 255"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_what_is_no_chart_is_refused(content: Any, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        charts.read(content)
    assert sentence in str(caught.value)
