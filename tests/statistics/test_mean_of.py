"""The groups whose means make the projector: they do not depend on how the examples are cut into batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from maecho.linalg import recursion
from maecho.network import kinds
from maecho.statistics import projector
from maecho.statistics.passes.groups import FewMeans, Means, size_for
from maecho.upload.client import make_upload
from support.clients import rng


class CalledTwice(nn.Module):
    """One layer before and after a non-linearity."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.same(self.same(x).relu()))
        return out


class TimeFirst(nn.Module):
    """A transformer layer whose inputs are [places, examples, width], as torch's default is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(6, 2, 8), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x.transpose(0, 1)).mean(0))
        return out


class Pooled(nn.Module):
    """A layer at every place of a sequence of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.each(x).relu().mean(1))
        return out


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "fully connected": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (6,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(168, 3)),
        (2, 7, 6),
    ),
    "too small for a patch": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 5, padding=2), nn.Flatten(), nn.Linear(16, 3)),
        (2, 4),
    ),
    "called twice": (CalledTwice, (6,)),
    "time first": (TimeFirst, (7, 6)),
    "sequence": (Pooled, (7, 6)),
}
COUNT = 150


def made(model: nn.Module, batches: object, mean_of: int | None) -> dict[str, Tensor]:
    upload = make_upload(model.eval(), batches, "a", ["projector"], None, mean_of=mean_of)  # type: ignore[arg-type]
    return {name: P.dense() for name, P in upload.statistics["projector"].items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mean_of", [1, 16, 64, None])
@pytest.mark.filterwarnings(
    "ignore:a. the neurons", "ignore:the neurons of these", "ignore:a. these are averaged", "ignore:a. nothing of"
)
def test_it_does_not_depend_on_the_batches(case: str, mean_of: int | None) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(COUNT, *shape, generator=rng(3), dtype=torch.float64) + 0.5
    expected = made(model, [x], mean_of)
    for cut in (*([1] if mean_of is None else []), 2, 4, 64, [50, 3, 97]):
        found = made(model, x.split(cut), mean_of)
        for name, P in expected.items():
            torch.testing.assert_close(found[name], P, rtol=0, atol=1e-9)


def test_the_size_of_the_groups_matters() -> None:
    x = torch.randn(64, 30, generator=rng(3)) + 0.5
    model = nn.Linear(30, 3)
    assert not torch.allclose(made(model, [x], 4)[""], made(model, [x], 16)[""], atol=0.1)


def test_examples_of_several_lengths_are_averaged_place_by_place() -> None:
    torch.manual_seed(0)
    model, draw = Pooled(), rng(5)
    sequences = [torch.randn(1, length, 6, generator=draw) for length in (3, 5, 5, 2, 4)]
    means = []
    for group in (sequences[:3], sequences[3:]):
        means += [
            torch.stack([x[0, place] for x in group if x.shape[1] > place]).double().mean(0)
            for place in range(max(x.shape[1] for x in group))
        ]
    Q = torch.eye(7, dtype=torch.float64)
    for mean in means:
        r = torch.cat([mean, torch.ones(1)])
        k = Q @ r
        Q = Q - 0.5 * torch.outer(k, k) / (recursion.DAMPING + r @ k)
    expected = torch.eye(7, dtype=torch.float64) - Q
    one_each = made(model, sequences, 3)["each"][0].double()
    torch.testing.assert_close(one_each, expected, rtol=0, atol=1e-5)
    joined = [sequences[0], torch.cat(sequences[1:3]), *sequences[3:]]
    torch.testing.assert_close(made(model, joined, 3)["each"][0].double(), expected, rtol=0, atol=1e-5)


def test_a_place_that_no_entry_has_is_zero() -> None:
    means = Means(2)
    assert means.add(torch.ones(1, 1, 2)) == []
    (found,) = means.add(torch.full((1, 2, 1), 3.0))
    assert found.tolist() == [[[2.0, 1.0], [3.0, 0.0]]]
    assert means.rest() == []


def test_the_last_group_counts_even_if_it_is_not_full() -> None:
    x = torch.randn(10, 4, generator=rng(1), dtype=torch.float64)
    means = Means(4)
    found = [mean for part in x.split(3) for mean in means.add(part)] + means.rest()
    torch.testing.assert_close(torch.cat(found), torch.stack([x[:4].mean(0), x[4:8].mean(0), x[8:].mean(0)]))


def test_no_more_than_a_sum_is_held() -> None:
    means = Means(1000)
    for _ in range(5):
        assert means.add(torch.zeros(100, 7)) == []
        held = [value for value in vars(means).values() if isinstance(value, Tensor)]
        assert sum(tensor.numel() for tensor in held) <= 2 * 7


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("most", "size"), [(128, 2), (75, 2), (64, 4), (10, 16), (1, 256)])
@pytest.mark.filterwarnings(
    "ignore:a. the neurons", "ignore:the neurons of these", "ignore:a. these are averaged", "ignore:a. nothing of"
)
def test_without_a_size_it_is_the_smallest_with_few_enough_means(
    case: str, most: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(COUNT, *shape, generator=rng(3), dtype=torch.float64) + 0.5
    monkeypatch.setattr(projector, "MOST_MEANS", most)
    expected, found = made(model, [x], size), made(model, x.split(40), None)
    assert found.keys() == expected.keys()
    for name, P in expected.items():
        torch.testing.assert_close(found[name], P, rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 100, 129])
@pytest.mark.parametrize("cut", [1, 4, 64, 7])
def test_few_means_are_those_of_groups_of_the_size_that_they_end_at(count: int, cut: int) -> None:
    x = torch.randn(count, 3, 2, generator=rng(count), dtype=torch.float64)
    few = FewMeans(8)
    for part in x.split(cut):
        assert few.add(part) == []
    assert few.of == size_for(count, 8)
    means = Means(few.of)
    expected = torch.cat(means.add(x) + means.rest())
    (found,) = few.rest()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert min(count, 5) <= len(found) <= 8
    assert few.rest() == []


@pytest.mark.parametrize("lengths", [(3, 5, 5, 2, 4, 1, 1), (2, 2, 2, 2, 2, 2, 6), (6, 1, 1, 1, 1, 1, 1)])
def test_few_means_of_several_lengths_are_averaged_place_by_place(lengths: tuple[int, ...]) -> None:
    draw = rng(5)
    sequences = [torch.randn(1, length, 2, generator=draw, dtype=torch.float64) for length in lengths]
    few = FewMeans(2)
    for x in sequences:
        few.add(x)
    (found,) = few.rest()
    assert len(found) == 2
    for mean, group in zip(found, (sequences[:4], sequences[4:]), strict=True):
        for place in range(max(lengths)):
            having = [x[0, place] for x in group if x.shape[1] > place]
            expected = torch.stack(having).mean(0) if having else torch.zeros(2, dtype=torch.float64)
            torch.testing.assert_close(mean[place], expected, rtol=0, atol=1e-12)


def held(means: FewMeans) -> int:
    """The bytes of the memory behind its tensors."""
    return sum(value.untyped_storage().nbytes() for value in vars(means).values() if isinstance(value, Tensor))


def test_few_means_of_large_inputs_are_fewer() -> None:
    few, x = FewMeans(128, room=40 * 8 * 50), torch.randn(100, 50, generator=rng(6), dtype=torch.float64)
    for part in x.split(9):
        few.add(part)
        assert held(few) <= few.room
    (found,) = few.rest()
    torch.testing.assert_close(found, torch.stack([part.mean(0) for part in x.split(4)]), rtol=0, atol=1e-12)


def test_few_means_are_fewer_once_inputs_are_longer_or_room_is_less() -> None:
    few, draw = FewMeans(64, room=64 * 8 * 2), rng(7)
    few.add(torch.randn(64, 1, 2, generator=draw))
    assert (few.of, held(few)) == (1, few.room)
    few.add(torch.randn(1, 4, 2, generator=draw))
    assert few.of == 16  # four times as long, and now with counts: an eighth as many
    assert held(few) <= few.room
    few.room //= 2
    few.add(torch.randn(1, 4, 2, generator=draw))
    assert few.of == 32
    assert held(few) <= few.room


def test_one_mean_is_left_however_large_it_is() -> None:
    few = FewMeans(64, room=1)
    few.add(torch.full((3, 5), 2.0))
    assert few.rest()[0].tolist() == [[2.0] * 5]


def test_calls_of_one_layer_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 6, generator=rng(4), dtype=torch.float64)
    torch.manual_seed(0)
    model = CalledTwice().double()
    monkeypatch.setattr(projector, "ROOM", 2 * 6 * 8 * 16)
    few = made(model, x.split(8), None)
    torch.testing.assert_close(few["same"], made(model, [x], 4)["same"], rtol=0, atol=1e-9)
    torch.testing.assert_close(few["head"], made(model, [x], 2)["head"], rtol=0, atol=1e-9)


MODULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "Linear": (nn.Linear(4, 3), (4,)),
    "Linear on places": (nn.Linear(4, 3), (5, 4)),
    "Conv1d": (nn.Conv1d(4, 6, 3, padding=1, groups=2), (4, 9)),
    "Conv2d": (nn.Conv2d(2, 3, (3, 2), dilation=2, padding_mode="circular", padding=1), (2, 9, 8)),
    "Conv3d": (nn.Conv3d(2, 3, 3), (2, 5, 4, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_rows_of_several_means_are_those_of_each(name: str) -> None:
    module, shape = MODULES[name]
    means = torch.randn(3, *shape, generator=rng(2))
    each = [kinds.mean_rows(module, mean) for mean in means.split(1)]
    assert torch.equal(kinds.mean_rows(module, means), torch.cat(each, 1))


def test_the_recipe_says_it() -> None:
    model, x = nn.Linear(4, 3), torch.randn(9, 4, generator=rng(0))
    upload = make_upload(model, [x], "a", ["projector"], mean_of=3)
    assert upload.recipe["projector"].startswith("recursion on means of 3 examples,")
    by_itself = make_upload(model, [x.repeat(100, 1)], "a", ["projector"])
    assert by_itself.recipe["projector"].startswith(
        "recursion on means of 8 examples (the smallest power of two with at"
    )


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "64"])
def test_it_must_be_a_whole_number(wrong: object) -> None:
    with pytest.raises(ValueError, match="a: mean_of must be a whole number, at least 1, got"):
        make_upload(nn.Linear(4, 3), [torch.zeros(2, 4)], "a", mean_of=wrong)  # type: ignore[arg-type]
