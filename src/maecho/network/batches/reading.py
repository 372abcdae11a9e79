"""Where a batch has its inputs and its labels, and where a model's output has its scores.

Batches come in many forms. The rules here know the usual ones; functions of the user take their place for the rest.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from maecho.errors import InputError, one_line
from maecho.network.batches.inputs import all_numbers, converted, is_number
from maecho.network.batches.signature import signature

Read = Callable[[Any], Any]

LABELS = ("labels", "label")
"""The keys of labels in a batch that is a mapping."""
SAY_WHERE = "say with inputs=, labels= or outputs= how they follow from a batch or from the model's output"


@dataclass(frozen=True)
class Reading:
    """Functions of the user that take the place of the rules.

    Args:
        inputs: takes a batch, gives the inputs: a tensor, a tuple for several arguments, or a dict for keywords.
        labels: takes a batch, gives one class for each example, or None.
        outputs: takes what the model returns, gives the tensor [examples, classes].
    """

    inputs: Read | None = None
    labels: Read | None = None
    outputs: Read | None = None

    def __post_init__(self) -> None:
        for name in ("inputs", "labels", "outputs"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                of = "the model's output" if name == "outputs" else "a batch"
                raise InputError(f"{name} must be a function of {of}, got {given!r}")


class SingleExampleError(InputError):
    """A single example came where a batch must be: the data are a data set, or a loader without a batch size."""


class Reader:
    """Reads the batches of one client, for one model. It warns once of each thing that is lost.

    Args:
        model: the model that the inputs are for.
        label: says whose batches they are, for errors and warnings.
        reading: functions of the user.
        strict: raise InputError for labels that cannot be used, instead of a warning.
    """

    def __init__(self, model: nn.Module, label: str, reading: Reading | None = None, strict: bool = False):
        self.label, self.reading, self._strict = label, reading or Reading(), strict
        self._takes = signature(model)
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        self._warned: set[str] = set()

    def read(self, batch: Any) -> tuple[Any, Any]:
        """The inputs of a batch in the form that the model takes, and what it has as labels."""
        given = self.reading
        unused: list[Any] = []
        if given.inputs is not None:
            inputs, labels = given.inputs(batch), None if given.labels else _labels_beside(batch)
        else:
            inputs, labels, unused = self._by_rule(batch)
        if given.labels is not None:
            labels = given.labels(batch)
        if is_number(labels) or isinstance(inputs, str) or is_number(inputs):
            what = f"a single example with the label {labels}" if is_number(labels) else f"the single value {inputs!r}"
            raise SingleExampleError(
                f"{self.label}: a batch must hold several examples and a label for each, got {what}; use a DataLoader "
                "with a batch_size"
            )
        if unused:
            weights = _one_each(unused[-1], batch[0]) and _weights(unused[-1])
            what = "sample weights" if weights else f"{len(unused)} further part(s) of a batch"
            self.lost(f"{what} are not used: all examples count alike, and a batch is inputs and labels; {SAY_WHERE}")
        return self._fitted(converted(inputs, self._dtype, self.label)), labels

    def lost(self, sentence: str) -> None:
        """Warn of something that is not used. The same sentence is said once."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            warnings.warn(one_line(f"{self.label}: {sentence}"), stacklevel=2)

    def lost_labels(self, reason: str) -> None:
        """Warn that labels are there but cannot be used."""
        if self._strict:
            raise InputError(f"{self.label}: {reason}")
        self.lost(f"no labels are used for some batches or all, since {reason}; {SAY_WHERE}")

    def _by_rule(self, batch: Any) -> tuple[Any, Any, list[Any]]:
        """The inputs, the labels and the unused rest of a batch."""
        if isinstance(batch, Mapping):
            return {key: value for key, value in batch.items() if key not in LABELS}, _labels_beside(batch), []
        if not isinstance(batch, tuple | list):
            return batch, None, []
        if not batch:
            raise InputError(f"{self.label}: a batch must hold inputs, got an empty {type(batch).__name__}")
        return self._split(list(batch))

    def _split(self, parts: list[Any]) -> tuple[Any, Any, list[Any]]:
        """The inputs, the labels and the unused rest of a tuple.

        A model of one argument gets the first part, and the second holds the labels. A model of several arguments gets
        all parts but the last one, if that one has one number for each example.
        """
        first, least, most = parts[0], self._takes.least, self._takes.most
        rest: list[Any] = []
        if len(parts) == 1:
            return first, None, rest
        nested = isinstance(first, Mapping | tuple | list) and not all_numbers(first)
        if nested or most < 2 or (len(parts) == 2 and least < 2):
            return first, parts[1], parts[2:]
        of_examples = [_one_each(part, first) for part in parts]
        if len(parts) - 2 >= max(least, 1) and all(of_examples[-2:]) and _weights(parts[-1]):
            parts, rest = parts[:-1], parts[-1:]
        count = len(parts) - 1
        if count == 1 and least < 2:
            return first, parts[1], rest
        if _one_each(parts[-1], first) and least <= count <= most:
            return tuple(parts[:-1]), parts[-1], rest
        if len(parts) <= most:
            return tuple(parts), None, rest
        count = int(most)
        return tuple(parts[:count]), parts[count], [*parts[count + 1 :], *rest]

    def _fitted(self, inputs: Any) -> Any:
        """Inputs without what the model does not take by name. A single one is given by position if it can be.

        A tuple for a model of one argument is that argument.
        """
        takes = self._takes
        if isinstance(inputs, tuple) and len(inputs) > 1 and takes.most == 1:
            return (inputs,)
        if not isinstance(inputs, Mapping):
            return inputs
        unknown = [key for key in inputs if takes.names is not None and key not in takes.names]
        if unknown and len(inputs) > 1:
            listed = ", ".join(map(repr, unknown))
            if len(unknown) == len(inputs):
                raise InputError(
                    f"{self.label}: the model must take the inputs of a batch by their names, got {listed}, which it "
                    "does not take; say with inputs= how its arguments follow from a batch"
                )
            self.lost(f"{listed} of the batches are not used, since the model takes no such argument; {SAY_WHERE}")
            inputs = {key: value for key, value in inputs.items() if key not in unknown}
        if len(inputs) == 1 and (unknown or takes.first in inputs) and takes.least <= 1 <= takes.most:
            return next(iter(inputs.values()))
        return inputs


def scores(output: Any, outputs: Read | None = None) -> Any:
    """The scores in what a model returns: what `outputs` finds, the `logits` of an object, or the first of several."""
    if outputs is not None:
        return outputs(output)
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(found, Tensor):
        return found
    return output[0] if isinstance(output, tuple | list) and output else output


def _labels_beside(batch: Any) -> Any:
    """The labels of a batch whose inputs are read by a function of the user."""
    if isinstance(batch, Mapping):
        return next((batch[key] for key in LABELS if key in batch), None)
    return batch[-1] if isinstance(batch, tuple | list) and len(batch) > 1 else None


def _one_each(x: Any, first: Any) -> bool:
    """Whether x has one number for each example that the first part of the batch has."""
    shape, examples = _shape(x), _shape(first)
    return bool(shape and examples) and shape[0] == math.prod(shape) == examples[0]


def _shape(x: Any) -> tuple[int, ...]:
    if isinstance(x, Tensor | np.ndarray):
        return tuple(x.shape)
    if not all_numbers(x):
        return ()
    return (len(x), *({_shape(part) for part in x if not is_number(part)} or {()}).pop())


def _weights(x: Any) -> bool:
    """Whether these are real numbers, as sample weights are."""
    if isinstance(x, Tensor):
        return x.is_floating_point()
    return x.dtype.kind == "f" if isinstance(x, np.ndarray) else any(isinstance(part, float) for part in x)
