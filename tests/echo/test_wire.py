"""The wire form: an error tells few numbers, however many a message holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from maecho.echo import wire
from maecho.echo.messages import Answer, Question
from support.tiny import refused_input

LARGE = "torch.{} of shape (100000,)"
READ: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "round": (lambda many: Question.read({"round": many}), f"at least 0, got {LARGE.format('int64')}"),
    "clients": (
        lambda many: Answer(many.double(), torch.ones(1)),
        f"answers must say of how many clients they are, got {LARGE.format('float64')}",
    ),
    "stage": (
        lambda many: Answer.read({"clients": torch.ones(1), "examples": torch.ones(1), "stage/0": many}),
        f"'stage/0' must be one whole number, at least 0, got {LARGE.format('int64')}",
    ),
    "sum": (
        lambda many: wire.add({"stage/0": many}, {"stage/0": many + 1}),
        f"as for the others, got {LARGE.format('int64')}",
    ),
}


@pytest.mark.parametrize("read", READ)
def test_a_message_of_many_numbers_is_not_repeated_in_the_error(read: str) -> None:
    """A list of numbers takes ten times the memory of a tensor."""
    make, said = READ[read]
    with refused_input(said):
        make(torch.ones(100_000, dtype=torch.int64))


def test_few_numbers_are_told() -> None:
    with refused_input("'stage/0' must be 3 as for the others, got 4"):
        wire.add({"stage/0": torch.tensor(3)}, {"stage/0": torch.tensor(4)})
    with refused_input("'round' must be one whole number, at least 0, got [1, 2]"):
        Question.read({"round": torch.tensor([1, 2])})
