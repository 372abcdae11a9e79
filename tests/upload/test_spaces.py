"""The neuron spaces of an upload were tried on the client's inputs. What fails is left out and named."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.alignment.transport import Alignment
from maecho.errors import UploadError
from maecho.network import kinds
from maecho.network.batches.inputs import few, stand_in
from maecho.privacy import Privacy
from maecho.upload import client
from support.clients import batches, network, rng


class Ramp(nn.Linear):
    """Multiplies its outputs by 1, 2, 3 …, so that their order matters."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * torch.arange(1, 1 + out.shape[-1])


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A network one of whose layers was registered as something that it is not."""
    monkeypatch.setattr(kinds, "_KINDS", {**kinds._KINDS, Ramp: kinds.Kind()})
    return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), Ramp(9, 7), nn.ReLU(), nn.Linear(7, 5))


def test_a_space_that_fails_is_left_out_and_named(wrong: nn.Module) -> None:
    with (
        pytest.warns(UserWarning, match=r"maecho cannot read them as matrices: 2 \(Ramp\)"),
        pytest.warns(UserWarning, match=r"these layers keep their order in matching: '2': permuting .* by \S+ of"),
    ):
        upload = maecho.make_upload(wrong, iter(batches()), "ann")
    assert upload.spaces is not None
    assert [space.name for space in upload.spaces] == ["0"]
    assert "permuting its neurons changed the outputs" in upload.recipe["not_sent"]["space '2'"]


def test_what_holds_is_sent_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        upload = maecho.make_upload(network(), batches(), "ann")
    assert [space.size for space in upload.spaces or ()] == [9, 7]
    assert not [name for name in upload.recipe["not_sent"] if "space" in name]


@pytest.mark.parametrize("private", [True, False])
def test_inputs_that_are_tried(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With privacy they are drawn, so that what is left out says nothing about the data."""
    tried: list[Tensor] = []

    def proven(model: nn.Module, inputs: Any) -> tuple[tuple[()], dict[str, str]]:
        tried.append(inputs)
        return (), {}

    monkeypatch.setattr(client, "proven", proven)
    data = batches(3)
    privacy = Privacy(noise=0.01, clip=1.0) if private else None
    maecho.make_upload(network(), data, "ann", privacy=privacy)
    x = data[0][0]
    assert tried[0].shape == (4, *x.shape[1:])
    assert torch.equal(tried[0], x[:4]) is not private
    assert tried[0].data_ptr() != x.data_ptr()


def test_few_examples() -> None:
    x, mask = torch.randn(9, 3, generator=rng()), torch.ones(9, dtype=torch.bool)
    assert torch.equal(few(x), x[:4])
    cut = few({"x": x, "mask": mask})
    assert (cut["x"].shape, cut["mask"].shape) == ((4, 3), (4,))
    graph = {"x": x, "edges": torch.zeros(2, 20), "scale": 2.0}
    assert {k: getattr(v, "shape", v) for k, v in few(graph).items()} == {"x": (9, 3), "edges": (2, 20), "scale": 2.0}
    assert few(x.to_sparse()).shape == (9, 3)
    assert few("words") == "words"


def test_stand_ins_have_the_shape_and_nothing_else() -> None:
    x = torch.full((4, 3), 7.0, dtype=torch.float64)
    made = stand_in({"x": x, "tokens": torch.full((4, 2), 7), "scale": 2.0})
    assert made["x"].shape == x.shape
    assert made["x"].dtype == x.dtype
    assert 0.5 < float(made["x"].std()) < 2
    assert made["tokens"].tolist() == [[0, 0]] * 4
    assert made["scale"] == 2.0


def _without_spaces(*statistics: str) -> list[maecho.Upload]:
    return [
        replace(maecho.make_upload(network(), batches(i), f"c{i}", statistics=statistics), spaces=None)
        for i in range(2)
    ]


def test_a_model_gives_the_spaces_that_the_uploads_lack() -> None:
    uploads = _without_spaces("moments")
    expected = Alignment(spaces=maecho.make_upload(network(), batches(), "ann").spaces).align(uploads)
    for one, other in zip(Alignment(model=network()).align(uploads), expected, strict=True):
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    with pytest.raises(UploadError, match=r"needs the neuron spaces .* beside uploads with moments, or the spaces as"):
        Alignment(model=network()).align(_without_spaces("gram"))
