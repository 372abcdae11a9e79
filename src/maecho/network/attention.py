"""nn.MultiheadAttention with its four projections as layers of their own.

Torch keeps the projections of queries, keys and values in one packed parameter. No module's forward multiplies it, so
hooks cannot see its inputs. `split` copies a network and puts plain `nn.Linear` modules in its place. `packed` turns a
state_dict of the copy into one of the original.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from maecho.errors import InputError, text_of

PARTS = ("q", "k", "v")


class SplitAttention(nn.Module):
    """Computes softmax(Q Kᵀ / √d + mask) V for each head, like nn.MultiheadAttention in evaluation mode."""

    def __init__(self, module: nn.MultiheadAttention):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = module.embed_dim, module.num_heads, module.head_dim
        self.batch_first = module.batch_first
        state = module.state_dict()
        biases = state["in_proj_bias"].chunk(3) if "in_proj_bias" in state else (None,) * 3
        weights = (
            state["in_proj_weight"].chunk(3)
            if "in_proj_weight" in state
            else [state[f"{part}_proj_weight"] for part in PARTS]
        )
        self.q, self.k, self.v = (_linear(W, b) for W, b in zip(weights, biases, strict=True))
        self.out = _linear(state["out_proj.weight"], state.get("out_proj.bias"))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Takes the arguments of nn.MultiheadAttention. `is_causal` is a hint there too; the mask alone decides."""
        batched = query.dim() == 3
        first = self.batch_first or not batched
        q, k, v = (
            layer(x) if first else layer(x).transpose(0, 1)
            for layer, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if attn_mask is not None:
            mask = _additive(attn_mask, scores)
            scores = scores + (mask.unflatten(0, (-1, self.num_heads)) if mask.dim() == 3 else mask)
        if key_padding_mask is not None:
            scores = scores + _additive(key_padding_mask, scores)[:, None, None, :]
        weights = scores.softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        out = self.out(mixed if first else mixed.transpose(0, 1))
        if average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            out, weights = out.squeeze(0), weights.squeeze(0)
        return out, weights if need_weights else None


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    # On the meta device, so that no random numbers are drawn for weights that are not wanted.
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    state = {"weight": weight.clone()} if bias is None else {"weight": weight.clone(), "bias": bias.clone()}
    layer.load_state_dict(state, assign=True)
    return layer


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers that are added to the scores. In a boolean mask, True means that a place is not looked at."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))
    return mask.to(like)


def attentions(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """The attentions that can be split, with all names that each one has.

    An attention with learned extra keys or with zero attention is left out, since it does more than its four
    projections.
    """
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.MultiheadAttention and module.bias_k is None and not module.add_zero_attn
    }


def copied(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # copying a model may raise anything
        raise InputError(
            f"the model must be one that copy.deepcopy can copy, got {type(model).__name__}: {text_of(error)}"
        ) from error


def split(model: nn.Module) -> nn.Module:
    """A copy of the network, in evaluation mode, with every attention split. It computes the same function."""
    twin = copied(model).eval()
    found = attentions(twin)
    parts = {module: SplitAttention(module).eval() for module in found.values()}
    for name, module in found.items():
        if not name:
            return parts[module]
        owner, _, part = name.rpartition(".")
        setattr(twin.get_submodule(owner), part, parts[module])
    return twin


def packed(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Turn a state_dict of `split(model)` into one of `model`."""
    out = dict(state)
    for name in attentions(model):
        prefix = f"{name}." if name else ""
        parts = [(out.pop(f"{prefix}{part}.weight"), out.pop(f"{prefix}{part}.bias", None)) for part in PARTS]
        if f"{prefix}in_proj_weight" in model.state_dict():
            out[f"{prefix}in_proj_weight"] = torch.cat([W for W, _ in parts])
        else:
            out |= {f"{prefix}{part}_proj_weight": W for part, (W, _) in zip(PARTS, parts, strict=True)}
        biases = [b for _, b in parts if b is not None]
        if biases:
            out[f"{prefix}in_proj_bias"] = torch.cat(biases)
        for key in ("weight", "bias"):
            if f"{prefix}out.{key}" in out:
                out[f"{prefix}out_proj.{key}"] = out.pop(f"{prefix}out.{key}")
    return {name: out[name] for name in model.state_dict()}


class _SlowPath:
    """Counts who needs the slow path. The switch is one for the whole process, so the last one to leave puts it
    back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, torch's transformer layers call their modules. Otherwise one fused function may do the work
        without them."""
        with self._lock:
            if not self._inside:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    torch.backends.mha.set_fastpath_enabled(self._before)


slow_path = _SlowPath()
