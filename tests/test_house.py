"""The rules of the code: who may import whom, what the core needs, how large modules get, documentation that runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from glob import glob
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

import maecho
from maecho.lab import data, demo, networks
from maecho.lab.training import LocalTraining

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "maecho"
CORE = {"torch", "numpy", "safetensors"}
LEAVES = {
    "rich": {"cli/console.py", "cli/rounds_commands.py", "progress.py"},
    "typer": {
        "cli/app.py",
        "cli/options.py",
        "cli/upload_commands.py",
        "cli/merging_commands.py",
        "cli/lab_commands.py",
        "cli/page_commands.py",
        "cli/relay_commands.py",
        "cli/rounds_commands.py",
    },
    "msgspec": {"schema.py"},
    "filelock": {"disk.py"},
    "daqp": {"linalg/simplex.py"},
    "sklearn": {"lab/data/handwritten.py", "lab/studies/neurons.py", "statistics/moments.py"},
    "scipy": {"aggregation/matching.py"},
    "ot": {"alignment/transport.py"},
    "dp_accounting": {"privacy.py"},
    "matplotlib": {"lab/report/plots.py"},
    "PIL": {"lab/data/domains.py"},
    "datasets": {"lab/data/hub.py"},
    "torchvision": {"backbones/resnet.py"},
    "jaxtyping": None,
}
"""What else may be imported, and where. jaxtyping is for the type checker alone."""

ROOT_HELPERS = {
    "_version",
    "devices",
    "disk",
    "errors",
    "formatting",
    "names",
    "options",
    "privacy",
    "progress",
    "randomness",
    "schema",
}
"""Modules beside the packages that know nothing of any room."""
ROOMS = (
    "root helpers",
    "linalg",
    "network",
    "statistics",
    "upload",
    "synthesis",
    "alignment",
    "echo",
    "aggregation",
    "backbones",
    "checking",
    "evaluation",
    "rounds",
    "lab",
    "cli",
)
"""A room may import from the rooms before it, and from itself."""
FRONT_DOOR = {"__init__", "__main__"}
"""They put the public names together, so they may import from everywhere. Nobody may import from them."""

LONGEST_MODULE = 300
MOST_MODULES = 14


def imports(path: Path) -> set[str]:
    """Full names of everything that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(name: str) -> str:
    """The room of a full name, e.g. maecho.network.layers.Layer; a name of the package's own is in none."""
    parts = name.split(".")
    first = parts[1] if len(parts) > 1 else ""
    return "root helpers" if first in ROOT_HELPERS else first


MODULES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = sorted({path.parent for path in MODULES})


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_third_parties_are_imported_in_their_leaf_alone(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        if top in CORE or top == "maecho" or top in sys.stdlib_module_names:
            continue
        assert top in LEAVES, f"{relative(path)} imports {top}"
        allowed = LEAVES[top]
        assert allowed is None or relative(path) in allowed, f"{relative(path)} imports {top}"


def test_every_leaf_is_there() -> None:
    for top, files in LEAVES.items():
        for file in files or ():
            assert any(name.split(".")[0] == top for name in imports(PACKAGE / file)), f"{file} imports no {top}"


def test_every_room_has_its_place() -> None:
    stems = {path.stem for path in PACKAGE.glob("*.py")} - FRONT_DOOR - ROOT_HELPERS
    assert stems | {path.name for path in PACKAGES if path.parent == PACKAGE} == set(ROOMS) - {"root helpers"}


@pytest.mark.parametrize(
    "path", [path for path in MODULES if not (path.parent == PACKAGE and path.stem in FRONT_DOOR)], ids=relative
)
def test_imports_go_one_way(path: Path) -> None:
    """No room knows a later one: uploads do not know who merges them, methods do not know who prints the result."""
    own = room(".".join(("maecho", *path.relative_to(PACKAGE).with_suffix("").parts)))
    for name in sorted(imports(path)):
        if name.split(".")[0] == "maecho":
            assert room(name) in ROOMS[: ROOMS.index(own) + 1], f"{own} may not import {name}: {room(name)} comes later"


def full_name(path: Path) -> str:
    """The full name of a module or, for an `__init__`, of its package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("maecho", *(part for part in parts if part != "__init__")))


def loaded(path: Path) -> set[str]:
    """Full names of what Python imports when it runs a file. What only the type checker reads does not count."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        for node in ast.walk(statement)
    }
    nodes = [node for node in ast.walk(tree) if id(node) not in hidden]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}


def order(graph: dict[str, set[str]]) -> list[str]:
    """The names in an order in which each comes after everything that it imports."""
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"these import each other in a circle: {' -> '.join(reversed(error.args[1]))}")


def test_no_module_and_no_package_imports_itself_through_others() -> None:
    """Packages within packages count, too: `statistics.passes` may import `statistics`, not the reverse."""
    places = {full_name(path): path for path in MODULES if not (path.parent == PACKAGE and path.stem in FRONT_DOOR)}
    graph: dict[str, set[str]] = {}
    for name, path in places.items():
        found = {one if one in places else one.rpartition(".")[0] for one in loaded(path)}
        graph[name] = found & places.keys() - {name}
    assert "maecho.statistics.of_gradients" in graph["maecho.statistics.fisher"]
    assert order(graph).index("maecho.errors") < order(graph).index("maecho.upload.upload")

    def package(name: str) -> str:
        path = places[name]
        return name if path.parent == PACKAGE else full_name(path.parent / "__init__.py")

    packages: dict[str, set[str]] = {package(name): set() for name in graph}
    for name, found in graph.items():
        packages[package(name)] |= {package(one) for one in found} - {package(name)}
    assert "maecho.statistics" in packages["maecho.statistics.passes"]
    order(packages)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_one_idea_a_module(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_MODULE
    assert path.name == "_version.py" or ast.get_docstring(ast.parse(text)), "a module opens by saying what it is for"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_a_package_can_be_overlooked(package: Path) -> None:
    """Few modules, and an `__init__` that says in one line what they are for."""
    assert len(list(package.glob("*.py"))) <= MOST_MODULES
    purpose = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    assert purpose, "no purpose"
    assert "\n" not in purpose


@pytest.mark.slow
def test_the_core_imports_with_three_packages_alone() -> None:
    blocked = sorted(set(LEAVES))
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked})); import maecho, maecho.lab.harness.runs; "
        "[getattr(maecho, name) for name in maecho.__all__]; print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.slow
def test_importing_maecho_loads_nothing_until_it_is_used() -> None:
    code = "import sys, maecho; print('torch' in sys.modules, maecho.network.register.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "register", "True"]


def test_every_public_name_has_one_home() -> None:
    """The type checker and the interpreter read two lists; they say the same."""
    import maecho

    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    checked = {
        alias.name: node.module.removeprefix("maecho.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("maecho.")
        for alias in node.names
    }
    assert checked == {**maecho._HOMES, "__version__": "_version"}
    assert set(maecho.__all__) == checked.keys()
    for name in maecho.__all__:
        assert getattr(maecho, name) is getattr(maecho, name)
    assert set(maecho.__all__) <= set(dir(maecho))
    with pytest.raises(AttributeError, match="module 'maecho' has no attribute 'merge'"):
        maecho.merge  # noqa: B018


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 100


@pytest.mark.parametrize("page", sorted(glob("*.md", root_dir=ROOT) + glob("docs/*.md", root_dir=ROOT)))
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", text):
        target = (ROOT / page).parent / link if link else ROOT / page
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads], anchor


def test_the_readme_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the README's Python with two clients, who have five digits each in place of a clinic's data."""
    digits, models, parts = data.digits(), [], []
    for i, share in enumerate((digits.y_train < 5, digits.y_train >= 5)):
        models.append(networks.build("digits-mlp", torch.Generator().manual_seed(0)))
        parts.append(data.batches(digits.x_train[share], digits.y_train[share], 16))
        training = LocalTraining(epochs=20, learning_rate=0.05, batch_size=16)
        training(models[i], digits.x_train[share], digits.y_train[share], torch.Generator().manual_seed(i))
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    code = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 8
    monkeypatch.chdir(tmp_path)
    maecho.make_upload(models[1], parts[1], client="clinic-b").save("clinic-b.safetensors")
    has = {"model": models[0], "batches": parts[0], "network": networks.digits_mlp()}
    exec(
        compile(block, "README.md", "exec"),
        {"__name__": "readme", **has, "test_batches": data.batches(digits.x_test, digits.y_test)},
    )
    assert 0.7 < float(capsys.readouterr().out.split()[-1]) <= 1


@pytest.mark.slow
def test_the_readme_says_what_the_demo_prints(tmp_path: Path) -> None:
    (block,) = re.findall(r"```text\n(.*?)```", README, re.S)
    head, *lines = block.splitlines()
    assert re.split(r"\s{2,}", head) == ["model", "accuracy", "calibration error"]
    rows = [re.split(r"\s{2,}", line) for line in lines]
    said = {name: [float(cell.removesuffix(" %")) for cell in cells] for name, *cells in rows}
    found = {row.name: (row.accuracy, row.calibration_error) for row in demo.demo(tmp_path, progress=False).rows}
    assert list(said) == list(found)
    for name, shares in found.items():
        # Other processors round otherwise, and training amplifies it.
        assert said[name] == pytest.approx([100 * share for share in shares], abs=1), name


def test_the_readme_recommends_what_there_is() -> None:
    """Every method that the README recommends exists."""
    (table,) = re.findall(r"\| your case \| use \|\n(.*?)\n\n", README, re.S)
    for line in table.splitlines()[1:]:
        for name in re.findall(r"`([^`]+)`", line.split("|")[2]):
            assert name in maecho.METHODS or name == "maecho.relay", name


def test_drawn_inputs_can_be_looked_at(tmp_path: Path) -> None:
    import drawn_inputs

    drawn_inputs.main(["--out", str(tmp_path / "drawn.png")])
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_says_what_its_docstring_says(capsys: pytest.CaptureFixture[str]) -> None:
    import one_shot

    one_shot.main()
    errors = dict(re.findall(r"^(.*?)\s\s+([\d.]+)$", capsys.readouterr().out, re.M))
    assert float(errors["as released"]) < 0.5 * float(errors["average"])


def test_every_package_that_is_imported_is_declared() -> None:
    """Those that other packages bring along too; and docs/dependencies.md names each."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *declared["dependencies"],
        *(line for extra in declared["optional-dependencies"].values() for line in extra),
    ]
    packages = {re.match(r"[\w-]+", line)[0] for line in lines}  # type: ignore[index]
    names = {"sklearn": "scikit-learn", "PIL": "pillow", "ot": "pot", "dp_accounting": "dp-accounting"}
    imported = {names.get(name, name) for name in CORE | LEAVES.keys()}
    assert imported <= packages
    reasons = (ROOT / "docs" / "dependencies.md").read_text().lower()
    assert [name for name in imported if name not in reasons] == []


def test_every_test_that_is_cited_exists() -> None:
    texts = [path for folder in ("src", "docs", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    texts = [path for path in texts if path.suffix in {".py", ".md"}] + list(ROOT.glob("*.md"))
    cited = {name for path in texts for name in re.findall(r"\btests/[\w/]+\.py", path.read_text())}
    assert "tests/aggregation/test_ma_echo.py" in cited
    assert [name for name in sorted(cited) if not (ROOT / name).exists()] == []
    shown = re.findall(r"`([\w/]*test_\w+\.py)`", (ROOT / "docs" / "testing.md").read_text())
    assert "aggregation/test_contract.py" in shown
    assert [name for name in shown if not (ROOT / "tests" / name.removeprefix("tests/")).exists()] == []
