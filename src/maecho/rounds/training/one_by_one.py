"""Local training, one client after the other, as anybody would write it. It takes every network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from maecho.randomness import global_seed
from maecho.rounds.training.local import Correction, Local
from maecho.rounds.training.losses import Step, shares


def train_one(
    model: nn.Module, start: Mapping[str, Tensor], x: Tensor, y: Tensor, local: Local, correction: Correction, seed: int
) -> dict[str, Tensor]:
    """Train from `start` on these examples. The result is the state_dict; `model` is a place to work in."""
    model.load_state_dict(dict(start))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    origin = {name: p.detach().clone() for name, p in parameters.items()}
    teacher = None
    if local.loss.needs_teacher:
        model.eval()
        with torch.no_grad():
            teacher = torch.cat([model(part) for part in x.split(1000)])
    rng = torch.Generator().manual_seed(seed)
    order = local.batches(len(y), rng)
    of_class: Tensor | None = None
    optimizer = torch.optim.SGD(parameters.values(), lr=local.learning_rate, momentum=local.momentum)
    model.train()
    with global_seed(seed, x.device):
        for batch in order:
            index = batch.to(x.device)
            logits = model(x[index]).unsqueeze(0)
            if of_class is None:
                of_class = shares(y, logits.shape[-1], logits).unsqueeze(0)
            taught = None if teacher is None else teacher[index].unsqueeze(0)
            optimizer.zero_grad()
            local.loss(Step(logits, y[index].unsqueeze(0), of_class, teacher=taught)).mean().backward()
            with torch.no_grad():
                for name, p in parameters.items():
                    if p.grad is None:
                        continue
                    if correction.pull:
                        p.grad += correction.pull * (p - origin[name])
                    if correction.offset is not None:
                        p.grad += correction.offset[name]
            if local.clip is not None:
                nn.utils.clip_grad_norm_(list(parameters.values()), local.clip)
            optimizer.step()
    model.eval()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
