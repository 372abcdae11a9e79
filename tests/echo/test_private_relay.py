"""A relay with privacy: what one example can change, the noise, the cost, and networks that are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from maecho import InputError, Privacy, RelayClient, relay
from maecho.echo.fit import Regression, repaired
from maecho.echo.observation import observe
from maecho.echo.totals import ByClass, UnitSums
from maecho.network.layers import Layer
from maecho.network.units import Unit
from maecho.network.units import network as units
from support.private import by_name, case, clipped_sums, rng
from support.tiny import batches, network


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["linear", "picture", "text"]),
    seed=st.integers(0, 10**6),
    clip=st.floats(0.01, 100),
    clip_output=st.floats(0.01, 100),
    scale=st.floats(0.01, 1000),
)
def test_one_example_changes_no_relay_sum_by_more_than_promised(
    kind: str, seed: int, clip: float, clip_output: float, scale: float
) -> None:
    privacy = Privacy(1.0, clip, clip_output)
    own, merged, x, y = case(kind, seed, scale=scale)
    whole = clipped_sums(privacy, own, merged, x, y)
    less = clipped_sums(privacy, own, merged, x[:-1], y[:-1])
    assert {"gram", "cross", "labels", "outputs", "counts"} == {key.rpartition("/")[2] for key in whole}
    for key, total in whole.items():
        change = float((total - less[key]).norm())
        assert change <= privacy.sensitivity(key.rpartition("/")[2]) * (1 + 1e-6) + 1e-9 * float(total.norm()), key


def test_the_bound_is_met_by_the_worst_example() -> None:
    """Not only bounded but tight: an example of one row that is clipped changes Σ h hᵀ by clip², Σ y hᵀ by clip."""
    privacy = Privacy(1.0, 0.5, 1e9)
    own, merged, x, y = case("linear", 0)
    whole = clipped_sums(privacy, own, merged, x, y)
    less = clipped_sums(privacy, own, merged, x[:-1], y[:-1])
    assert float((whole["0/gram"] - less["0/gram"]).norm()) == pytest.approx(privacy.sensitivity("gram"))
    assert float((whole["2/labels"] - less["2/labels"]).norm()) == pytest.approx(privacy.sensitivity("labels"))


def test_one_factor_keeps_z_a_linear_map_of_h() -> None:
    """With one client clipping loses nothing: its own weights fit its own outputs, clipped or not."""
    own = network(seed=3).double()
    data = [(x.double(), y) for x, y in batches(60)]
    exact = Regression(ridge=0, head="regression")
    for clip in (0.1, 1.0, 1e6):
        merged = relay(
            network(seed=9).double(), [(own, data)], regression=exact, privacy=Privacy(1e-13 / max(1, clip) ** 2, clip)
        )
        for name, tensor in own.state_dict().items():
            torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "picture", "text"])
def test_without_noise_or_clipping_it_is_the_relay(kind: str) -> None:
    clients = []
    for seed in (1, 2):
        own, _, x, y = case(kind, seed, n=80)
        clients.append((own.double(), [(x.double() if x.is_floating_point() else x, y)]))
    model = clients[0][0]
    plain = relay(model, clients)
    private = relay(model, clients, privacy=Privacy(1e-18, 1e4))
    assert plain.recipe["privacy"] == {}
    # With privacy nobody says how large the outputs are. So the head's scores may be of another size.
    head = list(plain)[-1].rpartition(".")[0]
    grown = private[f"{head}.weight"].norm() / plain[f"{head}.weight"].norm()
    for name, tensor in plain.items():
        expected = tensor * grown if name.startswith(f"{head}.") else tensor
        torch.testing.assert_close(private[name], expected, rtol=1e-4, atol=1e-4)


def test_the_noise_on_every_relay_sum_has_the_promised_scale() -> None:
    """A stage of two units, one of them the head, has six sums. The number of examples makes seven, so noise has √7."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.aside, self.head = nn.Linear(20, 15), nn.Linear(20, 10)

        def forward(self, x: Tensor) -> Tensor:
            self.aside(x)
            return self.head(x)

    x, y = torch.randn(30, 20, generator=rng()), torch.arange(30) % 10
    model, opening = Wide(), {"round": torch.tensor(0), "open": torch.tensor(1)}
    exact = RelayClient(model, [(x, y)]).answer(opening).tensors()
    found: dict[str, list[Tensor]] = {}
    privacy = Privacy(0.3, 50.0, 200.0, generator=rng(5))
    draws = 200
    for _ in range(draws):
        answer = RelayClient(model, [(x, y)], privacy=privacy).answer(opening).tensors()
        for key in exact:
            if re.search(r"/(gram|cross|labels|counts)$|^examples$", key):
                found.setdefault(key, []).append(answer[key] - exact[key])
        torch.testing.assert_close(answer["sum/head/noise"], torch.tensor((0.3 * 7**0.5 * 2500) ** 2).double())
    scales = {"gram": 50.0**2, "cross": 50.0 * 200, "labels": 50.0, "counts": 1.0, "examples": 1.0}
    assert {key.rpartition("/")[2] for key in found} == scales.keys()
    for key, several in found.items():
        noise = torch.stack(several) / (0.3 * 7**0.5 * scales[key.rpartition("/")[2]])
        if key.endswith("gram"):
            assert noise[0].shape == (1, 21 * 22 // 2), "each number is sent once"
        assert float(noise.mean()) == pytest.approx(0, abs=5 / noise.numel() ** 0.5), key
        assert float(noise.square().mean()) == pytest.approx(1, abs=8 / noise.numel() ** 0.5), key


def test_a_client_counts_its_releases_and_keeps_to_its_number() -> None:
    opening = {"round": torch.tensor(0), "open": torch.tensor(1)}
    privacy = Privacy(1.0, 1.0, releases=3)
    client = RelayClient(network(), batches(), "ann", privacy=privacy, released=1)
    assert client.spent() == (privacy.epsilon(1), privacy.delta)
    first = client.answer(opening)
    assert torch.equal(client.answer(opening).examples, first.examples), "the number of examples is said once"
    assert client.spent() == (privacy.epsilon(3), privacy.delta)
    with pytest.raises(InputError, match=r"ann: with this privacy the data may be asked 3 time\(s\), got one question"):
        client.answer(opening)
    with pytest.raises(InputError, match="ann: what is spent must be counted with privacy, got a client without"):
        RelayClient(network(), batches(), "ann").spent()


def test_a_relay_says_what_it_cost() -> None:
    clients = [(network(seed=k), batches(60)) for k in range(2)]
    privacy = Privacy(0.5, 1.0)
    for rounds, releases in (("all", 2), (1, 1), (2, 2)):
        merged = relay(network(), clients, rounds=rounds, privacy=privacy)
        said = merged.recipe["privacy"]
        assert said["releases"] == releases
        assert said["epsilon"] == pytest.approx(privacy.epsilon(releases))
        assert all(tensor.isfinite().all() for tensor in merged.values())


def test_totals_are_mended_after_noise() -> None:
    gram = torch.diag(torch.tensor([4.0, 1.0, -2.0])).double().unsqueeze(0)
    by_class = ByClass(torch.ones(2, 3), torch.tensor([-1.0, 4.0]))
    totals = UnitSums(gram, gram.clone(), by_class, noise=torch.tensor(0.25))
    plain, biased, tokens = Layer("0", "w"), Layer("0", "w", "b"), Layer("0", "w", transposed=True, one_hot=True)
    done = repaired(Unit(plain, ("0",)), totals, torch.tensor(10.0))
    torch.testing.assert_close(done.gram, gram.clamp(min=0))
    assert torch.linalg.eigvalsh(done.gram).min() >= 0
    assert float(done.floor) == pytest.approx(3**0.5 * 0.5)
    assert done.noise is None
    assert done.by_class is not None
    assert done.by_class.counts.tolist() == [0.0, 4.0]
    assert torch.equal(done.by_class.labels, by_class.labels), "without a bias nothing says how far examples shrank"
    row = repaired(Unit(tokens, ("0",)), replace(totals, gram=torch.tensor([[[3.0, -1.0]]])), torch.tensor(10.0))
    assert row.gram.tolist() == [[[3.0, 0.0]]]
    turned = torch.linalg.qr(torch.randn(3, 3, generator=rng()).double())[0]
    scaled = repaired(Unit(biased, ("0",)), replace(totals, gram=turned @ gram @ turned.mT), torch.tensor(10.0))
    assert float(scaled.gram[0, -1, -1]) == pytest.approx(10), "examples weigh what they are in number"
    factor = float(scaled.cross[0, 0, 0] / totals.cross[0, 0, 0])
    assert scaled.by_class is not None
    torch.testing.assert_close(scaled.by_class.labels, factor**0.5 * by_class.labels)
    assert float(scaled.floor) == pytest.approx(factor * float(done.floor))


@pytest.mark.parametrize("head", ["regression", "ridge", "lda"])
def test_every_head_and_much_noise_give_a_finite_model(head: Any) -> None:
    clients = [(network(seed=k), batches(20)) for k in range(2)]
    for seed in range(5):
        privacy = Privacy(20.0, 1.0, generator=rng(seed))
        merged = relay(network(), clients, regression=Regression(head=head), privacy=privacy)
        assert all(tensor.isfinite().all() for tensor in merged.values())


def test_an_example_that_overflows_adds_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.fill_(1e30)
    x = torch.tensor([[1e30, 1e30], [1e-30, 0.0]])
    seen = observe(model, model, list(units(model).values()), [x], "c", limit=Privacy(1.0, 1.0).factor)
    for sums in seen.units.values():
        assert all(total.isfinite().all() for total in by_name(sums).values())
        assert float(sums.gram.norm()) <= 1.0001


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.relu(self.layer(x))))


class Mixing(nn.Module):
    """A layer that reads the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


class Positions(nn.Module):
    """An embedding of places. Its rows belong to no example."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.layer = nn.Embedding(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.place(torch.arange(4)).mean(0))


class Folded(nn.Module):
    """Folds the axes of examples and places into one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 2)).reshape(len(x), 2, 3).mean(1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Twice(), "with privacy a layer must run once, got 'layer', which runs 2 times"),
        (Mixing(), "every example must give a layer rows of its own .* got other rows at 'layer'"),
        (Positions(), "every example must give a layer rows of its own .* got other rows at 'place'"),
        (Folded(), "every example must give a layer rows of its own .* got other rows at 'layer'"),
        (
            nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)),
            "the model must run on a single example, got an error: Expected more than 1 value per channel",
        ),
    ],
    ids=["twice", "mixing", "positions", "folded", "batch statistics"],
)
def test_networks_in_which_one_example_has_no_bound_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=f"client 0: .*{message}"):
        relay(model, [(model, batches())], privacy=Privacy(1.0, 1.0))


def test_a_first_batch_of_one_example_hides_no_mixing() -> None:
    """Whether examples mix shows in a batch of two alone, wherever it comes; and one alone cannot mix."""
    x = torch.randn(3, 4, generator=rng(0))
    with pytest.raises(InputError, match="every example must give a layer rows of its own"):
        relay(Mixing(), [(Mixing(), [x[:1], x[1:]])], privacy=Privacy(1.0, 1.0))
    with pytest.raises(InputError, match="with privacy a layer must run once"):
        relay(Twice(), [(Twice(), [x[:1], x[1:2]])], privacy=Privacy(1.0, 1.0))
    with pytest.raises(InputError, match="every example must give a layer rows of its own"):
        relay(Positions(), [(Positions(), [x[:1], x[1:2]])], privacy=Privacy(1.0, 1.0))
