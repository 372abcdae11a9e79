"""Checks the network that a method needs in order to run uploaded weights."""

from __future__ import annotations

from torch import nn

from maecho.errors import InputError
from maecho.network.plain import plain
from maecho.upload.upload import Upload


class NoNetworkError(InputError):
    """A method got no network. The command line gives other advice than Python."""

    def __init__(self, sentence: str, advice: str):
        super().__init__(f"{sentence}; {advice}")
        self.sentence = sentence


def skeleton(model: nn.Module | None, first: Upload, method: str, why: str) -> nn.Module:
    """The model without wrappers, if there is one and the weights of the first upload fit it. Raises InputError if not.

    `why` completes "since <method> …" in the error.
    """
    if model is None:
        raise NoNetworkError(
            f"{method}: model must be the network that the uploads are weights of, since {method} {why}, got none",
            f"give it as aggregate(uploads, {method!r}, model=network)",
        )
    model = plain(model, f"{method}: model")
    expected, got = first.state_dict(), model.state_dict()
    for name in {**expected, **got}:
        words = [
            "x".join(map(str, state[name].shape)) or "scalar" if name in state else "none" for state in (expected, got)
        ]
        if words[0] != words[1]:
            raise InputError(
                f"{method}: model must have {words[0]} for {name!r} as in the upload of {first.client}, got {words[1]}"
            )
    return model
