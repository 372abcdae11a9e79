"""Computed weights are merged as they are used, and go back into the same parametrized network."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations

import maecho
from maecho.network.packed.twin import twin_of
from support.clients import rng

Wrap = Callable[..., nn.Module]


def older(wrap: Any) -> Wrap:
    def quietly(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return wrap(module, *args, **options)  # type: ignore[no-any-return]

    return quietly


WRAPS: dict[str, Wrap] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm of the whole": lambda module: parametrizations.weight_norm(module, dim=None),  # type: ignore[arg-type]
    "weight norm of inputs": lambda module: parametrizations.weight_norm(module, dim=1),
    "spectral norm": parametrizations.spectral_norm,
    "older weight norm": older(utils.weight_norm),
    "older spectral norm": older(utils.spectral_norm),
}


def network(wrap: Wrap, seed: int = 0, convolution: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first: nn.Module = nn.Conv1d(3, 6, 2) if convolution else nn.Linear(3, 6)
        back: nn.Module = nn.Flatten() if convolution else nn.Identity()
        model = nn.Sequential(wrap(first), nn.ReLU(), back, wrap(nn.Linear(12 if convolution else 6, 4)))
        with torch.no_grad():
            model(torch.randn(2, 3, 3) if convolution else torch.randn(2, 3))  # the power iteration runs
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape))
    return model.eval()


@pytest.mark.parametrize("convolution", [False, True])
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_twin_has_the_weight_and_any_weight_goes_back(wrap: Wrap, convolution: bool) -> None:
    model = network(wrap, convolution=convolution)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pair, x = twin_of(model), torch.randn(5, 3, 3, generator=rng(1)) if convolution else torch.randn(5, 3)
    assert {name for name, _ in pair.network.named_parameters()} == {"0.weight", "0.bias", "3.weight", "3.bias"}
    with torch.no_grad():
        torch.testing.assert_close(pair.network(x), model(x))
        assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
        for p in pair.network.parameters():
            p.copy_(torch.randn(p.shape, generator=rng(p.numel())))
        pair.network[0].weight[1] = 0  # type: ignore[index,operator]
        model.load_state_dict(pair.packed(pair.network.state_dict()))
        torch.testing.assert_close(model(x), pair.network(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_merged_network_computes_the_average_of_the_weights(wrap: Wrap) -> None:
    models = [network(wrap, seed) for seed in range(2)]
    x = torch.randn(20, 3, generator=rng(2))
    uploads = [maecho.make_upload(m, [(x, torch.arange(20) % 4)], f"c{i}", ["gram"]) for i, m in enumerate(models)]
    merged = network(wrap, 5)
    merged.load_state_dict(maecho.aggregate(uploads, "fedavg"))
    with torch.no_grad():
        [model(x) for model in (merged, *models)]  # the older hooks compute the weight when they run
    W, *own = (getattr(model[0], "weight").detach() for model in (merged, *models))  # type: ignore[index]  # noqa: B009
    torch.testing.assert_close(W, (own[0] + own[1]) / 2, rtol=1e-4, atol=1e-6)


def test_spectral_norm_goes_on_training_from_the_merged_weight() -> None:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 4)))
    pair = twin_of(model)
    state = {name: torch.randn(tensor.shape, generator=rng(3)) for name, tensor in pair.network.state_dict().items()}
    model.load_state_dict(pair.packed(state))
    model.train()
    W: Tensor = model[0].weight.detach()
    sigma = torch.linalg.matrix_norm(state["0.weight"], 2)
    torch.testing.assert_close(W, state["0.weight"] / sigma, rtol=1e-2, atol=1e-3)


def test_the_hidden_matrix_of_an_lstm_with_weight_norm() -> None:
    lstm = parametrizations.weight_norm(nn.LSTM(3, 4, batch_first=True), "weight_hh_l0").eval()
    x = torch.randn(2, 5, 3, generator=rng(4))
    with torch.no_grad():
        lstm.parametrizations.weight_hh_l0.original0.mul_(2)  # type: ignore[union-attr,index,operator]
        pair = twin_of(lstm)
        torch.testing.assert_close(pair.network(x)[0], lstm(x)[0])
    parts = {one.name: one.parts for one in pair.stored}
    assert parts["parametrizations.weight_hh_l0.original1"] == ("hh_l0.weight",)
    assert parts["weight_ih_l0"] == ("ih_l0.weight",)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def own(module: nn.Module) -> nn.Module:
    utils.parametrize.register_parametrization(module, "weight", Doubled())
    return module


def both(module: nn.Module) -> nn.Module:
    return own(parametrizations.weight_norm(module))


@pytest.mark.parametrize(
    "wrap", [parametrizations.orthogonal, own, both], ids=["orthogonal", "a user's", "two at once"]
)
def test_what_cannot_be_put_back_is_averaged_and_named(wrap: Wrap) -> None:
    model, x = nn.Sequential(wrap(nn.Linear(3, 6)), nn.ReLU(), nn.Linear(6, 4)), torch.randn(20, 3, generator=rng(2))
    with pytest.warns(UserWarning, match=r"averaged without statistics.*0 \(ParametrizedLinear\)"):
        upload = maecho.make_upload(model, [(x, torch.arange(20) % 4)], "ann", ["gram"])
    assert [layer.name for layer in upload.layers] == ["2"]
    with pytest.warns(UserWarning, match=r"averaged, since they are no matrices that can be fitted.*Parametrized"):
        merged = maecho.relay(model, [(model, [(x, torch.arange(20) % 4)])])
    assert "0.bias" in merged.averaged
    assert merged.keys() == model.state_dict().keys()
