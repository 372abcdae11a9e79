"""Every module with parameters of its own: how it is read, and why others are only averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.checking.found import LayerFound
from maecho.network import layers, norms
from maecho.network.attention import slow_path
from maecho.network.batches.reading import Read
from maecho.network.forward import call, evaluating
from maecho.network.hooks import watching
from maecho.network.layers import Architecture
from maecho.upload.upload import Upload

NOT_ITS_MATRIX = "what it gives out is not its matrix times its inputs"
NO_KIND = "maecho does not know its class as a matrix"
A_NORM = "a norm, which only echo fits"
A_WEIGHT = "a parameter by itself"
NOT_RUN = "the model did not run"


def counted(model: nn.Module, inputs: Any, outputs: Read | None) -> dict[str, int]:
    """How often each module with parameters of its own runs in one pass."""
    calls = {name: 0 for name, module in model.named_modules() if _own(module)}

    def see(name: str, module: nn.Module, x: Tensor) -> None:
        calls[name] += 1

    with evaluating(model), slow_path(), torch.no_grad(), watching(model, calls, before=see):
        call(model, inputs, devices.of(model), outputs)
    return calls


def found(model: nn.Module, calls: Mapping[str, int] | None, upload: Upload | None) -> list[LayerFound]:
    """All modules with parameters of their own, and the matrices that an upload finds inside of others.

    `calls` is None if the model did not run, and `upload` if there is none.
    """
    architecture, of_norms = layers.read(model), norms.find(model)
    good = None if upload is None or calls is None else {layer.name for layer in upload.layers}
    state = model.state_dict()
    shapes = {name: layer.shape(state) for name, layer in architecture.layers.items()}
    rows = [
        _one(
            LayerFound(name, type(module).__name__, "averaged", calls=0 if calls is None else calls.get(name, 0)),
            architecture,
            name in of_norms,
            shapes.get(name),
            good,
        )
        for name, module in model.named_modules()
        if _own(module)
    ]
    return rows if upload is None else _with_parts(rows, upload)


def _with_parts(rows: list[LayerFound], upload: Upload) -> list[LayerFound]:
    """The rows, with the matrices inside a module in the place of the module, if the upload has some."""
    listed = {one.name for one in rows}
    parts = [layer for layer in upload.layers if layer.name not in listed]
    out = []
    for one in rows:
        inside = [layer for layer in parts if layer.name.startswith(f"{one.name}." if one.name else "")]
        inside = inside if one.read == "averaged" and one.why == NO_KIND else []
        parts = [layer for layer in parts if layer not in inside]
        out += [
            LayerFound(
                layer.name,
                f"in {one.kind}",
                "verified",
                matrix=layer.shape(upload.weights),
                bias=layer.bias is not None,
                inputs="numbers",
                calls=one.calls,
            )
            for layer in inside
        ] or [one]
    return out


def _own(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _one(
    one: LayerFound, architecture: Architecture, norm: bool, shape: tuple[int, int, int] | None, good: set[str] | None
) -> LayerFound:
    layer = architecture.layers.get(one.name)
    if layer is None:
        unknown = (f"{one.name} ({one.kind})" if one.name else one.kind) in architecture.unknown
        return replace(one, why=A_NORM if norm else NO_KIND if unknown else A_WEIGHT)
    one = replace(
        one,
        matrix=shape,
        bias=layer.bias is not None,
        inputs="tokens" if layer.one_hot else "patches" if layer.convolution else "numbers",
        shares=tuple(n for n, other in architecture.layers.items() if other.name == layer.name and n != one.name),
    )
    if good is None:
        return replace(one, read="not tried", why=NOT_RUN)
    if layer.name not in good:
        return replace(one, why=NOT_ITS_MATRIX)
    return replace(one, read="verified" if one.calls else "idle")
