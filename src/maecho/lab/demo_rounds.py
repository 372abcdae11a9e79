"""The clients of `maecho rounds`: scikit-learn's digits, a few classes each."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from maecho.errors import InputError
from maecho.lab import data, networks, partition
from maecho.rounds.engine import Client

NETWORK = "digits-mlp"


def digits(clients: int, classes: int, seed: int) -> tuple[nn.Module, list[Client], Client]:
    """The network, the clients and the test data."""
    found = data.digits()
    try:
        parts = partition.by_classes(found.y_train.numpy(), clients, classes, np.random.default_rng(seed))
    except ValueError as error:
        raise InputError(str(error).removeprefix("by_classes: ")) from error
    model = networks.build(NETWORK, torch.Generator().manual_seed(seed))
    index = [torch.from_numpy(part) for part in parts]
    return model, [(found.x_train[i], found.y_train[i]) for i in index], (found.x_test, found.y_test)
