"""Generated documentation: the files on disk are up to date, and a new table takes one config file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maecho import METHODS
from maecho.errors import InputError
from maecho.lab import charts, experiment
from maecho.lab.experiment import Experiment
from maecho.lab.report import documents, tables
from maecho.lab.report.curves import curves_markdown
from maecho.lab.report.findings import study_pictures, study_section
from maecho.lab.studies.config import Study
from maecho.statistics import STATISTICS
from support import records
from support.configs import HEAD
from support.records import record

ROOT = Path(__file__).resolve().parents[3]

CONFIG = (
    HEAD
    + """
[document]
order = 1
heading = "A table of mine"
text = "What I wanted to know."
shows = ["table", "uploads", "ladder"]

[methods]
local = { method = "local" }
echo-chain = { method = "echo-chain" }
"""
)


def test_the_pages_on_disk_are_those_that_would_be_written() -> None:
    """If this fails, run `make docs`."""
    found = documents.pages(ROOT)
    expected = {"README.md", *(f"docs/{name}.md" for name in ("methods", "reproduction", "results", "uploads"))}
    pictures = {path for path in found if path.suffix == ".svg"}
    assert {path.relative_to(ROOT).as_posix() for path in found.keys() - pictures} == expected
    assert pictures == set((ROOT / documents.PICTURES).iterdir()), "no picture is left over"
    for path, text in found.items():
        assert path.read_text(encoding="utf-8") == text, path.name


def test_a_new_statistic_is_one_more_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Medians(type(STATISTICS["gram"])):  # type: ignore[misc]
        reveals = "The | of every input."
        by_default = False
        private = True

    before = documents.statistic_table().splitlines()
    monkeypatch.setitem(STATISTICS, "medians", Medians())
    row = documents.statistic_table().splitlines()[-1]
    assert row.startswith("| `medians` | sum of x xᵀ over the inputs")
    assert row.endswith(r"| The \| of every input. | one matrix for each name | on demand, also with privacy |  |")
    assert documents.statistic_table().splitlines()[:-1] == before
    assert [line.split("|")[1].strip() for line in before[2:]] == ["`weights`", *(f"`{n}`" for n in STATISTICS)][:-1]


def test_everything_measured_is_shown() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    names = [path.stem for path in (experiment.folder() / "results").glob("*.json") if "-quick" not in path.stem]
    assert len(names) >= 24
    for name in (one for one in names if experiment.is_study(one)):
        study = Study.load(name)
        results = json.loads((experiment.folder() / "results" / f"{name}.json").read_text())
        assert study_section(study, results) in page
    for name in (one for one in names if not experiment.is_study(one)):
        config = Experiment.load(name)
        results = documents.committed(config)
        assert results is not None
        assert f"## {config.document.heading or config.title}\n" in page
        assert config.document.text.strip() in page
        table = tables.summarise(config, results)
        views = {
            "table": tables.markdown(config, table),
            "uploads": tables.upload_markdown(config, table),
            "curves": curves_markdown(config, results),
        }
        wanted = views.keys() & set(config.document.shows)
        assert wanted, name
        assert all(views[view] in page for view in wanted), name
    assert len(tables.ladders()) == 2
    for one in tables.ladders():
        assert tables.ladder_markdown(one) in page


def test_every_method_says_when_to_use_it() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name, method in METHODS.items():
        assert "guide" in vars(type(method)), f"{name} has the words of another"
        assert f"| `{name}` | {method.guide.does} | {method.guide.when} |" in page


def test_a_table_is_one_config_and_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "CHECKOUT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "mine.toml").write_text(CONFIG)
    config = Experiment.load("mine")
    assert documents.result_sections() == "", "no results yet"
    columns = {name: record(options, bytes=2_000_000) for name, options in config.methods.items()}
    run = records.run(config.cells[0], 0, columns, 1_000_000)
    (tmp_path / "results" / "mine.json").write_text(json.dumps({"format": 2, "runs": [run], "code": {}}))
    assert documents.result_sections().splitlines() == [
        "## A table of mine",
        "",
        "What I wanted to know.",
        "",
        "| clients | beta | init | local | echo-chain |",
        "|---|---|---|---|---|",
        "| 2 | 0.5 | same | 50.0 ± 0.0 | 50.0 ± 0.0 |",
        "",
        "| column | a client uploads | 2 clients, beta 0.5, same init |",
        "|---|---|---|",
        "| local | 2.0 MB | 50.0 ± 0.0 |",
        "| echo-chain | 2.0 MB | 50.0 ± 0.0 |",
        "",
        "| column | rounds | real data asked | a client uploads | times the weights | 2 clients, beta 0.5, same init |",
        "|---|---|---|---|---|---|",
        "| echo-chain | 1 | nowhere | 2.0 MB | 2.0 | 50.0 |",
        "",
        "`maecho reproduce mine`",
    ]


@pytest.mark.parametrize(
    ("right", "wrong", "part"),
    [
        ("shows = [", 'shows = ["pie", ', "shows must be among table, uploads, ladder, seconds, curves, got 'pie'"),
        ("order", "odor", "odor"),
    ],
)
def test_a_mistake_in_what_a_config_says(tmp_path: Path, right: str, wrong: str, part: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG.replace(right, wrong, 1))
    with pytest.raises(InputError) as caught:
        Experiment.load(str(path))
    assert part in str(caught.value)


def test_a_page_keeps_what_is_not_generated() -> None:
    page = "before\n<!-- one: by me -->\nold\n<!-- end -->\nbetween\n<!-- two: by me -->\n<!-- end -->\nafter\n"
    once = documents.with_part(page, "one", r"new | \1")
    assert once == page.replace("old", r"new | \1")
    assert documents.with_part(once, "one", r"new | \1") == once
    assert documents.with_part(page, "two", "2") == page.replace("<!-- two: by me -->\n", "<!-- two: by me -->\n2\n")
    with pytest.raises(InputError, match=r"a page must have one part <!-- three: … --> … <!-- end -->, got 'before"):
        documents.with_part(page, "three", "3")


def test_documents_are_written_in_a_checkout_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "CHECKOUT", tmp_path / "nothing")
    with pytest.raises(InputError, match="documents are written in a checkout, got an installed package"):
        documents.main()


def test_a_study_is_one_config_and_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "CHECKOUT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "mine.toml").write_text(CONFIG.replace("order = 1", "order = 2"))
    (tmp_path / "yours.toml").write_text('title = "Yours"\nstudy = "partitions"\nseeds = [0]\n[document]\norder = 1\n')
    (tmp_path / "results" / "mine.json").write_text(json.dumps({"format": 2, "runs": [], "code": {}}))
    lines = charts.write(charts.Lines("A <line>", "x", "y", {"a": [[0.0, 1.0], [1.0, 2.0]]}))
    run = {"seed": 0, "numbers": {"classes": 2.5}, "charts": [lines] * 5}
    (tmp_path / "results" / "yours.json").write_text(json.dumps({"format": 2, "runs": [run], "code": {}}))
    found = documents.result_sections()
    assert found.index("## Yours") < found.index("## A table of mine")
    assert found.splitlines()[:12] == [
        "## Yours",
        "",
        "| what was measured | with one seed | range |",
        "|---|---|---|",
        "| classes | 2.5 |  |",
        "",
        "![A <line>](figures/yours-1.svg)",
        "![A <line>](figures/yours-2.svg)",
        "![A <line>](figures/yours-3.svg)",
        "![A <line>](figures/yours-4.svg)",
        "",
        "`maecho reproduce yours`",
    ]
    pictures = study_pictures()
    assert list(pictures) == [f"yours-{k}.svg" for k in (1, 2, 3, 4)]
    assert "A &lt;line&gt;" in pictures["yours-1.svg"]
