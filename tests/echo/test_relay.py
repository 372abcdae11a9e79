"""echo-relay: exact where it claims to be, from totals alone, with clients that come and go."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import maecho
from maecho import RelayClient, RelayServer, relay
from maecho.echo import messages, server
from maecho.echo.fit import Regression
from maecho.echo.players import Drawing
from maecho.lab import data
from support.clients import Net, batches, rng
from support.clients import network as mlp
from support.tiny import NAN, refused

PLAIN = Regression().plain
"""To the clients' own outputs alone, whatever the labels."""


def made(make: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Random weights everywhere, and running statistics of data."""
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
    """Two layers with one weight and two biases, and a third that runs twice."""
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
    """The last layer gives out a map of scores."""
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


@pytest.fixture(params=list(ZOO))
def kind(request: pytest.FixtureRequest) -> tuple[Callable[[], nn.Module], Callable[..., list[Any]]]:
    return ZOO[request.param]


class TestExact:
    """Where the answer is known."""

    @pytest.mark.parametrize("training", [True, False])
    def test_one_client_gives_its_outputs_back(self, kind: Any, training: bool) -> None:
        make, data = kind
        own, other = made(make, 1).train(training), made(make, 2)
        before = {key: t.clone() for key, t in own.state_dict().items()}
        state = relay(other, [(own, data(1))])
        torch.testing.assert_close(outputs(own, state, data(1)), outputs(own, before, data(1)), rtol=1e-4, atol=1e-4)
        assert own.training is training
        assert all(torch.equal(t, before[key]) for key, t in own.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in own.modules())

    def test_identical_clients_are_a_fixed_point_on_data_of_their_own(self, kind: Any) -> None:
        make, data = kind
        own = made(make, 1)
        state = relay(made(make, 2), [(own, data(i)) for i in range(3)], regression=PLAIN)
        for i in range(3):
            expected = outputs(own, own.state_dict(), data(i))
            torch.testing.assert_close(outputs(own, state, data(i)), expected, rtol=1e-3, atol=1e-3)

    def test_a_linear_network_is_the_pooled_least_squares_solution(self) -> None:
        """Layer by layer: the best map from what the merged layers before give out."""
        models = [
            made(
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
        pairs = [(made(make, i, torch.float64), images(i, dtype=torch.float64)) for i in range(3)]
        merged = made(make, 9, torch.float64)
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
        pairs = [(made(transformer, i), sequences(i, 12 * (i + 1))) for i in range(2)]
        state = relay(pairs[0][0], pairs)
        expected = (pairs[0][0].place + 2 * pairs[1][0].place).detach() / 3
        torch.testing.assert_close(state["place"], expected)
        assert state.averaged == ("place",)
        assert state.recipe["method"] == "echo-relay"
        assert state.recipe["clients"] == [2] * len(state.recipe["stages"])
        assert relay(tied(), [(tied(), sequences())]).averaged == ("out.bias",)

    def test_counters_are_the_largest_and_layers_that_never_run_are_averaged(self) -> None:
        def make() -> nn.Module:
            parts = {"body": nn.Linear(12, 5), "norm": nn.BatchNorm1d(5), "idle": nn.Linear(3, 3)}
            return Net(lambda net, x: net.norm(net.body(x)), **parts)

        pairs = [(made(make, i), batches(i)) for i in range(2)]
        for i, (model, _) in enumerate(pairs):
            model.norm.num_batches_tracked.fill_(3 + i)
        state = relay(made(make, 5), pairs)
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
        with refused("prior must be a state_dict of the model", "Missing key"):
            relay(mlp(), pairs, prior={})


def play(server: RelayServer, clients: list[RelayClient]) -> maecho.Merged:
    while not server.done:
        question = server.broadcast()
        server.collect([client.answer(question) for client in clients])
    return server.result()


def made_clients(kind: Any = ZOO["mlp"], count: int = 3, dtype: torch.dtype = torch.float64) -> list[RelayClient]:
    make, data = kind

    def cast(d: list[Any]) -> list[Any]:
        return [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in d]

    return [RelayClient(made(make, i, dtype), cast(data(i)), f"client {i}") for i in range(count)]


def same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(
            one[key], other[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


class TestMessages:
    """Plain dictionaries of tensors, of which the server uses totals alone."""

    def test_only_totals_matter(self, kind: Any) -> None:
        """Noise on every real number that cancels in the total changes nothing but round-off."""
        clients, server = made_clients(kind), RelayServer(made(kind[0], 9, torch.float64))
        expected = play(RelayServer(made(kind[0], 9, torch.float64)), clients)
        while not server.done:
            question = server.broadcast()
            answers = [client.answer(question) for client in clients]
            draw = rng(server.broadcast()["round"].item())
            for key, tensor in answers[0].items():
                if tensor.is_floating_point():
                    masks = 100 * torch.randn(3, *tensor.shape, generator=draw, dtype=torch.float64)
                    masks[2] = -masks[0] - masks[1]
                    for answer, mask in zip(answers, masks, strict=True):
                        answer[key] = answer[key] + mask
            server.collect(answers)
        same(server.result(), expected, 1e-6)

    def test_they_survive_files(self, kind: Any) -> None:
        clients = made_clients(kind, 2, torch.float32)
        for client in clients:  # memory that files do not take as it is
            for module in client._own.modules():
                if isinstance(module, nn.Conv2d):
                    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        direct, server = play(RelayServer(made(kind[0], 9)), clients), RelayServer(made(kind[0], 9))
        while not server.done:
            question = load(save(server.broadcast()))
            server.collect(load(save(client.answer(question))) for client in clients)
        same(server.result(), direct)

    def test_a_question_does_not_change_with_what_comes_after(self) -> None:
        clients, server = made_clients(), RelayServer(mlp(dtype=torch.float64))
        server.collect([c.answer(server.broadcast()) for c in clients])
        question = server.broadcast()
        before = {key: t.clone() for key, t in question.items()}
        play(server, clients)
        same(question, before)
        server.result()["0.weight"].zero_()
        assert float(server.result()["0.weight"].abs().sum()) > 0

    def test_order_of_clients_does_not_matter(self, kind: Any) -> None:
        clients = made_clients(kind)
        server = lambda: RelayServer(made(kind[0], 9, torch.float64))  # noqa: E731
        same(play(server(), clients), play(server(), clients[::-1]), 1e-7)

    def test_only_what_is_settled_is_told(self) -> None:
        clients, server = made_clients(), RelayServer(mlp(dtype=torch.float64))
        assert server.broadcast().keys() == {"round", "open"}
        server.collect(c.answer(server.broadcast()) for c in clients)
        told = {"round", "head/4", "unit/2", "weights/0.weight", "weights/0.bias"}
        assert server.broadcast().keys() == told
        said = {"gram", "cross", "prior", "labels", "outputs", "counts"}
        assert clients[0].answer(server.broadcast()).keys() == {"clients", "examples", *(f"sum/2/{s}" for s in said)}

    def test_what_is_symmetric_is_told_once(self) -> None:
        server = RelayServer(mlp(dtype=torch.float64))
        answer = made_clients()[0].answer(server.broadcast())
        assert answer["sum/0/gram"].shape == (1, 13 * 14 // 2)
        whole = torch.randn(2, 5, 5, generator=rng())
        whole = whole + whole.mT
        assert torch.equal(messages.unfolded(messages.folded(whole), 5), whole)
        row = torch.ones(1, 1, 4)
        assert torch.equal(messages.unfolded(messages.folded(row), 4), row), "of a diagonal all is told"

    def test_the_server_says_how_large_they_were(self, tmp_path: Path) -> None:
        clients, path = made_clients(), tmp_path / "relay.safetensors"
        server, sizes = RelayServer(mlp(dtype=torch.float64), checkpoint=path), []
        while not server.done:
            answers = [client.answer(server.broadcast()) for client in clients]
            sizes.append(max(sum(t.nbytes for t in answer.values()) for answer in answers))
            server.collect(answers)
        assert server.result().recipe["bytes"] == server.bytes_heard == sizes
        other = RelayServer(mlp(dtype=torch.float64))
        other.resume(path)
        assert other.bytes_heard == sizes

    def test_uploads_of_before_are_gone_on_from(self) -> None:
        model, pairs = mlp(), [(mlp(seed), batches(seed)) for seed in (1, 2)]
        sent = [
            maecho.make_upload(m, b, f"client {i}", ["moments", "features"], rank=None)
            for i, (m, b) in enumerate(pairs)
        ]
        whole = relay(model, pairs, rounds=2)
        same(relay(model, pairs, rounds=2, uploads=sent), whole)
        assert whole.recipe["upload_bytes"] == max(upload.bytes() for upload in sent)
        small = [maecho.make_upload(m, b, f"client {i}", rank=2) for i, (m, b) in enumerate(pairs)]
        assert relay(model, pairs, rounds=2, uploads=small).recipe["upload_bytes"] < whole.recipe["upload_bytes"]
        assert relay(model, pairs, uploads=small).recipe["upload_bytes"] == 0
        with refused("uploads must be Upload objects, got str"):
            relay(model, pairs, rounds=2, uploads=["a.safetensors"])  # type: ignore[list-item]

    @pytest.mark.parametrize("rounds", [2, 3, ["2"], ["2", "4"]])
    def test_a_model_merged_before_is_gone_on_from(self, rounds: Any) -> None:
        """Nothing is drawn again that echo-chain has fitted, and the result is the same."""
        model, pairs = mlp(), [(mlp(seed), batches(seed)) for seed in (1, 2)]
        sent = [maecho.make_upload(m, b, f"client {i}", rank=None) for i, (m, b) in enumerate(pairs)]
        options: dict[str, Any] = {"rounds": rounds, "uploads": sent, "drawing": Drawing(300)}
        chain = maecho.aggregate(sent, "echo-chain", model=model, draws=300)
        found, whole = relay(model, pairs, start=chain, **options), relay(model, pairs, **options)
        same(found, whole)
        taken = {2: 2, 3: 1}[rounds] if isinstance(rounds, int) else 1
        assert found.recipe["taken"] == found.recipe["stages"][:taken]
        assert whole.recipe["taken"] == []
        assert (found.recipe["clients"], found.recipe["bytes"]) == (whole.recipe["clients"], whole.recipe["bytes"])
        # Where the data are asked, the start does not matter; before that nothing else does.
        other = relay(model, pairs, start=chain | {"0.weight": 2 * chain["0.weight"]}, **options)
        assert torch.equal(other["0.weight"], 2 * chain["0.weight"])
        spoilt = relay(model, pairs, start=chain | {"4.weight": 0 * chain["4.weight"]}, **options)
        same(spoilt, whole)
        everything = relay(model, pairs, start=chain, **{**options, "rounds": 99})
        same(everything, relay(model, pairs, **{**options, "rounds": 99}))

    def test_norms_and_what_has_no_matrix_come_from_the_start_too(self) -> None:
        pairs = [(made(resnet, i), images(i)) for i in range(2)]
        sent = [maecho.make_upload(m, b, f"client {i}", rank=None) for i, (m, b) in enumerate(pairs)]
        options: dict[str, Any] = {"rounds": ["one"], "uploads": sent, "drawing": Drawing(300)}
        chain = maecho.aggregate(sent, "echo-chain", model=resnet(), draws=300)
        same(relay(resnet(), pairs, start=chain, **options), relay(resnet(), pairs, **options))

    def test_starts_that_are_none(self) -> None:
        model, pairs = mlp(), [(mlp(seed), batches(seed)) for seed in (1, 2)]
        sent = [maecho.make_upload(m, b, f"client {i}", rank=2) for i, (m, b) in enumerate(pairs)]
        with refused("start must come with uploads", "rounds at some layers alone, got rounds='all'"):
            relay(model, pairs, uploads=sent, start=model.state_dict())
        with refused("with a start some stage must be asked for anew, got rounds=1"):
            relay(model, pairs, rounds=1, uploads=sent, start=model.state_dict())
        with refused("start must be a state_dict of the model", "got"):
            relay(model, pairs, rounds=2, uploads=sent, start={"0.weight": torch.zeros(1)})

    def test_with_privacy_uploads_of_before_must_promise_it_too(self) -> None:
        pairs, privacy = [(mlp(seed), batches(seed)) for seed in (1, 2)], maecho.Privacy(2.0, 3.0, generator=rng())
        plain = [maecho.make_upload(m, b, f"{i}") for i, (m, b) in enumerate(pairs)]
        with refused("0: with privacy an upload must be made with noise=2.0 and delta=1e-05, got noise=None"):
            relay(mlp(), pairs, rounds=2, uploads=plain, privacy=privacy)
        other = maecho.Privacy(2.0, 9.0, generator=rng(1))
        noisy = [maecho.make_upload(m, b, f"{i}", privacy=other) for i, (m, b) in enumerate(pairs)]
        merged = relay(mlp(), pairs, rounds=2, uploads=noisy, privacy=privacy)
        assert merged.recipe["privacy"]["releases"] == 2

    def test_no_layer_of_raw_inputs_is_told_the_labels(self) -> None:
        """Their sum by class would be the mean input of a class; asked twice or not."""
        client = made_clients()[0]
        opening = client.answer({"open": torch.ones(1)})
        again = client.answer({"unit/0": torch.ones(1), "head/4": torch.ones(1)})
        for answer in (opening, again):
            assert {key for key in answer if key.startswith("sum/")} == {
                f"sum/0/{s}" for s in ("gram", "cross", "prior")
            }
        alone = RelayClient(nn.Linear(12, 5), batches()).answer({"open": torch.ones(1)})
        assert "sum//labels" in alone  # nothing but a head


class TestComingAndGoing:
    """Clients that miss rounds, rounds that fail, servers that die."""

    def test_a_client_may_miss_rounds_and_come_back(self) -> None:
        clients, server = made_clients(), RelayServer(mlp(dtype=torch.float64), minimum=2)
        here = iter([clients[:2], clients[1:], clients])
        while not server.done:
            question = server.broadcast()
            server.collect(client.answer(question) for client in next(here))
        assert server.clients_heard == [2, 2, 3]
        # The first layer is that of the first two alone.
        same(
            {"0": server.result()["0.weight"]},
            {"0": play(RelayServer(mlp(dtype=torch.float64)), clients[:2])["0.weight"]},
            1e-9,
        )

    @pytest.mark.parametrize("stage", [0, 1])
    def test_too_few_answers_change_nothing_and_the_round_is_asked_again(self, stage: int) -> None:
        clients, server = made_clients(), RelayServer(mlp(dtype=torch.float64), minimum=2)
        for _ in range(stage):
            question = server.broadcast()
            server.collect([c.answer(question) for c in clients])
        before = server.broadcast()
        for few in (clients[:1], []):
            with refused(f"round {stage}: at least 2 client(s) must answer, got {len(few)}; ask again"):
                server.collect([c.answer(before) for c in few])
        same(server.broadcast(), before)
        same(play(server, clients), play(RelayServer(mlp(dtype=torch.float64)), clients))

    @pytest.mark.parametrize("stage", [0, 1])
    def test_a_bad_answer_changes_nothing(self, stage: int) -> None:
        clients, server = made_clients(), RelayServer(mlp(dtype=torch.float64))
        for _ in range(stage):
            question = server.broadcast()
            server.collect([c.answer(question) for c in clients])
        question = server.broadcast()
        good = [c.answer(question) for c in clients]
        name = ["0", "2"][stage]
        bad: list[tuple[Any, str]] = [
            ([], "got 0"),
            ([None], "must be a dictionary of tensors, got NoneType"),
            ([{}], "got 0"),
            ([{k: t for k, t in good[0].items() if k != "examples"}], "of how many examples they are, got none"),
            ([{**good[0], f"sum/{name}/gram": good[0][f"sum/{name}/gram"] * NAN}], "must be finite, got NaN"),
            ([good[0], {**good[1], "more": torch.ones(1)}], "got 'more' in one of them alone"),
            ([good[0], {**good[1], f"sum/{name}/cross": torch.ones(2)}], "got (2,)"),
            ([{**good[0], f"sum/{name}/cross": [1.0]}], "must be a tensor, got list"),
            ([{k: t for k, t in good[0].items() if not k.endswith("/cross")}], f"the sums of '{name}', got none"),
            ([{**good[0], f"sum/{name}/cross": torch.ones(1, 2, 3)}], "got (1, 2, 3)"),
            ([{**good[0], f"sum/{name}/gram": torch.ones(1, 7)}], "numbers, got (1, 7)"),
            ([{**good[0], f"sum/{name}/gram": torch.ones(5, 91)}], "numbers, got (5, 91)"),
            ([{**good[0], f"sum/{name}/gram": torch.ones(1, 3, 13)}], "numbers, got (1, 3, 13)"),
            ([{**good[0], f"sum/{name}/gram": good[0][f"sum/{name}/gram"].long()}], "real numbers, got torch.int64"),
            ([{**good[0], f"sum/{name}/prior": torch.tensor(1.0)}], f"round {stage}: the sums of '{name}'"),
            ([{**good[0], "examples": torch.zeros(())}], "of how many examples they are, got 0.0"),
            ([{**good[0], "examples": torch.ones(2)}], "of how many examples they are, got [1.0, 1.0]"),
        ]
        if stage == 1:
            bad.append(([{**good[0], "sum/2/labels": torch.ones(5, 3)}], "labels of '2' must be (5, 10), got (5, 3)"))
            bad.append(([{**good[0], "sum/2/counts": torch.ones(())}], "must be (0, 10), got (5, 10)"))
        if stage == 0:
            bad.append(([{k: t for k, t in good[0].items() if k != "stage/4"}], "got none for '4.weight'"))
            bad.append(([{**good[0], "stage/9": torch.tensor(0)}], "got '9', which it does not have"))
            bad.append(([{**good[0], "plain/9": torch.ones(1)}], "got '9' (1,)"))
            bad.append(([good[0], {**good[1], "stage/4": torch.tensor(7)}], "must be 2 as for the others, got 7"))
        for answers, said in bad:
            with refused(said):
                server.collect(answers)
            same(server.broadcast(), question)
        same(play(server, clients), play(RelayServer(mlp(dtype=torch.float64)), clients))

    def test_a_crash_in_the_first_round_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clients, opening = made_clients(), RelayServer(mlp(dtype=torch.float64))
        answers = [c.answer(opening.broadcast()) for c in clients]

        def crash(*_: Any) -> None:
            raise RuntimeError("out of luck")

        with monkeypatch.context() as broken:
            broken.setattr(server, "fitted", crash)
            with pytest.raises(RuntimeError, match="out of luck"):
                opening.collect(answers)
        assert opening.broadcast().keys() == {"round", "open"}
        same(play(opening, clients), play(RelayServer(mlp(dtype=torch.float64)), clients))

    @pytest.mark.parametrize("done", [1, 2])
    def test_another_server_goes_on_from_the_file(self, kind: Any, done: int, tmp_path: Path) -> None:
        clients, path = made_clients(kind), tmp_path / "relay.safetensors"
        first = RelayServer(made(kind[0], 9, torch.float64), checkpoint=path)
        for _ in range(done):
            if not first.done:
                question = first.broadcast()
                first.collect([c.answer(question) for c in clients])
        second = RelayServer(made(kind[0], 8, torch.float64))
        second.resume(path)
        assert second.clients_heard == first.clients_heard
        assert second.stages == first.stages
        same(play(second, clients), play(first, clients))

    def test_a_single_client_is_still_one_after_the_file(self, tmp_path: Path) -> None:
        """Its network is what is wanted, labels or not."""
        clients, path = made_clients(count=1), tmp_path / "relay.safetensors"
        first = RelayServer(mlp(9, torch.float64), checkpoint=path)
        first.collect([clients[0].answer(first.broadcast())])
        second = RelayServer(mlp(8, torch.float64))
        second.resume(path)
        same(play(second, clients), made(mlp, 0, torch.float64).state_dict(), 1e-6)

    def test_a_checkpoint_of_another_network_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "relay.safetensors"
        play(RelayServer(mlp(dtype=torch.float64), checkpoint=path), made_clients())
        wider = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 5))
        for other, said in ((resnet(), "got '0', which it does not have"), (wider, "'2.bias' (7,)")):
            server = RelayServer(other)
            before = {key: t.clone() for key, t in server._merged.state_dict().items()}
            with refused(str(path), "must be the checkpoint of a relay of this network", said):
                server.resume(path)
            same(server._merged.state_dict(), before)
            assert server.broadcast().keys() == {"round", "open"}
        mlp_upload = maecho.make_upload(mlp(), batches(), "ann")
        mlp_upload.save(tmp_path / "ann.safetensors")
        with refused("must be a maecho relay, got a maecho upload"):
            RelayServer(mlp()).resume(tmp_path / "ann.safetensors")
        with refused("must be a file, got nothing at that place"):
            RelayServer(mlp()).resume(tmp_path / "none")

    def test_questions_at_the_wrong_time(self) -> None:
        server = RelayServer(mlp())
        with refused("every stage must be fitted, got 0 of unknown"):
            server.result()
        clients = made_clients(dtype=torch.float32)
        server.collect([c.answer(server.broadcast()) for c in clients])
        with refused("every stage must be fitted, got 1 of 3"):
            server.result()
        play(server, clients)
        with refused("a stage left to ask for", "got a network that is fitted"):
            server.broadcast()
        with refused("a stage left to fit", "got answers"):
            server.collect([])


class TestRounds:
    """From drawn inputs at every stage to real data at every stage."""

    pairs = tuple((mlp(i), batches(i)) for i in range(3))
    few = Drawing(draws=300)

    def heard(self, rounds: Any) -> list[int]:
        found: list[int] = relay(mlp(), self.pairs, rounds=rounds, drawing=self.few).recipe["clients"]
        return found

    def test_real_data_are_consulted_where_it_is_said(self) -> None:
        assert self.heard("all") == [3, 3, 3]
        assert self.heard(1) == [0, 0, 0]
        assert self.heard(2) == [0, 0, 3]
        assert self.heard(3) == [0, 3, 3]
        assert self.heard(["2"]) == [0, 3, 0]
        assert self.heard(("0", "4")) == [3, 0, 3]

    def test_one_round_more_than_stages_is_all(self) -> None:
        kwargs: dict[str, Any] = {"drawing": self.few}
        same(relay(mlp(), self.pairs, rounds=4, **kwargs), relay(mlp(), self.pairs), 1e-6)
        same(relay(mlp(), self.pairs, rounds=99, **kwargs), relay(mlp(), self.pairs), 1e-6)

    def test_a_joined_norm_stands_for_its_layer(self) -> None:
        pairs = [(made(resnet, i), images(i)) for i in range(2)]
        assert relay(resnet(), pairs, rounds=["bn1"], drawing=self.few).recipe["clients"] == [0, 2, 0, 0]

    @pytest.mark.parametrize("rounds", [0, -1, True, 1.5, "some", (), None])
    def test_what_is_no_number_of_rounds(self, rounds: Any) -> None:
        with refused("rounds must be all, a whole number from 1 on, or names of layers", error=ValueError):
            relay(mlp(), self.pairs, rounds=rounds)

    def test_bad_values(self) -> None:
        with refused("rounds must name layers of the network (0, 2, 4)", "got '1'", error=ValueError):
            RelayServer(mlp(), rounds=["4", "1"])
        with refused("rounds=2 needs uploads with moments", "got none"):
            RelayServer(mlp(), rounds=2)
        with refused("minimum must be a whole number, at least 1", "got 0", error=ValueError):
            RelayServer(mlp(), minimum=0)
        with refused("at least one client", "got none"):
            relay(mlp(), [])

    def test_tokens_have_no_inputs_to_draw(self) -> None:
        with refused("client 0", "not one tensor of real numbers", "echo-relay"):
            relay(tied(), [(tied(), sequences())], rounds=2)


class TestBadClients:
    """One sentence each."""

    def test_another_architecture(self) -> None:
        narrow = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5))
        deep = nn.Sequential(*mlp(), nn.ReLU(), nn.Linear(5, 5))
        with refused("answer 1", "'sum/0/cross' must be (1, 9, 13), got (1, 8, 13)"):
            relay(mlp(), [(mlp(), batches()), (narrow, batches())])
        with refused("answer 1", "must hold what the first one holds", "one network"):
            relay(mlp(), [(mlp(), batches()), (deep, batches())])
        with refused("the sums of '0' must be (1, 9, 13) as its weights, got (1, 8, 13)"):
            relay(mlp(), [(narrow, batches())])
        with refused("got '6', which it does not have"):
            relay(mlp(), [(deep, batches())])
        with refused("answers must be of the server's network, got none for '6.weight'"):
            relay(deep, [(mlp(), batches())])
        server = RelayServer(mlp())
        server.collect([RelayClient(mlp(), batches()).answer(server.broadcast())])
        with refused("ann: the server's '0.bias' must be of this client's network ((8,)), got (9,)"):
            RelayClient(narrow, batches(), "ann").answer(server.broadcast())
        with refused("ann: sums must be of layers of this network, got '9'"):
            RelayClient(mlp(), batches(), "ann").answer({"unit/9": torch.ones(1)})

    def test_another_order_of_execution(self) -> None:
        def net(first: str, second: str) -> nn.Module:
            forward = lambda net, x: getattr(net, second)(getattr(net, first)(x).relu())  # noqa: E731
            return Net(forward, a=nn.Linear(12, 12), b=nn.Linear(12, 12))

        with refused("answer 1", "must hold what the first one holds", "'head/a'", "one network"):
            relay(net("a", "b"), [(net("a", "b"), batches()), (net("b", "a"), batches())])

    def test_labels_in_one_of_them_alone(self) -> None:
        bare = [x for x, _ in batches(1)]
        server = RelayServer(mlp())
        clients = [RelayClient(mlp(), batches()), RelayClient(mlp(), bare)]
        with refused("answer 1", "'sum/2/counts' in one of them alone", "all have labels or none"):
            play(server, clients)
        assert server.clients_heard == [2]

    def test_labels_of_some_batches_are_labels_of_none(self) -> None:
        some = [batches()[0], *(x for x, _ in batches()[1:])]
        bare = [x for x, _ in batches()]
        same(relay(mlp(), [(mlp(1), some)]), relay(mlp(), [(mlp(1), bare)]))
        same(relay(mlp(), [(mlp(1), bare)]), relay(mlp(), [(mlp(1), batches())], regression=PLAIN))

    def test_labels_that_are_no_classes(self) -> None:
        with refused("client 0: labels must lie in 0 … 4", "got 9"):
            relay(mlp(), [(mlp(), [(batches()[0][0], torch.full((16,), 9))])])

    def test_batches_that_are_used_up(self) -> None:
        def generator() -> Iterator[Any]:
            yield from batches()

        for used_up in (generator(), iter(batches())):
            with refused("client 0: the batches must be something that can be gone through once a round", "got a "):
                relay(mlp(), [(mlp(), used_up)])

    @pytest.mark.parametrize("nothing", [[], [torch.zeros(0, 12)], [(torch.zeros(0, 12), torch.zeros(0))]])
    def test_no_examples(self, nothing: list[Any]) -> None:
        with refused("client 0: the batches must hold at least one example, got none"):
            relay(mlp(), [(mlp(), nothing)])

    def test_empty_batches_among_others_are_passed_over(self) -> None:
        gaps = [(torch.zeros(0, 12), torch.zeros(0, dtype=torch.int64)), *batches()]
        same(relay(mlp(), [(mlp(1), gaps)]), relay(mlp(), [(mlp(1), batches())]))

    def test_inputs_and_models_that_do_not_work(self) -> None:
        x, y = batches()[0]
        with refused("client 0: the inputs must be finite, got NaN"):
            relay(mlp(), [(mlp(), [(x * NAN, y)])])
        with refused("client 0: the inputs must be finite, got NaN"):
            relay(mlp(), [(mlp(), [(x, y), (x * NAN, y)])])
        with refused("client 0: the model must take its own batches, got an error"):
            relay(mlp(), [(mlp(), [(x[:, :3], y)])])
        broken = mlp()
        broken[0].weight.data.fill_(NAN)
        with refused("client 0: the network must give finite outputs", "got NaN"):
            relay(mlp(), [(broken, batches())])

    def test_models_that_cannot_be_copied(self) -> None:
        class Stubborn(nn.Linear):
            def __deepcopy__(self, memo: object) -> nn.Module:
                raise TypeError("not this one")

        with refused("client 0: the model must be one that copy.deepcopy can copy, got Stubborn: not this one"):
            relay(mlp(), [(Stubborn(12, 5), batches())])
        with refused("the model must be one that copy.deepcopy can copy", "got Stubborn"):
            RelayServer(Stubborn(12, 5))


def digit_resnet() -> nn.Module:
    return resnet(1, 12, 24, 10)


def counting_transformer() -> nn.Module:
    def forward(net: Any, t: Tensor) -> Tensor:
        return net.head(net.norm(net.layer(net.embed(t) + net.place)).mean(1))

    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0)
    parts = {"embed": nn.Embedding(6, 16), "place": nn.Parameter(0.1 * torch.randn(9, 16)), "layer": layer}
    return Net(forward, **parts, norm=nn.LayerNorm(16), head=nn.Linear(16, 6))


def most_frequent(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Nine tokens, and which of them comes most often."""
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
    start, pairs = made(make), []
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
