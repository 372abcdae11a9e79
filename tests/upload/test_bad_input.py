"""Bad input ends in one sentence that says who, what was expected and what came. Files are in test_bad_files.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho import METHODS, Upload, UploadError, aggregate, make_upload
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal
from maecho.statistics import STATISTICS
from support.tiny import (
    INF,
    NAN,
    batches,
    cases,
    fill_with_nan,
    network,
    refused,
    refused_input,
    together,
    upload,
    with_fields,
    with_last_entry,
    with_statistics,
)

KINDS = ("gram", "projector", "gradients")
SOURCES = ("memory", "files")
x, y = (torch.cat(part) for part in zip(*batches(), strict=True))


def with_statistic(kind: str, layer: str, found: Any) -> Upload:
    return with_statistics(upload(), **{kind: {**upload().statistics[kind], layer: found}})


def with_moments(**fields: Any) -> Upload:
    moments = upload().statistics["moments"]
    assert moments is not None
    return with_statistics(
        upload(), moments=replace(moments, **{k: change(getattr(moments, k)) for k, change in fields.items()})
    )


def with_weight(name: str, change: Callable[[Tensor], object]) -> Upload:
    return with_fields(weights={**upload().weights, name: change(upload().weights[name])})


def with_class_counts(counts: Tensor) -> Upload:
    return with_statistics(upload(), classes=counts)


def with_targets(targets: object) -> Upload:
    return with_statistics(upload(), targets=targets)


def with_fisher(name: str, change: Callable[[Tensor], object]) -> Upload:
    return with_statistics(
        upload(), fisher={**upload().statistics["fisher"], name: change(upload().statistics["fisher"][name])}
    )


UPLOADS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "no name": (lambda: with_fields(client=" "), ("a client must have a name", "' '")),
    "NaN weight": (lambda: with_weight("0.weight", with_last_entry), ("ann", "'0.weight'", "finite", "NaN")),
    "infinite bias": (lambda: with_weight("0.bias", lambda b: b + INF), ("ann", "'0.bias'", "finite", "infinity")),
    "weight that is no tensor": (lambda: with_weight("0.bias", Tensor.tolist), ("ann", "'0.bias'", "tensor", "list")),
    "no weights": (lambda: with_fields(weights={}), ("ann", "weights", "got none")),
    "layer without its weight": (lambda: with_fields(weights={"x": torch.ones(1)}), ("ann", "'0'", "'0.weight'")),
    "no such head": (lambda: with_fields(head="tail"), ("ann", "head", "'tail'")),
    "tied to nothing": (lambda: with_fields(aliases={"x": "nowhere"}), ("ann", "'nowhere'")),
    "no examples": (lambda: with_fields(examples=0), ("ann", "at least 1", "got 0")),
    "counts of too many": (
        lambda: with_class_counts(torch.tensor([20, 10, 1])),
        ("ann", "sum to its 30", "got 31"),
    ),
    "negative counts": (lambda: with_class_counts(torch.tensor([40, -10, 0])), ("ann", "none negative", "-10")),
    "counts in halves": (
        lambda: with_class_counts(torch.tensor([14.5, 15.5, 0])),
        ("ann", "whole number", "14.5"),
    ),
    "counts of two classes": (lambda: with_class_counts(torch.tensor([20, 10])), ("ann", "3", "got 2")),
    "NaN class mean": (lambda: with_moments(means=with_last_entry), ("ann", "class means", "finite", "NaN")),
    "negative covariance": (
        lambda: with_moments(covariances=lambda cs: tuple(c.map(lambda s: s - 9) for c in cs)),
        ("ann", "covariances", "positive semidefinite", "got the eigenvalue -"),
    ),
    "NaN covariance": (
        lambda: with_moments(covariances=lambda cs: tuple(c.map(with_last_entry) for c in cs)),
        ("ann", "covariances", "finite"),
    ),
    "targets without a head": (
        lambda: with_statistics(with_fields(head=None, statistics={"targets": upload().statistics["targets"]})),
        ("ann", "targets", "head", "got none"),
    ),
    "targets of two classes": (lambda: with_targets(torch.ones(2, 6)), ("ann", "(3, 6)", "got (2, 6)")),
    "targets in a list": (lambda: with_targets([1.0]), ("ann", "(3, 6)", "got [1.0]")),
    "NaN targets": (lambda: with_targets(with_last_entry(torch.ones(3, 6))), ("ann", "targets", "finite", "NaN")),
    "targets of too many": (
        lambda: with_targets(torch.full((3, 6), 11.0)),
        ("ann", "its 30 examples", "got 33"),
    ),
    "NaN fisher": (lambda: with_fisher("0.weight", with_last_entry), ("ann", "fisher of '0.weight'", "finite", "NaN")),
    "infinite fisher": (lambda: with_fisher("2.bias", lambda F: F + INF), ("ann", "fisher of '2.bias'", "finite")),
    "negative fisher": (
        lambda: with_fisher("0.bias", lambda F: with_last_entry(F, -0.5)),
        ("ann", "fisher of '0.bias'", "not be negative", "got -0.5"),
    ),
    "fisher of another shape": (
        lambda: with_fisher("0.weight", lambda F: F.T),
        ("ann", "fisher of '0.weight'", "(5, 4)", "got (4, 5)"),
    ),
    "fisher in a list": (lambda: with_fisher("0.bias", Tensor.tolist), ("ann", "fisher of '0.bias'", "(5,)", "list")),
    "fisher of no weight": (
        lambda: with_statistics(upload(), fisher={**upload().statistics["fisher"], "zero": torch.ones(1)}),
        ("ann", "fisher", "parameters of the network", "got one for 'zero'"),
    ),
    "no fisher of a layer": (
        lambda: with_statistics(upload(), fisher={"0.weight": upload().statistics["fisher"]["0.weight"]}),
        ("ann", "fisher", "a tensor for '0.bias'", "got none"),
    ),
    "moments of more examples": (lambda: with_moments(counts=lambda n: n + 1), ("ann", "30", "got 33")),
}


@pytest.mark.parametrize(("make", "parts"), **cases(UPLOADS))
def test_an_upload_is_checked_when_it_is_made(make: Callable[[], object], parts: tuple[str, ...]) -> None:
    with refused(*parts):
        make()


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("means", lambda means: means[:, 1:], "got means of length 3"),
        ("means", lambda means: means[0], r"got .*\(4,\)"),
        ("counts", lambda counts: counts[1:], "one class, count and mean for each .*got 3, 2, 3"),
    ],
)
def test_moments_fit_together(part: str, change: Callable[[Tensor], Tensor], said: str) -> None:
    """Moments are checked when they are made, so the error cannot name the client."""
    with pytest.raises(ValueError, match=said):
        with_moments(**{part: change})


STATISTIC: dict[str, tuple[Callable[[Tensor, Tensor], object], tuple[str, ...]]] = {
    "NaN eigenvalue": (lambda s, U: Spectrum(with_last_entry(s), U), ("finite", "NaN")),
    "infinite eigenvalue": (lambda s, U: Spectrum(with_last_entry(s, INF), U), ("finite", "infinity")),
    "NaN basis": (lambda s, U: Spectrum(s, with_last_entry(U)), ("finite", "NaN")),
    "negative eigenvalue": (
        lambda s, U: Spectrum(with_last_entry(s, -0.5), U),
        ("positive semidefinite", "eigenvalue -0.5"),
    ),
    "long eigenvectors": (lambda s, U: Spectrum(s, 1.5 * U), ("orthonormal", "off by")),
    "one eigenvector": (lambda s, U: Spectrum(s, U[..., :1].expand_as(U)), ("orthonormal", "off by")),
    "too few eigenvalues": (lambda s, U: Spectrum(s[:, 1:], U), ()),
    "basis without groups": (lambda s, U: Spectrum(s, U[0]), ()),
    "basis of two groups": (lambda s, U: Spectrum(s, U.repeat(2, 1, 1)), ()),
    "no basis": (lambda s, U: Diagonal(torch.ones(1, 5)), ()),
    "narrow basis": (lambda s, U: Spectrum(torch.ones(1, 4), torch.eye(4)[None]), ("5x5", "4x4")),
    "two groups": (lambda s, U: torch.eye(5).repeat(2, 1, 1), ("1 group", "in 2")),
    "narrow matrix": (lambda s, U: torch.eye(4), ("5x5", "4x4")),
    "oblong matrix": (lambda s, U: torch.ones(5, 4), ("square", "(5, 4)")),
    "row": (lambda s, U: torch.ones(5), ("square", "(5,)")),
    "skew matrix": (lambda s, U: torch.eye(5) + torch.ones(5, 5).triu(1), ("symmetric", "mirror image")),
    "negative matrix": (lambda s, U: -torch.eye(5), ("positive semidefinite", "eigenvalue -1")),
    "NaN matrix": (lambda s, U: with_last_entry(torch.eye(5)), ("finite", "NaN")),
    "list": (lambda s, U: [1.0], ("list",)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("make", "parts"), **cases(STATISTIC))
def test_a_statistic_must_be_a_symmetric_matrix_of_its_layer(
    kind: str, make: Callable[[Tensor, Tensor], object], parts: tuple[str, ...]
) -> None:
    found: Spectrum = upload().statistics[kind]["0"]
    with refused("ann", f"{kind} of '0'", *parts):
        with_statistic(kind, "0", make(found.values, found.basis))


@pytest.mark.parametrize("found", [3 * torch.eye(5), Spectrum(torch.full((1, 5), 3.0), torch.eye(5)[None])])
def test_a_projector_has_eigenvalues_up_to_one(found: object) -> None:
    with refused("ann", "projector of '0'", "[0, 1]", "got 3"):
        with_statistic("projector", "0", found)
    with_statistic("gram", "0", found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_statistic_is_of_every_layer_and_of_no_other(kind: str) -> None:
    with refused("ann", kind, "layers of the network", "got a matrix for 'zero'"):
        with_statistic(kind, "zero", torch.eye(5))
    with refused("ann", kind, "a matrix for '2'", "got none"):
        with_statistics(upload(), **{kind: {"0": torch.eye(5)}})


DATA: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no batches": ({"batches": []}, ("ann", "at least one example", "got none")),
    "empty batches": ({"batches": [(x[:0], y[:0])] * 2}, ("ann", "at least one example", "got none")),
    "empty tuple": ({"batches": [()]}, ("ann",)),
    "inputs of another width": ({"batches": batches(width=3)}, ("ann", "4", "3")),
    "NaN weight": ({"model": network().apply(fill_with_nan)}, ("ann", "'0.weight'", "finite", "NaN")),
    "unknown statistic": ({"statistics": ["gram", "grahm"]}, ("ann", *STATISTICS, "'grahm'")),
    "statistics in one string": ({"statistics": "gram"}, ("ann", *STATISTICS, "'gram'")),
    **{
        f"{value} in the inputs, {statistic}": (
            {"batches": [*batches(), (with_last_entry(x, value), y)], "statistics": [statistic]},
            ("ann", "finite", "NaN or infinity"),
        )
        for value in (NAN, INF)
        for statistic in STATISTICS
    },
    "unknown labels": ({"labels": "guessed"}, ("ann", "expected, sampled, observed", "'guessed'")),
    "sampled labels": ({"labels": "sampled"}, ("ann", "generator", "got none")),
    **{
        f"rank {rank!r}": ({"rank": rank}, ("rank", "whole number", "share", "size", repr(rank)))
        for rank in ("3 apples", "", "x", -1, 1.5, 0.0, NAN, True, [3])
    },
    **{f"rank {rank!r}": ({"rank": rank}, ("ann", "bytes", "cannot be cut")) for rank in ("0.5x", "0x", "100 B")},
}


@pytest.mark.parametrize(("arguments", "parts"), **cases(DATA))
def test_make_upload_refuses(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused_input(*parts):
        make_upload(**{"model": network(), "batches": batches(), "client": "ann", **arguments})


def test_a_state_dict_holds_tensors_alone() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> str:
            return "odd"

    with refused_input("ann", "_extra_state", "tensor", "str"):
        make_upload(Odd(4, 3), batches(), "ann")


class Swapped(nn.Sequential):
    """An upload of the same weights in which the other layer comes last."""

    def forward(self, x: Tensor) -> Tensor:
        return self[0](self[1](x))


def two_linear(client: str, kind: type[nn.Sequential]) -> Upload:
    return make_upload(kind(nn.Linear(4, 4), nn.Linear(4, 4)), batches(classes=4), client, STATISTICS)


def ann_and(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> tuple[Upload, Upload]:
    return upload(), make_upload(model, data, "bob", STATISTICS)


OTHERS: dict[str, tuple[Callable[[], tuple[Upload, Upload]], tuple[str, ...]]] = {
    "width": (lambda: ann_and(network(width=6), batches(width=6)), ("'0.weight'", "float32 5x4", "got float32 5x6")),
    "classes": (lambda: ann_and(network(classes=2), batches(classes=2)), ("'2.", "float32 3", "got float32 2")),
    "dtype": (lambda: ann_and(network().double(), [(x.double(), y)]), ("float32", "got float64")),
    "names": (lambda: ann_and(nn.Sequential(network()), batches()), ("weight", "got none")),
    "no bias": (lambda: ann_and(network(bias=False), batches()), ("'0.bias'", "got none")),
    "one more layer": (lambda: ann_and(nn.Sequential(*network(), nn.Linear(3, 3)), batches()), ("got '3.",)),
    "head": (lambda: (two_linear("ann", Swapped), two_linear("bob", nn.Sequential)), ("head", "got 1")),
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
    with refused("Upload", "Dict"):
        aggregate([network().state_dict()])  # type: ignore[list-item]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("method", "options", "lacking", "parts"),
    [
        ("ma-echo", {}, "projector", ("ma-echo", "'projector'", "gram, moments, targets")),
        ("ma-echo", {"form": "printed"}, "gram", ("ma-echo", "'gram'", "gradients, moments, projector")),
        ("regmean", {}, "gram", ("regmean", "'gram'", "gradients, moments, projector")),
        ("fedavg", {"head": "class-aware"}, "classes", ("fedavg", "'classes'", "got an upload with features, fisher")),
        ("fisher", {}, "fisher", ("fisher", "'fisher'", "classes, features, gradients, gram")),
        ("kronecker", {}, "gradients", ("kronecker", "'gradients'", "statistics=['gradients', 'gram']")),
        ("kronecker", {}, "gram", ("kronecker", "'gram'", "statistics=['gradients', 'gram']")),
        ("afl", {}, "targets", ("afl", "'targets'", "statistics=['gram', 'targets']")),
        ("ma-echo", {"head": "class-aware"}, "classes", ("ma-echo", "'classes'")),
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
            return {name: tensor.flatten().tolist() for name, tensor in aggregate(uploads).items()}
        except UploadError as error:
            return str(error)

    unlabelled = make_upload(network(), [x], "bob")
    one, other = outcome(upload(), unlabelled), outcome(unlabelled, upload())
    assert type(one) is type(other)
    if isinstance(one, dict) and isinstance(other, dict):
        assert all(one[name] == pytest.approx(other[name], abs=1e-4) for name in one)
