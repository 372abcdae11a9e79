"""Nothing from a config or a results file becomes markup on the page, and bad files end in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maecho.errors import InputError
from maecho.lab.report.page.collected import collect
from maecho.lab.report.page.report import figures, page
from support.hostile import EVIL
from support.pages import Node, parse


@pytest.fixture
def tree(folder: Path) -> Node:
    return parse(page(*collect(folder)))


def test_no_name_becomes_markup(tree: Node) -> None:
    (script,) = [one for one in tree.all("script") if "type" not in one.attributes]
    assert "alert" not in script.text
    assert not tree.all("img")
    assert all(not name.startswith("on") for one in tree.all() for name in one.attributes)
    shown = EVIL.replace("\u202e", "\\u202e").replace("\x07", "\\x07")
    assert shown in [one.text for one in tree.all("h2")]
    assert len([head for head in tree.all("th") if head.text == shown]) > 3
    assert tree.text.isprintable() or all(one.isprintable() or one == "\n" for one in tree.text)


def test_a_study_shows_its_numbers_and_charts(tree: Node) -> None:
    section = tree.one("section", aria_labelledby="figure-2")
    assert len(section.all("figure")) == 2 * 5
    numbers = next(one for one in section.all("table") if "numbers" in one.one("caption").text)
    rows = [[cell.text for cell in row.all("th") + row.all("td")] for row in numbers.one("tbody").all("tr")]
    assert [row[1:] for row in rows][:2] == [["0.123457", "0.123457", "0.123457"], ["1", "1", "1"]]
    assert rows[1][0] == "inner, a"
    facts = [one.text for one in section.all("dd")]
    assert "1.5" in facts
    assert "1, 2" in facts


def test_a_study_stands_where_its_config_says(folder: Path) -> None:
    """The page has an order; the study's config is in `experiments/`."""
    tree = parse(page(*collect(folder)))
    names = [
        one.attributes["aria-labelledby"]
        for one in tree.one("main").all(
            "section",
        )
        if one.all("h2")
    ]
    assert names == ["overview", "stand-ins", "figure-2", "mine"]
    quick = json.loads((folder / "figure-2.json").read_text()) | {"quick": True, "runs": []}
    (folder / "figure-2-quick.json").write_text(json.dumps(quick))
    section = parse(page(*collect(folder))).one("section", aria_labelledby="figure-2-quick")
    assert "In place of the paper's data and network" in section.text
    assert "There are no runs yet." in section.text


def test_what_one_asked_for_is_shown(tree: Node) -> None:
    section = tree.one("section", aria_labelledby="mine")
    titles = [one.text for one in section.all("figcaption")]
    assert sum("step" not in one and "2 clients" in one for one in titles) >= 3, "curves, bytes, partitions"
    assert len(section.all("figure")) == 2 + 2 + 4
    for figure in section.all("figure")[:2]:
        assert figure.all("button")[0].text == "ma-echo"


def test_a_user_can_have_all_pictures(folder: Path) -> None:
    names = list(figures(*collect(folder)))
    assert "mine-1.svg" in names
    assert "mine-partition-2-clients-beta-0.5-same-init-seed-1.svg" in names
    assert [name for name in names if name.startswith("figure-2")] == [
        f"figure-2-seed-{seed}-{i}.svg" for seed in (0, 1) for i in range(1, 6)
    ]


def test_a_quick_run_says_so(folder: Path) -> None:
    content = json.loads((folder / "mine.json").read_text())
    (folder / "mine-quick.json").write_text(json.dumps({**content, "quick": True}))
    tree = parse(page(*collect(folder)))
    quick = tree.one("section", aria_labelledby="mine-quick")
    assert quick.one("h2").text.endswith("(quick)")
    assert "In place of the paper's data and network: the digits of scikit-learn" in quick.text
    assert "maecho reproduce mine --quick" in quick.text
    assert not tree.one("section", aria_labelledby="mine").all(class_="stand-in")


def change(content: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    """A copy with one entry changed, or left out if it is `...`."""
    copy = json.loads(json.dumps(content))
    place = copy
    for key in path[:-1]:
        place = place[key]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return copy


BAD: dict[str, tuple[str, tuple[Any, ...], Any, str]] = {
    "no accuracy": (
        "mine",
        ("runs", 0, "columns", "local", "accuracy"),
        ...,
        "must hold results of mine, got something",
    ),
    "accuracy as text": ("mine", ("runs", 0, "columns", "local", "accuracy"), "high", "must hold results of mine"),
    "no merging": (
        "mine",
        ("runs", 0, "columns", "local", "seconds"),
        {},
        "got: a column without its seconds of merging",
    ),
    "seconds as text": (
        "mine",
        ("runs", 0, "columns", "local", "seconds"),
        "long",
        "must hold whole runs of mine, got: ",
    ),
    "negative count": ("mine", ("runs", 0, "partition", 0, 0), -1, "got: a partition that is no table of counts"),
    "ragged partition": ("mine", ("runs", 0, "partition", 0), [1], "got: a partition that is no table of counts"),
    "a curve of words": (
        "mine",
        ("runs", 0, "columns", "local", "curve"),
        ["a"],
        "must hold whole runs of mine, got: ",
    ),
    "other format": ("mine", ("format",), 9, "must hold results of format 2, got format 9"),
    "unknown name": ("mine", ("experiment",), "theirs", "a config of experiments/ or beside it, got those of 'theirs'"),
    "a path as a name": ("mine", ("experiment",), "../mine", "or beside it, got those of '../mine'"),
    "neither": ("mine", ("experiment",), ..., "must hold results of an experiment or a study, got other JSON"),
    "study without runs": ("figure-2", ("runs",), ..., "must hold whole runs of a study, got: Object missing required"),
    "study of format 3": ("figure-2", ("format",), 3, "got: format 3 instead of 2"),
    "an unknown chart": ("figure-2", ("runs", 0, "charts", 0, "kind"), "pie", "got: a chart must be of the kind lines"),
    "half a chart": ("figure-2", ("runs", 0, "charts", 0, "series"), ..., "a chart of the kind lines must be whole"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_in_one_sentence(folder: Path, case: str) -> None:
    name, where, to, sentence = BAD[case]
    path = folder / f"{name}.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()), *where, to=to)))
    with pytest.raises(InputError) as caught:
        collect(folder)
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (lambda whole: whole[: len(whole) // 2], "must hold results as JSON, got a text that is cut or damaged: "),
        (lambda whole: "", "must hold results as JSON, got a text that is cut or damaged: "),
        (lambda whole: "[1]", "must hold results of an experiment or a study, got other JSON; move it away"),
        (lambda whole: whole.replace("3.0", "NaN"), "cut or damaged: NaN, which is not JSON"),
    ],
)
def test_a_half_written_file_is_named(folder: Path, content: Any, sentence: str) -> None:
    path = folder / "mine.json"
    path.write_text(content(path.read_text()))
    with pytest.raises(InputError) as caught:
        collect(folder)
    assert str(caught.value).startswith(str(path))
    assert sentence in str(caught.value)


def test_a_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must hold results as `maecho reproduce` writes them, got none"):
        collect(tmp_path)
    with pytest.raises(InputError, match=r"--results must be a folder, got nothing at .*nowhere"):
        collect(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--results must be a folder, got a file at "):
        collect(tmp_path / "file")
