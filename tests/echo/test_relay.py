"""echo-relay: it is exact in the cases that docs/echo.md names, and asks for real data at the right stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho import RelayServer, relay
from maecho.echo.fit import Regression
from maecho.echo.simulated import Drawing
from maecho.lab import data
from support.clients import Net, batches, rng
from support.clients import network as mlp
from support.relays import (
    PLAIN,
    convolutional,
    images,
    outputs,
    pre_activation,
    random_network,
    resnet,
    same,
    sequences,
    tied,
    transformer,
)
from support.tiny import refused, refused_input


class TestExact:
    """Cases whose answer is known."""

    @pytest.mark.parametrize("training", [True, False])
    def test_one_client_gives_its_outputs_back(self, kind: Any, training: bool) -> None:
        make, data = kind
        own, other = random_network(make, 1).train(training), random_network(make, 2)
        before = {key: t.clone() for key, t in own.state_dict().items()}
        state = relay(other, [(own, data(1))])
        torch.testing.assert_close(outputs(own, state, data(1)), outputs(own, before, data(1)), rtol=1e-4, atol=1e-4)
        assert own.training is training
        assert all(torch.equal(t, before[key]) for key, t in own.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in own.modules())

    @pytest.mark.parametrize("regression", [PLAIN, Regression(), Regression(head="lda", pull=1)], ids=str)
    def test_identical_clients_are_a_fixed_point_on_data_of_their_own(self, kind: Any, regression: Regression) -> None:
        make, data = kind
        own = random_network(make, 1)
        state = relay(random_network(make, 2), [(own, data(i)) for i in range(3)], regression=regression)
        for i in range(3):
            expected = outputs(own, own.state_dict(), data(i))
            torch.testing.assert_close(outputs(own, state, data(i)), expected, rtol=1e-3, atol=1e-3)

    def test_a_linear_network_is_the_pooled_least_squares_solution(self) -> None:
        """The best network, layer by layer: each fits best on the outputs of the merged layers before it."""
        models = [
            random_network(
                lambda: nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 6, bias=False), nn.Linear(6, 5)), i, torch.float64
            )
            for i in range(3)
        ]
        data = [batches(i, dtype=torch.float64) for i in range(3)]
        state = relay(models[0], list(zip(models, data, strict=True)), regression=Regression(0, "regression", 0))
        h = own = [torch.cat([x for x, _ in d]) for d in data]
        for name, bias in (("0", True), ("1", False), ("2", True)):
            H = torch.cat(h)
            H = torch.cat([H, torch.ones(len(H), 1)], 1) if bias else H
            own = [model.get_submodule(name)(x).detach() for model, x in zip(models, own, strict=True)]
            solution = torch.linalg.lstsq(H, torch.cat(own)).solution.T
            W = (
                torch.cat([state[f"{name}.weight"], state[f"{name}.bias"][:, None]], 1)
                if bias
                else state[f"{name}.weight"]
            )
            torch.testing.assert_close(W, solution, rtol=1e-8, atol=1e-8)
            h = list((H @ W.T).split([len(x) for x in h]))

    @pytest.mark.parametrize("make", [resnet, convolutional, pre_activation])
    def test_batchnorm_remembers_what_the_merged_network_gives_it(self, make: Any) -> None:
        pairs = [(random_network(make, i, torch.float64), images(i, dtype=torch.float64)) for i in range(3)]
        merged = random_network(make, 9, torch.float64)
        merged.load_state_dict(relay(merged, pairs))
        seen: dict[str, list[Tensor]] = {}
        norms = {name: m for name, m in merged.named_modules() if isinstance(m, nn.BatchNorm2d)}
        for name, module in norms.items():
            module.register_forward_pre_hook(
                lambda m, args, name=name: seen.setdefault(name, []).append(args[0].clone())
            )
        with torch.no_grad():
            for _, data in pairs:
                for x, _ in data:
                    merged.eval()(x)
        for name, module in norms.items():
            x = torch.cat(seen[name]).movedim(1, 0).flatten(1)
            torch.testing.assert_close(module.running_mean, x.mean(1), rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(module.running_var, x.var(1, correction=0), rtol=1e-6, atol=1e-8)

    def test_free_parameters_are_averaged_and_named(self) -> None:
        pairs = [(random_network(transformer, i), sequences(i, 12 * (i + 1))) for i in range(2)]
        state = relay(pairs[0][0], pairs)
        expected = (pairs[0][0].place + 2 * pairs[1][0].place).detach() / 3
        torch.testing.assert_close(state["place"], expected)
        assert state.averaged == ("place",)
        assert state.recipe["method"] == "echo-relay"
        assert [stage["clients"] for stage in state.recipe["rounds"]] == [2] * len(state.recipe["rounds"])
        assert len(state.recipe["rounds"]) > 1
        assert relay(tied(), [(tied(), sequences())]).averaged == ("out.bias",)

    def test_counters_are_the_largest_and_layers_that_never_run_are_averaged(self) -> None:
        def make() -> nn.Module:
            parts = {"body": nn.Linear(12, 5), "norm": nn.BatchNorm1d(5), "idle": nn.Linear(3, 3)}
            return Net(lambda net, x: net.norm(net.body(x)), **parts)

        pairs = [(random_network(make, i), batches(i)) for i in range(2)]
        for i, (model, _) in enumerate(pairs):
            model.norm.num_batches_tracked.fill_(3 + i)
        with pytest.warns(UserWarning, match=r"^client \d: these are averaged, .* ran on the first batch: idle; let"):
            state = relay(random_network(make, 5), pairs)
        assert int(state["norm.num_batches_tracked"]) == 4
        assert set(state.averaged) == {"norm.num_batches_tracked", "idle.weight", "idle.bias"}
        torch.testing.assert_close(
            state["idle.weight"], (pairs[0][0].idle.weight + pairs[1][0].idle.weight).detach() / 2
        )

    def test_the_prior_takes_the_place_of_the_average(self) -> None:
        pairs, prior = [(mlp(i), batches(i)) for i in range(2)], mlp(7)
        state = relay(mlp(), pairs, regression=Regression(1e9, "regression", 0), prior=prior.state_dict())
        for name, tensor in prior.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-5)
        with refused_input("prior must be a state_dict of the model", "Missing key"):
            relay(mlp(), pairs, prior={})


def clients_by_stage(merged: maecho.Merged) -> list[int]:
    """How many clients answered, stage by stage."""
    return [stage["clients"] for stage in merged.recipe["rounds"]]


class TestRounds:
    """Rounds from none (all inputs drawn) to all (real data at every stage)."""

    pairs = tuple((mlp(i), batches(i)) for i in range(3))
    few = Drawing(draws=300)

    def clients_asked(self, rounds: Any) -> list[int]:
        drawing = None if rounds == "all" else self.few
        return clients_by_stage(relay(mlp(), self.pairs, rounds=rounds, drawing=drawing))

    def test_real_data_are_consulted_where_it_is_said(self) -> None:
        assert self.clients_asked("all") == [3, 3, 3]
        assert self.clients_asked(1) == [0, 0, 0]
        assert self.clients_asked(2) == [0, 0, 3]
        assert self.clients_asked(3) == [0, 3, 3]
        assert self.clients_asked(["2"]) == [0, 3, 0]
        assert self.clients_asked(("0", "4")) == [3, 0, 3]

    def test_one_round_more_than_stages_is_all(self) -> None:
        kwargs: dict[str, Any] = {"drawing": self.few}
        same(relay(mlp(), self.pairs, rounds=4, **kwargs), relay(mlp(), self.pairs), 1e-6)
        same(relay(mlp(), self.pairs, rounds=99, **kwargs), relay(mlp(), self.pairs), 1e-6)

    def test_a_joined_norm_stands_for_its_layer(self) -> None:
        pairs = [(random_network(resnet, i), images(i)) for i in range(2)]
        assert clients_by_stage(relay(resnet(), pairs, rounds=["bn1"], drawing=self.few)) == [0, 2, 0, 0]

    @pytest.mark.parametrize("rounds", [0, -1, True, 1.5, "some", (), None])
    def test_what_is_no_number_of_rounds(self, rounds: Any) -> None:
        with refused("rounds must be all, a whole number from 1 on, or names of layers", error=ValueError):
            relay(mlp(), self.pairs, rounds=rounds)

    def test_bad_values(self) -> None:
        with refused("rounds must name layers of the network (0, 2, 4)", "got '1'", error=ValueError):
            RelayServer(mlp(), rounds=["4", "1"])
        with refused_input("rounds=2 needs uploads with moments", "got none"):
            RelayServer(mlp(), rounds=2)
        with refused("minimum must be a whole number, at least 1", "got 0", error=ValueError):
            RelayServer(mlp(), minimum=0)
        with refused_input("at least one client", "got none"):
            relay(mlp(), [])

    @pytest.mark.filterwarnings("ignore:.*not sent")
    def test_tokens_have_no_inputs_to_draw(self) -> None:
        with refused("client 0", "not one tensor of real numbers", "echo-relay"):
            relay(tied(), [(tied(), sequences())], rounds=2)


def digit_resnet() -> nn.Module:
    return resnet(1, 12, 24, 10)


def counting_transformer() -> nn.Module:
    def forward(net: Any, t: Tensor) -> Tensor:
        return net.head(net.norm(net.layer(net.embed(t) + net.place)).mean(1))

    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0)
    parts = {"embed": nn.Embedding(6, 16), "place": nn.Parameter(0.1 * torch.randn(9, 16)), "layer": layer}
    return Net(forward, **parts, norm=nn.LayerNorm(16), head=nn.Linear(16, 6))


def most_frequent(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences of nine tokens. The label is the most frequent token."""
    t = torch.randint(0, 6, (n, 9), generator=rng(seed))
    favourite = torch.randint(0, 6, (n,), generator=rng(seed + 1))
    for k in range(3):
        t[torch.arange(n), torch.randint(0, 9, (n,), generator=rng(seed + 2 + k))] = favourite
    count, which = nn.functional.one_hot(t, 6).sum(1).topk(2, 1)
    clear = count[:, 0] > count[:, 1]
    return t[clear], which[clear, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "held", "epochs", "floor"),
    [
        (digit_resnet, ((0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9)), 5, 0.8),
        (counting_transformer, ((0, 1, 2), (2, 3, 4), (4, 5, 0)), 4, 0.9),
    ],
    ids=["resnet", "transformer"],
)
def test_clients_of_few_classes_merge_far_above_their_average(make: Any, held: Any, epochs: int, floor: float) -> None:
    if make is digit_resnet:
        digits = data.digits()
        x, y, test = digits.x_train, digits.y_train, [(digits.x_test, digits.y_test)]
    else:
        (x, y), test = most_frequent(3000, 0), [most_frequent(1500, 100)]
    start, pairs = random_network(make), []
    for i, classes in enumerate(held):
        own = torch.isin(y, torch.tensor(classes))
        model = copy.deepcopy(start).train()
        optimizer = torch.optim.Adam(model.parameters(), 5e-3)
        draw = rng(i)
        for _ in range(epochs):
            for some in torch.randperm(int(own.sum()), generator=draw).split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[own][some]), y[own][some]).backward()
                optimizer.step()
        pairs.append((model, [(x[own], y[own])]))

    def accuracy(state: dict[str, Tensor]) -> float:
        model = copy.deepcopy(start)
        model.load_state_dict(state)
        return maecho.evaluate(model, test).accuracy

    states = [model.state_dict() for model, _ in pairs]
    average = {k: (sum(s[k].double() for s in states) / len(states)).to(t.dtype) for k, t in states[0].items()}  # type: ignore[attr-defined]
    for regression in (None, PLAIN):
        merged = accuracy(relay(start, pairs, regression=regression))
        assert merged >= max(floor - 0.1 * (regression is PLAIN), accuracy(average) + 0.2)
    assert max(accuracy(state) for state in states) < 0.7
