"""What somebody meets on the first day: files of torch.save, names that are slightly wrong, folders that are not
there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import maecho
from maecho import Merged, Upload, make_upload
from maecho.cli import factories
from maecho.formatting import columns, folded, names_of
from support.relays import sequences, tied

Run = Callable[..., Any]


def state() -> dict[str, torch.Tensor]:
    return load_file("ann-weights")


WRITTEN: dict[str, Callable[[str], object]] = {
    "state_dict": lambda to: torch.save(state(), to),
    "old format": lambda to: torch.save(state(), to, _use_new_zipfile_serialization=False),
    "checkpoint": lambda to: torch.save({"epoch": 3, "state_dict": state()}, to),
    "model_state_dict": lambda to: torch.save({"model_state_dict": state(), "optimizer": {"lr": 1.0}}, to),
    "model": lambda to: torch.save({"model": state()}, to),
    "parallel": lambda to: torch.save({f"module.{name}": tensor for name, tensor in state().items()}, to),
    "compiled": lambda to: torch.save({f"_orig_mod.module.{n}": t for n, t in state().items()}, to),
    "safetensors of a wrapper": lambda to: save_file({f"module.{n}": t for n, t in state().items()}, to),
}


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("suffix", ["pt", "bin", "pth"])
def test_weights_that_torch_saved(module: str, how: str, suffix: str) -> None:
    WRITTEN[how](f"w.{suffix}")
    made = factories.model(f"{module}:network", Path(f"w.{suffix}")).state_dict()
    assert all(torch.equal(made[name], tensor) for name, tensor in state().items())


def test_upload_and_evaluate_take_them(module: str, run: Run) -> None:
    torch.save(state(), "ann.pt")
    given = f"--model {module}:network --weights ann.pt --data {module}:ann"
    assert run(f"upload {given} --client ann --out ann.safetensors").code == 0
    assert torch.equal(Upload.load("ann.safetensors").weights["0.weight"], state()["0.weight"])
    assert run(f"evaluate {given} --json").json["examples"] == 60


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


BAD: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "code": (lambda: torch.save({"a": Trap()}, "w.pt"), ("w.pt must hold tensors alone", "could run code", "mkdir")),
    "a whole model": (
        lambda: torch.save(nn.Linear(4, 3), "w.pt"),
        ("torch.nn.modules.linear.Linear", "model.state_dict()"),
    ),
    "a list": (lambda: torch.save([1, 2], "w.pt"), ("must hold a state_dict, got a list",)),
    "other entries": (
        lambda: torch.save({"epoch": 3, "net": {}}, "w.pt"),
        ("alone or as its entry state_dict, model_state_dict or model, got the entries epoch, net",),
    ),
    "nothing": (lambda: torch.save({}, "w.pt"), ("must hold a state_dict", "got nothing")),
    "damaged": (
        lambda: Path("w.pt").write_bytes(b"PK\x03\x04 and so on"),
        ("w.pt must be a file of torch.save", "damaged"),
    ),
    "cut short": (lambda: Path("w.pt").write_bytes(b"\x80\x02"), ("w.pt must be a file of torch.save", "damaged")),
    "text": (lambda: Path("w.pt").write_text("weights"), ("a file of torch.save or a safetensors file, got neither",)),
    "empty": (lambda: Path("w.pt").write_text(""), ("a file of torch.save or a safetensors file, got neither",)),
    "none": (lambda: None, ("w.pt must be a file, got nothing at that place",)),
    "a folder": (lambda: Path("w.pt").mkdir(), ("w.pt must be a file, got a folder",)),
    "another network": (
        lambda: torch.save({"0.weight": torch.zeros(2, 2)}, "w.pt"),
        ("w.pt must hold the weights of",),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_one_sentence(module: str, run: Run, case: str) -> None:
    write, parts = BAD[case]
    write()
    said = run(f"evaluate --model {module}:network --weights w.pt --data {module}:ann")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    for part in parts:
        assert part in said.err
    assert not Path("sprung").exists(), "the pickle ran"


HINTS: dict[str, tuple[str, str]] = {
    "no colon": ("MODULE", "; write MODULE:function, with one of its functions (network, wide, data"),
    "a dot": ("MODULE.network", "got 'MODULE.network'; write MODULE:network"),
    "a file": ("MODULE.py:network", "got 'MODULE.py:network'; write MODULE:network"),
    "a slip": ("MODULE:netwrk", "must have a function 'netwrk', got none; did you mean 'network'?"),
    "another name": ("MODULE:zzz", "got none; its functions are network, wide, data, ann, bob"),
    "a slip in the module": (
        "MODULEx:network",
        "cannot import 'MODULEx': No module named 'MODULEx'; did you mean 'MODULE'?",
    ),
    "another module": ("zzz:network", "; the modules of this folder are broken, MODULE, missing"),
    "an import in the module": ("missing:network", "cannot import 'missing': No module named 'no_such_package'\n"),
    "an error in the module": (
        "broken:network",
        "cannot import 'broken': ZeroDivisionError: division by zero (broken.py, line 1)",
    ),
    "an error in the factory": ("MODULE:fails", "must return without an error, got KeyError: 'x' (MODULE.py, line"),
}


@pytest.mark.parametrize("case", HINTS)
def test_a_factory_that_is_not_found(module: str, run: Run, case: str) -> None:
    name, expected = HINTS[case]
    Path("broken.py").write_text("1 / 0\n")
    Path("missing.py").write_text("import no_such_package\n")
    path = Path(f"{module}.py")
    path.write_text(path.read_text() + '\n\ndef fails():\n    return {}["x"]\n')
    said = run(f"check --model {name.replace('MODULE', module)} --data {module}:ann")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    listed = sorted(["broken", module, "missing"])
    expected = expected.replace("broken, MODULE, missing", ", ".join(listed)).replace("MODULE", module)
    assert expected in said.err


def test_check(module: str, run: Run) -> None:
    given = f"check --model {module}:network --weights ann-weights --data {module}:ann"
    said = run(given)
    assert said.code == 0
    model = factories.model(f"{module}:network", Path("ann-weights"))
    expected = maecho.check(model, factories.batches(f"{module}:ann"))
    for part in ("layer ", "0      Linear  6 x 4+1  verified", "Labels: 3 classes", "upload, estimated"):
        assert part in said.out
        assert part in str(expected)
    about = run(f"{given} --json --statistics gram --rank 2").json
    assert about["ok"] is True
    assert [one["part"] for one in about["sizes"]] == ["weights", "gram"]
    assert about["rank"] == "2"
    assert {one["name"] for one in about["methods"]} == {*maecho.METHODS, "echo-relay"}
    before = sorted(Path().iterdir())
    wrong = run(f"check --model {module}:network --data {module}:narrow")
    assert wrong.code == 1
    assert "error: the model must take inputs (40, 3), got an error" in wrong.out
    assert run(f"check --model {module}:network --data {module}:number").code == 1, "no batches are a finding, too"
    broken = run(f"check --model {module}:network --data {module}:narrow --json")
    assert broken.code == 1
    assert json.loads(broken.out)["findings"][0]["level"] == "error"
    assert sorted(Path().iterdir()) == before


@pytest.mark.filterwarnings("ignore:.* are not in the answer")
def test_relay(module: str, run: Run) -> None:
    with Path(f"{module}.py").open("a") as file:
        file.write(
            "\n\ndef pairs():\n    return [(network(), ann()), (network(), bob())]\n\n\ndef bad():\n    return [1, 2]\n"
        )
    torch.save(load_file("bob-weights"), "bob.pt")
    pairs = f"--weights ann-weights --data {module}:ann --weights bob.pt --data {module}:bob"
    said = run(f"relay --model {module}:network {pairs} --out merged.safetensors --json").json
    network = factories.model(f"{module}:network")
    clients = [
        (factories.model(f"{module}:network", Path(f"{name}-weights")), factories.batches(f"{module}:{name}"))
        for name in ("ann", "bob")
    ]
    expected = maecho.relay(network, clients)
    found = Merged.load("merged.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert said["recipe"]["method"] == found.recipe["method"] == "echo-relay"
    assert said["recipe"]["clients"] == 2
    shown = run(f"relay --model {module}:network --clients {module}:pairs --rounds 1 --set head=lda --out two")
    assert shown.code == 0
    assert "2 clients by Regression(ridge=0.0005, head='lda'" in shown.out
    assert "rounds=1" in shown.out
    assert run(f"relay --model {module}:network --clients {module}:pairs --rounds 2 --minimum 3 --out three").code == 0
    lines = {
        "": "got 0 --data, 0 --weights and no --clients",
        f"--data {module}:ann": "got 1 --data, 0 --weights and no --clients",
        f"--clients {module}:pairs --data {module}:ann": "got 1 --data, 0 --weights and a --clients",
        f"--clients {module}:bad": "must return pairs of a model and its batches, got a list of int",
        f"--clients {module}:number": "must return pairs of a model and its batches, got int",
        f"--clients {module}:pairs --set head": "--set must be name=value, got 'head'",
        f"--clients {module}:pairs --set hat=1": "relay has the options ridge, head, pull, got 'hat'",
        f"--clients {module}:pairs --rounds nowhere": "nowhere",
        f"--clients {module}:pairs --minimum 100": "an answer must be of at least 100 examples, got 60",
    }
    for line, part in lines.items():
        wrong = run(f"relay --model {module}:network {line} --out new")
        assert (wrong.code, wrong.err.count("\n")) == (2, 1), line
        assert part in wrong.err
        assert not Path("new").exists()


def test_a_folder_that_is_made_is_said(module: str, run: Run) -> None:
    given = f"upload --model {module}:network --data {module}:ann --client ann"
    said = run(f"{given} --out a/b/ann.safetensors")
    assert (said.code, said.err) == (0, "note: made the folder a/b\n")
    assert run(f"{given} --out a/b/ann.safetensors --force").err == ""
    merged = run("aggregate a/b/ann.safetensors --out c/merged.safetensors --json")
    assert merged.err == "note: made the folder c\n"
    assert merged.json["out"] == "c/merged.safetensors"
    wrong = run(f"upload --model {module}:network --data {module}:narrow --client ann --out d/ann.safetensors")
    assert "note" not in wrong.err
    assert not Path("d").exists()


@pytest.mark.parametrize(
    "line",
    [
        "upload --model MODULE:network --data MODULE:ann --client ann --out ann-weights/new",
        "relay --model MODULE:network --data MODULE:ann --weights ann-weights --out ann-weights/new",
        "rounds --server fedavg --rounds 1 --out ann-weights/new",
        "report --out ann-weights/new",
        "report --out new --figures ann-weights/new",
        "rounds --server fedavg --rounds 1 --checkpoints ann-weights/new",
        "demo --out ann-weights/new",
        "reproduce table-1 --quick --out ann-weights/new",
    ],
)
def test_a_folder_that_cannot_be_made(module: str, run: Run, line: str) -> None:
    """It is said before any work, by every command."""
    said = run(line.replace("MODULE", module))
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "must lie in a folder, got ann-weights" in said.err
    assert "where ann-weights is a file" in said.err


@pytest.mark.parametrize("method", ["echo-chain", "dense"])
def test_a_method_that_needs_the_network_says_the_flag(uploads: list[Path], run: Run, method: str) -> None:
    said = run(f"aggregate ann.safetensors bob.safetensors --method {method} --out new")
    assert said.code == 2
    assert "got none; give it as --model package.module:factory" in said.err
    assert "aggregate(" not in said.err
    by_activations = run("aggregate ann.safetensors bob.safetensors --method ot --set metric=activations --out new")
    assert "give it as --model package.module:factory" in by_activations.err
    assert (
        run(f"aggregate ann.safetensors --method ot --set metric=activations --model {_module()}:network --out n").code
        == 0
    )


def _module() -> str:
    return next(Path().glob("clinic_*.py")).stem


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(10)), nn.Linear(12, 5))


def test_inspect_folds_equal_blocks(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = [(torch.randn(40, 12), torch.arange(40) % 5)]
    with torch.random.fork_rng():
        upload = make_upload(deep(), data, "ann", ["gram"])
    upload.save("ann.safetensors")
    shown, whole = run("inspect ann.safetensors").out, run("inspect ann.safetensors --all").out
    (line,) = (line for line in shown.splitlines() if line.startswith("  0-9.0.weight"))
    assert line.split() == ["0-9.0.weight", "10", "of", "12", "x", "12", "float32", f"{10 * 144 * 4:,}"]
    assert "0-9.0/basis" in shown
    assert "0-9" not in whole
    assert whole.count(".0.weight") == 10
    assert len(whole.splitlines()) > len(shown.splitlines()) + 20
    total = f"{upload.bytes():,}"
    assert any(line.startswith("total") and line.endswith(total) for line in shown.splitlines())


@pytest.mark.filterwarnings("ignore:.*these are averaged")
def test_inspect_says_that_tokens_are_counted(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_upload(tied(), sequences(), "ann", ["gram"]).save("ann.safetensors")
    shown = " ".join(run("inspect ann.safetensors").out.split())
    assert "how often each token occurs in the data is in the Gram of embed (7)" in shown


def test_the_repr_of_an_upload_is_three_lines(uploads: list[Path]) -> None:
    lines = repr(Upload.load(uploads[0])).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    for part in ("'ann'", "60 examples", "2 layers", "gram, projector", "kB", "rank='4x'"):
        assert part in "\n".join(lines)


def test_folded_names() -> None:
    names = [f"encoder.{i}.{part}" for i in range(4) for part in ("q", "k")] + ["head"]
    assert list(folded((name, ()) for name in names)) == ["encoder.0-3.q", "encoder.0-3.k", "head"]
    assert names_of([*names, "encoder.9.q"]) == "encoder.0-3.q, encoder.0-3.k, head, encoder.9.q"
    assert folded([("a.0", 1), ("a.1", 1), ("a.2", 2)]) == {"a.0": [0], "a.1": [1], "a.2": [2]}
    nested = [f"stage.{i}.block.{j}.w" for i in range(3) for j in range(3)]
    assert folded((name, ()) for name in nested) == {"stage.0-2.block.0-2.w": list(range(9))}
    ragged = [f"stage.{i}.block.{j}.w" for i in range(3) for j in range(3 + (i == 2))]
    assert list(folded((name, ()) for name in ragged)) == [
        "stage.0.block.0-2.w",
        "stage.1.block.0-2.w",
        "stage.2.block.0-3.w",
    ]
    assert names_of(["0", "2", "4"]) == "0, 2, 4"
    assert columns([("name", "n"), ("a" * 40, "2"), ("b", "10")], right=(1,)).splitlines() == [
        "name   n", "a" * 40, "       2", "b     10",
    ]  # fmt: skip
