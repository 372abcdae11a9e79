"""Measures how accurate a model is, overall and per class, and how well it is calibrated. Defines the ensemble that
merged models are compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from maecho.aggregation.average import HOLDS
from maecho.errors import InputError
from maecho.linalg.finite import is_finite
from maecho.network.batches.inputs import own
from maecho.network.batches.labels import check_labels
from maecho.network.batches.reading import Read, Reader, Reading, scores
from maecho.network.forward import forward

BINS = 15
"""The number of bins of the calibration error."""


@dataclass(frozen=True)
class Evaluation:
    """The counts that accuracies are computed from, and the calibration error."""

    correct: tuple[int, ...]
    """The number of right answers for each class."""
    examples: tuple[int, ...]
    """The number of examples of each class."""
    calibration_error: float
    """The expected calibration error Σ_b n_b / n · |accuracy_b − confidence_b|, in [0, 1]. An example's confidence is
    the largest of its probabilities (the softmax of the outputs), and b runs over 15 bins of equal width of the
    confidence. accuracy_b and confidence_b are the means over the n_b examples of a bin."""

    @property
    def accuracy(self) -> float:
        """The share of all examples that the model gets right, in [0, 1]."""
        return sum(self.correct) / sum(self.examples)

    @property
    def per_class(self) -> tuple[float, ...]:
        """The accuracy on each class; NaN for a class without examples."""
        pairs = zip(self.correct, self.examples, strict=True)
        return tuple(right / total if total else math.nan for right, total in pairs)


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    progress: bool | None = None,
    *,
    inputs: Read | None = None,
    labels: Read | None = None,
    outputs: Read | None = None,
) -> Evaluation:
    """Measure accuracy and calibration on batches with labels. The model is left unchanged.

    Args:
        model: the model.
        batches: pairs of inputs and labels, or another form that docs/batches.md names.
        progress: a progress bar: True, False, or None for one on a terminal if it takes long.
        inputs, labels, outputs: functions that find the inputs and the labels in a batch, and the scores in what the
            model returns, if the usual rules do not.
    """
    reader = Reader(model, "evaluation", Reading(inputs, labels, outputs))
    bins = torch.zeros(BINS, dtype=torch.float64)  # for each bin: Σ (right or not − confidence)
    correct = examples = torch.zeros(0, dtype=torch.int64)
    gives_probabilities = isinstance(model, Ensemble) and model.by == "probabilities"
    for step in forward(model, batches, "evaluation", progress, reader=reader):
        if step.labels is None or not isinstance(step.output, Tensor) or step.output.dim() != 2:
            of_model = tuple(step.output.shape) if isinstance(step.output, Tensor) else type(step.output).__name__
            got = f"none that can be used: {step.no_labels}" if step.no_labels else f"outputs {of_model}"
            raise InputError(
                "evaluation: each example must have a whole-number label, and the model one output for each class, got "
                f"{got}"
            )
        found, classes = step.labels.cpu(), step.output.shape[1]
        check_labels(found, classes, "evaluation")
        if not is_finite(step.output):
            raise InputError("evaluation: the model's outputs must be finite, got NaN or infinity")
        hit = step.output.argmax(1).cpu() == found
        right = found[hit].bincount(minlength=classes)
        bins += _gaps(step.output if gives_probabilities else step.output.softmax(1), hit)
        if not len(examples):
            correct = examples = torch.zeros(classes, dtype=torch.int64)
        correct, examples = correct + right, examples + found.bincount(minlength=classes)
    if not int(examples.sum()):
        raise InputError("evaluation: there must be at least one example, got none")
    error = float(bins.abs().sum() / examples.sum())
    return Evaluation(tuple(correct.tolist()), tuple(examples.tolist()), error)


def _gaps(probabilities: Tensor, hit: Tensor) -> Tensor:
    """Bin by bin: the number of right answers minus the sum of confidences. Bin b holds (b/15, (b + 1)/15]."""
    confidence = probabilities.detach().amax(1).double().cpu()
    of = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    return torch.zeros(BINS, dtype=torch.float64).index_add_(0, of, hit.double() - confidence)


class Ensemble(nn.Module):
    """Runs all N models and combines their outputs, at N times the cost of one.

    Args:
        models: of one architecture or of several, with the same outputs.
        by: "logits" and "probabilities" take the mean of those. "class-aware" averages the logit of each class over the
            models whose clients hold the class, as the MA-Echo release does; a class that nobody holds gets 0.
        class_counts: the number of examples of every class, for every model. Only "class-aware" needs them.
        outputs: finds the scores in what one of the models returns, if the usual rules do not.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        by: Literal["logits", "probabilities", "class-aware"] = "probabilities",
        class_counts: Sequence[Tensor | None] | None = None,
        outputs: Read | None = None,
    ):
        super().__init__()
        if not models:
            raise InputError("an ensemble must have at least one model, got none")
        if by not in ("logits", "probabilities", "class-aware"):
            raise InputError(f"by must be logits, probabilities or class-aware, got {by!r}")
        self.models, self.by, self._outputs = nn.ModuleList(models), by, Reading(outputs=outputs).outputs
        self._held = None
        if by == "class-aware":
            counts = [one for one in class_counts or () if one is not None]
            if len(counts) != len(models) or len({len(one) for one in counts}) != 1:
                classes = ", ".join(str(len(one)) for one in counts)
                got = f"those of {len(counts)}, with {classes} classes" if counts else "none"
                raise InputError(
                    f"a class-aware ensemble needs the class counts of its {len(models)} models, got {got}"
                )
            self._held = (torch.stack(counts) >= HOLDS).float()

    @property
    def inputs_of(self) -> nn.Module:
        """A model that takes the same inputs."""
        return self.models[0]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # Each model gets inputs of its own, since it may write into them.
        outputs = torch.stack([scores(model(*own(args), **own(kwargs)), self._outputs) for model in self.models])
        if self._held is not None:
            held = self._held.to(outputs)
            return torch.einsum("nbk,nk->bk", outputs, held) / held.sum(0).clamp(min=1)
        return (outputs if self.by == "logits" else outputs.softmax(-1)).mean(0)
