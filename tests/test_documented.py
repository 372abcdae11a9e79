"""Python in the documents runs as it stands."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_hugging_face_model_of_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    text = (DOCS / "batches.md").read_text(encoding="utf-8")
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", text, re.S) if "transformers" in one)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        exec(compile(block, "batches.md", "exec"), {"__name__": "documented"})
    assert capsys.readouterr().out.startswith("maecho check: 0 errors, ")
