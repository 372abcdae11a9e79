"""nn.RNN, nn.LSTM and nn.GRU with the matrices of inputs and of hidden states as layers of their own.

The matrix of layer k on its inputs, `weight_ih_l{k}` with `bias_ih_l{k}`, has x_t as inputs, and that on hidden states,
`weight_hh_l{k}` with `bias_hh_l{k}`, has h_{t−1}. Its neurons are the gates, one after the other. Each bias goes with
its own matrix: the two biases of a GRU's new gate are no single one, since only the second is multiplied by a gate.

Where no gradient is wanted, torch's own function runs a layer for all steps at once. It gives out all h_t, which are
shown to the layer of the hidden states as its inputs. Otherwise the steps run one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from maecho.network.packed.gates import MODES, step
from maecho.network.packed.linears import ALL, Linears, Matrix, Recurrent, Split

States = list[Tensor]
"""h, and for an LSTM c beside it, each [examples, width]."""


class SplitRecurrence(Split):
    """Computes what a recurrent module of torch computes in evaluation mode."""

    def __init__(self, module: nn.RNNBase, linears: Linears | None = None):
        linears = linears or Linears()
        super().__init__()
        self.mode, self.hidden_size, self.proj_size = module.mode, module.hidden_size, module.proj_size
        self.num_layers, self.bidirectional, self.batch_first = (
            module.num_layers,
            module.bidirectional,
            module.batch_first,
        )
        self.input_size, self.bias, self.dropout = module.input_size, module.bias, 0.0
        state = dict(module.named_parameters(recurse=False))
        for k in range(module.num_layers):
            for suffix in self._suffixes(k):
                for part in ("ih", "hh", "hr"):
                    if f"weight_{part}{suffix}" in state:
                        names = (f"weight_{part}{suffix}", f"bias_{part}{suffix}")
                        weight, bias = ((n, state[n], ALL) if n in state else None for n in names)
                        assert weight is not None
                        self.add(f"{part}{suffix}", linears, weight, bias, Matrix if part == "ih" else Recurrent)

    def flatten_parameters(self) -> None:
        """Does nothing. Networks call it on a recurrent module for the sake of GPUs."""

    def forward(
        self,
        input: Tensor | PackedSequence,  # noqa: A002 (networks may name it)
        hx: Tensor | tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor | tuple[Tensor, ...]]:
        packed = isinstance(input, PackedSequence)
        if isinstance(input, PackedSequence):
            x, sizes, order, back = input
            batched = True
        else:
            x, sizes, order, back = input, None, None, None
            batched = x.dim() == 3
            x = x.unsqueeze(0) if not batched else x if self.batch_first else x.transpose(0, 1)
        examples = int(sizes[0]) if sizes is not None else len(x)
        ends: list[States] = []
        for k, states in enumerate(self._starts(hx, x, examples, batched, order)):
            x, end = self._layer(k, x, states, sizes)
            ends += end
        last = [torch.stack(parts) for parts in zip(*ends, strict=True)]
        if back is not None:
            last = [h.index_select(1, back) for h in last]
        last = last if batched else [h.squeeze(1) for h in last]
        out: Tensor | PackedSequence
        if packed:
            assert sizes is not None
            out = PackedSequence(x, sizes, order, back)
        else:
            out = x.squeeze(0) if not batched else x if self.batch_first else x.transpose(0, 1)
        return out, tuple(last) if self.mode == "LSTM" else last[0]

    def _suffixes(self, k: int) -> list[str]:
        return [f"_l{k}", f"_l{k}_reverse"] if self.bidirectional else [f"_l{k}"]

    def _starts(
        self,
        hx: Tensor | tuple[Tensor, ...] | None,
        x: Tensor,
        examples: int,
        batched: bool,
        order: Tensor | None,
    ) -> Iterable[list[States]]:
        """The first states of each layer, direction by direction."""
        directions = 1 + self.bidirectional
        count, widths = self.num_layers * directions, [self.proj_size or self.hidden_size]
        widths += [self.hidden_size] if self.mode == "LSTM" else []
        if hx is None:
            given = [x.new_zeros(count, examples, width) for width in widths]
        else:
            given = list(hx) if isinstance(hx, tuple | list) else [hx]
            given = [h if batched else h.unsqueeze(1) for h in given]
            given = [h if order is None else h.index_select(1, order) for h in given]
        return [[[h[k * directions + d] for h in given] for d in range(directions)] for k in range(self.num_layers)]

    def _layer(self, k: int, x: Tensor, starts: list[States], sizes: Tensor | None) -> tuple[Tensor, list[States]]:
        """The outputs of one layer, and its last states direction by direction."""
        if torch.is_grad_enabled() or self.proj_size:  # the fused function does not give out what is projected
            found = [
                self._step_by_step(suffix, x, start, sizes)
                for suffix, start in zip(self._suffixes(k), starts, strict=True)
            ]
            return torch.cat([out for out, _ in found], -1), [end for _, end in found]
        out, last = self._at_once(k, x, starts, sizes)
        shown = _rows_of_examples(x, sizes)
        for d, (suffix, start) in enumerate(zip(self._suffixes(k), starts, strict=True)):
            own = out.unflatten(-1, (len(starts), -1))[..., d, :]
            self.part(f"ih{suffix}")(shown, False)
            self.part(f"hh{suffix}")(_rows_of_examples(_before(own, start[0], sizes, reverse=bool(d)), sizes), False)
        return out, [[h[d] for h in last] for d in range(len(starts))]

    def _at_once(
        self, k: int, x: Tensor, starts: list[States], sizes: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer by torch's own function."""
        layers = [[self.part(f"{part}{suffix}") for part in ("ih", "hh")] for suffix in self._suffixes(k)]
        weights = [
            getattr(layer, name)
            for pair in layers
            for name in (("weight", "bias") if self.bias else ("weight",))
            for layer in pair
        ]
        states = tuple(torch.stack(parts) for parts in zip(*starts, strict=True))
        hx = states if self.mode == "LSTM" else states[0]
        function = getattr(torch, self.mode.lower())
        with warnings.catch_warnings():  # the weights are no single piece of memory, which cuDNN would like better
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            if sizes is None:
                out, *last = function(x, hx, weights, self.bias, 1, 0.0, False, self.bidirectional, True)
            else:
                out, *last = function(x, sizes, hx, weights, self.bias, 1, 0.0, False, self.bidirectional)
        return out, tuple(last)

    def _step_by_step(self, suffix: str, x: Tensor, start: States, sizes: Tensor | None) -> tuple[Tensor, States]:
        """One direction of one layer, step by step."""
        gates = self.part(f"ih{suffix}")(_rows_of_examples(x, sizes))
        hidden = self.part(f"hh{suffix}")
        project = self.part(f"hr{suffix}") if self.proj_size else None
        inputs = list(gates.unbind(1)) if sizes is None else list(gates.reshape(len(x), -1).split(sizes.tolist()))
        states, out = list(start), list(inputs)
        times = range(len(inputs))
        for t in reversed(times) if suffix.endswith("reverse") else times:
            n = len(inputs[t])
            new = step(self.mode, inputs[t], hidden(states[0][:n]), [h[:n] for h in states])
            if project is not None:
                new[0] = project(new[0])
            out[t] = new[0]
            states = [torch.cat([h, old[n:]]) if n < len(old) else h for h, old in zip(new, states, strict=True)]
        return torch.stack(out, 1) if sizes is None else torch.cat(out), states


class SplitCell(Split):
    """Computes one step, like nn.RNNCell, nn.LSTMCell and nn.GRUCell."""

    def __init__(self, module: nn.RNNCellBase, linears: Linears | None = None):
        linears = linears or Linears()
        super().__init__()
        self.input_size, self.hidden_size, self.bias = module.input_size, module.hidden_size, module.bias
        self.mode = MODES[type(module)]
        if isinstance(module, nn.RNNCell):
            self.mode = f"RNN_{module.nonlinearity.upper()}"
        for part in ("ih", "hh"):
            weight, bias = getattr(module, f"weight_{part}"), getattr(module, f"bias_{part}")
            stored_bias = None if bias is None else (f"bias_{part}", bias, ALL)
            kind = Matrix if part == "ih" else Recurrent
            self.add(part, linears, (f"weight_{part}", weight, ALL), stored_bias, kind)

    def forward(
        self,
        input: Tensor,  # noqa: A002 (networks may name it)
        hx: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        if hx is None:
            states = [x.new_zeros(len(x), self.hidden_size)] * (2 if self.mode == "LSTM" else 1)
        else:
            states = [h if batched else h.unsqueeze(0) for h in (hx if isinstance(hx, tuple | list) else [hx])]
        new = step(self.mode, self.part("ih")(x), self.part("hh")(states[0]), states)
        new = new if batched else [h.squeeze(0) for h in new]
        return tuple(new) if self.mode == "LSTM" else new[0]


def _rows_of_examples(x: Tensor, sizes: Tensor | None) -> Tensor:
    """What a layer is shown. The rows of a packed sequence are not in the order of the examples, so that they must not
    pass for one row of each example."""
    return x if sizes is None or len(x) != int(sizes[0]) else x.unsqueeze(0)


def _before(out: Tensor, start: Tensor, sizes: Tensor | None, reverse: bool) -> Tensor:
    """The hidden state that each step began with, from those with which the steps ended."""
    if sizes is None:
        first = start.unsqueeze(1)
        return torch.cat([out[:, 1:], first] if reverse else [first, out[:, :-1]], 1)
    ends = list(out.split(sizes.tolist()))
    if reverse:
        after = [*ends[1:], out[:0]]
        return torch.cat([torch.cat([h, start[len(h) : len(own)]]) for own, h in zip(ends, after, strict=True)])
    return torch.cat([start, *(h[: len(own)] for own, h in zip(ends[1:], ends[:-1], strict=True))])
