"""The generated parts of the documentation, each between `<!-- NAME: … -->` and `<!-- end -->` on its page.

`make docs` (`python -m maecho.lab.report.documents`) writes them from METHODS and STATISTICS, from the configs in
`experiments/` and from the results beside these. A test holds that the pages on disk are what would be written. Nothing
is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from maecho.aggregation import METHODS, gathered_for
from maecho.errors import InputError
from maecho.formatting import markdown_table
from maecho.lab import experiment as configs
from maecho.lab.experiment import Experiment
from maecho.lab.harness.results import run_of
from maecho.lab.report.curves import curves_markdown
from maecho.lab.report.findings import study_pictures, study_sections
from maecho.lab.report.notes import notes
from maecho.lab.report.seconds import seconds_markdown
from maecho.lab.report.standing import NEAR, above, complete, far, near, stand_ins
from maecho.lab.report.tables import ladder, ladder_markdown, markdown, summarise, upload_markdown, words
from maecho.statistics import STATISTICS, Options
from maecho.statistics.parts import COUNTS, GAUSSIANS, MATRICES, PROJECTORS, TENSORS
from maecho.upload.inspection import OF_WEIGHTS

FRONT_ROWS = {
    "local": "a client's own model, mean",
    "average, class-aware head": "average of the weights, class-aware head",
    "ma-echo": "**MA-Echo**, the paper's method",
    "echo-chain": "**echo-chain**, ours, from the same single upload",
    "ensemble, class-aware": "class-aware ensemble, which keeps all models",
}
"""Columns of Table 1 that the README shows, in its words."""
FRONT_CELLS = (
    {"clients": 5, "beta": 0.01, "init": "same"},
    {"clients": 50, "beta": 0.1, "init": "same"},
)
FORMS = {
    TENSORS: "one tensor",
    COUNTS: "one tensor",
    MATRICES: "one matrix",
    PROJECTORS: "one matrix",
    GAUSSIANS: "Gaussians",
}
"""The kinds of parts that several statistics have, in the words of docs/uploads.md."""


def method_table() -> str:
    """What each method does, needs and costs, and when to use it."""
    rows = []
    for name, method in METHODS.items():
        g = method.guide
        rows.append([f"`{name}`", g.does, g.when, g.uploads, g.different, g.convolutions, g.residual, g.cost])
    heads = (
        "method", "what it does", "when to use it", "uploaded beside the weights", "different initialisations",
        "convolutions", "residual networks", "cost on the server",
    )  # fmt: skip
    return markdown_table(heads, rows)


def option_table() -> str:
    """The class of each method and its options with their defaults."""
    rows = []
    for name, method in METHODS.items():
        shown = [f"`{f.name}={getattr(method, f.name)}`" for f in fields(method) if f.repr]  # type: ignore[arg-type]
        rows.append([f"`{name}`", f"`{type(method).__name__}`", ", ".join(shown)])
    return markdown_table(("method", "class in `maecho.aggregation`", "options"), rows)


def statistic_table() -> str:
    """What each part of an upload holds and can reveal, how it is stored, when it is sent, and which methods read
    it."""
    rows = [["`weights`", "the state_dict", OF_WEIGHTS, "one tensor for each name", "always", "all"]]
    for name, statistic in STATISTICS.items():
        form = FORMS.get(statistic.kind, "a form of its own") + (" for each name" if statistic.by_name else "")
        sent = ("by default" if statistic.by_default else "on demand") + (", also with privacy" * statistic.private)
        users = [f"`{method}`" for method, one in METHODS.items() if name in gathered_for(one)]
        rows.append([f"`{name}`", statistic.recipe(Options()), statistic.reveals, form, sent, ", ".join(users)])
    return markdown_table(("part", "what it holds", "what it can reveal", "stored as", "sent", "read by"), rows)


def result_sections() -> str:
    """A section for every config that has results."""
    tables = [(one.document.order, one.name, section(one, results)) for one, results in _measured()]
    return "\n\n".join(text for _, _, text in sorted([*tables, *study_sections()]))


def _measured() -> list[tuple[Experiment, dict[str, Any]]]:
    """Every table that has committed results, in the order of the documents."""
    found = [(experiment, committed(experiment)) for experiment in map(Experiment.load, configs.names())]
    there = [(experiment, results) for experiment, results in found if results is not None]
    return sorted(there, key=lambda pair: (pair[0].document.order, pair[0].name))


def section(experiment: Experiment, results: Mapping[str, Any]) -> str:
    """One experiment: what its config says in `[document]`, and what was measured."""
    document, table = experiment.document, summarise(experiment, results)
    views: dict[str, Callable[[], str]] = {
        "table": lambda: markdown(experiment, table),
        "uploads": lambda: upload_markdown(experiment, table),
        "ladder": lambda: ladder_markdown(ladder(experiment, results)),
        "seconds": lambda: seconds_markdown(experiment, results),
        "curves": lambda: curves_markdown(experiment, results),
    }
    parts = [
        f"## {document.heading or experiment.title}",
        document.text.strip(),
        *(views[view]() for view in document.shows),
        *notes(experiment, table),
        f"![{experiment.title}]({document.picture})" if document.picture else "",
        f"`maecho reproduce {experiment.name}`",
    ]
    return "\n\n".join(part for part in parts if part)


def front_table() -> str:
    """The rows of Table 1 that a newcomer should see."""
    experiment = Experiment.load("table-1")
    results = committed(experiment) or {"runs": []}
    figures = [next(f for cell, f in summarise(experiment, results) if cell == wanted) for wanted in FRONT_CELLS]
    heads = ("accuracy in per cent", *(f"{cell['clients']} clients, β = {cell['beta']}" for cell in FRONT_CELLS))
    return markdown_table(heads, [[words, *(f[column] for f in figures)] for column, words in FRONT_ROWS.items()])


def standing_table() -> str:
    """How every experiment stands against the paper."""
    rows = []
    for experiment, results in _measured():
        table = summarise(experiment, results)
        close, best = near(table, experiment), above(table, experiment)
        if close.of or best.of:
            alone = above(table, experiment, one_upload=True)
            rows.append([experiment.title, str(complete(table, experiment)), str(close), str(best), str(alone)])
    heads = (
        "experiment", "figures measured", f"MA-Echo above the paper's or within {NEAR:g} points",
        "our best merged model above the paper's best", "the same from one upload, without `echo-relay` and `dense`",
    )  # fmt: skip
    return markdown_table(heads, rows)


def far_list() -> str:
    """The cells in which MA-Echo is far below the paper's figure, with every seed."""
    lines = []
    for experiment, results in _measured():
        for one in far(summarise(experiment, results), experiment):
            runs = [run for seed in experiment.seeds if (run := run_of(results, one.cell, seed))]
            ours, own = (_seeds(runs, column) for column in (one.column, "local"))
            lines += [
                f"- {experiment.name}, {words(one.cell)}, `{one.column}`: {one.ours:.1f}, the paper {one.paper:.1f}.",
                f"  By seed {ours}; the clients' own models {own}.",
            ]
    return "\n".join(lines) or "None."


def _seeds(runs: list[dict[str, Any]], column: str) -> str:
    return ", ".join(f"{run['columns'][column]['accuracy']:.1f}" for run in runs if column in run["columns"])


def stand_in_list() -> str:
    """What of the paper is not here, and what stands in for it."""
    found = dict.fromkeys(pair for name in configs.names() for pair in stand_ins(Experiment.load(name)))
    return "\n".join(f"- {paper}: {here}" for paper, here in found)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"table-1": front_table},
    "docs/methods.md": {"methods": method_table, "options": option_table},
    "docs/results.md": {"results": result_sections},
    "docs/reproduction.md": {"standing": standing_table, "far": far_list, "stand-ins": stand_in_list},
    "docs/uploads.md": {"statistics": statistic_table},
}
"""Page -> name of the part -> what makes it."""
PICTURES = "docs/figures"
"""The folder of the pictures of studies. Nothing else is in it."""


def committed(experiment: Experiment) -> dict[str, Any] | None:
    """The results beside the config; None if it has none."""
    path = configs.folder() / "results" / f"{experiment.name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def pages(root: Path) -> dict[Path, str]:
    """Every page with generated parts, and every picture of a study, as they should be."""
    found = {root / PICTURES / file: text for file, text in study_pictures().items()}
    for path, parts in PARTS.items():
        found[root / path] = (root / path).read_text(encoding="utf-8")
        for name, make in parts.items():
            found[root / path] = with_part(found[root / path], name, make())
    return found


def with_part(page: str, name: str, part: str) -> str:
    """The page with the part of that name replaced."""
    marks = re.compile(rf"(<!-- {re.escape(name)}:[^>]*-->\n).*?(<!-- end -->)", re.S)
    if len(marks.findall(page)) != 1:
        raise InputError(f"a page must have one part <!-- {name}: … --> … <!-- end -->, got {page[:60]!r} …")
    return marks.sub(lambda match: f"{match[1]}{part}\n{match[2]}", page)


def main() -> None:
    if not configs.CHECKOUT.is_dir():
        raise InputError("documents are written in a checkout, got an installed package")
    for path, text in pages(configs.CHECKOUT.parent).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
