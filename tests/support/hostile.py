"""Results whose every name and text is hostile: markup that would run a script if it were not escaped."""

from __future__ import annotations

import json
from pathlib import Path

from maecho.lab import charts
from maecho.lab.charts import Bubbles, Lines, Pictures, Scatter, Surface
from maecho.lab.experiment import Experiment
from support import records

EVIL = "</script></details><script>alert(1)</script><img src=x onerror=alert(2)> \" ' ` &lt; \u202e \x07"
CONFIG = f"""
title = {json.dumps(EVIL)}
data = "digits"
network = "digits-mlp"
seeds = [0, 1]
cells = [{{ clients = 2, beta = 0.5, init = "same" }}, {{ clients = 3, beta = 0.5, init = "same" }}]

[document]
text = {json.dumps(EVIL)}
shows = ["table", "uploads", "ladder", "curves"]

[methods]
local = {{ method = "local" }}
echo-chain = {{ method = "echo-chain" }}
ma-echo = {{ method = "ma-echo", curve = [0, 5] }}
{json.dumps(EVIL)} = {{ method = "ma-echo", steps = 3 }}
"""
STUDY = {
    "study": "figure-2",
    "title": EVIL,
    "format": 2,
    "quick": False,
    "text": f"{EVIL}\n\n- {EVIL}",
    "runs": [
        {
            "seed": seed,
            "settings": {EVIL: EVIL, "steps": [1, 2]},
            "numbers": {EVIL: 0.123456789, "inner": {"a": 1, "b": EVIL}},
            "charts": [
                charts.write(Lines(EVIL, EVIL, EVIL, {EVIL: [[0.0, 1.0], [1.0, 2.0]]}, {"level": 1.0})),
                charts.write(Scatter(EVIL, EVIL, EVIL, {EVIL: [[0.0, 1.0]]})),
                charts.write(Bubbles(EVIL, EVIL, EVIL, [[1, 2]])),
                charts.write(Surface(EVIL, EVIL, EVIL, [0.0, 1.0], [0.0], [[1.0, 2.0]], [[0.0, 0.0]], {EVIL: [1, 0]})),
                charts.write(Pictures(EVIL, [EVIL], {EVIL: [[[1, 2]]]})),
            ],
            "seconds": 1.5,
            "device": EVIL,
            "versions": {"torch": EVIL},
            "data": EVIL,
            "code": EVIL,
        }
        for seed in (0, 1)
    ],
}  # fmt: skip


def write(place: Path) -> Path:
    """Write a user's own config with hostile names, and results of it and of a study with every kind of chart.

    Returns the folder of the results.
    """
    (place / "mine.toml").write_text(CONFIG)
    config = Experiment.load(str(place / "mine.toml"))
    found = records.results(config)
    for run in found["runs"]:
        run["partition"] = [[1, 0], [2, 3]]
        for column, record in run["columns"].items():
            record |= {"device": EVIL, "versions": {EVIL: EVIL}, "recipe": EVIL, "trained_on": EVIL}
            record["trusted"] = {"because": [EVIL], "data": "", "clients": "", "code": ""}
            if column == "ma-echo":
                record["curve"] = [[0, 10.0], [5, 20.0]]
    results = place / "results"
    results.mkdir()
    (results / "mine.json").write_text(json.dumps({**found, "experiment": "mine"}))
    (results / "figure-2.json").write_text(json.dumps(STUDY))
    (results / ".mine.json.lock").write_text("")
    return results
