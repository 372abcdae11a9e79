"""What a header says, judged without its tensors; and what makes two architectures one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maecho import Upload
from maecho.upload import storage
from maecho.upload.cohort import Cohort
from maecho.upload.envelope import Limits
from maecho.upload.header import LARGEST
from maecho.upload.upload import read_header
from support import damage
from support.tiny import ANN, cases, refused, saved, upload


def bare() -> Upload:
    return replace(upload(), statistics={}, spaces=None)


OTHERS: dict[str, tuple[Callable[[Upload], Upload], str]] = {
    "a bias that is only averaged": (
        lambda u: replace(u, layers=(replace(u.layers[0], bias=None), u.layers[1])),
        "the bias of layer '0' must be 0.bias as in ann, got None",
    ),
    "another head": (
        lambda u: replace(u, head="0"),
        "head must be 2 as in ann, got 0",
    ),
    "no head": (
        lambda u: replace(u, head=None),
        "head must be 2 as in ann, got None",
    ),
    "a tie": (
        lambda u: replace(u, aliases={"tied": "0.weight"}),
        "the tie of 'tied' must be None as in ann, got 0.weight",
    ),
    "another dtype": (
        lambda u: replace(u, weights={n: t.double() for n, t in u.weights.items()}),
        "weight '0.weight' must be float32 5x4 as in ann, got float64 5x4",
    ),
    "one weight more": (
        lambda u: replace(u, weights={**u.weights, "more": torch.ones(1)}),
        "weights must be those of ann, got 'more' besides",
    ),
    "patches instead of rows": (
        lambda u: replace(u, layers=(replace(u.layers[0], convolution=True), u.layers[1])),
        "the convolution of layer '0' must be False as in ann, got True",
    ),
}


@pytest.mark.parametrize(("change", "words"), **cases(OTHERS))
def test_other_architectures_have_other_fingerprints(change: Callable[[Upload], Upload], words: str) -> None:
    one = bare()
    other = replace(change(one), client="bob")
    assert other.fingerprint != one.fingerprint
    with refused(f"bob: {words}"):
        Cohort([one, other])


def test_values_and_names_of_clients_do_not_matter() -> None:
    one = bare()
    other = replace(one, client="bob", examples=7, weights={n: t + 1 for n, t in one.weights.items()})
    assert other.fingerprint == one.fingerprint
    assert len(Cohort([one, other])) == 2


def forged(folder: Path, **said: Any) -> Path:
    path = saved(folder)
    return damage.forged(path, load_file(path), {**storage.read_about(path, "upload"), **said})


def test_spaces_are_judged_without_the_tensors(tmp_path: Path) -> None:
    (space,) = storage.read_about(saved(tmp_path), "upload")["spaces"]
    for wrong, words in (({"size": 4}, "4 neurons of 1 entries, got 5"), ({"size": 0}, "must be positive, got 0")):
        path = forged(tmp_path, spaces=[{**space, **wrong}])
        for look in (read_header, Upload.load):
            with refused(ANN, words):
                look(path)


def test_a_statistic_that_is_listed_is_there(tmp_path: Path) -> None:
    path = saved(tmp_path)
    tensors = {key: tensor for key, tensor in load_file(path).items() if not key.startswith("gram/")}
    about = {key: said for key, said in storage.read_about(path, "upload").items() if key != "tensors"}
    damage.forged(path, tensors, about)
    for look in (read_header, Upload.load):
        with refused(ANN, "ann: gram must be there as the header says, got none"):
            look(path)


def test_the_largest_number_of_examples(tmp_path: Path) -> None:
    replace(bare(), examples=LARGEST).save(tmp_path / ANN)
    assert read_header(tmp_path / ANN).examples == Upload.load(tmp_path / ANN).examples == LARGEST == 2**53
    with refused("ann: the number of examples must be at least 1 and at most 2**53"):
        replace(bare(), examples=LARGEST + 1)


def test_limits_hold_for_headers_too(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for limits, words in ((Limits(file=100), "MAECHO_MAX_FILE"), (Limits(header=100), "MAECHO_MAX_HEADER")):
        for look in (read_header, Upload.load):
            with refused(ANN, "must", "at most 100 bytes", words):
                look(path, limits=limits)
