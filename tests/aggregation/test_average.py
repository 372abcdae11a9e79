"""Averages by number of examples and uniform, and the class-aware head, on values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import maecho
from maecho.aggregation import OT, FedAvg
from maecho.linalg import means
from maecho.upload.cohort import Cohort
from support.clients import clients, rng


def with_rows(value: float, labels: list[int], client: str) -> maecho.Upload:
    """One linear layer of three classes, all of whose weights are `value`."""
    model = nn.Linear(2, 3, bias=False)
    nn.init.constant_(model.weight, value)
    return maecho.make_upload(model, [(torch.ones(len(labels), 2), torch.tensor(labels))], client, ["classes"])


UPLOADS = [
    (1.0, [0, 0, 1, 1, 1, 1, 1, 1]),  # 8 examples: 2 of class 0, 6 of class 1
    (5.0, [0, 0, 0, 0, 0, 0, 1, 1, 2]),  # 9 examples: 6 of class 0, 2 of class 1, a single one of class 2
    (9.0, [0]),  # 1 example: no class counts as held
]
BY_HAND: dict[tuple[str, str], list[float]] = {
    ("examples", "average"): [(8 * 1 + 9 * 5 + 1 * 9) / 18] * 3,
    ("uniform", "average"): [5.0] * 3,
    ("examples", "class-aware"): [(2 * 1 + 6 * 5) / 8, (6 * 1 + 2 * 5) / 8, (8 * 1 + 9 * 5 + 1 * 9) / 18],
    ("uniform", "class-aware"): [3.0, 3.0, 5.0],
}


@pytest.mark.parametrize("method", [FedAvg, OT])
@pytest.mark.parametrize(("weighting", "head"), BY_HAND)
def test_every_average_by_hand(weighting: Literal["examples", "uniform"], head: Any, method: type[FedAvg | OT]) -> None:
    """These networks have no neurons that could be matched, so that `ot` is the average alone."""
    uploads = [with_rows(value, labels, f"client-{i}") for i, (value, labels) in enumerate(UPLOADS)]
    expected = torch.tensor(BY_HAND[weighting, head])[:, None].expand(3, 2)
    torch.testing.assert_close(maecho.aggregate(uploads, method(weighting=weighting, head=head))["weight"], expected)


class Made(TorchDispatchMode):
    """Keeps all memory that operations on tensors take."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, list | tuple) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
                self.dtypes.add(tensor.dtype)
        return found

    def bytes_beside(self, given: list[maecho.Upload]) -> int:
        held = {tensor.untyped_storage().data_ptr() for upload in given for tensor in upload.weights.values()}
        return sum(storage.nbytes() for at, storage in self.storages.items() if at not in held)


def many(count: int) -> list[maecho.Upload]:
    draw = rng()
    like = clients(1, statistics=["fisher"])[0]
    weights = [
        {name: t + 0.1 * torch.randn(t.shape, generator=draw) for name, t in like.weights.items()} for _ in range(count)
    ]
    return [replace(like, client=f"client-{i}", examples=10 + i, weights=w) for i, w in enumerate(weights)]


@pytest.mark.parametrize("count", [5, 60])
def test_an_average_in_memory_takes_the_memory_of_its_result(count: int) -> None:
    given = many(count)
    size = sum(tensor.nbytes for tensor in given[0].weights.values())
    with Made() as made:
        maecho.aggregate(given, "fedavg")
    assert made.dtypes == {torch.float32}
    # Means of eight are made before they are joined.
    assert made.bytes_beside(given) < (1.5 if count <= 8 else 2.5) * size


@pytest.mark.parametrize("method", ["fedavg", "fisher"])
def test_fifty_clients_are_averaged_as_exactly_as_float32_allows(method: str) -> None:
    given = many(50)
    double = [replace(u, weights={name: t.double() for name, t in u.weights.items()}) for u in given]
    found, wanted = maecho.aggregate(given, method), maecho.aggregate(double, method)
    assert {tensor.dtype for tensor in wanted.values()} == {torch.float64}
    exact = torch.cat([tensor.flatten() for tensor in wanted.values()])
    gap = torch.cat([found[name].flatten() for name in wanted]) - exact
    assert float(gap.norm() / exact.norm()) < 1e-7


@pytest.mark.parametrize("method", ["fedavg", "fisher"])
def test_equal_weights_stay_as_they_are_bit_for_bit(method: str) -> None:
    first = many(20)[0]
    same = [replace(first, client=f"client-{i}", examples=3 + i) for i in range(20)]
    merged = maecho.aggregate(same, method)
    assert all(torch.equal(merged[name], tensor) for name, tensor in first.weights.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["fedavg", "fisher"])
def test_pieces_of_any_size_give_the_same(method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [replace(u, weights={name: t.to(dtype) for name, t in u.weights.items()}) for u in many(12)]
    whole = maecho.aggregate(given, method)
    monkeypatch.setattr(means, "BLOCK", 48)
    cut = maecho.aggregate(given, method)
    for name, tensor in whole.items():
        torch.testing.assert_close(cut[name], tensor, rtol=1e-6, atol=1e-7)
        assert cut[name].dtype == dtype
    streamed = type(maecho.METHODS[method])()(Cohort(given, device="cpu"))
    for name, tensor in whole.items():
        torch.testing.assert_close(streamed[name], tensor, rtol=1e-6, atol=1e-7)
