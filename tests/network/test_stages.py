"""Which units of a network can be fitted at once, and in which order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maecho.network.packed.twin import twin_of
from maecho.network.stages import Plan, plan
from support.clients import Net, rng
from support.clients import network as mlp
from support.tiny import NAN, refused_input

IMAGE = torch.randn(4, 3, 6, 6, generator=rng(1))
ROWS = torch.randn(4, 6, generator=rng(2))


def planned(model: nn.Module, x: Any) -> Plan:
    return plan(twin_of(model).network, x)


def stages(model: nn.Module, x: Any) -> list[set[str]]:
    """The names of every stage. A BatchNorm that is fitted with its layer follows a plus."""
    return [{u.name + (f"+{u.norm}" if u.norm else "") for u in stage} for stage in planned(model, x).stages]


def test_an_mlp_has_one_layer_a_stage() -> None:
    found = planned(mlp(), torch.randn(3, 12))
    assert [[u.name for u in stage] for stage in found.stages] == [["0"], ["2"], ["4"]]
    assert found.head == "4"
    assert found.calls == {"0": 1, "2": 1, "4": 1}


def test_a_layer_is_joined_with_the_batchnorm_behind_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, bias=False))
    model.append(nn.BatchNorm2d(4)).append(nn.Flatten()).append(nn.Linear(16, 5)).append(nn.BatchNorm1d(5))
    assert stages(model, IMAGE) == [{"0+1"}, {"3+4"}, {"6+7"}]
    assert planned(model, IMAGE).head is None  # its rows are not what the model gives out


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: net.conv(net.norm(x).relu()).mean((2, 3)),
        lambda net, x: net.norm(z := net.conv(x)).mean((2, 3)) + z.mean((2, 3)),
        lambda net, x: net.norm((z := net.conv(x)).relu_()).mean((2, 3)) if net else z,
        lambda net, x: net.norm(net.conv(x) + x).mean((2, 3)),
        lambda net, x: net.norm(net.conv(net.norm(net.conv(x)))).mean((2, 3)),
    ],
    ids=["pre-activation", "seen by another", "changed in place", "of a sum", "used twice"],
)
def test_a_batchnorm_that_does_not_see_the_layer_alone_stands_by_itself(forward: Any) -> None:
    net = Net(forward, conv=nn.Conv2d(3, 3, 3, padding=1), norm=nn.BatchNorm2d(3))
    found = [unit for stage in planned(net, IMAGE).stages for unit in stage]
    assert {unit.name for unit in found} == {"conv", "norm"}
    assert all(unit.norm is None for unit in found)


def test_a_batchnorm_is_joined_to_no_other_norm() -> None:
    model = nn.Sequential(nn.RMSNorm(6), nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    assert stages(model, ROWS) == [{"0"}, {"1"}, {"2"}, {"3"}]


def test_shortcut_and_first_convolution_of_a_block_are_one_stage() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.bn2(net.two(net.bn1(net.one(x)).relu()))
        return net.head((h + net.bn0(net.short(x))).relu().mean((2, 3)))

    parts = {
        "one": nn.Conv2d(3, 4, 3, 2, 1, bias=False),
        "bn1": nn.BatchNorm2d(4),
        "two": nn.Conv2d(4, 4, 3, 1, 1, bias=False),
        "bn2": nn.BatchNorm2d(4),
        "short": nn.Conv2d(3, 4, 1, 2, bias=False),
        "bn0": nn.BatchNorm2d(4),
        "head": nn.Linear(4, 5),
    }
    net = Net(forward, **parts)
    assert stages(net, IMAGE) == [{"one+bn1", "short+bn0"}, {"two+bn2"}, {"head"}]
    assert planned(net, IMAGE).head == "head"


def test_queries_keys_and_values_are_one_stage() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    found = stages(layer, torch.randn(2, 5, 8))
    first, *rest = [{name.removeprefix("self_attn.") for name in stage} for stage in found]
    assert first == {"q", "k", "v"}
    assert rest == [{"out"}, {"norm1"}, {"linear1"}, {"linear2"}, {"norm2"}]


def test_modules_that_share_a_weight_are_one_unit() -> None:
    net = Net(lambda net, x: net.head(net.two(net.one(x).relu())), one=nn.Linear(6, 6), two=nn.Linear(6, 6))
    net.head = nn.Linear(6, 2)
    net.two.weight = net.one.weight
    (), (one,), (head,) = planned(net, ROWS).stages  # it feeds itself: nothing is fitted before that is seen
    assert (one.modules, one.bias, head.name) == (("one", "two"), False, "head")
    net.two.bias = net.one.bias
    assert planned(net, ROWS).stages[1][0].bias


def test_a_tied_embedding_has_the_embedding_in_front_and_no_head() -> None:
    net = Net(lambda net, t: net.out(net.mid(net.embed(t)).mean(1)), embed=nn.Embedding(5, 5), mid=nn.Linear(5, 5))
    net.out = nn.Linear(5, 5, bias=False)
    net.out.weight = net.embed.weight
    found = planned(net, torch.tensor([[1, 2], [3, 4]]))
    assert [[u.name for u in stage] for stage in found.stages] == [["embed"], ["mid"]]
    assert found.head is None


def test_a_layer_that_feeds_itself_takes_its_turn() -> None:
    net = Net(lambda net, x: net.head(net.same(net.same(net.first(x)).relu())), first=nn.Linear(6, 6))
    net.same, net.head = nn.Linear(6, 6), nn.Linear(6, 3)
    found = planned(net, ROWS)
    assert [[u.name for u in stage] for stage in found.stages] == [["first"], ["same"], ["head"]]
    assert found.calls["same"] == 2
    loop = Net(lambda net, x: net.b(net.a(net.b(net.a(x)))), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    assert stages(loop, ROWS) == [set(), {"a"}, {"b"}]


def test_where_a_free_parameter_comes_first_the_first_stage_is_empty() -> None:
    net = Net(lambda net, x: net.head(x + net.shift), shift=nn.Parameter(torch.zeros(6)), head=nn.Linear(6, 3))
    assert stages(net, ROWS) == [set(), {"head"}]

    def tokens(net: Any, t: Tensor) -> Tensor:
        h = torch.cat([net.cls.expand(len(t), 1, 4), net.embed(t)], 1) + net.place
        return net.head(h[:, 0])

    net = Net(tokens, embed=nn.Embedding(5, 4), cls=nn.Parameter(torch.zeros(4)), place=nn.Parameter(torch.zeros(3, 4)))
    net.head = nn.Linear(4, 3)
    assert stages(net, torch.tensor([[1, 2], [3, 4]])) == [{"embed"}, {"head"}]


def test_layers_that_never_run_are_no_part_of_the_plan() -> None:
    net = Net(lambda net, x: net.head(x), head=nn.Linear(6, 3), idle=nn.Linear(6, 3), norm=nn.LayerNorm(6))
    assert stages(net, ROWS) == [{"head"}]
    assert stages(nn.Flatten(), ROWS) == []


def test_a_network_may_be_one_layer() -> None:
    assert stages(nn.Linear(6, 3), ROWS) == [{""}]
    assert planned(nn.Linear(6, 3), ROWS).head == ""


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: (h := net.body(x)) + net.last(h.relu()),
        lambda net, x: net.last(net.body(x).unsqueeze(1).relu()).mean(1),
        lambda net, x: net.last(net.body(x).relu()).unsqueeze(1),
        lambda net, x: net.norm(net.last(net.body(x))),
        lambda net, x: net.last(net.last(net.body(x))),
    ],
    ids=["residual", "pooled", "one more axis", "normed", "twice"],
)
def test_a_last_layer_that_is_not_the_output_is_no_head(forward: Any) -> None:
    net = Net(forward, body=nn.Linear(6, 3), last=nn.Linear(3, 3), norm=nn.LayerNorm(3))
    assert planned(net, ROWS).head is None


@pytest.mark.parametrize(
    "after",
    [lambda z: z, lambda z: z.log_softmax(1), lambda z: (z, None)],
    ids=["logits", "log-probabilities", "tuple"],
)
def test_a_head_may_be_followed_by_what_has_no_weights(after: Any) -> None:
    net = Net(lambda net, x: after(net.last(net.body(x))), body=nn.Linear(6, 3), last=nn.Linear(3, 3))
    assert planned(net, ROWS).head == "last"


def test_inputs_may_be_named_and_come_with_a_mask() -> None:
    net = Net(lambda net, x, mask, scale: net.head((mask @ x).sum(1) * scale), head=nn.Linear(3, 2))
    inputs = {"x": torch.randn(5, 4, 3), "mask": torch.ones(4, 4), "scale": torch.tensor(2.0)}
    assert stages(net, inputs) == [{"head"}]


class Asserting(nn.Module):
    """It asserts that all numbers are finite, and makes indices of what its first layer gives out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.table, self.b = nn.Linear(6, 6), nn.Embedding(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        assert h.isfinite().all()
        return self.b(self.table((100 * h[:, 0]).abs().long() % 5) + h)


def test_a_network_that_does_not_run_on_nan() -> None:
    """Weights were NaN to find what depends on what: it ended in an assertion, and in an index that there is not."""
    assert stages(Asserting(), ROWS) == [{"a"}, {"table"}, {"b"}]


def test_a_dependency_that_nan_to_num_hides() -> None:
    model = Net(lambda net, x: net.c(net.b(net.a(x).nan_to_num()).relu()), a=nn.Linear(6, 6), b=nn.Linear(6, 6),
                c=nn.Linear(6, 3))  # fmt: skip
    assert stages(model, ROWS) == [{"a"}, {"b"}, {"c"}]


def test_a_parameter_that_is_zero_matters_too() -> None:
    model = Net(
        lambda net, x: net.b(net.a(x) + net.norm(x)), a=nn.Linear(6, 6), norm=nn.BatchNorm1d(6), b=nn.Linear(6, 3)
    )
    nn.init.zeros_(model.a.weight)
    nn.init.zeros_(model.a.bias)
    nn.init.zeros_(model.norm.weight)
    assert stages(model, ROWS) == [{"a", "norm"}, {"b"}]


def test_the_model_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten())
    model.append(nn.Linear(64, 5)).train()
    model[1].eval()
    model[5].weight.requires_grad_(False)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = IMAGE.clone()
    plan(model, x)
    assert torch.equal(x, IMAGE)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == [True, True, False, True, True, True, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert [p.requires_grad for p in model.parameters()] == [True, True, True, True, False, True]


def test_bad_input() -> None:
    with refused_input("inputs must be finite", "NaN"):
        plan(mlp(), torch.full((2, 12), NAN))
    broken = mlp()
    broken[2].weight.data.fill_(NAN)
    with refused_input("finite outputs for finite inputs", "NaN"):
        plan(broken, torch.randn(2, 12))


def test_a_dead_neuron_hides_no_dependency() -> None:
    """Of the only neuron between two layers nothing comes through on these inputs."""
    model = nn.Sequential(nn.Linear(4, 1), nn.ReLU(), nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2))
    for seed in range(20):
        random = rng(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=random))
            model[0].bias.fill_(-20.0)
        found = plan(model, torch.randn(4, 4, generator=random))
        assert [[unit.name for unit in stage] for stage in found.stages] == [["0"], ["2"], ["4"]]
