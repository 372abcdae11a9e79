"""Decoders that were trained on some digits each, merged into one that draws all (Figure 4).

A decoder is a network from [z, one-hot class] to pixels. The statistics of its inputs need no image: z has the normal
distribution that decoders are trained for, and the classes are the client's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maecho import disk
from maecho.aggregation import aggregate, choose
from maecho.echo.relay import relay
from maecho.errors import InputError
from maecho.lab import columns, networks
from maecho.lab.charts import Image, Pictures
from maecho.lab.data import Dataset
from maecho.lab.experiment import Experiment
from maecho.lab.harness.cache import cache_folder, digest
from maecho.lab.harness.clients import Cohort
from maecho.lab.harness.code import Code
from maecho.lab.harness.streams import stream
from maecho.lab.studies import cvae
from maecho.lab.studies.cvae import Shape
from maecho.lab.studies.found import Found, Task
from maecho.lab.training import LocalTraining
from maecho.network import spaces
from maecho.statistics import STATISTICS
from maecho.statistics.projector import RELEASED_MEAN_OF
from maecho.upload import storage
from maecho.upload.client import make_upload

BATCH = 1024


def _methods() -> dict[str, dict[str, Any]]:
    return {
        "average": {"method": "fedavg", "weighting": "uniform"},
        "ma-echo": {"method": "ma-echo"},
        "regmean": {"method": "regmean"},
        "echo-relay": {"method": "echo-relay"},
    }


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What merged decoders draw, and how much of it a classifier reads right."""

    data: str = "mnist"
    labels: tuple[tuple[int, ...], ...] = ((0, 1, 3, 4, 7), (2, 5, 6, 8, 9))
    """The classes of each client."""
    same: bool = True
    """Whether all clients start from the same weights."""
    latent: int = 30
    hidden: tuple[int, ...] = (256, 512)
    training: cvae.Training = field(default_factory=cvae.Training)
    draws: int = 20_000
    """How many inputs each client's statistics are gathered on."""
    methods: dict[str, dict[str, Any]] = field(default_factory=_methods)
    reader: str = "mlp"
    """The network of the classifier. It is trained on all training images."""
    reading: LocalTraining = field(default_factory=LocalTraining)
    each: int = 100
    """How many images of each class are read."""

    def __post_init__(self) -> None:
        if len(self.labels) < 2 or not all(self.labels):
            raise ValueError(f"labels must list the classes of two clients or more, got {list(self.labels)}")
        if min(self.latent, self.draws, self.each, *self.hidden) < 1:
            raise ValueError("latent, hidden, draws and each must be at least 1, got less")
        if self.reader not in networks.NETWORKS:
            raise ValueError(f"reader must be among {', '.join(networks.NETWORKS)}, got {self.reader!r}")
        for options in self.methods.values():
            if options.get("method") in ("local", "pooled", "ensemble"):
                raise ValueError(f"methods must merge decoders, got {options['method']!r}")
            if options.get("method") == "echo-relay":
                columns.protocol(options, 0)
            else:
                choose(**options)

    @property
    def rows(self) -> tuple[Any, ...]:
        chosen = [choose(**one)[1] for one in self.methods.values() if one["method"] != "echo-relay"]
        needed = {name for one in self.methods.values() for name in columns.gathered(one)}
        return (
            networks.NETWORKS[self.reader],
            *map(type, chosen),
            *(type(STATISTICS[name]) for name in sorted(needed)),
        )

    def __call__(self, task: Task) -> Found:
        shape = Shape(task.data.classes, task.data.x_train[0].numel(), self.latent, self.hidden)
        everything = tuple(sorted(label for own in self.labels for label in own))
        groups = [*self.labels, everything]
        decoders = [self._decoder(shape, own, task, k / (len(groups) + 1), len(groups)) for k, own in enumerate(groups)]
        locals_, ideal = decoders[:-1], decoders[-1]
        task.tell(len(groups) / (len(groups) + 1), "merges, draws and reads")
        reader = self._reader(task)
        z = torch.randn(self.each * shape.classes, shape.latent, generator=self._rng("draws", task.seed))
        classes = torch.arange(shape.classes).repeat(self.each)
        test = task.data.x_test, task.data.y_test
        numbers = {"real test images read right": 100 * _right(reader, *test)}
        pictures: dict[str, list[Image]] = {}
        merged = self._merged(shape, locals_, task)
        shown = {_words(own): decoder for own, decoder in zip(self.labels, locals_, strict=True)}
        for words, decoder in {**shown, **merged, "trained on everything": ideal}.items():
            images = cvae.drawn(shape, decoder, z, classes)
            numbers[f"drawn digits read right, {words}"] = 100 * _right(reader, as_inputs(task.data, images), classes)
            pictures[words] = [as_picture(task.data, image) for image in images[: shape.classes]]
        for own, decoder in zip(self.labels, locals_, strict=True):
            inside = torch.isin(classes, torch.tensor(own))
            images = cvae.drawn(shape, decoder, z[inside], classes[inside])
            right = _right(reader, as_inputs(task.data, images), classes[inside])
            numbers[f"of its own digits, {_words(own)}"] = 100 * right
        title = "Drawn digits: every column has one class and one z"
        return Found(numbers, [Pictures(title, [str(label) for label in range(shape.classes)], pictures)])

    def _merged(self, shape: Shape, decoders: Sequence[nn.Module], task: Task) -> dict[str, nn.Module]:
        """Every method's decoder."""
        clients = [
            (decoder, self._inputs(shape, own, task, i))
            for i, (own, decoder) in enumerate(zip(self.labels, decoders, strict=True))
        ]
        needed = sorted({name for one in self.methods.values() for name in columns.gathered(one)} - {"classes"})
        uploads = [
            make_upload(decoder, batches, f"client-{i}", needed, None, False, mean_of=RELEASED_MEAN_OF)
            for i, (decoder, batches) in enumerate(clients)
        ]
        found = {}
        for name, options in self.methods.items():
            model = shape.decoder(torch.Generator().manual_seed(0)).to(task.device)
            if options["method"] == "echo-relay":
                state: Mapping[str, Tensor] = relay(
                    model, clients, progress=False, **columns.protocol(options, task.seed)
                )
            else:
                state = aggregate(uploads, **options)
            found[name] = spaces.load(model, state).eval()
        return found

    def _inputs(self, shape: Shape, own: Sequence[int], task: Task, client: int) -> list[Tensor]:
        """Inputs of a client's decoder, in batches: classes as its data have them, and z as the decoder expects it."""
        rng = self._rng("inputs", task.seed, client=client)
        known = task.data.y_train[torch.isin(task.data.y_train, torch.tensor(own))]
        labels = known[torch.randint(len(known), (self.draws,), generator=rng)]
        z = torch.randn(self.draws, shape.latent, generator=rng)
        return list(shape.inputs(z, labels).to(task.device).split(BATCH))

    def _decoder(self, shape: Shape, own: tuple[int, ...], task: Task, done: float, parts: int) -> nn.Module:
        """The decoder that is trained on the examples of these classes. It is read from the cache if it is there."""
        initial = self._rng("initial weights", task.seed, client=None if self.same else list(own))
        rng = self._rng("training", task.seed, labels=list(own))
        code = Code.of(Shape, cvae.Training, cvae.negative_bound)
        identity = digest(
            task.data.digest, list(own), repr(shape), repr(self.training), initial.initial_seed(), rng.initial_seed(),
            code.digest,
        )  # fmt: skip
        path = cache_folder() / "decoders" / f"{identity}.safetensors"
        decoder = shape.decoder(initial)
        with disk.locked(path):
            if path.exists():
                with contextlib.suppress(InputError, RuntimeError):  # a damaged file is replaced
                    storage.read_about(path, "model")
                    decoder.load_state_dict(storage.read_tensors(path))
                    return decoder.to(task.device).eval()
            index = torch.isin(task.data.y_train, torch.tensor(own))
            x = task.data.pixels(task.data.x_train[index]).flatten(1)
            encoder = shape.encoder(initial).to(task.device)

            def on_epoch(epoch: int, loss: float) -> None:
                share = epoch / self.training.epochs / (parts + 1)
                task.tell(done + share, f"trains on {_digits(own)}: epoch {epoch}, loss {loss:.1f}")

            self.training(shape, encoder, decoder.to(task.device), x, task.data.y_train[index], rng, on_epoch)
            storage.write_tensors(
                path,
                "model",
                decoder.cpu().state_dict(),
                {"recipe": {}, "trained": {"labels": list(own), "seed": task.seed}},
            )
        return decoder.to(task.device).eval()

    def _reader(self, task: Task) -> nn.Module:
        """The classifier, trained on all training images, from another stream than anything that is drawn."""
        cell = {"reader": True}
        experiment = Experiment("study", "", self.data, self.reader, (task.seed,), (cell,), {}, self.reading)
        whole = [np.arange(len(task.data.y_train))]
        (found,) = Cohort(experiment, cell, task.seed, task.data, whole).train(task.device)
        return found.model.to(task.device)

    def _rng(self, purpose: str, seed: int, **more: Any) -> torch.Generator:
        sequence = stream(f"decoders: {purpose}", data=self.data, seed=seed, **more)
        return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0]) >> 1)


def as_inputs(dataset: Dataset, pixels: Tensor) -> Tensor:
    """Drawn pixels in [0, 1] as the data set has its inputs: in its shape, and standardised."""
    x = pixels.view(len(pixels), *dataset.x_train.shape[1:])
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, std = (torch.tensor(each, dtype=x.dtype).view(shape) for each in (dataset.mean, dataset.std))
    return (x - mean) / std


def as_picture(dataset: Dataset, pixels: Tensor) -> Image:
    """A square image of grey values."""
    side = round(pixels.numel() ** 0.5)
    found: Image = (255 * pixels.view(side, side)).round().int().tolist()
    return found


@torch.no_grad()
def _right(reader: nn.Module, x: Tensor, classes: Tensor) -> float:
    """The share of inputs that the classifier reads as these classes."""
    device = next(reader.parameters()).device
    return float((reader(x.to(device)).argmax(1).cpu() == classes).double().mean())


def _digits(own: Sequence[int]) -> str:
    return ", ".join(map(str, own))


def _words(own: Sequence[int]) -> str:
    return f"trained on {_digits(own)}"
