"""Bad input ends in one sentence that says who, what was expected and what came; nothing on disk is lost."""

from __future__ import annotations

import contextlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maecho import METHODS, Ensemble, Merged, Upload, UploadError, aggregate, evaluate, files, make_upload
from maecho.spectra import Spectrum
from maecho.statistics import STATISTICS

NAN, INF = float("nan"), float("inf")
KINDS = ("gram", "projector")
SOURCES = ("memory", "files")


def network(width: int = 4, classes: int = 3, seed: int = 0, bias: bool = True) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(width, 5, bias=bias), nn.ReLU(), nn.Linear(5, classes))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    return model


def examples(n: int = 30, width: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(n) % classes


def batches(n: int = 30, width: int = 4, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    x, y = examples(n, width, classes)
    return list(zip(x.split(5), y.split(5), strict=True))


@cache
def upload(client: str = "ann") -> Upload:
    return make_upload(network(seed=len(client)), batches(), client, rank=None)


def changed(**fields: Any) -> Upload:
    return replace(upload(), **fields)


def spoilt(tensor: Tensor, value: float = NAN) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


def with_statistic(kind: str, layer: str, found: Any) -> Upload:
    return changed(**{f"{kind}s": {**getattr(upload(), f"{kind}s"), layer: found}})


def with_moments(**fields: Any) -> Upload:
    moments = upload().moments
    assert moments is not None
    return changed(moments=replace(moments, **{name: change(getattr(moments, name)) for name, change in fields.items()}))


def edited(path: Path, tensors: Callable[[dict[str, Tensor]], object] = bool, **header: Any) -> Path:
    """An upload's file, its tensors and header changed by hand; None takes an entry out of the header."""
    upload().save(path)
    about = {k: v for k, v in {**files.read_about(path, "upload"), **header}.items() if k not in header or v is not None}
    found = load_file(path)
    tensors(found)
    save_file(found, path, metadata={files.KEY: json.dumps(about)})
    return path


@contextlib.contextmanager
def refused(*parts: str, error: type[Exception] = UploadError) -> Iterator[None]:
    """One line, with these parts and with what came (or what could not be done)."""
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text
    assert re.search(r"\b(got|cannot)\b", text), text
    for part in parts:
        assert part in text


def cases(table: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {"argvalues": list(table.values()), "ids": list(table)}


UPLOADS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "no name": (lambda: changed(client=" "), ("a client must have a name", "' '")),
    "NaN weight": (lambda: changed(weights={"w": torch.tensor([1.0, NAN])}, layers=()), ("ann", "'w'", "finite", "NaN")),
    "infinite bias": (
        lambda: changed(weights={**upload().weights, "0.bias": spoilt(upload().weights["0.bias"], INF)}),
        ("ann", "'0.bias'", "finite", "infinity"),
    ),
    "weight that is no tensor": (lambda: changed(weights={**upload().weights, "x": "text"}), ("ann", "'x'", "tensor")),
    "no weights": (lambda: changed(weights={}), ("ann", "weights", "got none")),
    "layer without its weight": (lambda: changed(weights={"x": torch.ones(1)}), ("ann", "'0'", "'0.weight'")),
    "no such head": (lambda: changed(head="tail"), ("ann", "head", "'tail'")),
    "tied to nothing": (lambda: changed(aliases={"x": "nowhere"}), ("ann", "'nowhere'")),
    "no examples": (lambda: changed(examples=0), ("ann", "at least 1", "got 0")),
    "half an example": (lambda: changed(examples=0.5), ("ann", "examples", "got 0.5")),
    "counts of too many": (lambda: changed(class_counts=torch.tensor([20, 10, 1])), ("ann", "sum to its 30", "got 31")),
    "negative counts": (lambda: changed(class_counts=torch.tensor([40, -10, 0])), ("ann", "none negative", "-10")),
    "counts in halves": (lambda: changed(class_counts=torch.tensor([14.5, 15.5, 0])), ("ann", "whole number", "14.5")),
    "counts of two classes": (lambda: changed(class_counts=torch.tensor([20, 10])), ("ann", "3", "got 2")),
    "NaN class mean": (lambda: with_moments(means=spoilt), ("ann", "class means", "finite", "NaN")),
    "negative covariance": (
        lambda: with_moments(covariances=lambda c: c.map(lambda s: s - 9)),
        ("ann", "covariances", "positive semidefinite", "got the eigenvalue -"),
    ),
    "NaN covariance": (lambda: with_moments(covariances=lambda c: c.map(spoilt)), ("ann", "covariances", "finite")),
    "moments of another length": (lambda: with_moments(means=lambda m: m[:, 1:]), ("ann", "length 3")),
    "moments of more examples": (lambda: with_moments(counts=lambda n: n + 1), ("ann", "30", "got 33")),
}


@pytest.mark.parametrize(("make", "parts"), **cases(UPLOADS))
def test_an_upload_is_checked_when_it_is_made(make: Callable[[], object], parts: tuple[str, ...]) -> None:
    with refused(*parts):
        make()


STATISTIC: dict[str, tuple[Callable[[Tensor, Tensor], object], tuple[str, ...]]] = {
    "NaN eigenvalue": (lambda s, U: Spectrum(spoilt(s), U), ("finite", "NaN")),
    "infinite eigenvalue": (lambda s, U: Spectrum(spoilt(s, INF), U), ("finite", "infinity")),
    "NaN basis": (lambda s, U: Spectrum(s, spoilt(U)), ("finite", "NaN")),
    "negative eigenvalue": (lambda s, U: Spectrum(spoilt(s, -0.5), U), ("positive semidefinite", "eigenvalue -0.5")),
    "long eigenvectors": (lambda s, U: Spectrum(s, 1.5 * U), ("orthonormal", "off by")),
    "one eigenvector": (lambda s, U: Spectrum(s, U[..., :1].expand_as(U)), ("orthonormal", "off by")),
    "too few eigenvalues": (lambda s, U: Spectrum(s[:, 1:], U), ()),
    "basis without groups": (lambda s, U: Spectrum(s, U[0]), ()),
    "basis of two groups": (lambda s, U: Spectrum(s, U.repeat(2, 1, 1)), ()),
    "no basis": (lambda s, U: Spectrum(torch.ones(1, 5), None), ()),
    "narrow basis": (lambda s, U: Spectrum(torch.ones(1, 4), torch.eye(4)[None]), ("5x5", "4x4")),
    "two groups": (lambda s, U: torch.eye(5).repeat(2, 1, 1), ("1 group", "in 2")),
    "narrow matrix": (lambda s, U: torch.eye(4), ("5x5", "4x4")),
    "oblong matrix": (lambda s, U: torch.ones(5, 4), ("square", "(5, 4)")),
    "row": (lambda s, U: torch.ones(5), ("square", "(5,)")),
    "skew matrix": (lambda s, U: torch.eye(5) + torch.ones(5, 5).triu(1), ("symmetric", "mirror image")),
    "negative matrix": (lambda s, U: -torch.eye(5), ("positive semidefinite", "eigenvalue -1")),
    "NaN matrix": (lambda s, U: spoilt(torch.eye(5)), ("finite", "NaN")),
    "list": (lambda s, U: [1.0], ("list",)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("make", "parts"), **cases(STATISTIC))
def test_a_statistic_must_be_a_symmetric_matrix_of_its_layer(
    kind: str, make: Callable[[Tensor, Tensor], object], parts: tuple[str, ...]
) -> None:
    found: Spectrum = getattr(upload(), f"{kind}s")["0"]
    with refused("ann", f"{kind} of '0'", *parts):
        with_statistic(kind, "0", make(found.values, found.basis))


@pytest.mark.parametrize("found", [3 * torch.eye(5), Spectrum(torch.full((1, 5), 3.0), torch.eye(5)[None])])
def test_a_projector_has_eigenvalues_up_to_one(found: object) -> None:
    with refused("ann", "projector of '0'", "[0, 1]", "got 3"):
        with_statistic("projector", "0", found)
    with_statistic("gram", "0", found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_statistic_is_of_every_layer_and_of_no_other(kind: str) -> None:
    with refused("ann", f"{kind} of 'zero'", "no such layer", "got one"):
        with_statistic(kind, "zero", torch.eye(5))
    with refused("ann", f"{kind} of '2'", "expected one", "got none"):
        changed(**{f"{kind}s": {"0": torch.eye(5)}})


x, y = examples()
DATA: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no batches": ({"batches": []}, ("ann", "at least one example", "got none")),
    "empty batches": ({"batches": [(x[:0], y[:0])] * 2}, ("ann", "at least one example", "got none")),
    "empty tuple": ({"batches": [()]}, ("ann",)),
    "inputs of another width": ({"batches": batches(width=3)}, ("ann", "4", "3")),
    "label too large": ({"batches": [(x, y + 1)]}, ("ann", "0 … 2", "3 outputs", "got 3")),
    "negative label": ({"batches": [(x, y - 1)]}, ("ann", "0 … 2", "got -1")),
    "weight NaN": ({"model": nn.Linear(4, 3).apply(lambda m: m.weight.data.fill_(NAN))}, ("ann", "'weight'", "finite")),
    "unknown statistic": ({"statistics": ["gram", "grahm"]}, ("ann", *STATISTICS, "'grahm'")),
    "statistics in one string": ({"statistics": "gram"}, ("ann", *STATISTICS, "'gram'")),
    **{
        f"{value} in the inputs, {statistic}": (
            {"batches": [*batches(), (spoilt(x, value), y)], "statistics": [statistic]},
            ("ann", "finite", "NaN or infinity"),
        )
        for value in (NAN, INF)
        for statistic in ("gram", "projector", "moments")
    },
    **{
        f"rank {rank!r}": ({"rank": rank}, ("rank", "whole number", "share", "size", repr(rank)))
        for rank in ("3 apples", "", "x", -1, 1.5, 0.0, NAN, True, [3])
    },
    **{f"rank {rank!r}": ({"rank": rank}, ("ann", "bytes", "cannot be cut")) for rank in ("0.5x", "0x", "100 B")},
}


@pytest.mark.parametrize(("arguments", "parts"), **cases(DATA))
def test_make_upload_refuses(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused(*parts):
        make_upload(**{"model": network(), "batches": batches(), "client": "ann", **arguments})


def test_a_state_dict_holds_tensors_alone() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> str:
            return "odd"

    with refused("ann", "_extra_state", "tensor", "str"):
        make_upload(Odd(4, 3), batches(), "ann")


@pytest.mark.parametrize("cut", [0, 4, 8, "header", "header end", "first tensor", -1])
def test_a_truncated_file(tmp_path: Path, cut: int | str) -> None:
    path = tmp_path / "cut.safetensors"
    upload().save(path)
    whole = path.read_bytes()
    end = 8 + int(struct.unpack("<Q", whole[:8])[0])
    path.write_bytes(whole[: {"header": end // 2, "header end": end, "first tensor": end + 3}.get(str(cut), cut)])  # type: ignore[misc]
    for read in (Upload.load, Merged.load, lambda p: aggregate([upload("bob"), p])):
        with refused(str(path), "whole safetensors file", "cut short"):
            read(path)


FOREIGN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "nothing": (lambda p: None, ("must be a file", "got nothing")),
    "folder": (lambda p: p.mkdir(), ("must be a file", "got a folder")),
    "text": (lambda p: p.write_text("name,age\nann,3\n"), ("safetensors file", "foreign")),
    "plain": (lambda p: save_file({"w": torch.ones(1)}, p), ("maecho upload", "maecho did not write")),
    "odd": (lambda p: save_file({}, p, metadata={"maecho": "[1]"}), ("maecho upload", "maecho did not write")),
    "model": (lambda p: aggregate([upload()]).save(p), ("maecho upload", "got a maecho model")),
    "newer": (lambda p: edited(p, version=files.VERSION + 1), (f"format {files.VERSION}", "got 2", "newer maecho")),
}


@pytest.mark.parametrize(("make", "parts"), **cases(FOREIGN))
def test_a_foreign_file(tmp_path: Path, make: Callable[[Path], object], parts: tuple[str, ...]) -> None:
    path = tmp_path / "ann.safetensors"
    make(path)
    for read in (Upload.load, lambda p: aggregate([upload("bob"), p])):
        with refused(str(path), *parts):
            read(path)


def test_an_upload_is_not_a_model(tmp_path: Path) -> None:
    upload().save(tmp_path / "ann")
    with refused(str(tmp_path / "ann"), "maecho model", "got a maecho upload"):
        Merged.load(tmp_path / "ann")


ABOUT = ("client", "examples", "fingerprint", "statistics", "layers", "head", "aliases", "recipe")


@pytest.mark.parametrize("key", ABOUT)
def test_a_header_without_an_entry(tmp_path: Path, key: str) -> None:
    with refused(str(tmp_path / "ann"), "maecho upload", key):
        Upload.load(edited(tmp_path / "ann", **{key: None}))


@pytest.mark.parametrize("key", sorted(upload().tensors()))
def test_every_tensor_of_a_file_is_checked(tmp_path: Path, key: str) -> None:
    """Left out, of another length, or not finite."""
    path = tmp_path / "ann"
    with refused(str(path)):
        Upload.load(edited(path, lambda tensors: tensors.pop(key)))
    with refused(str(path)):
        Upload.load(edited(path, lambda tensors: tensors.update({key: tensors[key][..., 1:].contiguous()})))
    if upload().tensors()[key].is_floating_point():
        for value in (NAN, INF):
            with refused(str(path), "ann", "finite", "NaN or infinity"):
                Upload.load(edited(path, lambda tensors, v=value: tensors.update({key: spoilt(tensors[key], v)})))


def test_a_header_that_promises_a_statistic_which_is_not_there(tmp_path: Path) -> None:
    def without(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("gram/")]:
            del tensors[key]

    with refused("ann", "gram"):
        aggregate([edited(tmp_path / "ann", without)], "regmean")


def together(source: str, folder: Path, *uploads: Upload) -> list[Upload | Path]:
    if source == "memory":
        return list(uploads)
    for i, one in enumerate(uploads):
        one.save(folder / f"{i}.safetensors")
    return sorted(folder.glob("*.safetensors"))


class Swapped(nn.Sequential):
    """Of the same weights, but the other layer comes last."""

    def forward(self, x: Tensor) -> Tensor:
        return self[0](self[1](x))


def two_linear(kind: type[nn.Sequential]) -> Upload:
    return make_upload(kind(nn.Linear(4, 4), nn.Linear(4, 4)), batches(classes=4), "ann" if kind is Swapped else "bob")


OTHERS: dict[str, tuple[Callable[[], tuple[Upload, Upload]], tuple[str, ...]]] = {
    "width": (
        lambda: (upload(), make_upload(network(width=6), batches(width=6), "bob")),
        ("'0.weight'", "5x4", "5x6"),
    ),
    "classes": (
        lambda: (upload(), make_upload(network(classes=2), batches(classes=2), "bob")),
        ("'2.weight'", "3x5", "2x5"),
    ),
    "dtype": (
        lambda: (upload(), make_upload(network().double(), [(x.double(), y)], "bob")),
        ("'0.weight'", "float32", "float64"),
    ),
    "names": (lambda: (upload(), make_upload(nn.Sequential(network()), batches(), "bob")), ("weight", "'0")),
    "no bias": (lambda: (upload(), make_upload(network(bias=False), batches(), "bob")), ("'0.bias'", "got none")),
    "one more layer": (
        lambda: (upload(), make_upload(nn.Sequential(*network(), nn.Linear(3, 3)), batches(), "bob")),
        ("'3.",),
    ),
    "head": (lambda: (two_linear(Swapped), two_linear(nn.Sequential)), ("head", "got 1")),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("make", "parts"), **cases(OTHERS))
def test_clients_have_one_architecture(
    tmp_path: Path, source: str, make: Callable[[], tuple[Upload, Upload]], parts: tuple[str, ...]
) -> None:
    for method in METHODS:
        with refused("bob", "ann", *parts):
            aggregate(together(source, tmp_path, *make()), method)


@pytest.mark.parametrize("source", SOURCES)
def test_every_client_comes_once_and_one_must_come(tmp_path: Path, source: str) -> None:
    with refused("ann", "once", "got it twice"):
        aggregate(together(source, tmp_path, upload(), upload("bob"), upload()))
    with refused("at least one upload", "got none"):
        aggregate([])
    with refused("upload", "dict"):
        aggregate([network().state_dict()])  # type: ignore[list-item]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("method", "options", "lacking", "parts"),
    [
        ("ma-echo", {}, "projector", ("ma-echo", "'projector'", "classes, gram, moments")),
        ("ma-echo", {"form": "printed"}, "gram", ("ma-echo", "'gram'", "classes, moments, projector")),
        ("regmean", {}, "gram", ("regmean", "'gram'", "classes, moments, projector")),
        ("fedavg", {"head": "class-aware"}, "classes", ("fedavg", "'classes'", "gram, moments, projector")),
        ("ma-echo", {"head": "class-aware"}, "classes", ("class-aware head", "class counts")),
    ],
)
def test_a_statistic_that_the_method_needs(
    tmp_path: Path, source: str, method: str, options: dict[str, Any], lacking: str, parts: tuple[str, ...]
) -> None:
    less = make_upload(network(), batches(), "bob", [name for name in STATISTICS if name != lacking])
    for order in ((upload(), less), (less, upload())):
        with refused("bob", *parts):
            aggregate(together(source, tmp_path, *order), method, **options)


def test_a_client_without_labels_is_the_same_first_or_last() -> None:
    def outcome(*uploads: Upload) -> object:
        try:
            return {name: tensor.tolist() for name, tensor in aggregate(uploads, steps=0).items()}
        except UploadError as error:
            return str(error)

    unlabelled = make_upload(network(), [x], "bob")
    assert outcome(upload(), unlabelled) == pytest.approx(outcome(unlabelled, upload()))
