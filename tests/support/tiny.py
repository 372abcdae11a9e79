"""A tiny client, and a check of error messages, for the tests of bad input."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho import InputError, Upload, UploadError, make_upload
from maecho.statistics import STATISTICS

NAN, INF = float("nan"), float("inf")

QUICK: dict[str, dict[str, Any]] = {
    "afl": {"backbone": "average"},
    "dense": {"epochs": 1, "generator_steps": 2, "student_steps": 2, "batch_size": 8, "width": 2},
}
"""Options for tests of all methods: small budgets for training, and no common backbone for AFL."""


def network(width: int = 4, classes: int = 3, seed: int = 0, bias: bool = True) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(width, 5, bias=bias), nn.ReLU(), nn.Linear(5, classes))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    return model


def batches(n: int = 30, width: int = 4, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(1))
    return list(zip(x.split(5), (torch.arange(n) % classes).split(5), strict=True))


@cache
def upload(client: str = "ann") -> Upload:
    return make_upload(network(seed=sum(client.encode())), batches(), client, STATISTICS, rank=None)


def with_fields(**fields: Any) -> Upload:
    return replace(upload(), **fields)


def with_statistics(upload: Upload, **statistics: Any) -> Upload:
    """The upload with these statistics replaced. A statistic that is None is left out."""
    values = {name: value for name, value in {**upload.statistics, **statistics}.items() if value is not None}
    return replace(upload, statistics=values)


def with_last_entry(tensor: Tensor, value: float = NAN) -> Tensor:
    """The tensor with its last entry replaced."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    tensor.view(-1)[-1] = value
    return tensor


ANN = "ann.safetensors"


def saved(folder: Path, one: Upload | None = None) -> Path:
    """The file of an upload in this folder."""
    (one or upload()).save(folder / ANN)
    return folder / ANN


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether tensors are the same to the bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@contextlib.contextmanager
def refused(*parts: str, error: type[Exception] = UploadError) -> Iterator[None]:
    """Expect an error of one line that holds these parts, and says what it got or what it could not do."""
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text
    assert re.search(r"\b(got|cannot)\b", text), f"what came? {text}"
    for part in parts:
        assert part in text


def refused_input(*parts: str) -> contextlib.AbstractContextManager[None]:
    """The same for bad input that is no upload: a model, batches, an option, a message. UploadError would be wrong."""

    @contextlib.contextmanager
    def check() -> Iterator[None]:
        with refused(*parts, error=InputError), _of_no_upload():
            yield

    return check()


@contextlib.contextmanager
def _of_no_upload() -> Iterator[None]:
    try:
        yield
    except UploadError as error:
        pytest.fail(f"an error of uploads for what is none: {error}")


def cases(table: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Turn a table of named cases into arguments of pytest.mark.parametrize."""
    return {"argvalues": list(table.values()), "ids": list(table)}


def fill_with_nan(module: nn.Module) -> None:
    for p in module.parameters():
        p.data.fill_(NAN)


def together(source: str, folder: Path, *uploads: Upload) -> list[Upload | Path]:
    if source == "memory":
        return list(uploads)
    for i, one in enumerate(uploads):
        one.save(folder / f"{i}.safetensors")
    return sorted(folder.glob("*.safetensors"))
