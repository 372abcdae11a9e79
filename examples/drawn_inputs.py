"""What echo-chain draws, to look at: paintings of shapes, the same made white, and images drawn with the means and
covariances of two classes from Gaussian noise and from the white paintings.

    python examples/drawn_inputs.py --data cifar10 --classes 7 8 --out docs/leaves.png   # needs maecho[plots]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from maecho.lab import data
from maecho.statistics.moments import ClassScatter
from maecho.synthesis import leaves
from maecho.synthesis.pseudo import draw

COLUMNS = 12


def rows(dataset: data.Dataset, classes: list[int]) -> dict[str, Tensor]:
    """Images [COLUMNS, channels, height, width] by what they are."""
    rng, shape = torch.Generator().manual_seed(0), tuple(dataset.x_train.shape[1:])
    painted = leaves.paint(COLUMNS, shape, rng)
    white = leaves.draw_white(shape, COLUMNS, rng, torch.device("cpu")).reshape(painted.shape)
    found = {"shapes over shapes": painted, "made white": white}
    for label in classes:
        x = dataset.x_train[dataset.y_train == label]
        scatter = ClassScatter()
        scatter.add(x, None)
        moments = scatter.moments()
        found[f"class {label}, Gaussian"] = draw(moments, 0, COLUMNS, rng, torch.float32, "gaussian")
        found[f"class {label}, leaves"] = draw(moments, 0, COLUMNS, rng, torch.float32, "leaves")
    return found


def picture(found: dict[str, Tensor], path: Path) -> None:
    drawn = Figure(figsize=(0.62 * COLUMNS + 1.6, 0.66 * len(found)), layout="constrained")
    for axes, (name, images) in zip(drawn.subplots(len(found), 1), found.items(), strict=True):
        low, high = torch.quantile(images.flatten()[:100_000], torch.tensor([0.01, 0.99]))
        strip = ((images - low) / (high - low)).clamp(0, 1).permute(2, 0, 3, 1).flatten(1, 2)
        axes.imshow(strip.squeeze(-1).numpy(), cmap="gray", interpolation="nearest")
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        axes.set(xticks=[], yticks=[], frame_on=False)
    drawn.savefig(path, dpi=110)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--classes", nargs="+", type=int, default=[3, 8])
    parser.add_argument("--out", type=Path, default=Path("drawn-inputs.png"))
    options = parser.parse_args(words)
    picture(rows(data.load(options.data), options.classes), options.out)
    print(f"{options.out}: {COLUMNS} images a row")


if __name__ == "__main__":
    main()
