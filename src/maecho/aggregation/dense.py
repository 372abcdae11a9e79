"""DENSE: the clients' ensemble distilled into one model, on inputs from a generator that is trained against it.

    generator:  min_G  CE(D(x), y) + λ1 L_BN(x) − λ2 ω KL(D(x) ‖ f(x)),    x = G(z),  D = mean of the clients' logits
    student:    min_f  KL(D(x) ‖ f(x))

ω is 1 where the student f and the ensemble D decide differently, else 0 (Zhang et al., NeurIPS 2022). As in the
release, every epoch starts with a new generator, one batch of noise and random labels. It trains the generator and the
noise. The inputs that they give at their best step join a pool, and the student learns from the whole pool. No other
method here trains on the server.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho import devices
from maecho.aggregation.average import Mean
from maecho.aggregation.method import Guide, assemble
from maecho.alignment.skeleton import skeleton
from maecho.errors import InputError, UploadError
from maecho.network.packed.twin import twin_of
from maecho.options import NOT_NEGATIVE, POSITIVE, number, one_of
from maecho.progress import track
from maecho.randomness import global_seed
from maecho.synthesis.generator import NOISE, Generator, Standardised, Teachers, boundary_support, divergence, logits
from maecho.upload.cohort import Cohort
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload

GENERATOR_RATE, GENERATOR_BETAS = 1e-3, (0.5, 0.999)
"""The learning rate and the betas of the generator's Adam, as in the release."""
MOMENTUM = 0.9
LARGEST_GRADIENT = 10.0
"""A longer gradient of the student is cut to this length. If inputs are on a large scale, one step could otherwise ruin
the student."""


@dataclass(frozen=True)
class DENSE:
    """Distillation of the clients' ensemble, on the server.

    The defaults take about a minute on a CPU. The paper's budget is `epochs=200, generator_steps=30`, with the
    release's `batch_size=256, width=64`, for a GPU.

    Args:
        epochs: how often a new generator is trained, and then the student.
        generator_steps: how many steps of Adam the generator takes in every epoch.
        student_steps: how many steps of SGD the student takes in every epoch, on batches from all inputs so far. The
            release passes over them once, which is 100 steps on average over its 200 epochs.
        batch_size: how many inputs are generated in an epoch, and how many a batch of the student has.
        width: the number of channels of the generator.
        learning_rate: the learning rate of the student.
        temperature: the temperature of the distillation.
        batchnorm: λ1, the weight of L_BN. It has no effect on networks without BatchNorm.
        boundary: λ2, the weight of the boundary-support divergence.
        ensemble: the teacher is the mean of the "logits" as in the paper, or of the "probabilities".
        start: the student starts from the "average" of the clients by examples, or from new weights ("random", as in
            the paper).
        input_shape: the shape of one input, e.g. (1, 28, 28). By default it is read from the uploads' moments.
        scale: the range of generated inputs. "moments": every pixel or feature gets the mean and spread that the
            uploads' moments report. This is the default without an `input_shape`. "standard": every channel gets mean 0
            and spread 1, by a BatchNorm without parameters at the end. It suits data that were standardised, and is the
            default with an `input_shape`. "unit": a sigmoid, for pixels in [0, 1], as in the release. The last two use
            nothing of the clients' data.
        seed: the seed of everything that is random.
        device: where to train, e.g. "cpu". By default CUDA if there is one. The result is where the uploads are.
        model: the network that the uploads are weights of. Its own weights do not matter, and it is not changed.
    """

    guide: ClassVar[Guide] = Guide(
        does=(
            "trains on the server: a generator against the ensemble of the clients, then one model on what it generates"
        ),
        uploads="moments, or only `input_shape=`; the server needs the network itself (`model=`)",
        different="yes",
        convolutions="yes",
        residual="yes",
        cost="a minute on a CPU with the small budget, minutes on a GPU with the paper's; memory of all models",
        when="training on the server is allowed and the ensemble is good",
    )

    epochs: int = 20
    generator_steps: int = 15
    student_steps: int = 100
    batch_size: int = 128
    width: int = 16
    learning_rate: float = 0.01
    temperature: float = 4.0
    batchnorm: float = 1.0
    boundary: float = 0.5
    ensemble: Literal["logits", "probabilities"] = "logits"
    start: Literal["average", "random"] = "average"
    input_shape: tuple[int, ...] | None = None
    scale: Literal["moments", "standard", "unit"] | None = None
    seed: int = 0
    device: devices.Device | None = None
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("epochs", "generator_steps", "student_steps", "width"):
            number(name, getattr(self, name), "a whole number, at least 1", 1, whole=True)
        number("batch_size", self.batch_size, "a whole number, at least 2 (BatchNorm needs two)", 2, whole=True)
        number("learning_rate", self.learning_rate, POSITIVE, 0)
        number("temperature", self.temperature, POSITIVE, 0)
        number("batchnorm", self.batchnorm, NOT_NEGATIVE, 0)
        number("boundary", self.boundary, NOT_NEGATIVE, 0)
        number("seed", self.seed, "a whole number, at least 0", 0, whole=True)
        one_of("ensemble", self.ensemble, ("logits", "probabilities"))
        one_of("start", self.start, ("average", "random"))
        one_of("scale", self.scale, (None, "moments", "standard", "unit"))
        if self.input_shape is not None:
            if not isinstance(self.input_shape, tuple | list) or not self.input_shape:
                raise InputError(f"input_shape must be the lengths of one input's axes, got {self.input_shape!r}")
            for length in self.input_shape:
                number("input_shape", length, "of whole numbers, at least 1", 1, whole=True)
            object.__setattr__(self, "input_shape", tuple(self.input_shape))  # a config or command line gives a list
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError) as error:
                raise InputError(f"device must be one of torch's, such as cpu or cuda, got {self.device!r}") from error

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"moments"} if self.input_shape is None or self._scale == "moments" else ())

    @property
    def _scale(self) -> str:
        return self.scale or ("moments" if self.input_shape is None else "standard")

    def __call__(self, uploads: Sequence[Upload]) -> Merged:
        uploads = uploads if isinstance(uploads, Cohort) else Cohort(uploads, self.needs, "dense")
        # In the order of names, so that the result does not depend on the order of the clients.
        uploads = sorted(uploads, key=lambda upload: upload.client)
        first, mean = uploads[0], Mean()
        network = twin_of(skeleton(self.model, first, "dense", "trains"), always_copy=False).network
        shape, output = self._inputs(uploads)
        device = devices.find(self.device or ("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
        models = []
        for upload in uploads:
            mean.add(upload)
            models.append(copy.deepcopy(network))
            models[-1].load_state_dict(upload.tied(upload.weights))
        dtype = devices.float32_or_finer(first.weights.values())
        with global_seed(self.seed, device), torch.enable_grad():
            student = devices.cast(self._student(network, first, mean), device, dtype)
            began = {name: tensor.clone() for name, tensor in student.state_dict().items()}
            teachers = Teachers([devices.cast(model, device, dtype) for model in models], self.ensemble)
            self._train(student, teachers, shape, output.to(device, dtype))
        ended = student.state_dict()
        merged = assemble(first, {name: ended[name].to(tensor.device) for name, tensor in first.weights.items()}, {})
        kept = [name for name in first.weights if torch.equal(began[name], ended[name])]
        merged.averaged = tuple(first.model_names(kept)) if self.start == "average" else ()
        return merged

    def _train(self, student: nn.Module, teachers: Teachers, shape: tuple[int, ...], output: nn.Module) -> None:
        """Run both stages in turn, on the device of the student."""
        parameters = [p for p in student.parameters() if p.requires_grad]
        if not parameters:
            raise InputError(f"dense: the model must have parameters to train, got {type(student).__name__} with none")
        optimizer = torch.optim.SGD(parameters, self.learning_rate, momentum=MOMENTUM)
        rng = torch.Generator().manual_seed(self.seed)
        pool = answers = torch.empty(0)
        like = next((p for p in parameters if not p.is_complex()), parameters[0])
        for _ in track(range(self.epochs), "dense"):
            student.eval()
            generator = Generator(shape, self.width, output, rng).to(like)
            x = self._synthesise(generator, student, teachers, rng)
            with torch.no_grad():
                answer, _ = teachers(x)
            pool, answers = (torch.cat([pool, x]), torch.cat([answers, answer])) if len(pool) else (x, answer)
            student.train()
            for _ in range(self.student_steps):
                rows = torch.randint(len(pool), (self.batch_size,), generator=rng).to(pool.device)
                optimizer.zero_grad()
                divergence(answers[rows], logits(student, pool[rows]), self.temperature).mean().backward()
                nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
                optimizer.step()
        student.eval()

    def _synthesise(self, generator: Generator, student: nn.Module, teachers: Teachers, rng: torch.Generator) -> Tensor:
        """Stage 1: train a new generator, and return the batch of inputs from its best step."""
        like = next(generator.parameters())
        z = torch.randn(self.batch_size, NOISE, generator=rng).to(like).requires_grad_()
        trained = [*generator.parameters(), z]
        optimizer = torch.optim.Adam(trained, GENERATOR_RATE, betas=GENERATOR_BETAS)
        labels: Tensor | None = None
        least = best = like.new_zeros(())
        for step in range(self.generator_steps):
            x = generator(z)
            answer, distance = teachers(x)
            if labels is None:
                labels = torch.randint(answer.shape[1], (self.batch_size,), generator=rng).to(like.device)
            loss = functional.cross_entropy(answer, labels) + self.batchnorm * distance
            if self.boundary:
                loss = loss + self.boundary * boundary_support(answer, logits(student, x))
            now, made = loss.detach(), x.detach()
            if step:  # chosen on the device, so that Python does not wait for a GPU
                made, now = torch.where(now < least, made, best), torch.where(now < least, now, least)
            least, best = now, made
            optimizer.zero_grad()
            loss.backward(inputs=trained)
            optimizer.step()
        return best

    def _student(self, network: nn.Module, first: Upload, mean: Mean) -> nn.Module:
        student = copy.deepcopy(network).cpu()  # on the CPU: a random start is the same for every device
        if self.start == "average":
            weights = mean.weights()
            student.load_state_dict(first.tied(weights))
            return student
        for module in student.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        return student

    def _inputs(self, uploads: Sequence[Upload]) -> tuple[tuple[int, ...], nn.Module]:
        """The shape of one input, and the module that brings the generator's numbers into the range of the data."""
        shape = self.input_shape
        for upload in uploads if self.needs else ():
            shape = shape or upload.statistics["moments"].shape
            got = upload.statistics["moments"].shape
            if got != shape:
                whose = "input_shape says" if self.input_shape else f"{uploads[0].client}'s are"
                raise UploadError(f"{upload.client}: inputs must be {shape} as {whose}, got {got}")
        assert shape is not None
        if self._scale == "unit":
            return shape, nn.Sigmoid()
        return shape, Standardised(shape, _pooled(uploads) if self._scale == "moments" else None)


def _pooled(uploads: Sequence[Upload]) -> tuple[Tensor, Tensor]:
    """Mean and spread of every pixel or feature, over all clients and classes."""
    moments = [upload.statistics["moments"] for upload in uploads]
    counts = torch.cat([m.counts.double().cpu() for m in moments])
    p = counts / counts.sum()
    means = torch.cat([m.means.double().cpu() for m in moments])
    within = [m.variances.cpu().expand(len(m.means), -1) for m in moments]  # one covariance may be shared by all
    mean = p @ means
    return mean, (p @ (torch.cat(within) + (means - mean) ** 2)).sqrt()
