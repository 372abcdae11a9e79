"""White noise with edges: paintings of shapes over shapes ("dead leaves"), made white.

A server knows the means and covariances of a client's images. Gaussian images have the same ones, but no edges, and
convolutions look for edges. Edges like those of natural images can be made without data: shapes of all sizes that cover
each other have much in common with natural images (Lee, Mumford, Huang 2001; Baradad et al., "Learning to See by
Looking at Noise", 2021). A few such paintings on a torus are whitened exactly. Shifted at random they are stationary,
so their covariance is one matrix [channels, channels] for each frequency:

    w = F⁻¹ S^(−1/2) F (x − mean),   S(k) = mean of F(x)(k) F(x)(k)ᴴ

A randomly shifted w has mean 0 and covariance I, like Gaussian noise, and takes the place of Gaussian noise.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

SHAPES = 32
"""How many shapes are painted over each other."""
PAINTINGS = 1024
"""How many paintings are made of small images. Of larger ones there are so many that all have a million pixels
together, but at least 64."""
SMALLEST = 1.5
"""The smallest radius in pixels. The number of shapes falls with the cube of the radius, as in natural images."""
CHANNELS = 4
"""Inputs with more channels do not count as images."""


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether a shape is that of an image [channels, height, width]."""
    return len(shape) == 3 and 1 <= shape[0] <= CHANNELS and min(shape[1:]) >= 8


def paint(n: int, shape: tuple[int, ...], rng: torch.Generator) -> Float[Tensor, "n c h w"]:
    """Paint ellipses and rectangles of any direction on a torus. Each has one colour with a little shading."""
    c, h, w = shape
    at_y, at_x = torch.arange(h)[:, None], torch.arange(w)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, 1, 1, generator=rng, dtype=torch.float32)

    image = uniform(n, c).expand(n, c, h, w).clone()
    for _ in range(SHAPES):
        # p(r) ~ r^-3 between the smallest and the largest: 1/r² is uniform.
        least, most = SMALLEST**-2, (max(h, w) / 1.5) ** -2
        r = torch.rsqrt(least + (most - least) * uniform(n))
        dy = (at_y - h * uniform(n) + h / 2) % h - h / 2
        dx = (at_x - w * uniform(n) + w / 2) % w - w / 2
        turn, stretch = math.pi * uniform(n), torch.exp(0.8 * (uniform(n) - 0.5))
        u = (turn.cos() * dx + turn.sin() * dy) * stretch
        v = (turn.cos() * dy - turn.sin() * dx) / stretch
        distance = torch.where(uniform(n) < 0.5, torch.hypot(u, v), torch.maximum(u.abs(), v.abs()))
        covered = (r - distance + 0.5).clamp(0, 1).unsqueeze(1)
        shading = 0.6 * ((uniform(n) - 0.5) * u + (uniform(n) - 0.5) * v) / r
        colour = uniform(n, 1) + 0.5 * (uniform(n, c) - 0.5) + shading.unsqueeze(1)
        image = torch.lerp(image, colour, covered)
    return image


def whiten(images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    """Give images covariance I over all their shifts. Their edges stay."""
    x = (images - images.mean((0, 2, 3), keepdim=True)).double()
    waves = torch.fft.fft2(x, norm="ortho")
    S = torch.einsum("nchw,ndhw->hwcd", waves, waves.conj()) / len(x)
    s, V = torch.linalg.eigh(S)
    root = (V * s.clamp(min=1e-9 * float(s.max())).rsqrt().unsqueeze(-2)) @ V.mH
    white: Tensor = torch.fft.ifft2(torch.einsum("hwcd,ndhw->nchw", root.to(waves), waves), norm="ortho")
    return white.real


@lru_cache(maxsize=4)
def paintings(shape: tuple[int, ...], device: torch.device) -> Float[Tensor, "n c h w"]:
    """White paintings, always the same ones. They hold nobody's data."""
    n = max(64, min(PAINTINGS, 2**20 // (shape[1] * shape[2])))
    return whiten(paint(n, shape, torch.Generator().manual_seed(0))).float().to(device)


def draw_white(shape: tuple[int, ...], size: int, rng: torch.Generator, device: torch.device) -> Float[Tensor, "n d"]:
    """Draw white noise with edges for so many images, flattened.

    Each is a painting, shifted at random, mirrored or not, with its sign changed or not. It is the same on any device.
    """
    found = paintings(shape, device)
    n, c, h, w = found.shape

    def choose(below: int, *axes: int) -> Tensor:
        return torch.randint(below, (size, *axes), generator=rng).to(device)

    which, sign = choose(n, 1, 1, 1), 2 * choose(2, 1, 1, 1) - 1
    rows = (torch.arange(h, device=device)[:, None] + choose(h, 1, 1, 1)) % h
    columns = (torch.arange(w, device=device) * (2 * choose(2, 1, 1, 1) - 1) + choose(w, 1, 1, 1)) % w
    channels = torch.arange(c, device=device)[:, None, None]
    return (found[which, channels, rows, columns] * sign).flatten(1)
