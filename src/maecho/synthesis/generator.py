"""The parts that DENSE trains its student with: a generator of inputs, the clients as one teacher, and the losses.

Nothing here knows uploads or files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho.errors import InputError, text_of
from maecho.network.batches.reading import scores
from maecho.network.hooks import watching
from maecho.network.norms import BatchNorm

if TYPE_CHECKING:
    from jaxtyping import Float

NOISE = 256
"""How many random numbers an input is generated from, as in the release."""


class Generator(nn.Module):
    """Turns noise into inputs of one shape, by convolutions for images [channels, height, width], else by an MLP.

    Args:
        shape: the shape of one input.
        width: the number of channels before the image. An MLP has eight times as many neurons.
        output: the last module. It brings the numbers into the range of the data.
        rng: the source of the initial weights, a generator on the CPU.
    """

    def __init__(self, shape: tuple[int, ...], width: int, output: nn.Module, rng: torch.Generator):
        super().__init__()
        layers = _image_layers(shape, width) if len(shape) == 3 else _flat_layers(prod(shape), 8 * width)
        self.layers, self.output, self.shape = nn.Sequential(*layers), output, shape
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() > 1:
                    p.normal_(0, 0.02, generator=rng)
                elif name.endswith("bias"):
                    p.zero_()

    def forward(self, z: Float[Tensor, "n noise"]) -> Float[Tensor, "n ..."]:
        x: Tensor = self.output(self.layers(z).reshape(len(z), *self.shape))
        return x


def _image_layers(shape: tuple[int, ...], width: int) -> list[nn.Module]:
    """Start with a quarter of the height and width, rounded up, and double them twice."""
    channels, *size = shape
    half, quarter = (tuple(-(-length // part) for length in size) for part in (2, 4))
    return [
        nn.Linear(NOISE, 2 * width * prod(quarter)),
        nn.Unflatten(1, (2 * width, *quarter)),
        nn.BatchNorm2d(2 * width),
        nn.Upsample(size=half),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Upsample(size=tuple(size)),
        nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, channels, 3, padding=1),
    ]


def _flat_layers(inputs: int, hidden: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before in (NOISE, hidden):
        layers += [nn.Linear(before, hidden, bias=False), nn.BatchNorm1d(hidden), nn.LeakyReLU(0.2)]
    return [*layers, nn.Linear(hidden, inputs)]


class Standardised(nn.Module):
    """Gives a batch of inputs the mean and the standard deviation that the clients report. Without reports these are 0
    and 1 in every channel."""

    mean: Tensor
    spread: Tensor

    def __init__(self, shape: tuple[int, ...], moments: tuple[Tensor, Tensor] | None = None):
        super().__init__()
        channels = shape[:1] or (1,)
        mean, spread = moments or (torch.zeros(channels), torch.ones(channels))
        self.register_buffer("mean", mean)
        self.register_buffer("spread", spread)
        self.norm = nn.BatchNorm1d(len(mean), affine=False, track_running_stats=False)

    def forward(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        standard: Tensor = self.norm(x.reshape(len(x), len(self.mean), -1))
        return (standard * self.spread[:, None] + self.mean[:, None]).reshape(x.shape)


class Teachers:
    """Runs the clients' models as one teacher. The models are frozen and put in evaluation mode.

    Args:
        models: the clients' models.
        by: "logits" averages their logits; "probabilities" takes the logarithm of their averaged probabilities.
    """

    def __init__(self, models: Sequence[nn.Module], by: Literal["logits", "probabilities"] = "logits"):
        self.models = [model.eval().requires_grad_(False) for model in models]
        self.by = by

    def __call__(self, x: Float[Tensor, "n ..."]) -> tuple[Float[Tensor, "n classes"], Float[Tensor, ""]]:
        """The logits of the teacher, and L_BN averaged over clients: how far the statistics of x are from those in the
        clients' BatchNorms."""
        distances: list[Tensor] = []

        def compare(name: str, norm: nn.Module, inputs: Tensor) -> None:
            assert isinstance(norm, BatchNorm)
            distances.append(batchnorm_distance(inputs, norm))

        outputs = []
        for model in self.models:
            with watching(model, _remembering(model), compare):
                outputs.append(logits(model, x))
        each = torch.stack(outputs)
        distance = sum(distances, start=x.new_zeros(())) / len(self.models)
        if self.by == "logits":
            return each.mean(0), distance
        return each.log_softmax(-1).logsumexp(0) - math.log(len(self.models)), distance


def _remembering(model: nn.Module) -> list[str]:
    """The names of the BatchNorms that hold a running mean and variance."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and module.running_mean is not None
    ]


def logits(model: nn.Module, x: Tensor) -> Float[Tensor, "n classes"]:
    """The model's outputs for generated inputs. Raises InputError if the model cannot take them."""
    try:
        output = model(x.clone())  # a model may write into its inputs, and others get them too
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        kind = str(x.dtype).removeprefix("torch.")
        raise InputError(
            f"dense: the model must take {kind} inputs {tuple(x.shape)}, got an error: {text_of(error)}"
        ) from error
    output = scores(output)
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(x):
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"dense: the model must give one output for each class and each of {len(x)} inputs, got {got}")
    return output


def batchnorm_distance(x: Float[Tensor, "n channels ..."], norm: BatchNorm) -> Float[Tensor, ""]:
    """‖mean(x) − running mean‖ + ‖var(x) − running variance‖, with one mean and one variance for each channel."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    rows = x.transpose(0, 1).flatten(1)
    gaps = rows.mean(1) - norm.running_mean, rows.var(1, correction=0) - norm.running_var
    distance: Tensor = torch.linalg.vector_norm(gaps[0]) + torch.linalg.vector_norm(gaps[1])
    return distance


def divergence(
    teacher: Float[Tensor, "n classes"], student: Float[Tensor, "n classes"], temperature: float = 1.0
) -> Float[Tensor, " n"]:
    """KL(teacher ‖ student) of every input at temperature T, times T². That factor keeps the size of the gradient."""
    log_p, log_q = (out.div(temperature).log_softmax(1) for out in (teacher, student))
    return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1) * temperature**2


def boundary_support(teacher: Float[Tensor, "n classes"], student: Float[Tensor, "n classes"]) -> Float[Tensor, ""]:
    """L_div = −mean of ω · KL(teacher ‖ student), with ω = 1 if the two choose different classes and 0 if not."""
    differ = teacher.argmax(1) != student.argmax(1)
    return -(differ * divergence(teacher, student)).mean()
