"""Where data and weights are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from maecho.errors import InputError
from maecho.lab.data.places import data_folder, find, unchecked


def test_the_folder_of_the_data_set_comes_before_the_folder_itself(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for place in ("a.gz", "set/a"):
        (tmp_path / place).touch()
    assert find("set", tmp_path, "a", "there", (".gz", "")) == tmp_path / "set" / "a"
    assert find("other", tmp_path, "a", "there", (".gz", "")) == tmp_path / "a.gz"
    with pytest.raises(InputError, match=r"set: .* has no b, neither .* in its folder set; get it from there, and"):
        find("set", tmp_path, "b", "there")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAECHO_DATA", "")
    assert data_folder() == Path.home() / ".cache" / "maecho" / "data"
    for value, welcome in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("MAECHO_DATA_UNCHECKED", value)
        assert unchecked() is welcome
