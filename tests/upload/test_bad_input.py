"""Bad input ends in one sentence that says who, what was expected and what came. Files are in test_bad_files.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho import METHODS, Ensemble, InputError, Upload, UploadError, aggregate, evaluate, make_upload
from maecho.linalg.spectra import Spectrum
from maecho.linalg.symmetric import Diagonal
from maecho.network.spaces import load
from maecho.statistics import STATISTICS
from support.tiny import (
    INF,
    NAN,
    QUICK,
    batches,
    cases,
    network,
    refused,
    refused_input,
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


def fill_with_nan(module: nn.Module) -> None:
    for p in module.parameters():
        p.data.fill_(NAN)


DATA: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no batches": ({"batches": []}, ("ann", "at least one example", "got none")),
    "empty batches": ({"batches": [(x[:0], y[:0])] * 2}, ("ann", "at least one example", "got none")),
    "empty tuple": ({"batches": [()]}, ("ann",)),
    "inputs of another width": ({"batches": batches(width=3)}, ("ann", "4", "3")),
    "label too large": ({"batches": [(x, y + 1)]}, ("ann", "0 … 2", "3 outputs", "got 3")),
    "negative label": ({"batches": [(x, y - 1)]}, ("ann", "0 … 2", "got -1")),
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
        f"{statistic} of labels too large": (
            {"batches": [(x, y + 1)], "statistics": [statistic], "labels": "observed"},
            ("ann", "0 … 2", "3 outputs", "got 3"),
        )
        for statistic in ("targets", "fisher", "gradients")
    },
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


def together(source: str, folder: Path, *uploads: Upload) -> list[Upload | Path]:
    if source == "memory":
        return list(uploads)
    for i, one in enumerate(uploads):
        one.save(folder / f"{i}.safetensors")
    return sorted(folder.glob("*.safetensors"))


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


EVALUATE: dict[str, tuple[nn.Module, list[Any], tuple[str, ...]]] = {
    "no labels": (network(), [x], ("label",)),
    "labels that are no classes": (network(), [(x, y.float())], ("label",)),
    "too few labels": (network(), [(x, y[:7])], ("label",)),
    "one output for all": (nn.Sequential(network(), nn.Flatten(0)), [(x, y)], ("one output for each class",)),
    "no batches": (network(), [], ("at least one example", "got none")),
    "empty batches": (network(), [(x[:0], y[:0])], ("at least one example", "got none")),
    "label too large": (network(), [(x, y + 1)], ("0 … 2", "3 outputs", "3")),
    "negative label": (network(), [(x, y - 1)], ("0 … 2", "3 outputs", "-1")),
    "NaN in the inputs": (network(), [(with_last_entry(x), y)], ("finite", "NaN")),
    "NaN in the model": (network().apply(fill_with_nan), [(x, y)], ("finite", "NaN")),
}


@pytest.mark.parametrize(("model", "data", "parts"), **cases(EVALUATE))
def test_evaluate_refuses(model: nn.Module, data: list[Any], parts: tuple[str, ...]) -> None:
    model.train()
    with refused("evaluation", *parts, error=InputError):
        evaluate(model, data)
    assert model.training


@pytest.mark.parametrize(
    ("count", "by", "counts", "parts"),
    [
        (0, "probabilities", None, ("at least one model", "got none")),
        (2, "class-aware", None, ("class counts", "2 models", "got none")),
        (2, "class-aware", [torch.ones(3)], ("class counts", "2 models", "those of 1")),
        (2, "class-aware", [torch.ones(3), torch.ones(2)], ("class counts",)),
        (2, "class-aware", [torch.ones(3), None], ("class counts",)),
        (1, "vote", None, ("logits, probabilities or class-aware", "'vote'")),
    ],
)
def test_an_ensemble_refuses(count: int, by: Any, counts: Any, parts: tuple[str, ...]) -> None:
    with refused(*parts, error=ValueError):
        Ensemble([network()] * count, by, counts)


WORKS: dict[str, Callable[[], list[Upload]]] = {
    "one client": lambda: [upload()],
    "one sample": lambda: [make_upload(network(seed=i), [(x[:1], y[:1])], f"{i}", STATISTICS) for i in range(2)],
    "one sample, one client": lambda: [make_upload(network(), [(x[:1], y[:1])], "0", STATISTICS)],
    "a class nobody has": lambda: [make_upload(network(seed=i), [(x, y % 2)], f"{i}", STATISTICS) for i in range(2)],
    "rank 0": lambda: [make_upload(network(seed=i), batches(), f"{i}", STATISTICS, rank=0) for i in range(2)],
    "rank 0 beside a full one": lambda: [make_upload(network(), batches(), "0", STATISTICS, rank=0), upload()],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", WORKS)
def test_what_is_rare_but_sound_works(tmp_path: Path, method: str, source: str, case: str) -> None:
    uploads = WORKS[case]()
    merged = aggregate(together(source, tmp_path, *uploads), method, model=network(), **QUICK.get(method, {}))
    load(network(), merged)  # pfnm's network may have grown
    assert all(tensor.isfinite().all() for tensor in merged.values())
    # Nothing speaks against the average; but some learn from weights or class means, and Fisher has no rank.
    if len(uploads) == 1 or (
        case == "rank 0" and method not in ("dense", "fisher", "ot", "ma-echo+ot", "pfnm", "fedma", "echo-chain")
    ):
        for name, tensor in merged.items():
            if method == "afl" and name.startswith("2.") and case != "rank 0":
                continue  # its head is new
            average = torch.stack([one.weights[name] for one in uploads]).mean(0)
            torch.testing.assert_close(tensor, average, rtol=1e-5, atol=1e-5)


class Rare(nn.Module):
    """Some layers see no data: an embedding at some clients, and a layer that runs only in training."""

    def __init__(self, reached: bool):
        super().__init__()
        self.reached = reached
        self.tokens, self.body = nn.Embedding(7, 4), nn.Linear(4, 5)
        self.head, self.extra = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.tokens(x).mean(1) if self.reached else torch.ones(len(x), 4))
        return self.head(h) + self.extra(h) if self.training else self.head(h)


@pytest.mark.parametrize("method", METHODS)
def test_layers_that_nothing_reached(method: str) -> None:
    if method in ("dense", "echo-chain", "pfnm"):
        pytest.skip("dense and echo-chain draw real numbers, and pfnm knows fully connected layers, not tokens")
    tokens = torch.arange(90).reshape(30, 3) % 7
    uploads = [make_upload(Rare(i == 0), [(tokens, y)], f"{i}", STATISTICS) for i in range(2)]
    assert [one.head for one in uploads] == ["head", "head"]
    merged = aggregate(uploads, method, **QUICK.get(method, {}))
    for name, tensor in aggregate(uploads[::-1], method, **QUICK.get(method, {})).items():
        torch.testing.assert_close(tensor, merged[name])


def test_inputs_of_many_lengths_have_no_moments() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3))
    made = make_upload(model, [(torch.ones(3, 2, length), y[:3]) for length in (8, 9)], "ann")
    assert made.has == {"gram", "projector", "classes", "features"}
    assert "moments" in made.recipe["not_sent"]
