"""Differential privacy: what one example can change, the noise, the total cost of releases, and what is refused."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import maecho
from maecho import InputError, Privacy, RelayClient, Upload, make_upload, relay
from maecho.cli import app as cli
from maecho.echo.fit import Regression, repaired
from maecho.echo.observation import observe
from maecho.network.attention import split
from maecho.network.forward import forward
from maecho.network.layers import Layer, read
from maecho.network.stages import plan
from maecho.network.units import Unit
from maecho.network.units import network as units
from maecho.privacy import normal
from maecho.statistics import Options
from maecho.statistics.statistic import Setting
from maecho.upload import inspection
from maecho.upload.private import ClippedSums
from support.tiny import batches, network

ROOT = Path(__file__).resolve().parent.parent


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Text(nn.Module):
    """A network from tokens to classes: an embedding, a norm, layers over a sequence, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.each = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.words(x))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(torch.relu(self.each(h)).mean(1))


def picture() -> nn.Module:
    """A network with patches, groups, BatchNorms with and without a layer, a GroupNorm, a head without bias."""
    return nn.Sequential(
        nn.BatchNorm2d(2),
        nn.Conv2d(2, 4, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(16, 3, bias=False),
    )


def case(kind: str, seed: int, n: int = 9, scale: float = 1.0) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A client's network, a merged one, and data."""
    draw = rng(seed)
    models = []
    for _ in range(2):
        model = {"linear": network, "picture": picture, "text": Text}[kind]().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=draw))
        models.append(split(model))
    shape = {"linear": (n, 4), "picture": (n, 2, 6, 6), "text": (n, 5)}[kind]
    x = torch.randint(0, 7, shape, generator=draw) if kind == "text" else scale * torch.randn(shape, generator=draw)
    return models[0], models[1], x, torch.randint(0, 3, (n,), generator=draw)


def clipped_sums(privacy: Privacy, own: nn.Module, merged: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """All sums of all stages, before noise."""
    found = plan(own, x)
    out: dict[str, Tensor] = {}
    for stage in found.stages:
        if not stage:
            continue
        layers, parts = {unit.name for unit in stage}, [(x[:4], y[:4]), (x[4:], y[4:])]
        seen = observe(own, merged, stage, parts, "c", layers_with_labels=layers, classes=3, limit=privacy.factor)
        out |= {f"{name}/{part}": t for name, sums in seen.units.items() for part, t in sums.tensors().items()}
    return out


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


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), clip=st.floats(0.01, 100), scale=st.floats(0.01, 1000), shared=st.booleans())
def test_one_example_changes_the_moments_by_no_more_than_promised(
    seed: int, clip: float, scale: float, shared: bool
) -> None:
    privacy = Privacy(1.0, clip)
    model, _, x, y = case("linear", seed, scale=scale)

    def sums(x: Tensor, y: Tensor) -> ClippedSums:
        setting = Setting("c", model, read(model), Options(covariance="shared" if shared else "class"))
        found = ClippedSums(setting, clip, 3, True)
        for step in forward(model, [(x[:4], y[:4]), (x[4:], y[4:])], "c"):
            found.add(step)
        return found

    whole, less = sums(x, y), sums(x[:-1], y[:-1])
    assert float((whole.counts - less.counts).norm()) == 1
    slack = 1 + 1e-6
    assert float((whole.totals - less.totals).norm()) <= privacy.sensitivity("totals") * slack
    change = [whole.squares(k) - less.squares(k) for k in range(1 if shared else 3)]
    assert float(torch.stack(change).norm()) <= privacy.sensitivity("gram") * slack


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
    for name, tensor in plain.items():
        torch.testing.assert_close(private[name], tensor, rtol=1e-4, atol=1e-4)


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


def test_the_noise_on_moments_has_the_promised_scale() -> None:
    x, y = torch.randn(4000, 3, generator=rng()), torch.zeros(4000, dtype=torch.int64)
    model = network(width=3).double()
    counts, means, seconds = [], [], []
    privacy, clip = Privacy(2.0, 1.5, generator=rng(7)), 1.5
    rows = x.double() * (clip / x.double().norm(dim=1, keepdim=True)).clamp(max=1)
    for _ in range(400):
        upload = make_upload(model, [(x.double(), y)], "c", rank=None, privacy=privacy)
        moments = upload.statistics["moments"]
        assert moments is not None
        assert int(moments.classes[0]) == 0
        n, mean = 4000.0, moments.means[0]
        counts.append(float(moments.counts[0]) - n)
        means.append((mean * moments.counts[0] - rows.sum(0)) / clip)
        second = moments.covariances[0].dense()[0] + torch.outer(mean, mean)
        seconds.append((second * moments.counts[0] - rows.T @ rows)[torch.ones(3, 3).triu().bool()] / clip**2)
    std = 2 * 3**0.5
    assert torch.tensor(counts).std().item() == pytest.approx(std, rel=0.15)
    assert torch.stack(means).std().item() == pytest.approx(std, rel=0.1)
    assert torch.stack(seconds).std().item() == pytest.approx(std, rel=0.1)


def test_noise_of_the_operating_system_is_normal_and_never_twice_the_same() -> None:
    drawn = normal((300, 400))
    assert drawn.dtype == torch.float64
    assert not torch.equal(drawn, normal((300, 400)))
    assert float(drawn.mean()) == pytest.approx(0, abs=0.02)
    assert float(drawn.std()) == pytest.approx(1, abs=0.02)
    inside = (drawn.abs() < 1.959964).double().mean()
    assert float(inside) == pytest.approx(0.95, abs=0.005)
    assert normal((0, 3)).shape == (0, 3)
    assert Privacy(1.0, 1.0).generator is None
    x = torch.zeros(3, 3)
    assert not torch.equal(Privacy(1.0, 1.0).noisy(x, "gram", 1), Privacy(1.0, 1.0).noisy(x, "gram", 1))
    same = [Privacy(1.0, 1.0, generator=rng(1)).noisy(x, "cross", 1) for _ in range(2)]
    assert torch.equal(*same)


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


@pytest.mark.parametrize("noise", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("releases", [1, 5, 60])
def test_the_accountant_agrees_with_gaussian_differential_privacy(noise: float, releases: int) -> None:
    """δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) with μ = √R/σ (Dong, Roth and Su, 2022)."""
    privacy = Privacy(noise, 1.0, delta=1e-4)
    epsilon, mu, phi = privacy.epsilon(releases), math.sqrt(releases) / noise, _phi
    if epsilon < 500:  # e^ε and Φ leave the range of float64 beyond
        delta = phi(-epsilon / mu + mu / 2) - math.exp(epsilon) * phi(-epsilon / mu - mu / 2)
        assert delta == pytest.approx(1e-4, rel=1e-5)
    else:
        assert phi(-epsilon / mu + mu / 2) >= 1e-4
    assert privacy.epsilon(0) == 0


def test_noise_for_an_epsilon() -> None:
    privacy = Privacy.for_epsilon(2.5, 1e-6, 7, clip=3.0, clip_output=4.0)
    assert privacy.epsilon(7) <= 2.5
    assert privacy.epsilon(7) == pytest.approx(2.5)
    assert (privacy.clip, privacy.clip_output, privacy.delta, privacy.releases) == (3.0, 4.0, 1e-6, 7)


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
    totals = {"gram": gram, "cross": gram.clone(), "noise": torch.tensor(0.25), "prior": torch.ones(1, 3, 3)}
    plain, biased, tokens = Layer("0", "w"), Layer("0", "w", "b"), Layer("0", "w", transposed=True, one_hot=True)
    done = repaired(Unit(plain, ("0",)), totals, torch.tensor(10.0))
    torch.testing.assert_close(done["gram"], gram.clamp(min=0))
    assert torch.linalg.eigvalsh(done["gram"]).min() >= 0
    assert float(done["floor"]) == pytest.approx(3**0.5 * 0.5)
    assert "noise" not in done
    row = repaired(Unit(tokens, ("0",)), {**totals, "gram": torch.tensor([[[3.0, -1.0]]])}, torch.tensor(10.0))
    assert row["gram"].tolist() == [[[3.0, 0.0]]]
    turned = torch.linalg.qr(torch.randn(3, 3, generator=rng()).double())[0]
    scaled = repaired(Unit(biased, ("0",)), {**totals, "gram": turned @ gram @ turned.mT}, torch.tensor(10.0))
    assert float(scaled["gram"][0, -1, -1]) == pytest.approx(10), "examples weigh what they are in number"
    assert torch.equal(scaled["prior"], totals["prior"])


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
        assert all(total.isfinite().all() for total in sums.tensors().values())
        assert float(sums.tensors()["gram"].norm()) <= 1.0001


def test_an_upload_with_privacy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = batches(3000)
    only = [(x[y != 1], y[y != 1]) for x, y in data]
    upload = make_upload(network(), only, "ann", privacy=Privacy(1.0, 2.0, generator=rng()))
    assert upload.has == {"moments", "classes"}
    assert upload.statistics.get("moments") is not None
    assert upload.statistics.get("classes") is not None
    assert upload.statistics["moments"].classes.tolist() == [0, 2], "a class without examples drowns in its noise"
    assert upload.statistics["classes"][1] == 0
    assert upload.statistics["moments"].counts.tolist() == upload.statistics["classes"][[0, 2]].tolist()
    assert upload.statistics["classes"].tolist() == pytest.approx([1000, 0, 1000], abs=10)
    said = upload.recipe["privacy"]
    assert said["epsilon"] == pytest.approx(Privacy(1.0, 2.0).epsilon())
    assert "weights themselves are not covered" in said["covers"]
    upload.save(tmp_path / "ann.safetensors")
    again = Upload.load(tmp_path / "ann.safetensors")
    sentence = inspection.privacy(again)
    assert sentence is not None
    cli.console.show_upload(tmp_path / "ann.safetensors", as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Privacy, as the client says: {sentence}." in shown
    assert "(ε, δ) = (4.377, 1e-05) for one example of one client, added or removed" in shown
    model = network()
    merged = maecho.aggregate([again], "echo-chain", model=model)
    assert all(tensor.isfinite().all() for tensor in merged.values())


def test_uploads_without_labels_or_of_tokens_or_with_one_covariance() -> None:
    privacy = Privacy(1.0, 2.0, generator=rng())
    bare = make_upload(network(), [x for x, _ in batches(300)], "ann", privacy=privacy)
    assert bare.has == {"moments"}
    assert bare.statistics.get("moments") is not None
    assert bare.statistics["moments"].classes.tolist() == [-1]
    assert "no whole-number label" in bare.recipe["not_sent"]["classes"]
    own, _, x, y = case("text", 0, n=300)
    counted = make_upload(own, [(x, y)], "ann", ("classes",), privacy=privacy)
    assert counted.has == {"classes"}
    shared = make_upload(network(), batches(300), "ann", rank=None, covariance="shared", privacy=privacy)
    assert shared.statistics.get("moments") is not None
    assert len(shared.statistics["moments"].covariances) == 1
    with pytest.raises(InputError, match="ann: for moments the inputs must be one tensor of real numbers, got oth"):
        make_upload(own, [(x, y)], "ann", privacy=privacy)


def test_little_noise_gives_the_plain_moments() -> None:
    data = batches(90)
    for covariance in ("class", "shared"):
        plain = make_upload(network().double(), _double(data), "c", ("moments",), rank=None, covariance=covariance)
        private = make_upload(
            network().double(), _double(data), "c", rank=None, covariance=covariance, privacy=Privacy(1e-12, 100.0)
        )
        assert plain.statistics.get("moments") is not None
        assert private.statistics.get("moments") is not None
        assert torch.equal(plain.statistics["moments"].counts, private.statistics["moments"].counts)
        torch.testing.assert_close(plain.statistics["moments"].means, private.statistics["moments"].means)
        for one, other in zip(
            plain.statistics["moments"].covariances, private.statistics["moments"].covariances, strict=True
        ):
            torch.testing.assert_close(one.dense(), other.dense())


def _double(data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in data]


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistics": ("gram",)}, "with privacy the statistics must be among classes, moments, got 'gram'"),
        ({"gaussians": 2}, "with privacy there must be one Gaussian a class, got gaussians=2"),
        ({"privacy": Privacy(1000.0, 1.0, generator=rng())}, "some class must have at least .* examples, got none"),
        ({"batches": []}, "the batches must hold at least one example, got none"),
        ({"batches": [*batches(), batches()[0][0]]}, "with privacy all batches or none must have labels, got both"),
        ({"batches": [(torch.randn(3, 4), torch.tensor([0, 1, 3]))]}, "labels must lie in 0 … 2"),
    ],
)
def test_uploads_that_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"batches": batches(), "client": "ann", "privacy": Privacy(1.0, 1.0), **options}
    with pytest.raises(InputError, match=f"ann: .*{message}"):
        make_upload(network(), **given)


def test_inputs_that_are_too_long_or_not_of_one_shape() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(5000, 3))
    with pytest.raises(
        InputError, match="ann: for moments with privacy an input must have at most 4096 numbers, got 5"
    ):
        make_upload(flat, [torch.zeros(2, 5000)], "ann", privacy=Privacy(1.0, 1.0))
    pooled = nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Linear(4, 3))
    with pytest.raises(InputError, match=r"ann: for moments all inputs must have one shape, got \(1, 4\) and \(1, 6\)"):
        make_upload(pooled, [torch.zeros(2, 1, 4), torch.zeros(2, 1, 6)], "ann", privacy=Privacy(1.0, 1.0))
    maps = nn.Conv1d(1, 2, 3)
    with pytest.raises(InputError, match="ann: with privacy labels must be classes of the model, one output each, got"):
        make_upload(maps, [(torch.zeros(2, 1, 4), torch.zeros(2, dtype=torch.int64))], "ann", privacy=Privacy(1.0, 1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": 0.0}, "noise must be positive and finite, got 0.0"),
        ({"noise": True}, "noise must be positive and finite, got True"),
        ({"clip": float("inf")}, "clip must be positive and finite, got inf"),
        ({"clip_output": -1}, "clip_output must be positive and finite, got -1"),
        ({"delta": 0}, "delta must lie between 0 and 1, got 0"),
        ({"delta": "small"}, "delta must lie between 0 and 1, got 'small'"),
        ({"releases": 0}, "releases must be a whole number, at least 1, got 0"),
        ({"releases": 2.5}, "releases must be a whole number, at least 1, got 2.5"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Privacy(**{"noise": 1.0, "clip": 1.0, **options})


def test_an_epsilon_that_is_refused() -> None:
    with pytest.raises(ValueError, match="epsilon must be positive and finite, got -1"):
        Privacy.for_epsilon(-1, 1e-5, 1, clip=1.0)


def test_without_the_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"computed by dp-accounting, got none: pip install 'maecho\[privacy\]'"):
        make_upload(network(), batches(), "ann", privacy=Privacy(1.0, 1.0))


def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "clinic.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def network(): return nn.Linear(4, 3)\n"
        "def train(): return [(torch.randn(300, 4), torch.arange(300) % 3)]\n"
    )

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split("upload --model clinic:network --data clinic:train --client ann --out ann.safetensors")
        command = [sys.executable, "-m", "maecho", *words, *more]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("--privacy-noise", "1.5", "--privacy-clip", "2", "--privacy-delta", "1e-6")
    assert done.returncode == 0, done.stderr
    assert "Privacy, as the client says: (ε, δ) = (" in done.stdout
    assert Upload.load(tmp_path / "ann.safetensors").recipe["privacy"]["delta"] == 1e-6
    failed = run("--privacy-noise", "1.5")
    assert failed.returncode == 2
    assert "--privacy-noise and --privacy-clip must be given together, got one of them" in failed.stderr


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "privacy.md").read_text(), re.S)
    with torch.random.fork_rng():
        exec(compile(block, "privacy.md", "exec"), {})
    first, last = (float(line.split()[0]) for line in capsys.readouterr().out.strip().splitlines())
    assert first == pytest.approx(3)
    assert last == pytest.approx(3)
