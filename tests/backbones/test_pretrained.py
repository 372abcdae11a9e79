"""Published weights: they are checked, loaded without a remainder, and see what is in a picture."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from maecho.backbones import BACKBONES, MobileNetV2, features, load
from maecho.errors import InputError
from maecho.lab.data import backbone
from maecho.lab.data import load as load_data
from maecho.lab.data.domains import CLASSES, DOMAINS
from maecho.randomness import global_seed

FILE = BACKBONES["mobilenet-v2"].file


@pytest.fixture
def random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights of the published names whose checksum is known."""
    path = tmp_path / FILE
    with global_seed(1):
        torch.save(MobileNetV2().state_dict(), path)
    known = replace(BACKBONES["mobilenet-v2"], sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setitem(BACKBONES, "mobilenet-v2", known)
    return path


def test_weights_are_loaded_and_the_head_is_left_out(random_weights: Path) -> None:
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with global_seed(1):
        expected = MobileNetV2().eval()
    whole, body = (
        load("mobilenet-v2", random_weights, side=32, head=True),
        load("mobilenet-v2", random_weights, side=32),
    )
    assert features(whole, x).shape == (2, 1000)
    assert features(body, x).shape == (2, BACKBONES["mobilenet-v2"].width)
    assert torch.equal(body.network.features[0][0].weight, expected.features[0][0].weight)  # type: ignore[index,union-attr]
    found = backbone("mobilenet-v2", random_weights.parent, side=32)
    assert found.digest == body.digest


def test_damaged_weights(random_weights: Path) -> None:
    content = bytearray(random_weights.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (bytes(content), bytes(content[:-100]), b""):
        random_weights.write_bytes(damaged)
        message = (
            f"{random_weights}: weights of mobilenet-v2 must have the SHA-256 {BACKBONES['mobilenet-v2'].sha256[:16]}"
        )
        with pytest.raises(InputError, match=re.escape(message)):
            load("mobilenet-v2", random_weights)


def test_missing_weights_and_names(tmp_path: Path) -> None:
    message = f"weights: .* has no {FILE}, .*; get it from download.pytorch.org/models/{FILE}, and set MAECHO_DATA"
    with pytest.raises(FileNotFoundError, match=message):
        backbone("mobilenet-v2", tmp_path)
    with pytest.raises(InputError, match=f"{FILE} must be a file, got nothing at that place"):
        load("mobilenet-v2", tmp_path / FILE)
    for call in (backbone, lambda name: load(name, tmp_path)):
        with pytest.raises(InputError, match="backbone: no 'vgg', known are mobilenet-v2, resnet-18, resnet-34"):
            call("vgg")


class Tiny(nn.Module):
    """As torchvision's ResNets: features, then `fc`."""

    def __init__(self, weights: None) -> None:
        super().__init__()
        assert weights is None
        self.body, self.fc = nn.Flatten(), nn.Linear(3 * 8 * 8, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x))  # type: ignore[no-any-return]


def test_resnets_come_from_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModuleType("torchvision.models")
    models.resnet18 = models.resnet34 = Tiny  # type: ignore[attr-defined]
    package = ModuleType("torchvision")
    package.models = models  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", package)
    path = tmp_path / BACKBONES["resnet-34"].file
    torch.save(Tiny(None).state_dict(), path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(BACKBONES, "resnet-34", replace(BACKBONES["resnet-34"], sha256=found[:8]))
    x = torch.rand(2, 3, 8, 8)
    assert features(load("resnet-34", path, side=8), x).shape == (2, 192)
    assert features(load("resnet-34", path, side=8, head=True), x).shape == (2, 1000)


def test_without_torchvision_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    message = "resnet-18 needs torchvision, got none; pip install 'maecho[resnets]'"
    with pytest.raises(InputError, match=re.escape(message)):
        BACKBONES["resnet-18"].make()


@pytest.mark.parametrize(("name", "parameters"), [("resnet-18", 11_689_512), ("resnet-34", 21_797_672)])
def test_torchvisions_resnets(name: str, parameters: int) -> None:
    try:
        network = BACKBONES[name].make()
    except InputError as error:
        pytest.skip(str(error))
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert getattr(network, BACKBONES[name].head).in_features == BACKBONES[name].width


DOGS, ELEPHANTS, HORSES, GUITARS = set(range(151, 269)), {101, 385, 386}, {339}, {402, 546}
"""Classes of ImageNet: its breeds; tusker, Indian and African elephant; sorrel; acoustic and electric guitar."""


@pytest.mark.data
def test_the_published_weights_see_what_is_in_pacs() -> None:
    try:
        network, data = backbone("mobilenet-v2", head=True), load_data("pacs")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert data.groups_test is not None
    photo = data.groups_test == DOMAINS.index("photo")
    seen = {}
    for name in ("dog", "elephant", "horse", "guitar"):
        rows = torch.nonzero(photo & (data.y_test == CLASSES.index(name)))[:8, 0]
        seen[name] = features(network, data.x_test[rows], pixels=data.pixels).argmax(1).tolist()
    assert seen["horse"][2:] == [339] * 6
    assert seen["guitar"][:3] == [546] * 3
    right = {"dog": DOGS, "elephant": ELEPHANTS, "horse": HORSES, "guitar": GUITARS}
    assert all(sum(found in right[name] for found in seen[name]) >= 5 for name in right), seen
