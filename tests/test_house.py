"""The house rules: who may import whom, what the core needs, documentation that runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "maecho"
CORE = {"torch", "numpy", "safetensors"}
LEAVES = {
    "rich": {"console.py", "progress.py"},
    "typer": {"app.py"},
    "msgspec": {"schema.py"},
    "filelock": {"disk.py"},
    "daqp": {"simplex.py"},
    "sklearn": {"data.py"},
    "scipy": {"matching.py"},
    "ot": {"transport.py"},
    "dp_accounting": {"privacy.py"},
    "matplotlib": {"plots.py"},
    "jaxtyping": None,
}
"""What else may be imported, and where. jaxtyping is for the type checker alone."""


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_third_parties_are_imported_in_their_leaf_alone(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        if top in CORE or top == "maecho" or top in sys.stdlib_module_names:
            continue
        assert top in LEAVES, f"{path.name} imports {top}"
        allowed = LEAVES[top]
        assert allowed is None or path.name in allowed, f"{path.name} imports {top}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "aggregation").glob("*.py")), ids=lambda p: p.name)
def test_data_flow_one_way(path: Path) -> None:
    """Aggregation knows uploads; it does not know where they came from or who prints the result."""
    later = ("cli", "console", "data", "demo", "evaluation", "flower", "partition", "reproduce", "training")
    for name in imports(path):
        assert not re.match(rf"maecho\.({'|'.join(later)})\b", name), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_one_idea_a_module(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 360
    assert path.name == "_version.py" or ast.get_docstring(ast.parse(text)), "a module opens by saying what it is for"


@pytest.mark.slow
def test_the_core_imports_with_three_packages_alone() -> None:
    blocked = sorted(set(LEAVES))
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import maecho, maecho.lab.runs; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr


def test_the_readme_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 1
    assert len(blocks[0].strip().splitlines()) <= 15
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks[0], "README.md", "exec"), {"__name__": "readme"})
    accuracy = float(capsys.readouterr().out.split()[-1])
    assert 0.5 < accuracy <= 1


def test_the_readme_names_files_that_exist() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / link).exists(), link


def test_the_readme_and_the_guide_say_the_same_of_every_method() -> None:
    from maecho import METHODS
    from maecho.aggregation import guide

    assert guide.GUIDES.keys() == METHODS.keys()
    assert guide.markdown() in (ROOT / "README.md").read_text()


def test_drawn_inputs_can_be_looked_at(tmp_path: Path) -> None:
    import drawn_inputs

    drawn_inputs.main(["--out", str(tmp_path / "drawn.png")])
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_says_what_its_docstring_says(capsys: pytest.CaptureFixture[str]) -> None:
    import one_shot

    one_shot.main()
    errors = dict(re.findall(r"^(.*?)\s\s+([\d.]+)$", capsys.readouterr().out, re.M))
    assert float(errors["as released"]) < 0.5 * float(errors["average"])
