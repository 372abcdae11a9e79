"""Layers that pass for another kind: what they give out is compared with their matrix times their inputs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho import aggregate, make_upload, relay
from maecho.network.units import network
from maecho.network.verified import misread
from support.clients import Net, rng


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, w / w.std((1, 2, 3), keepdim=True), self.bias)


class ChannelsFirst(nn.LayerNorm):
    """As in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        u = x - x.mean(1, keepdim=True)
        u = u / (u.square().mean(1, keepdim=True) + self.eps).sqrt()
        return u * self.weight[:, None, None] + self.bias[:, None, None]


class Places(nn.Embedding):
    """As in OPT: it gets a mask and counts places."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.arange(x.shape[1], device=x.device).expand_as(x))


class Table(nn.Embedding):
    """As in Whisper: the first rows of the table, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[: x.shape[1]]


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


class OnlyNamed(nn.Linear):
    """A class of the user's own that changes nothing."""


def images() -> nn.Sequential:
    return nn.Sequential(
        Standardised(3, 4, 3, padding=1), nn.BatchNorm2d(4), ChannelsFirst(4), nn.Conv2d(4, 4, 3, groups=2, stride=2),
        nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), OnlyNamed(36, 5), nn.LayerNorm(5), nn.RMSNorm(5),
        nn.BatchNorm1d(5), Scaled(5, 3),
    )  # fmt: skip


def tokens() -> nn.Module:
    parts = {"own": nn.Embedding(9, 6), "places": Places(9, 6), "table": Table(9, 6), "last": nn.Linear(6, 3)}
    return Net(lambda net, x: net.last((net.own(x) + net.places(x) + net.table(x)).mean(1)), **parts)


def shaken(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


X, TOKENS = torch.randn(12, 3, 8, 8, generator=rng(0)), torch.randint(0, 9, (12, 5), generator=rng(0))
Y = torch.arange(12) % 3


def wrong(model: nn.Module, x: Tensor) -> set[str]:
    with misread(model, network(model).values()) as found, torch.no_grad():
        model(x)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_misread_and_what_is_not(dtype: torch.dtype) -> None:
    """A factor of 1.01 is below what 16 bits can tell."""
    low = dtype in (torch.bfloat16,)
    assert wrong(shaken(images).to(dtype), X.to(dtype)) == {"0", "2"} | (set() if low else {"11"})
    assert wrong(shaken(tokens).to(dtype), TOKENS) == {"places", "table"}


def test_modules_that_share_a_weight_and_not_their_biases() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    assert not wrong(nn.Sequential(one, nn.ReLU(), two), torch.randn(5, 4, generator=rng()))


@pytest.mark.filterwarnings("ignore:.*not sent. moments, features")  # of tokens
@pytest.mark.parametrize(("make", "x", "named"), [
    (images, X, "0 (Standardised), 11 (Scaled)"),
    (tokens, TOKENS, "places (Places), table (Table)"),
])  # fmt: skip
def test_uploads_average_them_and_say_so(make: Callable[[], nn.Module], x: Tensor, named: str) -> None:
    sentence = f": these are averaged without statistics, since maecho cannot read them as matrices: {named}"
    with pytest.warns(UserWarning, match=f"^[ab]{re.escape(sentence)}$"):
        uploads = [make_upload(shaken(make), [(x, Y)], name) for name in "ab"]
    names = {part.split(" ")[0] for part in named.split(", ")}
    assert not names & {layer.name for layer in uploads[0].layers}
    assert uploads[0].recipe["unknown"] == named.split(", ")
    merged = aggregate(uploads, "regmean")
    assert {f"{name}.weight" for name in names} <= set(merged.averaged)


@pytest.mark.parametrize(("make", "x", "named"), [
    (images, X, r"0 \(Standardised\), 11 \(Scaled\), 2 \(ChannelsFirst\)"),
    (tokens, TOKENS, r"places \(Places\), table \(Table\)"),
])  # fmt: skip
def test_a_relay_of_one_client_alone_gives_it_back(make: Callable[[], nn.Module], x: Tensor, named: str) -> None:
    model = shaken(make)
    with pytest.warns(UserWarning, match=f"these are averaged, since they are no matrices .*: {named}"):
        merged = relay(shaken(make), [(model, [(x, Y)])])
    twin = shaken(make)
    twin.load_state_dict(dict(merged))
    with torch.no_grad():
        torch.testing.assert_close(twin(x), model(x), atol=1e-3, rtol=1e-3)


def test_the_first_batch_tells_and_no_batch_is_lost() -> None:
    """The batches come from a generator, and every example counts once."""
    model = shaken(images)
    with pytest.warns(UserWarning, match="Standardised"):
        upload = make_upload(
            model, ((X[k : k + 4], Y[k : k + 4]) for k in (0, 4, 8)), "a", ["gram", "classes"], rank=None
        )
    assert upload.examples == 12
    assert upload.statistics["classes"].sum() == 12
    with torch.no_grad():
        rows = torch.cat([model[:7](X).double(), torch.ones(12, 1)], 1)
    torch.testing.assert_close(upload.statistics["gram"]["7"].dense()[0].double(), rows.T @ rows, rtol=1e-4, atol=1e-3)


class Adapted(nn.Module):
    """A layer with an adapter whose matrices are parameters of its own, a gate for every output, and learned places."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.places = nn.Linear(6, 5), nn.Parameter(torch.randn(3, 6))
        self.start = nn.Parameter(torch.randn(1, 6))
        self.A, self.B, self.gate = (nn.Parameter(torch.randn(*size)) for size in ((2, 6), (5, 2), (1, 5)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places
        x = x + self.base(self.start).sum()
        return ((self.base(x) + x @ self.A.T @ self.B.T) * self.gate).mean(1)


class Scale(nn.Module):
    """A norm of its own: one number for every feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, [6]) * self.weight


class Odd(nn.Module):
    """A layer of no known kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


def test_matrices_outside_of_layers_are_named() -> None:
    """What is only added to others or scales them is not."""
    model = nn.Sequential(Scale(), Odd(), Adapted())
    data = [(torch.randn(8, 3, 6, generator=rng()), torch.arange(8) % 5)]
    named = r"1 \(Odd\), 2\.A \(Adapted\), 2\.B \(Adapted\)"
    with pytest.warns(UserWarning, match=rf"cannot read them as matrices: {named}$"):
        upload = make_upload(model, data, "a", ["gram"])
    assert upload.recipe["unknown"] == ["1 (Odd)", "2.A (Adapted)", "2.B (Adapted)"]
    with pytest.warns(UserWarning, match=rf"no matrices that can be fitted: {named}$"):
        relay(model, [(model, data)])


def test_the_model_runs_once_a_batch() -> None:
    """To look for such matrices takes no pass of its own."""
    ran: list[Tensor] = []
    model = nn.Sequential(Adapted())
    model.register_forward_hook(lambda _, args, out: ran.append(args[0]))
    data = [torch.randn(8, 3, 6, generator=rng(i)) for i in range(2)]
    with pytest.warns(UserWarning, match="cannot read them as matrices"):
        make_upload(model, data, "a", ["gram"])
    assert len(ran) == len(data)


def test_gradients_of_a_layer_that_is_none() -> None:
    """The first pass takes gradients of layers as they are read, before it is known that one is not."""

    class Lengths(nn.Embedding):
        def forward(self, mask: Tensor) -> Tensor:
            return super().forward(mask.cumsum(1).long() - 1)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.head = Lengths(4, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x + self.places(torch.ones(x.shape[:2]))).mean(1))

    model, x = Masked(), torch.randn(8, 4, 6, generator=rng())
    with pytest.warns(UserWarning, match=r"cannot read them as matrices: places \(Lengths\)"):
        upload = make_upload(model, [x], "a", ["fisher"])
    assert float(upload.statistics["fisher"]["places.weight"].min()) > 0
