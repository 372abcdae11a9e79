"""Configs of studies: the committed ones can be read, and mistakes are found when a config is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from maecho import InputError
from maecho.lab import experiment
from maecho.lab.experiment import Experiment
from maecho.lab.studies import STUDIES
from maecho.lab.studies.config import Study
from maecho.lab.studies.found import Question
from maecho.lab.studies.partitions import Partitions

MISTAKES = {
    "no TOML": ('title = "Mine"', "title: Mine", "must be a TOML file, got:"),
    "no title": ("title =", "# title =", "must say 'title', got nothing of that name"),
    "misspelt entry": ("seeds = [0, 1]", "seeds = [0]\nseed = 0", "'seed', known are title, study, seeds"),
    "unknown study": ('"partitions"', '"partition"', "study: must be one of partitions, "),
    "seeds that are none": ("[0, 1]", '["a"]', "seeds: must be a list of whole numbers, got ['a']"),
    "no seeds": ("[0, 1]", "[]", "seeds: must be a list of whole numbers, got []"),
    "misspelt setting": ("clients = 3", "client = 3", "settings: 'client', known are data, clients, betas"),
    "misspelt quick setting": ("{ clients = 2 }", "{ client = 2 }", "settings: 'client', known are"),
    "setting of a wrong type": ("clients = 3", 'clients = "3"', "settings: Expected `int`, got `str`"),
    "setting that makes no sense": ("[0.1, 20]", "[0]", "settings: betas must be positive numbers, got [0.0]"),
    "unknown data": ('"digits"', '"figures"', "settings: data must be among digits, mnist"),
    "misspelt word": ("text =", "txt =", "document: 'txt', known are heading, text, order"),
    "misspelt change": ("seeds = [5]", "sed = [5]", "quick: 'sed', known are seeds, settings"),
    "settings that are no table": ("settings = { clients = 2 }", "settings = 3", "mistake at"),
}


@pytest.mark.parametrize(("right", "wrong", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(config: Path, right: str, wrong: str, sentence: str) -> None:
    text = config.read_text()
    assert right in text
    config.write_text(text.replace(right, wrong, 1))
    with pytest.raises(InputError) as caught:
        Study.load(str(config), quick="quick" in sentence or wrong in ("{ client = 2 }", "settings = 3"))
    assert sentence in str(caught.value)
    assert str(config) in str(caught.value)


def test_a_config_says_what_is_asked(config: Path) -> None:
    full, quick = Study.load(str(config)), Study.load(str(config), quick=True)
    assert full.question == Partitions("digits", 3, (0.1, 20.0))
    assert quick.question == Partitions("digits", 2, (0.1, 20.0))
    assert (full.name, full.title, full.seeds, full.quick) == ("mine", "Mine", (0, 1), False)
    assert (quick.seeds, quick.quick) == ((5,), True)
    assert full.document.text == "What I wanted to know."


def test_every_config_is_a_table_or_a_study() -> None:
    studies = [name for name in experiment.every_name() if name not in experiment.names()]
    assert {type(Study.load(name).question) for name in studies} == set(STUDIES.values())
    for name in studies:
        assert experiment.is_study(name)
        assert isinstance(Study.load(name, quick=True).question, Question)
        assert Study.load(name, quick=True).question.data in ("", "digits"), "a quick run needs no data"
        with pytest.raises(InputError, match="must describe an experiment"):
            Experiment.load(name)
