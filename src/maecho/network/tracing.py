"""Finds the neuron spaces of a network by tracing it with torch.fx.

The tracer follows the neurons of every value through the network. Where neurons pass something that it does not
understand, they are fixed: they keep their order, and no space holds them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from maecho.errors import InputError, text_of
from maecho.network import kinds
from maecho.network.kinds import Kind
from maecho.network.spaces import Place, Space, Spaces


@dataclass(eq=False)
class _Neurons:
    """The neurons along the channel axis of one value, while the network is traced."""

    size: int
    """The number of neurons. 0 for the inputs of the network, which cannot be permuted."""
    places: dict[tuple[str, int], Place]
    fixed: bool = False
    merged: _Neurons | None = None

    def root(self) -> _Neurons:
        return self if self.merged is None else self.merged.root()

    def join(self, other: _Neurons) -> None:
        """Join two sets of neurons into one, since their values are added."""
        one, two = self.root(), other.root()
        if one is two:
            return
        one.fixed |= two.fixed or one.size != two.size or _clash(one, two)
        one.places |= two.places
        two.merged = one


def _clash(one: _Neurons, two: _Neurons) -> bool:
    """Whether two spaces divide one axis into blocks of different sizes."""
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
    """Find the spaces of a network. Neurons that pass something unknown are left out.

    Raises InputError if torch.fx cannot trace the network.
    """
    try:
        graph = _Leaves().trace(model)
    except Exception as error:  # tracing runs the user's own forward, which may raise anything
        raise InputError(
            f"{type(model).__name__} must be traceable by torch.fx for its neuron spaces to be found, got: "
            f"{text_of(error)}; give them by hand as maecho.network.Space objects"
        ) from error
    return _Tracer(model).run(graph)


class _Leaves(fx.Tracer):
    """Traces a network. It stops at the layers of torch, and at layers whose own type was registered with a kind."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return kinds.registered(m) or super().is_leaf_module(m, module_qualified_name)

    # While torch.fx traces, every module of the process calls these two. What other threads run is not traced.

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


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
        inputs, kind = arguments[0], kinds.find(module)
        if isinstance(module, _ELEMENTWISE):
            return inputs
        if kind is not None:
            return self._matrix(name, module, kind, inputs)
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm):
            return self._normalisation(name, module, inputs)
        for neurons in arguments:
            neurons.fixed = True
        return _no_neurons()

    def _matrix(self, name: str, module: nn.Module, kind: Kind, inputs: _Neurons) -> _Neurons:
        groups, shape, out_axis = kind.groups(module), getattr(module, kind.weight).shape, int(kind.transposed)
        width = shape[1 - out_axis]
        if groups > 1:
            if groups == inputs.size == shape[out_axis]:  # depthwise: every channel stays its own
                return self._place_outputs(inputs, name, kind)
            inputs.fixed = True
        elif kind.one_hot:
            pass  # tokens are no neurons
        elif inputs.size and width % inputs.size:
            inputs.fixed = True
        else:
            self._place(inputs, name, (kind.weight,), 1 - out_axis, width // (inputs.size or width))
        if name in self._outputs:  # its second use gives out the same neurons
            return self._outputs[name].root()
        out = _Neurons(shape[out_axis], {}, fixed=groups > 1)
        self._outputs[name] = out
        return self._place_outputs(out, name, kind)

    def _place_outputs(self, neurons: _Neurons, name: str, kind: Kind) -> _Neurons:
        return self._place(self._place(neurons, name, (kind.weight,), int(kind.transposed)), name, (kind.bias,), 0)

    def _normalisation(self, name: str, module: nn.Module, inputs: _Neurons) -> _Neurons:
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
            inputs.fixed = True
        return self._place(inputs, name, ("weight", "bias", "running_mean", "running_var"), 0)

    def _place(self, neurons: _Neurons, name: str, parts: Sequence[str], axis: int, block: int = 1) -> _Neurons:
        module = self._model.get_submodule(name)
        for part in parts:
            tensor = getattr(module, part, None)
            if isinstance(tensor, Tensor):
                key = self._aliases.get(id(tensor))
                if key is None:
                    neurons.root().fixed = True
                    continue
                # A tied weight is in several layers. Its neurons are the same in all of them.
                neurons.join(self._owners.setdefault((key, axis), neurons))
                neurons.root().places[key, axis] = Place(key, axis, block)
        return neurons.root()
