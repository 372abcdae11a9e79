"""Which axes of which parameters are the same neurons: an architecture's symmetry, as data.

Permuting the neurons of one space, in every place where it occurs, leaves the network's outputs as they were. `derive`
finds the spaces of any network that `torch.fx` can trace; for the rest they are given by hand, as the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from maecho.errors import UploadError
from maecho.network.forward import evaluating


@dataclass(frozen=True)
class Place:
    """One axis of one tensor. Flattened maps give every neuron a block of neighbouring entries."""

    tensor: str
    axis: int
    block: int = 1


@dataclass(frozen=True)
class Space:
    """Neurons that may be permuted together."""

    name: str
    size: int
    places: tuple[Place, ...]


Spaces = tuple[Space, ...]


def permute(weights: Mapping[str, Tensor], spaces: Iterable[Space], orders: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same network with the neurons of each space in another order: new neuron k is old neuron order[k]."""
    out = dict(weights)
    for space in spaces:
        if space.name in orders:
            for place in space.places:
                out[place.tensor] = take(out[place.tensor], place, orders[space.name])
    return out


def take(tensor: Tensor, place: Place, order: Tensor) -> Tensor:
    """The neurons of one place in another order."""
    blocks = tensor.unflatten(place.axis, (-1, place.block))
    taken: Tensor = blocks.index_select(place.axis, order.to(tensor.device)).flatten(place.axis, place.axis + 1)
    return taken


def load(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load a state_dict whose layers may have grown: parameters and buffers take the sizes that come."""
    for name, tensor in state.items():
        owner, _, part = name.rpartition(".")
        module = model.get_submodule(owner)
        old = getattr(module, part)
        if old.shape != tensor.shape:
            new = torch.empty_like(tensor, device=old.device)
            setattr(module, part, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
            for attribute, axis in (("in_features", 1), ("out_features", 0), ("in_channels", 1), ("out_channels", 0)):
                if part == "weight" and hasattr(module, attribute):
                    setattr(module, attribute, tensor.shape[axis])
            if hasattr(module, "num_features"):
                setattr(module, "num_features", len(tensor))  # noqa: B010 (mypy sees a tensor or a module here)
    model.load_state_dict(dict(state))
    return model


def check(spaces: Sequence[Space], weights: Mapping[str, Tensor]) -> None:
    """That a specification fits the weights; raises UploadError that names the first place that does not."""
    seen: dict[tuple[str, int], str] = {}
    for space in spaces:
        for place in space.places:
            where = f"space {space.name!r}: axis {place.axis} of {place.tensor!r}"
            if place.tensor not in weights:
                raise UploadError(f"{where} must be a weight of the network, got a name that it does not have")
            shape = tuple(weights[place.tensor].shape)
            if not 0 <= place.axis < len(shape) or shape[place.axis] != space.size * place.block:
                got = shape[place.axis] if 0 <= place.axis < len(shape) else "no such axis"
                raise UploadError(f"{where} must be {space.size} neurons of {place.block} entries, got {got}")
            if (place.tensor, place.axis) in seen:
                raise UploadError(f"{where} must belong to one space, got it in {seen[place.tensor, place.axis]!r} too")
            seen[place.tensor, place.axis] = space.name


def verify(model: nn.Module, spaces: Sequence[Space], inputs: Any, tolerance: float = 1e-3) -> None:
    """That permuting each space leaves the outputs unchanged; raises UploadError that names the first that does not."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check(spaces, state)
    rng = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad(), evaluating(model):
            before = model(inputs)
            for space in spaces:
                order = torch.randperm(space.size, generator=rng)
                model.load_state_dict(permute(state, [space], {space.name: order}))
                gap = float((model(inputs) - before).norm() / before.norm().clamp(min=1e-12))
                if gap > tolerance:
                    raise UploadError(
                        f"space {space.name!r} must leave the outputs unchanged when its neurons are permuted, got a "
                        f"change of {gap:.3g}; its places are {', '.join(p.tensor for p in space.places)}"
                    )
    finally:
        model.load_state_dict(state)


@dataclass(eq=False)
class _Neurons:
    """The neurons along the channel axis of one value, while the network is traced."""

    size: int
    """0: of the inputs, which cannot be permuted."""
    places: dict[tuple[str, int], Place]
    fixed: bool = False
    merged: _Neurons | None = None

    def root(self) -> _Neurons:
        return self if self.merged is None else self.merged.root()

    def join(self, other: _Neurons) -> None:
        """A sum of two values: the same neurons on both sides."""
        one, two = self.root(), other.root()
        if one is two:
            return
        one.fixed |= two.fixed or one.size != two.size or _clash(one, two)
        one.places |= two.places
        two.merged = one


def _clash(one: _Neurons, two: _Neurons) -> bool:
    """The same axis cut into blocks of two sizes."""
    return any(one.places[key].block != place.block for key, place in two.places.items() if key in one.places)


def _no_neurons() -> _Neurons:
    return _Neurons(0, {}, fixed=True)


# What keeps every neuron where it is, channel by channel.
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Softplus,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Identity, nn.Flatten,
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.ReplicationPad2d, nn.ZeroPad2d,
)  # fmt: skip
_ELEMENTWISE_FUNCTIONS = {
    "relu", "relu_", "leaky_relu", "gelu", "silu", "tanh", "sigmoid", "elu", "dropout", "dropout2d", "flatten", "mean",
    "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "boolean_dispatch", "contiguous", "view", "reshape", "detach", "clone",
}  # fmt: skip
_SUMS = {"add", "iadd", "add_", "sub", "mul", "imul", "mul_"}


def derive(model: nn.Module) -> Spaces:
    """The spaces of a network that torch.fx can trace; what cannot be understood is left unpermuted.

    Raises UploadError where the network cannot be traced.
    """
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:  # tracing runs the user's own forward, which may fail in any way
        reason = " ".join(str(error).split())
        raise UploadError(
            f"{type(model).__name__} must be traceable by torch.fx for its neuron spaces to be found, got: {reason}; "
            "give them by hand as maecho.spaces.Space objects"
        ) from error
    return _Tracer(model).run(graph)


class _Tracer:
    """Follows neurons through a traced network."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._values: dict[fx.Node, _Neurons] = {}
        self._outputs: dict[str, _Neurons] = {}
        self._aliases: dict[int, str] = {}
        self._owners: dict[tuple[str, int], _Neurons] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            self._aliases.setdefault(id(tensor), name)

    def run(self, graph: fx.Graph) -> Spaces:
        for node in graph.nodes:
            self._values[node] = self._node(node)
        found, seen = [], set()
        for name, neurons in self._outputs.items():
            root = neurons.root()
            if id(root) not in seen and not root.fixed:
                found.append(Space(name, root.size, tuple(root.places.values())))
            seen.add(id(root))
        return tuple(found)

    def _node(self, node: fx.Node) -> _Neurons:
        arguments = [self._values[n].root() for n in node.all_input_nodes]
        if node.op == "call_module" and arguments:
            module = self._model.get_submodule(str(node.target))
            return self._module(str(node.target), module, arguments)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op in ("call_function", "call_method") and arguments:
            if name in _SUMS:
                for other in arguments[1:]:
                    arguments[0].join(other)
                return arguments[0].root()
            if name in _ELEMENTWISE_FUNCTIONS:
                return arguments[0]
            if name in ("size", "getattr", "getitem", "shape"):
                return arguments[0]
        for neurons in arguments:
            neurons.fixed = True
        return _no_neurons()

    def _module(self, name: str, module: nn.Module, arguments: list[_Neurons]) -> _Neurons:
        inputs = arguments[0]
        kinds: list[tuple[Any, Callable[[str, Any, _Neurons], _Neurons]]] = [
            (_ELEMENTWISE, lambda _name, _module, neurons: neurons),
            ((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), self._matrix),
            ((nn.modules.batchnorm._NormBase, nn.LayerNorm), self._normalisation),
            (nn.Embedding, self._embedding),
        ]
        for kind, follow in kinds:
            if isinstance(module, kind):
                return follow(name, module, inputs)
        for neurons in arguments:
            neurons.fixed = True
        return _no_neurons()

    def _matrix(self, name: str, module: Any, inputs: _Neurons) -> _Neurons:
        groups = getattr(module, "groups", 1)
        width = module.weight.shape[1]
        if groups > 1:
            if groups == inputs.size == module.weight.shape[0]:  # depthwise: every channel stays its own
                return self._place(inputs, name, ("weight", "bias"), 0)
            inputs.fixed = True
        elif inputs.size and width % inputs.size:
            inputs.fixed = True
        else:
            self._place(inputs, name, ("weight",), 1, width // (inputs.size or width))
        if name in self._outputs:  # used a second time: the same neurons come out
            return self._outputs[name].root()
        out = _Neurons(module.weight.shape[0], {}, fixed=groups > 1)
        self._outputs[name] = out
        return self._place(out, name, ("weight", "bias"), 0)

    def _normalisation(self, name: str, module: Any, inputs: _Neurons) -> _Neurons:
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
            inputs.fixed = True
        return self._place(inputs, name, ("weight", "bias", "running_mean", "running_var"), 0)

    def _embedding(self, name: str, module: nn.Embedding, _inputs: _Neurons) -> _Neurons:
        out = self._outputs.setdefault(name, _Neurons(module.embedding_dim, {}))
        return self._place(out.root(), name, ("weight",), 1)

    def _place(self, neurons: _Neurons, name: str, parts: Sequence[str], axis: int, block: int = 1) -> _Neurons:
        module = self._model.get_submodule(name)
        for part in parts:
            tensor = getattr(module, part, None)
            if isinstance(tensor, Tensor):
                key = self._aliases.get(id(tensor))
                if key is None:
                    neurons.root().fixed = True
                    continue
                # A tied weight stands in several layers: its neurons are the same in all of them.
                neurons.join(self._owners.setdefault((key, axis), neurons))
                neurons.root().places[key, axis] = Place(key, axis, block)
        return neurons.root()
