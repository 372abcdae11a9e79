"""The first batch, and a copy of the model to run it: both are mended as far as needed, so that a check can go on."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from maecho.checking.found import Finding
from maecho.errors import InputError, one_line, text_of
from maecho.linalg.finite import is_finite
from maecho.network.batches.inputs import NOT_FINITE, each, examples, leaves
from maecho.network.batches.reading import Reader, SingleExampleError
from maecho.upload.checks import not_finite

FEW = 32
"""So many examples of a data set are put together to one batch."""
LISTED = 3
"""So many names are listed before the rest is counted."""
WITHOUT_LOADER = (
    "the batches must come from a DataLoader with a batch_size, got a data set of single examples; give "
    "DataLoader(data, batch_size=64)"
)

Add = Callable[[Finding], None]


@contextlib.contextmanager
def undisturbed(batches: Any) -> Iterator[None]:
    """Inside, random numbers may be drawn. Afterwards all generators are in their old states, a loader's own too."""
    own = {
        id(g): g
        for one in (batches, getattr(batches, "sampler", None))
        if isinstance(g := getattr(one, "generator", None), torch.Generator)
    }
    states = [(g, g.get_state()) for g in own.values()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the user's code may draw from it)
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def heard(add: Add, client: str) -> Iterator[None]:
    """Inside, what maecho warns of becomes a finding. What other code warns of becomes a note."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for one in caught:
                text = str(one.message)
                ours = text.startswith(f"{client}: ")
                add(
                    without_name(text, client) if ours else Finding("note", one_line(f"the model's code warns: {text}"))
                )


def without_name(text: str, client: str, level: Any = "warning") -> Finding:
    """A sentence of maecho as a finding. The name of the client at its beginning is left out."""
    for label in (f"{client}: statistics: ", f"{client}: "):
        text = text.removeprefix(label)
    return Finding(level, text)


def copied(model: nn.Module, add: Add) -> nn.Module:
    """A copy to run. If there can be none, the model itself."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # copying a model may raise anything
        add(
            Finding(
                "warning",
                one_line(
                    f"the model must be one that copy.deepcopy can copy, got {type(model).__name__}: {text_of(error)}; "
                    "without a copy there are no neuron spaces, no echo-chain and no echo-relay"
                ),
            )
        )
        return model


def finite_weights(model: nn.Module, add: Add) -> bool:
    """Find weights that are not finite. In the copy they become 0, so that the rest can be looked at. Gives whether
    all were finite."""
    bad = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not is_finite(value)
    }
    for name in list(bad)[:LISTED]:
        add(Finding("error", f"{not_finite(name)}; take an earlier checkpoint, or train with a smaller learning rate"))
    if len(bad) > LISTED:
        add(Finding("error", f"so must {len(bad) - LISTED} other weights of {len(model.state_dict())}"))
    with torch.no_grad():
        for value in bad.values():
            value.copy_(value.nan_to_num(0.0, 0.0, 0.0))
    return not bad


@dataclass(frozen=True)
class FirstBatch:
    """What was read of the first batch."""

    inputs: Any
    labels: Any
    count: int | None
    """The number of batches, if it can be known."""


def first(batches: Any, reader: Reader, client: str, add: Add) -> FirstBatch | None:
    """The first batch that has examples. None if there is none that can be read."""
    if isinstance(batches, Iterator):
        add(
            Finding(
                "note",
                f"the batches are a {type(batches).__name__}, which can be read once: its first batch has been taken "
                "out of it; make it anew for the upload, and give a list or a DataLoader to a relay",
            )
        )
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        add(Finding("error", WITHOUT_LOADER))
        return _read(_together(batches), reader, client, add)
    if not isinstance(batches, Iterable):
        add(Finding("error", f"the batches must be something to iterate over, got {type(batches).__name__}"))
        return None
    try:
        for batch in batches:
            try:
                inputs, labels = reader.read(batch)
            except SingleExampleError as error:
                add(without_name(str(error), client, "error"))
                return _read(_together(batches), reader, client, add)
            if examples(inputs):
                return FirstBatch(inputs, labels, len(batches) if isinstance(batches, Sized) else None)
    except InputError as error:
        add(without_name(str(error), client, "error"))
        return None
    except Exception as error:  # the user's own data may raise anything
        add(Finding("error", one_line(f"the batches must be readable, got {type(error).__name__}: {text_of(error)}")))
        return None
    add(Finding("error", "the batches must hold at least one example, got none"))
    return None


def _together(data: Any) -> Any:
    """The first examples of a data set as one batch. None if they cannot be put together."""
    data = getattr(data, "dataset", data)
    with contextlib.suppress(Exception):  # the user's own data may raise anything
        return default_collate([data[i] for i in range(min(FEW, len(data)))])
    return None


def _read(batch: Any, reader: Reader, client: str, add: Add) -> FirstBatch | None:
    if batch is None:
        return None
    try:
        return FirstBatch(*reader.read(batch), None)
    except InputError as error:
        add(without_name(str(error), client, "error"))
        return None


def finite_inputs(inputs: Any, add: Add) -> Any:
    """The inputs with 0 in place of what is not finite, which is an error."""
    real = [x for x in leaves(inputs) if x.is_floating_point()]
    bad = next((x for x in real if not is_finite(x)), None)
    if bad is None:
        return inputs
    rows = int((~bad.isfinite()).reshape(len(bad), -1).any(1).sum()) if bad.dim() else 1
    count = len(bad) if bad.dim() else 1
    add(
        Finding(
            "error", f"{NOT_FINITE} in {rows} of {count} examples of the first batch; leave these out, or fill the gaps"
        )
    )
    return each(inputs, lambda x: x.nan_to_num(0.0, 0.0, 0.0) if x.is_floating_point() else x)
