"""Weights that are computed from parameters: weight norm and spectral norm, as hooks and as parametrizations of torch.

The twin has the weight itself. What the merged weight becomes in the model is data (see storage.py), so that the server
needs no code of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from maecho.network.packed.storage import Stored

WEIGHT_NORM, SPECTRAL_NORM = "_WeightNorm", "_SpectralNorm"
_OF_TORCH = "torch.nn.utils.parametrizations"


def plain_weights(module: nn.Module) -> list[Stored]:
    """Replace the computed weights of a module that can be put back by plain parameters. The list says how each of
    the old tensors is made of them; names are those within the module."""
    return [*_of_parametrizations(module), *_of_hooks(module)]


def readable(module: nn.Module) -> bool:
    """Whether the module has computed weights that `plain_weights` replaces."""
    computed = _parametrizations(module).values()
    return bool(computed and all(map(_form, computed))) or any(_exact(module, hook) for hook in _hooks(module))


def _parametrizations(module: nn.Module) -> dict[str, Any]:
    return dict(module.parametrizations.items()) if parametrize.is_parametrized(module) else {}  # type: ignore[operator,union-attr]


def _form(computed: Any) -> str | None:
    """What computes the weight, if its inverse is known."""
    if len(computed) != 1 or type(computed[0]).__module__ != _OF_TORCH:
        return None
    name = type(computed[0]).__name__
    if name == WEIGHT_NORM and computed.is_tensor is False:
        return name
    return name if name == SPECTRAL_NORM and computed.original.dim() > 1 else None


def _of_parametrizations(module: nn.Module) -> Iterator[Stored]:
    computed = _parametrizations(module)
    if not computed or not all(map(_form, computed.values())):
        return
    weights = {name: getattr(module, name).detach().clone() for name in computed}
    # The class has a property for each computed weight. It is also that of other copies, so it must stay as it is.
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    for name, one in computed.items():
        prefix, axis = f"parametrizations.{name}", int(one[0].dim)
        if _form(one) == WEIGHT_NORM:
            yield from _weight_norm(name, f"{prefix}.original0", f"{prefix}.original1", axis)
        else:
            yield from _spectral_norm(name, f"{prefix}.original", f"{prefix}.0._u", f"{prefix}.0._v", axis)
        wanted = any(p.requires_grad for p in one.parameters())
        module.register_parameter(name, nn.Parameter(weights[name], wanted))


def _hooks(module: nn.Module) -> list[WeightNorm | SpectralNorm]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm | SpectralNorm)]


def _exact(module: nn.Module, hook: WeightNorm | SpectralNorm) -> str | None:
    """The name of the hook's class, if its inverse is known."""
    if type(hook) is WeightNorm:
        return "WeightNorm"
    return "SpectralNorm" if type(hook) is SpectralNorm and getattr(module, f"{hook.name}_orig").dim() > 1 else None


def _of_hooks(module: nn.Module) -> Iterator[Stored]:
    for key, hook in list(module._forward_pre_hooks.items()):
        if not isinstance(hook, WeightNorm | SpectralNorm) or _exact(module, hook) is None:
            continue
        name, axis = hook.name, int(hook.dim)
        if isinstance(hook, WeightNorm):
            yield from _weight_norm(name, f"{name}_g", f"{name}_v", axis)
            old, weight = ["g", "v"], hook.compute_weight(module)
        else:
            yield from _spectral_norm(name, f"{name}_orig", f"{name}_u", f"{name}_v", axis)
            old, weight = ["orig", "u", "v"], hook.compute_weight(module, do_power_iteration=False)
        wanted = any(getattr(module, f"{name}_{part}").requires_grad for part in old)
        for part in old:
            delattr(module, f"{name}_{part}")
        if hasattr(module, name):
            delattr(module, name)
        del module._forward_pre_hooks[key]
        module.register_parameter(name, nn.Parameter(weight.detach().clone(), wanted))
    if not _hooks(module):
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key, one in list(hooks.items()):
                inner = getattr(one, "hook", one)
                if type(inner).__name__.startswith("SpectralNorm"):
                    del hooks[key]


def _weight_norm(name: str, g: str, v: str, axis: int) -> Iterator[Stored]:
    yield Stored(g, (name,), "norm", axis)
    yield Stored(v, (name,), "direction", axis)


def _spectral_norm(name: str, original: str, u: str, v: str, axis: int) -> Iterator[Stored]:
    yield Stored(original, (name,))
    yield Stored(u, (name,), "left", axis)
    yield Stored(v, (name,), "right", axis)
