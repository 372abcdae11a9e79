"""Finds the neuron spaces of a network: torch.fx traces it, and a real batch is run through it node by node.

With every value go the neurons that lie on its axes (see the package `axes`). Where neurons pass something that it does
not understand, they are fixed: they keep their order, and no space holds them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from maecho import devices
from maecho.errors import InputError, text_of
from maecho.network import kinds
from maecho.network.axes import rules
from maecho.network.axes.along import Call
from maecho.network.axes.neurons import Axes, Neurons, Spot, carried, fix, joined
from maecho.network.batches.inputs import arguments
from maecho.network.hooks import remove_all
from maecho.network.kinds import Kind
from maecho.network.packed.linears import Split
from maecho.network.spaces import Place, Space, Spaces, holding


def derive(model: nn.Module, inputs: Any) -> Spaces:
    """Find the spaces of a network from a run on these inputs. Neurons that pass something unknown are left out.

    The model is not changed. Raises InputError if torch.fx cannot trace the network, or if it does not run.
    """
    return _derived(_twin(model), inputs)


def proven(model: nn.Module, inputs: Any) -> tuple[Spaces, dict[str, str]]:
    """The spaces of a network that hold when they are tried on these inputs, and the reason for each that does not."""
    twin = _twin(model)
    return holding(twin, _derived(twin, inputs), inputs)


def _twin(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, since tracing runs forward(), which may change buffers. It shares the parameters.

    It has no hooks, since these runs are not the user's.
    """
    try:
        twin = copy.deepcopy(model, {id(p): p for p in model.parameters()}).eval()
    except Exception as error:  # copying a model may raise anything
        raise InputError(
            f"{type(model).__name__} must be copyable for its neuron spaces to be found, got: {text_of(error)}"
        ) from error
    remove_all(twin)
    return twin


def _derived(model: nn.Module, inputs: Any) -> Spaces:
    try:
        graph = _Leaves().trace(model)
    except Exception as error:  # tracing runs the user's own forward, which may raise anything
        raise InputError(
            f"{type(model).__name__} must be traceable by torch.fx for its neuron spaces to be found, got: "
            f"{text_of(error)}; give them by hand as maecho.network.Space objects"
        ) from error
    tracer = _Tracer(model, graph)
    try:
        with torch.no_grad():
            tracer.run(initial_env=_arguments(graph, inputs, devices.of(model)))
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} must run on the inputs as torch.fx traced it for its neuron spaces to be found, "
            f"got: {text_of(error)}"
        ) from error
    return tracer.spaces()


def _arguments(graph: fx.Graph, inputs: Any, device: torch.device) -> dict[fx.Node, Any]:
    """The values of the network's arguments."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    args, kwargs = arguments(inputs, device)
    given = dict(zip([str(node.target) for node in nodes], args, strict=False)) | kwargs
    for node in nodes:
        if str(node.target) not in given and not node.args:
            raise InputError(f"the inputs must hold {str(node.target)!r}, got {', '.join(map(repr, given)) or 'none'}")
    return {node: given[str(node.target)] if str(node.target) in given else node.args[0] for node in nodes}


class _Leaves(fx.Tracer):
    """Traces a network. It stops at the layers of torch, at layers whose own type was registered with a kind, and
    at split modules."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return kinds.registered(m) or isinstance(m, Split) or super().is_leaf_module(m, module_qualified_name)

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


class _Tracer(fx.Interpreter):
    """Runs a traced network node by node, and follows the neurons."""

    def __init__(self, model: nn.Module, graph: fx.Graph):
        super().__init__(model, graph=graph)
        self.extra_traceback = False
        self._model = model
        self._axes: dict[fx.Node, Axes] = {}
        self._outputs: dict[str, Neurons] = {}
        self._aliases: dict[int, str] = {}
        self._owners: dict[tuple[str, int], Neurons] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            self._aliases.setdefault(id(tensor), name)

    def spaces(self) -> Spaces:
        """The spaces that were found, in the order in which their first layers ran."""
        found, seen = [], set()
        for name, neurons in self._outputs.items():
            root = neurons.root()
            if id(root) not in seen and not root.fixed:
                found.append(
                    Space(name, root.size, tuple(Place(*place, block) for place, block in root.places.items()))
                )
            seen.add(id(root))
        return tuple(found)

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        values = {node: self.env[node] for node in n.all_input_nodes}
        out = super().run_node(n)
        self._axes[n] = self._after(n, values, out, args, kwargs)
        return out

    def _after(
        self, node: fx.Node, values: Mapping[fx.Node, Any], out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Axes:
        """The neurons of a node's value."""
        tensors = {one: value for one, value in values.items() if isinstance(value, Tensor)}
        pairs = [(self._of(one), value) for one, value in tensors.items()]
        if node.op == "get_attr":  # the network's own forward does something with it
            self._keep([out])
        if node.op == "call_module":
            module = self._model.get_submodule(str(node.target))
            if len(values) == len(tensors) == 1 and isinstance(out, Tensor):
                (source,) = tensors
                return self._module(str(node.target), module, source, tensors[source], out)
            kind = kinds.find(module)
            if kind is not None and len(values) == len(tensors) and isinstance(out, Tensor):
                return self._product(str(node.target), kind, tensors, out)
            self._keep(module.parameters())
        if node.op in ("call_function", "call_method"):
            name, function = _named(node, args)
            if name in rules.SHAPES:
                return {}
            if isinstance(out, Tensor) and name in rules.ELEMENTWISE:
                return joined(pairs, out)
            if isinstance(out, Tensor) and name in rules.JOINING:
                axis = Call(out, out, function, args[1:], kwargs).argument(0, "dim", "axis") or 0
                return joined(pairs, out, axis % out.dim())
            if name in rules.RULES and len(tensors) == 1:
                (source,) = tensors
                call = Call(tensors[source], out, function, args[1:], kwargs)
                if args and args[0] is call.x and isinstance(out, Tensor):
                    return carried(self._of(source), rules.RULES[name], call)
        return fix(map(self._of, values))

    def _keep(self, tensors: Iterable[Any]) -> None:
        """Fix all axes of some weights, since it is not known what is done with them."""
        for tensor in tensors:
            for axis in range(tensor.dim() if id(tensor) in self._aliases else 0):
                self._owners.setdefault((self._aliases[id(tensor)], axis), Neurons(0)).fix()

    def _of(self, node: fx.Node) -> Axes:
        return self._axes.get(node, {})

    def _module(self, name: str, module: nn.Module, source: fx.Node, x: Tensor, out: Tensor) -> Axes:
        kind, rule, weighted = kinds.find(module), rules.of_module(module), rules.weighted_axes(module, x)
        if kind is not None and kind.built and not kind.convolution:
            return self._product(name, kind, [source], out)
        if kind is not None:
            return self._matrix(name, kind, source, x, out)
        if isinstance(module, rules.ELEMENTWISE_MODULES):
            return joined([(self._of(source), x)], out)
        if rule is not None:
            return carried(self._of(source), rule, Call(x, out, module))
        if weighted is None:
            self._keep(module.parameters())
            return fix([self._of(source)])
        for k, axis in enumerate(weighted):
            self._place(self._of(source).get(axis), name, ("weight", "bias", "running_mean", "running_var"), k)
        return self._of(source)

    def _matrix(self, name: str, kind: Kind, source: fx.Node, x: Tensor, out: Tensor) -> Axes:
        module, before = self._model.get_submodule(name), self._of(source)
        W: Tensor = getattr(module, kind.weight)
        groups = kind.groups(module)
        out_axis = int(kind.transposed and groups == 1)
        axis = out.dim() - (kind.example_axes(module) if kind.convolution else 1)
        read = None if kind.one_hot else before.get(axis)
        fits = out.shape[axis] == W.shape[out_axis] and (
            kind.one_hot or (x.dim() == out.dim() and x.shape[axis] == groups * W.shape[1 - out_axis])
        )
        depthwise = read is not None and read.block == 1 and groups == x.shape[axis] == out.shape[axis]
        if not fits or (groups > 1 and not depthwise):
            self._keep(module.parameters())
            return fix([self._of(source)])
        for other, spot in before.items():
            if other > axis or kind.one_hot:
                spot.neurons.fix()
        after = {other: spot for other, spot in before.items() if other < axis and not kind.one_hot}
        if groups > 1 and read is not None:  # every channel stays its own
            after[axis] = read
        else:
            self._place(read, name, (kind.weight,), 1 - out_axis)
            # At its second use a layer gives out the same neurons.
            after[axis] = Spot(self._outputs.setdefault(name, Neurons(W.shape[out_axis])))
        self._place(after[axis], name, (kind.weight,), out_axis)
        self._place(after[axis], name, (kind.bias,), 0)
        return after

    def _product(self, name: str, kind: Kind, sources: Iterable[fx.Node], out: Tensor) -> Axes:
        """A layer whose rows are built from its arguments. Its inputs keep their order, its outputs are neurons."""
        fix(map(self._of, sources))
        module, out_axis = self._model.get_submodule(name), int(kind.transposed)
        W: Tensor = getattr(module, kind.weight)
        if not kind.built or kind.convolution or out.shape[-1] != W.shape[out_axis]:
            self._keep(module.parameters())
            return {}
        for axis in set(range(W.dim())) - {out_axis}:
            self._place(None, name, (kind.weight,), axis)
        spot = Spot(self._outputs.setdefault(name, Neurons(W.shape[out_axis])))
        self._place(spot, name, (kind.weight,), out_axis)
        self._place(spot, name, (kind.bias,), 0)
        return {out.dim() - 1: spot}

    def _place(self, spot: Spot | None, name: str, parts: Sequence[str], axis: int) -> None:
        """Note that the neurons lie on an axis of some weights of a module. Without neurons the axis is fixed."""
        if spot is None:
            spot = Spot(Neurons(0))
            spot.neurons.fix()
        module = self._model.get_submodule(name)
        for tensor in (getattr(module, part, None) for part in parts):
            if isinstance(tensor, Tensor):
                key = self._aliases.get(id(tensor))
                if key is None:
                    spot.neurons.fix()
                    continue
                # A tied weight is in several layers. Its neurons are the same in all of them.
                spot.neurons.join(self._owners.setdefault((key, axis), spot.neurons))
                spot.neurons.root().places[key, axis] = spot.block


def _named(node: fx.Node, args: Sequence[Any]) -> tuple[str, Callable[..., Any]]:
    """The name of a function or method, and what runs it. An attribute that is read counts as a method."""
    if node.op == "call_method":
        return str(node.target), getattr(Tensor, str(node.target), getattr)
    assert callable(node.target)
    return str(args[1]) if node.target is getattr else getattr(node.target, "__name__", ""), node.target
