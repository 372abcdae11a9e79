"""Figure 4: merged decoders draw the digits of all clients, and the numbers are those of the pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from maecho.lab import charts, data
from maecho.lab.studies import cvae
from maecho.lab.studies.found import Found, Task
from maecho.lab.studies.generation import Generation, as_inputs, as_picture
from maecho.lab.training import LocalTraining

STUDY = Generation(
    data="digits", latent=8, hidden=(32, 64), draws=2000, reader="digits-mlp", each=20,
    training=cvae.Training(epochs=25, learning_rate=0.005, batch_size=32),
    reading=LocalTraining(epochs=10, learning_rate=0.05, batch_size=16),
)  # fmt: skip
ROWS = [
    "trained on 0, 1, 3, 4, 7",
    "trained on 2, 5, 6, 8, 9",
    "average",
    "ma-echo",
    "regmean",
    "echo-relay",
    "trained on everything",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAECHO_CACHE", str(folder))
        return STUDY(Task(0, data.digits()))


def test_merged_decoders_draw_all_digits(found: Found) -> None:
    numbers = found.numbers
    assert numbers["real test images read right"] > 90
    for own in ROWS[:2]:
        assert numbers[f"of its own digits, {own}"] > 85
        assert numbers[f"drawn digits read right, {own}"] < 75, "it has not seen the other half"
    assert numbers["drawn digits read right, trained on everything"] > 85
    for method in ("regmean", "echo-relay"):
        assert numbers[f"drawn digits read right, {method}"] > 85
    (pictures,) = found.charts
    assert isinstance(pictures, charts.Pictures)
    assert pictures.columns == [str(digit) for digit in range(10)]
    assert list(pictures.rows) == ROWS
    assert {(len(image), len(image[0])) for images in pictures.rows.values() for image in images} == {(8, 8)}


def test_a_second_run_trains_nothing(found: Found, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setenv("MAECHO_CACHE", str(folder))
    monkeypatch.setattr(cvae.Training, "__call__", fail)
    monkeypatch.setattr(LocalTraining, "__call__", fail)
    again = STUDY(Task(0, data.digits()))
    assert again.numbers == found.numbers
    with pytest.raises(AssertionError, match="trained again"):
        STUDY(Task(1, data.digits()))


def test_the_number_is_that_of_a_decoder(found: Found, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn, standardised and read here step by step."""
    monkeypatch.setenv("MAECHO_CACHE", str(folder))
    task = Task(0, data.digits())
    shape = cvae.Shape(10, 64, 8, (32, 64))
    decoder = STUDY._decoder(shape, STUDY.labels[0], task, 0.0, 3)
    reader = STUDY._reader(task)
    z = torch.randn(200, 8, generator=STUDY._rng("draws", 0))
    right = 0
    for i in range(200):
        code = torch.cat([z[i], torch.eye(10)[i % 10]])
        image = torch.sigmoid(decoder(code[None]))[0].detach()
        (mean,), (std,) = task.data.mean, task.data.std
        x = ((image - mean) / std).view(1, *task.data.x_train.shape[1:])
        right += int(reader(x).argmax()) == i % 10
    assert found.numbers["drawn digits read right, trained on 0, 1, 3, 4, 7"] == pytest.approx(right / 2)


def test_pictures_are_what_the_reader_sees() -> None:
    digits = data.digits()
    pixels = digits.pixels(digits.x_test[:5]).flatten(1)
    torch.testing.assert_close(as_inputs(digits, pixels), digits.x_test[:5], atol=1e-5, rtol=0)
    image = as_picture(digits, pixels[0])
    assert len(image) == len(image[0]) == 8
    assert image[0][3] == round(255 * float(pixels[0][3]))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"labels must list the classes of two clients or more, got \[\(1,\)\]"):
        Generation(labels=((1,),))
    with pytest.raises(ValueError, match=r"reader must be among .*, got 'mpl'"):
        Generation(reader="mpl")
    with pytest.raises(ValueError, match="methods must merge decoders, got 'local'"):
        Generation(methods={"local": {"method": "local"}})
    with pytest.raises(ValueError, match=r"method must be one of .*, got 'ma-ecco'"):
        Generation(methods={"mine": {"method": "ma-ecco"}})
    with pytest.raises(ValueError, match="latent, hidden, draws and each must be at least 1"):
        Generation(each=0)
