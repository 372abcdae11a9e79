"""A config as a user could write it for `experiments/`."""

from __future__ import annotations

HEAD = """
title = "Mine"
data = "digits"
network = "digits-mlp"
seeds = [0]
cells = [{ clients = 2, beta = 0.5, init = "same" }]
"""
"""What they have in common: a table on the embedded digits."""

CONFIG = (
    HEAD
    + """
[training]
epochs = 1

[methods]
ma-echo = { method = "ma-echo" }
"ensemble, logits" = { method = "ensemble", by = "logits" }
"""
)
