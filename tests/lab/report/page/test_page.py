"""The page of the committed results: it is whole, fetches nothing, and says what the results say."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

import pytest

from maecho.formatting import size
from maecho.lab.report.notes import notes
from maecho.lab.report.page.collected import Measured, Study
from maecho.lab.report.page.experiments import heading
from maecho.lab.report.seconds import published_seconds, seconds
from maecho.lab.report.tables import Figure, published_column, summarise, words
from support.pages import Node

Committed = tuple[list[Measured], list[Study]]


def sections(tree: Node, committed: Committed) -> Iterator[tuple[Node, Measured]]:
    assert len(committed[0]) >= 7
    for one in committed[0]:
        yield tree.one("section", aria_labelledby=one.name), one


def cells(table: Node) -> list[list[str]]:
    (body,) = table.all("tbody")
    return [[cell.text for cell in row.all("th") + row.all("td")] for row in body.all("tr")]


def heads(table: Node) -> list[str]:
    return [head.text for head in table.one("thead").all("th")]


def shown(figure: Figure | None) -> str:
    """A figure as a cell of the page has it."""
    if figure is None:
        return ""
    ours = f"{figure.mean:.1f} ± {(figure.high - figure.low) / 2:.1f}{figure.marks}"
    if figure.paper is None:
        return ours
    return f"{ours}[{figure.paper:.1f}] {figure.mean - figure.paper:+.1f}".replace("-", "−")


def test_every_cell_of_a_table_is_that_of_the_results(tree: Node, committed: Committed) -> None:
    seen = 0
    for section, one in sections(tree, committed):
        table = summarise(one.experiment, one.results)
        columns = [column for column in one.experiment.methods if any(column in figures for _, figures in table)]
        by_cell = [
            [*(str(value) for value in cell.values()), *(shown(figures.get(column)) for column in columns)]
            for cell, figures in table
        ]
        by_column = [[column, *(shown(figures.get(column)) for _, figures in table)] for column in columns]
        for drawn in section.all("table", class_="results"):
            seen += 1
            if heads(drawn)[0] == "column":
                assert heads(drawn) == ["column", "a client uploads", *(words(cell) for cell, _ in table)]
                assert [[row[0], *row[2:]] for row in cells(drawn)][:-1] == by_column
                largest = [
                    max((f[column].bytes or 0 for _, f in table if column in f), default=0) for column in columns
                ]
                assert [row[1] for row in cells(drawn)][:-1] == [size(most) for most in largest]
                assert cells(drawn)[-1] == ["seeds", "", *("3" for _ in table)]
            else:
                assert heads(drawn) == [*one.experiment.cells[0], *columns, "seeds"]
                assert [row[:-1] for row in cells(drawn)] == by_cell
    assert seen >= 7


def test_experiments_stand_in_the_order_of_their_documents(committed: Committed) -> None:
    orders = [one.experiment.document.order for one in committed[0]]
    assert orders == sorted(orders)
    names = [one.name for one in committed[0]]
    assert names != sorted(names), "an order that names alone do not give"


def test_the_best_merged_model_stands_out(tree: Node) -> None:
    table = tree.one("section", aria_labelledby="table-1").one("table", class_="results")
    for row in table.one("tbody").all("tr"):
        best = [i for i, cell in enumerate(row.all("td")) if cell.all("strong")]
        assert [heads(table)[3 + i] for i in best] == ["echo-relay"]


def test_seconds_stand_beside_the_papers(tree: Node, committed: Committed) -> None:
    measured = next(one for one in committed[0] if one.name == "table-1")
    found, published = seconds(measured.experiment, measured.results), published_seconds(measured.experiment)
    section = tree.one("section", aria_labelledby="table-1")
    (table,) = [one for one in section.all("table") if "seconds" in one.one("caption").text]
    assert heads(table) == ["column", *(f"{clients} clients" for clients in found)]
    for column, *row in cells(table):
        for said, clients in zip(row, found, strict=True):
            theirs = published[str(clients)].get(published_column(measured.experiment, column) or "")
            assert said == f"{found[clients][column]:.3g}" + ("" if theirs is None else f"[{theirs:.3g}]")
    assert "ma-echo" in [row[0] for row in cells(table)]


def test_every_run_is_there_with_all_that_it_depends_on(tree: Node, committed: Committed) -> None:
    for section, one in sections(tree, committed):
        folded = [(fold.all("summary")[0].text, fold) for fold in section.all("details", class_="run")]
        assert len(folded) == len({repr(run["cell"]) for run in one.results["runs"]})
        links = {a.attributes["href"] for a in section.all("a")}
        for run in one.results["runs"]:
            (place,) = [fold for said, fold in folded if said.startswith(f"{words(run['cell'])}: seed")]
            (part,) = [p for p in place.all("section") if p.all("h4")[0].text == f"Seed {run['seed']}"]
            counts, records = (t for t in part.all("table"))
            assert [row[1:] for row in cells(counts)] == [[str(n) for n in row] for row in run["partition"]]
            said = part.text
            assert run["clients"] in said
            for row, (column, record) in zip(cells(records), run["columns"].items(), strict=True):
                assert row[:2] == [column, f"{record['accuracy']:.2f}"]
                assert row[2] == (size(record["bytes"]) if "bytes" in record else "")
                assert row[5] == f"{record['seconds']['merging']:.3g}"
                assert row[6].startswith(record["device"])
                assert row[7] == record["settings"]
                assert f"torch {record['versions']['torch']}" in said
            assert f"#{place.attributes['id']}" in links


def test_words_and_notes_are_there(tree: Node, committed: Committed) -> None:
    for section, one in sections(tree, committed):
        said = " ".join(section.text.split())
        assert section.one("h2").text == heading(one.experiment)
        for note in notes(one.experiment, summarise(one.experiment, one.results)):
            assert " ".join(note.replace("`", "").split()) in said
        first = re.sub(r"`|\[|\]\([^)]*\)", "", one.experiment.document.text.strip().split("\n\n")[0])
        assert " ".join(first.split()) in said
        assert f"maecho reproduce {one.experiment.name}" in said


def test_the_page_is_whole_and_fetches_nothing(text: str, tree: Node) -> None:
    assert len(text.encode()) < 15_000_000
    ids = [one.attributes["id"] for one in tree.all() if "id" in one.attributes]
    assert len(set(ids)) == len(ids)
    links = [str(a.attributes["href"]) for a in tree.all("a")]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    assert not [one.tag for one in tree.all() if one.tag in ("link", "img", "iframe", "object", "base", "form")]
    assert not [one.tag for one in tree.all() if "src" in one.attributes or "style" in one.attributes]
    pictures = [str(one.attributes["href"]) for one in tree.all("image")]
    assert all(link.startswith("data:image/png;base64,") for link in pictures)
    assert not re.search(r"@import|url\(", tree.one("style").text)
    assert "://" not in text


def test_only_our_own_script_may_run(tree: Node) -> None:
    (script,) = [one for one in tree.all("script") if "type" not in one.attributes]
    policy = str(tree.one("meta", http_equiv="Content-Security-Policy").attributes["content"])
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_everybody_can_use_it(tree: Node) -> None:
    assert tree.one("html").attributes["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer", "h1"):
        tree.one(landmark)
    for table in tree.all("table"):
        assert table.one("caption").text
        assert all(head.attributes["scope"] == "col" for head in table.one("thead").all("th"))
    for frame in tree.all("div", class_="scroll"):
        assert frame.attributes["aria-label"]
        assert frame.attributes["tabindex"] == "0"
    figures = tree.all("figure")
    assert len(figures) > 50
    for figure in figures:
        picture = figure.one("svg")
        assert picture.attributes["role"] == "img"
        assert str(picture.attributes["aria-label"]).startswith(figure.one("figcaption").text)
        assert picture.all(class_="mark")
        assert cells(figure.one("details", class_="numbers").one("table")), "a table behind every picture"
        names = [one.text for one in figure.all("button")]
        assert len(set(names)) == len(names)
    for button in tree.all("button"):
        assert button.attributes["type"] == "button"


@pytest.mark.parametrize(("row", "close", "better"), [("Table 1: 5 to 50", "12 of 12", "12 of 12")])
def test_the_first_table_says_how_it_stands(tree: Node, row: str, close: str, better: str) -> None:
    table = tree.one("section", aria_labelledby="overview").all("table")[0]
    (found,) = [one for one in cells(table) if one[0].startswith(row)]
    assert found[2:] == [close, better]
