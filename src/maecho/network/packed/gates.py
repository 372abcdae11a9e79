"""One step of each kind of recurrent module, from the products of its two matrices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MODES: dict[type[nn.Module], str] = {nn.RNNCell: "RNN", nn.LSTMCell: "LSTM", nn.GRUCell: "GRU"}


def step(mode: str, of_input: Tensor, of_hidden: Tensor, states: list[Tensor]) -> list[Tensor]:
    """The states after a step: h, and for an LSTM c beside it.

    Args:
        mode: LSTM, GRU, RNN_TANH or RNN_RELU, as torch names them.
        of_input, of_hidden: W x_t + b and U h_{t−1} + b', gate after gate.
        states: the states before.
    """
    if mode == "LSTM":
        i, f, g, o = (of_input + of_hidden).chunk(4, -1)
        c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]
    if mode == "GRU":
        (r, z, n), (r_h, z_h, n_h) = of_input.chunk(3, -1), of_hidden.chunk(3, -1)
        n = torch.tanh(n + (r + r_h).sigmoid() * n_h)
        z = (z + z_h).sigmoid()
        return [(1 - z) * n + z * states[0]]
    total = of_input + of_hidden
    return [total.relu() if mode == "RNN_RELU" else total.tanh()]
