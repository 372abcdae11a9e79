"""Fully connected layers whose weight or rows are of another form than those of nn.Linear.

A bag of tokens is a row of counts, which is exact but as wide as the vocabulary. The row of a bilinear layer holds all
products of two inputs. Rows that are wider than WIDEST are not formed, since a Gram matrix has the square of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from maecho.network.kinds.kind import Kind

WIDEST = 4096


class InputsFirst(Kind):
    """y = x W + b with W stored [in, out], such as the Conv1D of Hugging Face."""

    sizes = ("nx", "nf")
    transposed = True


class Bilinear(Kind):
    """y = x₁ᵀ A x₂ + b. Its rows hold the products of every entry of x₁ with every entry of x₂."""

    sizes = ("in1_features", "out_features")
    built = True

    def reads(self, module: Any) -> bool:
        return bool(module.weight[0].numel() <= WIDEST)

    def entering(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        one, two = (_exact(x) for x in _arguments(("input1", "input2"), args, kwargs))
        return (one.unsqueeze(-1) * two.unsqueeze(-2)).flatten(-2)

    def resize(self, module: Any, shape: Sequence[int]) -> None:
        module.out_features, module.in1_features, module.in2_features = shape


class Bag(Kind):
    """An nn.EmbeddingBag that sums or averages. A row says how much of each token is in a bag."""

    sizes = ("num_embeddings", "embedding_dim")
    transposed = True
    built = True

    def reads(self, module: Any) -> bool:
        return module.mode in ("sum", "mean") and len(module.weight) <= WIDEST

    def entering(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        tokens, offsets, weights = _arguments(("input", "offsets", "per_sample_weights"), args, kwargs)
        if tokens.dim() == 2:
            n = len(tokens)
            bags = torch.arange(n, device=tokens.device).repeat_interleave(tokens.shape[1])
        else:
            starts = offsets[:-1] if module.include_last_offset else offsets
            n = len(starts)
            places = torch.arange(len(tokens), device=tokens.device)
            bags = torch.searchsorted(starts, places.to(starts.dtype), right=True) - 1
        tokens = tokens.flatten()
        like = _exact(module.weight)
        share = like.new_ones(len(tokens)) if weights is None else _exact(weights).flatten().to(like)
        if module.padding_idx is not None:
            share = torch.where(tokens == module.padding_idx, 0, share)
        rows = like.new_zeros(n, len(like)).index_put_((bags, tokens.long()), share, accumulate=True)
        return rows / rows.sum(1, keepdim=True).clamp(min=1) if module.mode == "mean" else rows


def _arguments(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call by position or by name. None for what was not given."""
    return [args[k] if k < len(args) else kwargs.get(name) for k, name in enumerate(names)]


def _exact(x: Tensor) -> Tensor:
    """At least in float32, so that products and counts are not rounded to 16 bits."""
    return x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
