"""Input that is rare but sound works, with every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from maecho import METHODS, Upload, aggregate, make_upload
from maecho.linalg.spectra import Spectrum
from maecho.network.spaces import load
from maecho.statistics import STATISTICS
from maecho.upload import storage
from support.damage import forged
from support.tiny import (
    QUICK,
    batches,
    network,
    refused,
    together,
    upload,
)

SOURCES = ("memory", "files")
x, y = (torch.cat(part) for part in zip(*batches(), strict=True))


WORKS: dict[str, Callable[[], list[Upload]]] = {
    "one client": lambda: [upload()],
    "one sample": lambda: [make_upload(network(seed=i), [(x[:1], y[:1])], f"{i}", STATISTICS) for i in range(2)],
    "one sample, one client": lambda: [make_upload(network(), [(x[:1], y[:1])], "0", STATISTICS)],
    "a class nobody has": lambda: [make_upload(network(seed=i), [(x, y % 2)], f"{i}", STATISTICS) for i in range(2)],
    "rank 0": lambda: [make_upload(network(seed=i), batches(), f"{i}", STATISTICS, rank=0) for i in range(2)],
    "rank 0 beside a full one": lambda: [make_upload(network(), batches(), "0", STATISTICS, rank=0), upload()],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", WORKS)
def test_what_is_rare_but_sound_works(tmp_path: Path, method: str, source: str, case: str) -> None:
    uploads = WORKS[case]()
    merged = aggregate(together(source, tmp_path, *uploads), method, model=network(), **QUICK.get(method, {}))
    load(network(), merged)  # pfnm's network may have grown
    assert all(tensor.isfinite().all() for tensor in merged.values())
    # Nothing speaks against the average; but some learn from weights or class means, Fisher has no rank, and
    # RegMean and Kronecker weigh clients by the mean eigenvalues that a cut leaves.
    if len(uploads) == 1 or (
        case == "rank 0"
        and method not in ("dense", "fisher", "kronecker", "regmean", "ot", "ma-echo+ot", "pfnm", "fedma", "echo-chain")
    ):
        for name, tensor in merged.items():
            if method == "afl" and name.startswith("2.") and case != "rank 0":
                continue  # its head is new
            average = torch.stack([one.weights[name] for one in uploads]).mean(0)
            torch.testing.assert_close(tensor, average, rtol=1e-5, atol=1e-5)


class Rare(nn.Module):
    """Some layers see no data: an embedding at some clients, and a layer that runs only in training."""

    def __init__(self, reached: bool):
        super().__init__()
        self.reached = reached
        self.tokens, self.body = nn.Embedding(7, 4), nn.Linear(4, 5)
        self.head, self.extra = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.tokens(x).mean(1) if self.reached else torch.ones(len(x), 4))
        return self.head(h) + self.extra(h) if self.training else self.head(h)


@pytest.mark.filterwarnings("ignore:.*(not sent|nothing of)")
@pytest.mark.parametrize("method", METHODS)
def test_layers_that_nothing_reached(method: str) -> None:
    if method in ("dense", "echo-chain", "pfnm"):
        pytest.skip("dense and echo-chain draw real numbers, and pfnm knows fully connected layers, not tokens")
    tokens = torch.arange(90).reshape(30, 3) % 7
    uploads = [make_upload(Rare(i == 0), [(tokens, y)], f"{i}", STATISTICS) for i in range(2)]
    assert [one.head for one in uploads] == ["head", "head"]
    merged = aggregate(uploads, method, **QUICK.get(method, {}))
    for name, tensor in aggregate(uploads[::-1], method, **QUICK.get(method, {})).items():
        torch.testing.assert_close(tensor, merged[name])


@pytest.mark.filterwarnings("ignore:.*not sent")
def test_inputs_of_many_lengths_have_no_moments() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3))
    made = make_upload(model, [(torch.ones(3, 2, length), y[:3]) for length in (8, 9)], "ann")
    assert made.has == {"gram", "projector", "classes", "features"}
    assert "moments" in made.recipe["not_sent"]


@pytest.mark.filterwarnings("ignore:.*nothing of")
@pytest.mark.parametrize("statistic", ["gram", "projector"])
def test_a_matrix_of_tokens_is_a_diagonal(tmp_path: Path, statistic: str) -> None:
    """Methods solve with it entry by entry. With eigenvectors regmean and exact ma-echo ended in a traceback."""
    tokens = torch.arange(90).reshape(30, 3) % 7
    made = make_upload(Rare(True), [(tokens, y)], "ann", ["gram", "projector"])
    made.save(tmp_path / "ann")
    assert torch.equal(Upload.load(tmp_path / "ann").statistics[statistic]["tokens"].values,
                       made.statistics[statistic]["tokens"].values)  # fmt: skip
    about, tensors = storage.read_about(tmp_path / "ann", "upload"), load_file(tmp_path / "ann")
    forged(tmp_path / "ann", {**tensors, f"{statistic}/tokens/basis": torch.eye(7)[None]}, about)
    sentence = f"{statistic} of 'tokens' must be a Diagonal, since the layer's inputs are tokens, got eigenvectors"
    with refused(f"ann: {sentence}"):
        Upload.load(tmp_path / "ann")
    for matrix in (Spectrum(torch.ones(1, 7), torch.eye(7)[None]), torch.eye(7)):
        values = {**made.statistics, statistic: {**made.statistics[statistic], "tokens": matrix}}
        with refused(f"ann: {sentence}"):
            replace(made, statistics=values)
