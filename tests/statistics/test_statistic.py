"""Laws for every row of STATISTICS: a new one takes one file and one row, and additive ones add up."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho import Upload, make_upload
from maecho.alignment import responses, transport
from maecho.alignment.responses import common_inputs
from maecho.alignment.transport import Alignment
from maecho.errors import InputError
from maecho.linalg.gaussians import Gaussians
from maecho.linalg.spectra import Spectrum
from maecho.network.forward import Pass
from maecho.network.layers import Layer
from maecho.statistics import INPUTS, STATISTICS, Gatherer, Options, Statistic
from maecho.statistics.parts import entries
from maecho.statistics.statistic import Carrier, Found, Setting
from maecho.upload import checks, client, cohort, header, inspection, size, storage
from maecho.upload import upload as upload_module
from support.clients import batches, network
from support.networks import NETWORKS
from support.tiny import refused
from support.values import close


class Largest(Statistic):
    """The largest input of every layer, and beside it a matrix that can be cut: a statistic in twenty lines."""

    name = "largest"
    reveals = "The largest number that reaches each layer."
    kind = Spectrum
    by_name = True

    def gatherer(self, setting: Setting) -> Gatherer:
        return _Largest()

    def recipe(self, options: Options) -> str:
        return "the largest input"

    def warnings(self, value: Any, carrier: Carrier) -> list[str]:
        return ["a largest input may be that of one example"]


class _Largest(Gatherer):
    def __init__(self) -> None:
        self._found: dict[str, float] = {}

    def see(self, layer: Layer, module: nn.Module, x: Tensor) -> None:
        self._found[layer.name] = max(float(x.max()), self._found.get(layer.name, 0.0))

    def value(self, found: Found) -> dict[str, Spectrum]:
        return {n: Spectrum.of_dense(v * torch.diag(torch.arange(4.0, 0, -1))[None]) for n, v in self._found.items()}


def test_a_new_statistic_is_one_class_and_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATISTICS, "largest", Largest())
    data = batches()
    upload = make_upload(network(), data, "ann", ["gram", "largest"], rank=None)
    assert upload.statistics["largest"]["0"].values[0, 0] == pytest.approx(4 * float(max(x.max() for x, _ in data)))
    assert upload.recipe["largest"] == "the largest input"
    upload.save(tmp_path / "ann.safetensors")
    again = Upload.load(tmp_path / "ann.safetensors")
    assert again.has == {"gram", "largest"}
    for key, tensor in upload.tensors().items():
        torch.testing.assert_close(again.tensors()[key], tensor, rtol=0, atol=0)
    assert Upload.load(tmp_path / "ann.safetensors", only=["largest"]).has == {"largest"}
    assert {entry.part for entry in inspection.entries(again)} == {"weights", "gram", "largest"}
    assert [e.rank for e in inspection.entries(again) if e.part == "largest"] == [4] * 6
    assert inspection.reveals(again)["largest"] == Largest.reveals
    assert inspection.warnings(again)[-1] == "a largest input may be that of one example"
    cut = size.cut(upload, size.parse(2))
    assert all(one.rank == 2 for one in cut.statistics["largest"].values())
    assert cut.bytes(["largest"]) - cut.bytes([]) == 3 * (2 * 8 + 4 * 2 * 4)
    assert cut.to("cpu").statistics["largest"]["0"].rank == 2
    aligned = Alignment(reference="ann").align([upload, make_upload(network(1), batches(), "bob", ["largest"])])
    assert "largest" in aligned[1].statistics


@pytest.mark.parametrize(
    "module", [client, checks, cohort, header, inspection, size, storage, upload_module, responses, transport]
)
def test_who_handles_uploads_names_no_statistic(module: ModuleType) -> None:
    """A new statistic changes none of these files. Docstrings may give examples."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    texts = {
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    used = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} - texts
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert used & STATISTICS.keys() == set()


def test_inputs_are_drawn_from_the_statistic_that_says_so() -> None:
    assert [name for name, statistic in STATISTICS.items() if statistic.of_inputs] == [INPUTS]
    upload = make_upload(network(), batches(), "ann", [INPUTS])
    assert isinstance(upload.statistics[INPUTS], Gaussians)
    (own,) = common_inputs([upload], 50, 0)
    assert own[0] == "ann"
    assert sum(len(x) for x, _ in own[1]) == sum(own[1].counts()) > 45
    with refused("ot needs the statistic 'moments', got an upload with gram"):
        Alignment(metric="activations").align([make_upload(network(), batches(), "ann", ["gram"])])


def test_a_statistic_that_nobody_knows_is_refused() -> None:
    upload = make_upload(network(), batches(), "ann", ["gram"])
    with pytest.raises(InputError, match=r"ann: statistics must be among gram, .*, got 'largest'"):
        Upload("ann", upload.examples, upload.weights, upload.layers, statistics={"largest": {}})
    with pytest.raises(InputError, match=r"ann: statistics must be among gram, .*, got 'largest'"):
        make_upload(network(), batches(), "ann", ["largest"])


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("architecture", ["mlp", "cnn", "tokens"])
def test_what_is_additive_adds_up(name: str, architecture: str) -> None:
    """stat(A ∪ B) = stat(A) + stat(B) for additive statistics, as long as nothing is cut. Others refuse to be added."""
    draw = torch.Generator().manual_seed(3)
    if architecture == "tokens":
        model: nn.Module = nn.Sequential(nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 5)).eval()
        x = torch.randint(0, 7, (140, 3), generator=draw)
    else:
        make, shape = NETWORKS[architecture]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = make().eval()
        x = torch.randn((140, *shape[1:]), generator=draw)
    y = torch.arange(140) % 4
    y[:60] = 2 * (y[:60] // 2)  # a class that only one of the two has

    def of(rows: slice) -> Any:
        upload = make_upload(model, [(x[rows], y[rows])], "ann", [name], rank=None)
        return upload.statistics.get(name)

    together, one, other = of(slice(None)), of(slice(60)), of(slice(60, None))
    statistic = STATISTICS[name]
    if together is None:
        assert name in ("moments", "features"), "tokens have no mean"
        return
    if statistic.additive:
        assert close(statistic.plus(one, other), together)
        assert not close(one, together), "a law that holds for everything says nothing"
    else:
        with pytest.raises(TypeError, match=f"{name} must be additive .* got one that is not"):
            statistic.plus(one, other)


@pytest.mark.parametrize("name", STATISTICS)
def test_it_goes_into_a_file_and_back(name: str) -> None:
    statistic = STATISTICS[name]
    value = make_upload(network(), batches(), "ann", [name], rank=3).statistics[name]
    again = statistic.read(statistic.tensors(value), statistic.facts(value))
    assert entries(again).keys() == entries(value).keys()
    assert statistic.bytes(again) == sum(t.nbytes for t in statistic.tensors(value).values())
    for key, tensor in statistic.tensors(value).items():
        torch.testing.assert_close(statistic.tensors(again)[key], tensor, rtol=0, atol=0)
    assert statistic.reveals.endswith(".")


def test_a_pass_without_labels_says_why_there_are_no_classes() -> None:
    seen: list[Pass] = []
    upload = make_upload(network(), [x for x, _ in batches()], "ann", ["classes", "targets"])
    assert not seen
    assert upload.has == frozenset()
    assert upload.recipe["not_sent"]["classes"] == "the batches carry no whole-number label for every example"
