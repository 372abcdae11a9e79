"""What an upload costs the client, beside a forward pass over its data and an epoch of training, in one run.

An epoch is one pass of SGD in batches of 64, the batches that the statistics are gathered from too. Every statistic is
made alone, then the default upload, then uploads with what some methods need. On the CPU, seconds are those that this
process computes, on one thread, so other programs on the machine hardly matter.

    python benchmarks/client.py                            # all four networks; some minutes
    python benchmarks/client.py --networks mlp --quick
    python benchmarks/client.py --device cuda --networks cnn --examples 10000
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho import make_upload
from maecho.lab import networks
from maecho.statistics import STATISTICS

METHODS = ("fedavg", "ma-echo", "regmean", "echo-chain", "afl", "fisher")


@dataclass(frozen=True)
class Case:
    """A network and its data."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    examples: int
    quick: int
    classes: int = 10


class Scores(nn.Module):
    """A model of transformers that takes its inputs by position and returns its scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x).logits
        return out


def vit() -> nn.Module:
    """2.7 million weights: six blocks of width 192 on 64 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 768,
    }
    config = ViTConfig(**sizes, image_size=32, patch_size=4)
    config.num_labels = 10
    return Scores(ViTForImageClassification(config))


def minilm() -> nn.Module:
    """An encoder of MiniLM's sizes with a head for four classes. Its weights are random."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    }
    config = BertConfig(**sizes, vocab_size=30522)
    config.num_labels = 4
    return Scores(BertForSequenceClassification(config))


def images(count: int, channels: int, side: int) -> Tensor:
    """Smooth random images: neighbouring points are alike, as in photographs."""
    rough = torch.randn(count, channels, side // 4 + 1, side // 4 + 1)
    smooth = functional.interpolate(rough, size=(side, side), mode="bicubic", align_corners=True)
    return smooth + 0.3 * torch.randn(count, channels, side, side)


CASES: Mapping[str, Case] = {
    "mlp": Case(
        lambda: networks.build("mlp", torch.Generator().manual_seed(0)), lambda n: images(n, 1, 28), 60_000, 4_000
    ),
    "cnn": Case(
        lambda: networks.build("cnn", torch.Generator().manual_seed(0)), lambda n: images(n, 3, 32), 5_000, 300
    ),
    "vit": Case(vit, lambda n: images(n, 3, 32), 2_000, 64),
    "minilm": Case(minilm, lambda n: torch.randint(30522, (n, 64)), 256, 16, classes=4),
}
Batches = Sequence[tuple[Tensor, Tensor]]


class Clock:
    """Seconds of work on a device."""

    def __init__(self, device: str) -> None:
        self._gpu = device != "cpu"

    def now(self) -> float:
        if self._gpu:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def of(self, work: Callable[[], Any]) -> float:
        began = self.now()
        work()
        return self.now() - began


def forward(model: nn.Module, batches: Batches) -> None:
    with torch.no_grad():
        for x, _ in batches:
            model(x)


def epoch(model: nn.Module, batches: Batches) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5)
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def measure(name: str, examples: int, device: str, only: Sequence[str]) -> None:
    """Print the rows of one network."""
    torch.manual_seed(0)
    case, clock = CASES[name], Clock(device)
    x, y = case.inputs(examples).to(device), torch.randint(case.classes, (examples,), device=device)
    batches = list(zip(x.split(64), y.split(64), strict=True))
    model = case.build().to(device).eval()
    forward(model, batches[:2])  # so that nobody pays for the first call
    epoch(case.build().to(device), batches[:2])
    passes = clock.of(lambda: forward(model, batches))
    epochs = clock.of(lambda: epoch(model, batches))
    print(f"\n{name}, {examples} examples, {device}: forward pass {passes:.2f} s, epoch {epochs:.2f} s\n")
    print("| upload with | seconds | forward passes | epochs |\n|---|---|---|---|", flush=True)
    rows: dict[str, dict[str, Any]] = {one: {"statistics": [one]} for one in STATISTICS}
    rows["default"] = {}
    rows |= {f"for {method}": {"for_methods": [method]} for method in METHODS}
    for label, arguments in rows.items():
        if only and label not in only:
            continue
        took = clock.of(lambda: make_upload(model, batches, "a", progress=False, **arguments))  # noqa: B023
        print(f"| {label} | {took:.2f} | {took / passes:.2f} | {took / epochs:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--examples", type=int, help="by default each network has its own number")
    parser.add_argument("--quick", action="store_true", help="few examples: shows that it runs, the ratios mean little")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=[], help="rows to measure: names of statistics, default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of what these networks cannot send
    for name in options.networks:
        case = CASES[name]
        count = options.examples or (case.quick if options.quick else case.examples)
        measure(name, count, options.device, options.only)


if __name__ == "__main__":
    main()
