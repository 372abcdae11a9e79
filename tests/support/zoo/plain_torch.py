"""Networks of plain torch as people write them: recurrent, with parametrizations, adapters, wrappers, skips."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from support.zoo.entry import (
    CLASSES,
    LENGTH,
    TOKENS,
    Draw,
    Entry,
    pictures,
    sequences,
    small_pictures,
    tokens,
    vectors,
)


class Encoder(nn.Module):
    """torch's own transformer, on tokens with learned places."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Embedding(TOKENS, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.place, self.head = nn.Parameter(0.1 * torch.randn(LENGTH, 16)), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x) + self.place).mean(1))


class AttentionPooling(nn.Module):
    """A learned query that looks at all places."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.query = nn.Linear(5, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x).relu()
        return self.head(self.attention(self.query.expand(len(h), -1, -1), h, h, need_weights=False)[0][:, 0])


class Recurrent(nn.Module):
    """The last state of an LSTM, GRU or RNN."""

    def __init__(self, cell: type[nn.RNNBase], **options: object):
        super().__init__()
        self.cell = cell(5, 12, batch_first=True, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class TextOfWords(nn.Module):
    """Embedded words, read by a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (
            nn.Embedding(TOKENS, 8),
            nn.GRU(8, 12, batch_first=True),
            nn.Linear(12, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(x))[1][-1])


class Autoencoder(nn.Module):
    """A picture is made small, a second branch makes it large again, and both give scores."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(6, 1, 4, 2, 1))
        self.head, self.of_error = nn.Linear(32, CLASSES), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        code = self.down(x)
        return self.head(code.flatten(1)) + self.of_error((self.up(code) - x).flatten(1))


class UNet(nn.Module):
    """Two resolutions, a skip by concatenation, and the mean of a map of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.two = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU())
        self.up, self.last = nn.Upsample(scale_factor=2), nn.Conv2d(16, 8, 3, padding=1)
        self.scores = nn.Linear(8 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.one(x)
        h = self.last(torch.cat([skip, self.up(self.two(skip))], 1)).relu()
        return self.scores(nn.functional.avg_pool2d(h, 2).flatten(1))


class Block(nn.Module):
    """A residual block with GroupNorm."""

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(2, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(2, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter that is trained, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A, self.B = (
            nn.Parameter(0.3 * torch.randn(rank, base.in_features)),
            nn.Parameter(torch.zeros(base.out_features, rank)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.A.T @ self.B.T


class AdaptedByLayers(nn.Module):
    """The same with two linear layers, as the package peft has it."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(x))


class Bag(nn.Module):
    """The mean of the words of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.one, self.head = nn.EmbeddingBag(TOKENS, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.one(self.bag(x)).relu())


class TwoWays(nn.Module):
    """Two views of the same numbers, joined by a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 6), nn.Linear(12, 5)
        self.join, self.head = nn.Bilinear(6, 5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.join(self.left(x).relu(), self.right(x).tanh()).relu())


class Mixed(nn.Module):
    """An MLP-mixer: layers along the places, then along the features."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.places = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
        self.features = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        h = h + self.places(self.norm(h).mT).mT
        return self.head((h + self.features(h)).mean(1))


def mlp(*change: object) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, CLASSES))


def each_layer(change: object, make: object = mlp) -> nn.Module:
    """The MLP with every layer changed."""
    model = make()
    for i, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            model[i] = change(layer)
    return model


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 2, 2), nn.BatchNorm2d(8), nn.GELU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, CLASSES),
    )  # fmt: skip


def residual() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), Block(8), nn.Conv2d(8, 12, 3, 2, 1), Block(12), nn.GroupNorm(3, 12),
                         nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, CLASSES))  # fmt: skip


def volumes() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 6, (2, 4, 4), (1, 4, 4)), nn.BatchNorm3d(6), nn.ReLU(),
                         nn.AvgPool3d((1, 2, 2)), nn.Flatten(), nn.Linear(48, 12), nn.PReLU(),
                         nn.Linear(12, CLASSES))  # fmt: skip


def temporal() -> nn.Module:
    return nn.Sequential(nn.Conv1d(6, 8, 3, padding=2, dilation=2), nn.BatchNorm1d(8), nn.ReLU(),
                         nn.Conv1d(8, 8, 3, padding="same", groups=2), nn.ReLU(), nn.Flatten(),
                         nn.Linear(40, CLASSES))  # fmt: skip


def entry(make: object, draw: Draw, **options: object) -> Entry:
    return Entry(make, draw, rate=1e-2, **options)


PLAIN_TORCH: dict[str, Entry] = {
    "nn.TransformerEncoder": entry(Encoder, tokens),
    "attention pooling": entry(AttentionPooling, sequences),
    "LSTM": entry(lambda: Recurrent(nn.LSTM), sequences),
    "bidirectional GRU": entry(lambda: Recurrent(nn.GRU, bidirectional=True, num_layers=2), sequences),
    "RNN": entry(lambda: Recurrent(nn.RNN), sequences),
    "GRU on words": entry(TextOfWords, tokens),
    "weight norm": entry(lambda: each_layer(parametrizations.weight_norm), vectors),
    "spectral norm": entry(lambda: each_layer(parametrizations.spectral_norm), vectors),
    "orthogonal": entry(lambda: each_layer(parametrizations.orthogonal), vectors),
    "autoencoder": entry(Autoencoder, small_pictures),
    "EmbeddingBag": entry(Bag, tokens),
    "Bilinear": entry(TwoWays, vectors),
    "U-Net": entry(UNet, small_pictures),
    "depthwise CNN": entry(depthwise, pictures),
    "GroupNorm ResNet": entry(residual, pictures),
    "3d CNN": entry(volumes, pictures),
    "temporal CNN": entry(temporal, sequences),
    "MLP-mixer": entry(Mixed, sequences),
    "adapters": entry(lambda: each_layer(Adapted), vectors),
    "adapters of layers": entry(lambda: each_layer(AdaptedByLayers), vectors),
    "compiled": entry(lambda: torch.compile(mlp(), backend="eager"), vectors),
    "DataParallel": entry(lambda: nn.DataParallel(mlp()), vectors),
}
