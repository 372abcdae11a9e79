"""Laws for every row of STATISTICS: a new one takes one file and one row, and additive ones add up."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from maecho import Upload, make_upload
from maecho.alignment import responses, transport
from maecho.alignment.responses import common_inputs
from maecho.alignment.transport import Alignment
from maecho.errors import InputError
from maecho.linalg.spectra import Spectrum
from maecho.network.forward import Pass
from maecho.network.layers import Layer
from maecho.statistics import INPUTS, STATISTICS, Gatherer, Options, Statistic
from maecho.statistics.parts import GAUSSIANS, MATRICES, Kind, entries
from maecho.statistics.statistic import Carrier, Found, Setting
from maecho.upload import checks, client, cohort, header, inspection, size, storage
from maecho.upload import upload as upload_module
from maecho.upload.cohort import Cohort
from support.clients import batches, network
from support.damage import forged
from support.networks import NETWORKS
from support.tiny import cases, refused
from support.values import close


class Largest(Statistic):
    """The largest input of every layer, and beside it a matrix that can be cut: a statistic in twenty lines."""

    name = "largest"
    reveals = "The largest number that reaches each layer."
    kind = MATRICES
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
    assert cut.bytes(["largest"]) - cut.bytes([]) == 3 * (2 * 8 + 4 * 2 * 4 + 8)
    assert cut.to("cpu").statistics["largest"]["0"].rank == 2
    aligned = Alignment(reference="ann").align([upload, make_upload(network(1), batches(), "bob", ["largest"])])
    assert "largest" in aligned[1].statistics


@dataclass(frozen=True)
class Range:
    """The smallest and the largest input of a layer, and in how many batches it ran."""

    ends: Tensor
    batches: Tensor


class Ranges(Kind):
    """A type of its own for the parts of a statistic: how it is stored and read. All else has a default."""

    suffixes = ("ends", "batches")
    whole = ("batches",)

    def tensors(self, part: Range) -> dict[str, Tensor]:
        return {"ends": part.ends, "batches": part.batches}

    def read(self, found: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Range:
        return Range(found["ends"], found["batches"])


class Seen(Statistic):
    """The range of the inputs of every layer."""

    name = "seen"
    reveals = "The smallest and the largest number that reach each layer."
    kind = Ranges()
    by_name = True

    def gatherer(self, setting: Setting) -> Gatherer:
        return _Seen()

    def recipe(self, options: Options) -> str:
        return "the range of the inputs"


class _Seen(Gatherer):
    def __init__(self) -> None:
        self._found: dict[str, list[Tensor]] = {}

    def see(self, layer: Layer, module: nn.Module, x: Tensor) -> None:
        self._found.setdefault(layer.name, []).append(torch.stack(list(x.aminmax())))

    def value(self, found: Found) -> dict[str, Range]:
        ends = {name: torch.stack(seen) for name, seen in self._found.items()}
        return {n: Range(torch.stack([e[:, 0].min(), e[:, 1].max()]), torch.tensor([len(e)])) for n, e in ends.items()}


def test_a_new_statistic_may_bring_a_type_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside its file knows the type of its parts."""
    monkeypatch.setitem(STATISTICS, "seen", Seen())
    path = tmp_path / "ann.safetensors"
    upload = make_upload(network(), batches(), "ann", ["gram", "seen"])
    upload.save(path)
    again = Upload.load(path)
    first = again.statistics["seen"]["0"]
    x = torch.cat([x for x, _ in batches()])
    assert isinstance(first, Range)
    assert torch.equal(first.ends, torch.stack([x.min(), x.max()]))
    assert first.batches.tolist() == [len(batches())]
    assert [e.name for e in inspection.entries(again) if e.part == "seen"][:2] == ["0/ends", "0/batches"]
    assert upload.bytes(["seen"]) - upload.bytes([]) == 3 * (2 * 4 + 8)
    assert size.cut(upload, size.parse(1)).statistics["seen"]["0"].ends.dtype == torch.float32
    assert Seen().at(again.statistics["seen"], torch.float64)["0"].ends.dtype == torch.float64
    assert again.to("cpu").statistics["seen"]["0"].batches.dtype == torch.int64
    assert Seen().ranks(again.statistics["seen"]) == {}
    assert Seen().spectra(again.statistics["seen"]) == []
    assert Cohort([path], needs=["seen"])[0].has == {"seen"}
    assert Alignment(reference="ann").align([again, make_upload(network(1), batches(), "bob", ["seen"])])[1].has
    monkeypatch.setattr(Seen, "additive", True)
    with pytest.raises(TypeError, match="parts must be of a kind that can be added, got Range"):
        Seen().plus(first, first)


DAMAGED: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "real counts": ({"seen/0/batches": torch.ones(1)}, "seen of '0' must be whole numbers, got torch.float32"),
    "whole ends": ({"seen/0/ends": torch.tensor([1])}, "seen of '0' must be of floating point, got torch.int64"),
    "one left out": ({"seen/0/ends": None}, "ann: the parts of seen must fit together, got others ('ends')"),
    "one too many": ({"seen/0/more": torch.ones(1)}, "seen must hold tensors that maecho reads, got '0/more' besides"),
    "no entry": ({"seen": torch.ones(1)}, "seen must hold tensors that maecho reads, got '' besides"),
    "one twice": ({"seen/ends": torch.ones(1), "seen//ends": torch.ones(1)}, "that maecho reads, got '"),
}


@pytest.mark.parametrize(("changes", "said"), **cases(DAMAGED))
def test_a_damaged_file_of_a_new_statistic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Tensor | None], said: str
) -> None:
    monkeypatch.setitem(STATISTICS, "seen", Seen())
    path = tmp_path / "ann.safetensors"
    make_upload(network(), batches(), "ann", ["seen"]).save(path)
    about, tensors = storage.read_about(path, "upload"), {**load_file(path), **changes}
    forged(path, {name: tensor for name, tensor in tensors.items() if tensor is not None}, about)
    with refused(str(path), said):
        Upload.load(path)


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
    assert STATISTICS[INPUTS].kind is GAUSSIANS
    (own,) = common_inputs([make_upload(network(), batches(), "ann", [INPUTS])], 50, 0)
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


def test_which_are_sums() -> None:
    """What is a sum over examples says so: other methods count on it (secure sums, kept sums)."""
    sums = {name for name, statistic in STATISTICS.items() if statistic.additive}
    assert sums == {"features", "gram", "classes", "moments", "targets", "fisher", "gradients"}


def test_a_layer_that_one_of_two_has_counts_with_what_it_has() -> None:
    one, other = (
        dict(make_upload(network(seed), batches(seed), "ann", ["fisher"]).statistics["fisher"]) for seed in (0, 1)
    )
    first, *_, last = one
    del one[first], other[last]
    both = STATISTICS["fisher"].plus(one, other)
    assert both.keys() == one.keys() | other.keys()
    assert torch.equal(both[first], other[first])
    assert torch.equal(both[last], one[last])
    (common, *_) = one.keys() & other.keys()
    torch.testing.assert_close(both[common], one[common] + other[common])


@pytest.mark.filterwarnings("ignore:.*not sent")
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
    with pytest.warns(UserWarning, match="ann: not sent: classes, targets, since the batches carry no"):
        upload = make_upload(network(), [x for x, _ in batches()], "ann", ["classes", "targets"])
    assert not seen
    assert upload.has == frozenset()
    assert upload.recipe["not_sent"]["classes"] == "the batches carry no whole-number label for every example"
