"""What DENSE trains its student on: a generator from noise to inputs, the clients as one teacher, and their losses.

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

from maecho.errors import InputError
from maecho.network.hooks import watching

if TYPE_CHECKING:
    from jaxtyping import Float

NOISE = 256
"""Numbers that an input is generated from, as in the release."""

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


class Generator(nn.Module):
    """Noise to inputs of one shape: convolutions for images [channels, height, width], an MLP for everything else.

    Args:
        shape: of one input.
        width: channels before the image; an MLP has eight times as many neurons.
        output: what stands at the end and brings the numbers into the range of the data.
        rng: decides the initial weights; a generator on the CPU.
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
    """From a quarter of the height and width, rounded up, in two doublings."""
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
    """Every input with the mean and the spread that the clients report of it; without them 0 and 1 in every channel."""

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
    """The clients' models, frozen, as one.

    Args:
        models: in any mode; they are put in evaluation mode.
        by: their logits averaged, or the logarithm of their averaged probabilities.
    """

    def __init__(self, models: Sequence[nn.Module], by: Literal["logits", "probabilities"] = "logits"):
        self.models = [model.eval().requires_grad_(False) for model in models]
        self.by = by

    def __call__(self, x: Float[Tensor, "n ..."]) -> tuple[Float[Tensor, "n classes"], Float[Tensor, ""]]:
        """The logits of all together, and L_BN: the distance of x from what their BatchNorms saw, a client's mean."""
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
    """The BatchNorms that know the mean and the variance of what they saw."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and module.running_mean is not None
    ]


def logits(model: nn.Module, x: Tensor) -> Float[Tensor, "n classes"]:
    """What a model says of generated inputs; an error in one sentence if it does not take them."""
    try:
        output = model(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())
        kind = str(x.dtype).removeprefix("torch.")
        raise InputError(
            f"dense: the model must take {kind} inputs {tuple(x.shape)}, got an error: {reason}"
        ) from error
    output = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(x):
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"dense: the model must give one output a class for each of {len(x)} inputs, got {got}")
    return output


def batchnorm_distance(x: Float[Tensor, "n channels ..."], norm: BatchNorm) -> Float[Tensor, ""]:
    """‖mean(x) − running mean‖ + ‖var(x) − running variance‖, channel by channel."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    rows = x.transpose(0, 1).flatten(1)
    gaps = rows.mean(1) - norm.running_mean, rows.var(1, correction=0) - norm.running_var
    distance: Tensor = torch.linalg.vector_norm(gaps[0]) + torch.linalg.vector_norm(gaps[1])
    return distance


def divergence(
    teacher: Float[Tensor, "n classes"], student: Float[Tensor, "n classes"], temperature: float = 1.0
) -> Float[Tensor, " n"]:
    """KL(teacher ‖ student) of every input, both softened, times T², which keeps the gradient's size."""
    log_p, log_q = (out.div(temperature).log_softmax(1) for out in (teacher, student))
    return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1) * temperature**2


def boundary_support(teacher: Float[Tensor, "n classes"], student: Float[Tensor, "n classes"]) -> Float[Tensor, ""]:
    """L_div = −mean of ω · KL(teacher ‖ student), ω = 1 where the two decide differently and 0 elsewhere."""
    differ = teacher.argmax(1) != student.argmax(1)
    return -(differ * divergence(teacher, student)).mean()
