"""Networks of many kinds, their data, and relay clients made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import maecho
from maecho import RelayClient, RelayServer
from maecho.echo.fit import Regression
from support.clients import Net, batches, rng
from support.clients import network as mlp

PLAIN = Regression().plain
"""To the clients' own outputs alone, whatever the labels."""


def random_network(make: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A network with random weights everywhere, norms included, and random running statistics."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().to(dtype)
        for name, p in model.named_parameters():
            if p.dim() == 1:
                nn.init.normal_(p, 1.0 if name.endswith("weight") else 0.0, 0.3)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2)
    return model


def images(seed: int = 0, n: int = 24, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(n, 2, 6, 6, generator=rng(seed)).to(dtype)
    return list(zip(x.split(9), torch.randint(0, 5, (n,), generator=rng(seed)).split(9), strict=True))


def sequences(seed: int = 0, n: int = 24) -> list[tuple[Tensor, Tensor]]:
    t = torch.randint(0, 7, (n, 5), generator=rng(seed))
    return list(zip(t.split(9), (t[:, 0] % 3).split(9), strict=True))


def resnet(channels: int = 2, narrow: int = 6, wide: int = 8, classes: int = 5) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.bn0(net.stem(x)).relu_()
        h = net.bn2(net.two(net.bn1(net.one(x)).relu_()))
        return net.head((h + net.bns(net.short(x))).relu_().mean((2, 3)))

    conv, norm = lambda i, o, k, s: nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d
    parts = {"stem": conv(channels, narrow, 3, 1), "bn0": norm(narrow), "one": conv(narrow, wide, 3, 2)}
    parts |= {"bn1": norm(wide), "two": conv(wide, wide, 3, 1), "bn2": norm(wide), "short": conv(narrow, wide, 1, 2)}
    return Net(forward, **parts, bns=norm(wide), head=nn.Linear(wide, classes))


def pre_activation() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x)
        return net.head((x + net.conv(net.norm(x).relu())).mean((2, 3)))

    parts = {"stem": nn.Conv2d(2, 4, 3), "norm": nn.BatchNorm2d(4), "conv": nn.Conv2d(4, 4, 3, padding=1)}
    return Net(forward, **parts, head=nn.Linear(4, 5))


def transformer() -> nn.Module:
    def forward(net: Any, t: Tensor) -> Tensor:
        return net.head(net.norm(net.layer(net.embed(t) + net.place)).mean(1))

    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    parts = {"embed": nn.Embedding(7, 8), "place": nn.Parameter(torch.randn(5, 8)), "layer": layer}
    return Net(forward, **parts, norm=nn.LayerNorm(8), head=nn.Linear(8, 3))


def tied() -> nn.Module:
    def forward(net: Any, t: Tensor) -> Tensor:
        return net.out(net.mid(net.embed(t)).relu().mean(1))

    net = Net(forward, embed=nn.Embedding(7, 6), mid=nn.Linear(6, 6), out=nn.Linear(6, 7))
    net.out.weight = net.embed.weight
    return net


def twins() -> nn.Module:
    """A network with two layers that share a weight but not a bias, and a third layer that runs twice."""
    net = Net(
        lambda net, x: net.head(net.again(net.again(net.two(net.one(x).relu()).relu()).relu()).relu()),
        one=nn.Linear(12, 12),
        two=nn.Linear(12, 12),
        again=nn.Linear(12, 12),
        head=nn.Linear(12, 5),
    )
    net.two.weight = net.one.weight
    return net


def convolutional() -> nn.Module:
    body = (
        nn.Conv2d(2, 6, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding="same", groups=6, bias=False),
        nn.GroupNorm(3, 6),
        nn.ReLU(inplace=True),
        nn.BatchNorm2d(6),
        nn.Conv2d(6, 4, 1, padding_mode="circular"),
    )
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(36, 5))


def normed() -> nn.Module:
    body = (nn.Linear(12, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.RMSNorm(8), nn.BatchNorm1d(8))
    return nn.Sequential(*body, nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.LayerNorm((2, 4)), nn.Flatten(), nn.Linear(8, 5))


def pooled() -> nn.Module:
    """A network whose last layer gives a map of scores, which is then averaged."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Any]]]] = {
    "mlp": (mlp, batches),
    "without bias": (lambda: mlp(bias=False), batches),
    "one layer": (lambda: nn.Linear(12, 5), batches),
    "convolutions": (convolutional, images),
    "resnet": (resnet, images),
    "pre-activation": (pre_activation, images),
    "norms": (normed, batches),
    "transformer": (transformer, sequences),
    "tied embedding": (tied, sequences),
    "twins": (twins, batches),
    "pooled scores": (pooled, images),
}


def outputs(model: nn.Module, state: dict[str, Tensor], data: list[Any]) -> Tensor:
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    with torch.no_grad():
        return torch.cat([model.eval()(x) for x, _ in data])


def play(server: RelayServer, clients: list[RelayClient]) -> maecho.Merged:
    while not server.done:
        question = server.broadcast()
        server.collect([client.answer(question) for client in clients])
    return server.result()


def relay_clients(kind: Any = ZOO["mlp"], count: int = 3, dtype: torch.dtype = torch.float64) -> list[RelayClient]:
    make, data = kind

    def cast(d: list[Any]) -> list[Any]:
        return [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in d]

    return [RelayClient(random_network(make, i, dtype), cast(data(i)), f"client {i}") for i in range(count)]


def same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(
            one[key], other[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )
