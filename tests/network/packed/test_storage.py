"""What is said about stored tensors is checked, travels in files, and is part of the fingerprint."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho import Upload
from maecho.network.packed.storage import Stored, complaint, pack, packed_names
from maecho.upload import storage as files
from maecho.upload.upload import read_header
from support.clients import rng
from support.tiny import refused, upload

WEIGHTS = {"q": torch.ones(2, 3), "k": 2 * torch.ones(1, 3), "b": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}
ALIASES = {"other": "q"}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ([Stored("q", ("k",))], "'q' must be a weight or made of weights, once"),
        ([Stored("other", ("k",))], "'other' must be a weight or made of weights, once"),
        ([Stored("all", ("q",)), Stored("all", ("k",))], "'all' must be a weight or made of weights, once"),
        ([Stored("all", ())], "'all' must be made of at least one weight, got none"),
        ([Stored("all", ("q", "v"))], "'all' must be made of weights, got 'v', which is not there"),
        ([Stored("all", ("q", "q"))], "'q' must lie in one place of one tensor, got it in 'all' too"),
        (
            [Stored("all", ("q", "k")), Stored("more", ("k",))],
            "'k' must lie in one place of one tensor, got it in 'more'",
        ),
        ([Stored("v", ("q",), "direction"), Stored("w", ("q",))], "'q' must lie in one place of one tensor"),
        ([Stored("g", ("q",), "norm"), Stored("h", ("q",), "norm", 1)], "'q' must lie in one place of one tensor"),
        ([Stored("all", ("n",))], "'all' must be made of rows of floating point, got 'n'"),
        ([Stored("all", ("q", "b"))], "the parts of 'all' must have rows of one shape, got (3,), ()"),
        ([Stored("g", ("q",), "norm", 2)], "'g' must be computed along an axis of its 2, got 2"),
        ([Stored("g", ("q",), "norm", -2)], "'g' must be computed along an axis of its 2, got -2"),
        ([Stored("u", ("b",), "left")], "'u' must be computed along an axis of its 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(stored: list[Stored], words: str, tmp_path: Path) -> None:
    meta = {name: tensor.to("meta") for name, tensor in WEIGHTS.items()}
    for weights in (WEIGHTS, meta):
        found = complaint(stored, weights, ALIASES)
        assert found is not None
        assert words in found
    with refused("ann:", words):
        Upload("ann", 1, WEIGHTS, aliases=ALIASES, stored=tuple(stored))
    sound = Upload("ann", 1, WEIGHTS, aliases=ALIASES, stored=(Stored("all", ("q", "k")),))
    sound.save(tmp_path / "sound")
    about = read_header(tmp_path / "sound").about()
    hostile = replace(sound, stored=())
    about |= {"stored": [vars(one) for one in stored], "fingerprint": hostile.fingerprint}
    files.write_tensors(tmp_path / "hostile", "upload", hostile.tensors(), about)
    with refused("hostile: ann:", words):
        Upload.load(tmp_path / "hostile")


@pytest.mark.parametrize("entry", [{"form": "code"}, {"parts": "q"}, {"axis": 0.5}])
def test_a_file_with_another_form_is_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    sound = Upload("ann", 1, WEIGHTS, aliases=ALIASES, stored=(Stored("all", ("q", "k")),))
    sound.save(tmp_path / "sound")
    about = read_header(tmp_path / "sound").about()
    about["stored"] = [{**about["stored"][0], **entry}]
    files.write_tensors(tmp_path / "hostile", "upload", sound.tensors(), about)
    with refused("must be a maecho upload, got one whose header says"):
        Upload.load(tmp_path / "hostile")


def test_pack_makes_the_tensors_of_the_model() -> None:
    stored = [Stored("all", ("q", "k")), Stored("g", ("q",), "norm"), Stored("u", ("q",), "left")]
    assert complaint(stored, WEIGHTS, ALIASES) is None
    found = pack(WEIGHTS, stored)
    assert found.keys() == {"b", "n", "all", "g", "u"}
    assert torch.equal(found["all"], torch.tensor([[1.0] * 3, [1.0] * 3, [2.0] * 3]))
    torch.testing.assert_close(found["g"], torch.full((2, 1), 3**0.5))
    assert packed_names(["q", "b"], WEIGHTS, stored) == ["b", "g", "u"]
    assert packed_names(["q", "k"], WEIGHTS, stored) == ["all", "g", "u"]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attn(x, x, x)[0].mean(1))  # type: ignore[no-any-return]


def attending(seed: int = 0) -> Upload:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Attending()
    x = torch.randn(12, 3, 4, generator=rng(seed))
    return maecho.make_upload(model, [(x, torch.arange(12) % 3)], f"c{seed}", ["gram"])


def test_files_carry_it(tmp_path: Path) -> None:
    one = attending()
    one.save(tmp_path / "file")
    back = Upload.load(tmp_path / "file")
    assert back.stored == one.stored
    assert back.stored[0] == Stored("attn.in_proj_weight", ("attn.q.weight", "attn.k.weight", "attn.v.weight"))
    assert back.fingerprint == one.fingerprint != replace(one, stored=one.stored[1:]).fingerprint
    assert back.state_dict().keys() == Attending().state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    merged = maecho.aggregate([tmp_path / "file", attending(1)], "regmean")
    Attending().load_state_dict(merged)
    assert merged.averaged == ()


def test_another_way_of_storing_is_another_architecture() -> None:
    one, other = attending(), attending(1)
    turned = replace(other, stored=(replace(other.stored[0], parts=other.stored[0].parts[::-1]), *other.stored[1:]))
    with refused("c1: the way in which 'attn.in_proj_weight' is stored must be"):
        maecho.aggregate([one, turned], "fedavg")


def test_plain_networks_have_the_header_and_the_fingerprint_that_they_had(tmp_path: Path) -> None:
    one = upload()
    one.save(tmp_path / "file")
    assert "stored" not in read_header(tmp_path / "file").about()
    assert one.fingerprint == "8884f5672f925a67"


def test_no_warning_of_attention(recwarn: pytest.WarningsRecorder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attending()
    assert not recwarn.list
