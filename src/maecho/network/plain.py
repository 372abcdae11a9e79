"""The network inside a wrapper, and passes that run eagerly.

A compiled network calls no hooks, and the names of its parameters begin with another word. What is inside a wrapper at
the root is used in its place; the rest is refused.
"""

from __future__ import annotations

import contextlib
import copy
import sys

import torch
from torch import nn

from maecho.errors import InputError

_INSIDE = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Wrapper -> the attribute that holds the network."""
_REFUSED = ("FullyShardedDataParallel", "FSDPModule")


def plain(model: nn.Module, what: str = "the model") -> nn.Module:
    """The network itself, without torch.compile, DataParallel or DistributedDataParallel around it.

    Raises InputError for a network that is scripted, sharded, or wrapped in a part only.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"{what} must be a torch.nn.Module, got {type(model).__name__}")
    while type(model).__name__ in _INSIDE:
        inside = getattr(model, _INSIDE[type(model).__name__], None)
        if not isinstance(inside, nn.Module):
            break
        model = inside
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        where = f" in {name!r}" if name else ""
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{what} must be the module that was scripted or traced, got a {type(module).__name__}{where}"
            )
        if kinds.intersection(_REFUSED):
            raise InputError(f"{what} must be whole on every process, got one that FSDP has sharded{where}")
        if name and kinds.intersection(_INSIDE):
            raise InputError(
                f"{what} must be compiled or wrapped as a whole or not at all, got a {type(module).__name__}{where}; "
                "give the network as it was before"
            )
    # What is made in torch.inference_mode() can take no gradients, and cannot be written to outside of it.
    made_there = any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])
    return copy.deepcopy(model) if made_there and not torch.is_inference_mode_enabled() else model


def eagerly() -> contextlib.AbstractContextManager[object]:
    """Inside, compiled modules run as they were written, so that hooks see what happens."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes a second
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager
