"""One pass over the data: what it sums up, and that it leaves the model unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho.linalg import recursion
from maecho.linalg.gaussians import NO_CLASS
from maecho.linalg.recursion import MeanRecursion
from maecho.linalg.sums.scatter import SKETCH, Scatter
from maecho.linalg.symmetric import Diagonal
from maecho.network.kinds import rows
from maecho.statistics import STATISTICS
from maecho.statistics.moments import ClassScatter
from maecho.upload.client import make_upload
from support.clients import batches, network, rng
from support.tiny import QUICK


def test_gram_is_the_sum_over_all_rows() -> None:
    model, data = network(0), batches(0)
    upload = make_upload(model, data, "a", rank=None)
    x = torch.cat([x for x, _ in data]).double()
    model = model.double()
    for name, index in (("0", 0), ("2", 2), ("4", 4)):
        h = model[:index](x) if index else x
        ones = torch.cat([h, torch.ones(len(h), 1)], 1)
        torch.testing.assert_close(
            upload.statistics["gram"][name].dense()[0].double(), ones.T @ ones, rtol=1e-4, atol=1e-3
        )


def test_ten_million_rows_lose_no_precision() -> None:
    """Sums are not float32: there even a count would stop at 2**24."""
    model, size, count = nn.Sequential(nn.Linear(1, 2)), 200_000, 100
    x = torch.full((size, 1), 0.1)
    upload = make_upload(model, (x for _ in range(count)), "a", statistics=["gram"], rank=None)
    exact = float(x[0, 0].double())
    found = upload.statistics["gram"]["0"]
    G = found.dense()[0].double()
    assert upload.examples == size * count == 20_000_000
    assert float(found.unit) == pytest.approx(exact, rel=1e-12)  # in this unit the constant is as large as the input
    assert float(found.values.sum()) == pytest.approx(2 * size * count * exact**2, rel=1e-11)
    assert float(G[1, 1]) == pytest.approx(size * count, rel=1e-6)
    assert float(G[0, 1] / G[1, 1]) == pytest.approx(exact, rel=1e-6)


def test_the_model_comes_back_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 5))
    model.train()
    model[1].eval()  # a mode of its own, as for a frozen normalisation
    model(batches(3)[0][0]).sum().backward()
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    make_upload(model, batches(), "a")
    assert [m.training for m in model] == [True, False, True, True]
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


def test_a_model_that_cannot_be_copied_is_uploaded_without_spaces() -> None:
    class Single(nn.Linear):
        def __deepcopy__(self, memo: object) -> object:
            raise RuntimeError("there is one of me")

    upload = make_upload(Single(12, 5), batches(), "a")
    assert upload.spaces is None
    assert "there is one of me" in upload.recipe["not_sent"]["spaces"]


def test_a_forward_that_counts_is_not_run_on_the_model_by_tracing() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(12, 5)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = nn.Sequential(Counting())
    make_upload(model, batches(count=3), "a")
    assert float(model[0].calls) == 3  # the three batches, and nothing besides


def test_it_comes_back_also_when_the_data_fail() -> None:
    def broken() -> object:
        yield batches()[0]
        raise RuntimeError("disk on fire")

    model = network().train()
    with pytest.raises(RuntimeError, match="disk on fire"):
        make_upload(model, broken(), "a")  # type: ignore[arg-type]
    assert all(m.training for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("convolution", [False, True])
def test_released_projector_is_the_literal_recursion(convolution: bool) -> None:
    draw = rng(2)
    if convolution:
        model: nn.Sequential = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1))
        data = [torch.randn(5, 2, 9, 8, generator=draw) for _ in range(3)]
        # Patches of the mean map: kernel 3, stride 2, no padding, read row by row.
        maps = [x.mean(0).double() for x in data]
        means = [
            m[:, i : i + 3, j : j + 3].flatten() for m in maps for i in range(0, 9 - 2, 2) for j in range(0, 8 - 2, 2)
        ]
        damping = recursion.DAMPING_CONVOLUTION
    else:
        model, damping = nn.Sequential(nn.Linear(6, 4)), recursion.DAMPING
        data = [torch.randn(5, 6, generator=draw) for _ in range(4)]
        means = [x.mean(0).double() for x in data]
    d = len(means[0]) + 1
    Q = torch.eye(d, dtype=torch.float64)
    for r in means:
        r = torch.cat([r, torch.ones(1)])
        k = Q @ r
        Q = Q - 0.5 * torch.outer(k, k) / (damping + r @ k)
    upload = make_upload(model, data, "a", rank=None, mean_of=5)
    torch.testing.assert_close(
        upload.statistics["projector"]["0"].dense()[0].double(),
        torch.eye(d, dtype=torch.float64) - Q,
        rtol=1e-4,
        atol=1e-5,
    )
    assert upload.statistics["projector"]["0"].rank <= len(means)


@pytest.mark.parametrize("count", [3, 50, 600])
def test_recursion_folds_without_a_trace(count: int) -> None:
    """A few columns, more columns, and columns folded into a dense Q give the same answer."""
    means = torch.randn(1, count, 10, generator=rng(), dtype=torch.float64)
    kept = MeanRecursion(1, 10)
    kept.add(means)
    Q = torch.eye(10, dtype=torch.float64)
    for r in means[0]:
        k = Q @ r
        Q = Q - 0.5 * torch.outer(k, k) / (recursion.DAMPING + r @ k)
    torch.testing.assert_close(kept.spectrum().dense()[0], torch.eye(10, dtype=torch.float64) - Q)


def test_with_step_one_on_single_samples_it_is_the_exact_projector() -> None:
    X = torch.randn(7, 12, generator=rng(), dtype=torch.float64)
    kept = MeanRecursion(1, 12, damping=0.3, step=1.0)
    kept.add(X.unsqueeze(0))
    exact = X.T @ torch.linalg.solve(X @ X.T + 0.3 * torch.eye(7, dtype=torch.float64), X)
    torch.testing.assert_close(kept.spectrum().dense()[0], exact)


def test_large_batches_are_cut_to_the_releases_size() -> None:
    x = torch.randn(128, 12, generator=rng())
    one = make_upload(network(), [x], "a", rank=None, mean_of=64)
    two = make_upload(network(), x.split(64), "a", rank=None, mean_of=64)
    torch.testing.assert_close(one.statistics["projector"]["0"].dense(), two.statistics["projector"]["0"].dense())


def test_embedding_counts_tokens() -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 3))
    tokens = torch.tensor([[0, 1, 1], [5, 1, 0]])
    with pytest.warns(UserWarning, match="a: not sent: moments, features, since the inputs are not one tensor"):
        upload = make_upload(model, [(tokens, torch.tensor([0, 2]))], "a")
    assert isinstance(upload.statistics["gram"]["0"], Diagonal)
    assert upload.statistics["gram"]["0"].values.tolist() == [[2, 3, 0, 0, 0, 1]]
    counts = upload.statistics["gram"]["0"].values
    torch.testing.assert_close(upload.statistics["projector"]["0"].values, counts / (counts + recursion.DAMPING))
    assert upload.statistics.get("moments") is None
    assert upload.recipe["not_sent"] == {
        "moments": "the inputs are not one tensor of real numbers, so they have no mean",
        "features": "the inputs are not one tensor of real numbers, so they have no mean",
    }


def test_labels_make_class_counts_and_a_head() -> None:
    upload = make_upload(network(), batches(), "a")
    labels = torch.cat([y for _, y in batches()])
    assert upload.head == "4"
    assert upload.statistics.get("classes") is not None
    assert upload.statistics["classes"].tolist() == labels.bincount(minlength=5).tolist()


WHY = {
    "nothing": "since the batches carry no whole-number label for every example",
    "floats": "since the labels are not whole numbers, as in regression",
    "per token": "since the labels are (16, 3), not one number for each of 16 examples",
    "text": "since the labels are no numbers",
}


@pytest.mark.parametrize("second", WHY)
def test_without_whole_number_labels_there_are_no_classes(second: str) -> None:
    x = batches()[0][0]
    y = {"floats": torch.rand(16), "per token": torch.zeros(16, 3, dtype=torch.long), "text": ["a"] * 16}
    batch = x if second == "nothing" else (x, y[second])
    with pytest.warns(UserWarning, match="a: (not sent: classes, targets|no labels are used)") as said:
        upload = make_upload(network(), [batch], "a", STATISTICS)
    assert any(WHY[second] in str(one.message) for one in said)
    assert upload.statistics.get("classes") is None
    assert upload.statistics.get("targets") is None
    assert upload.statistics.get("moments") is not None
    assert upload.statistics["moments"].classes.tolist() == [NO_CLASS]
    assert upload.recipe["not_sent"].keys() == {"classes", "targets"}
    for method in maecho.METHODS.keys() - {"afl"}:
        maecho.aggregate([upload], method, model=network(), **QUICK.get(method, {}))


@pytest.mark.filterwarnings("ignore:.*not sent")
def test_inputs_may_be_a_mapping() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.inner(input=x * scale.unsqueeze(1))

    x, y = batches()[0]
    upload = make_upload(Named(), [({"x": x, "scale": torch.ones(16)}, y)], "a", rank=None)
    plain = make_upload(network(), [(x, y)], "a", rank=None)
    torch.testing.assert_close(upload.statistics["gram"]["inner.0"].dense(), plain.statistics["gram"]["0"].dense())


def test_layers_come_in_order_of_execution_and_those_that_never_ran_have_rank_0() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.last, self.first = nn.Linear(3, 3), nn.Linear(4, 5), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    with pytest.warns(UserWarning, match="a: nothing of idle is in gram, projector, since no module of that name ran"):
        upload = make_upload(Backwards(), batches(), "a")
    assert [layer.name for layer in upload.layers] == ["first", "last", "idle"]
    assert upload.statistics["gram"]["idle"].rank == upload.statistics["projector"]["idle"].rank == 0
    for method in ("ma-echo", "regmean"):
        merged = maecho.aggregate([upload], method)
        assert {"idle.weight", "idle.bias"} <= set(merged.averaged)


def test_a_wide_convolution_is_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)), torch.randn(7, 2, 6, 6, generator=rng())
    whole = make_upload(model, [x], "a", rank=None).statistics["gram"]["0"].dense()
    monkeypatch.setattr("maecho.network.kinds.CHUNK", 1)
    torch.testing.assert_close(make_upload(model, [x], "a", rank=None).statistics["gram"]["0"].dense(), whole)
    assert rows(model[0], x).shape == (1, 7 * 36, 18)


def test_moments_are_those_of_each_class() -> None:
    data = batches(count=5)
    upload = make_upload(network(), data, "a", rank=None)
    x, y = torch.cat([x for x, _ in data]).double(), torch.cat([y for _, y in data])
    assert upload.statistics.get("moments") is not None
    for i, label in enumerate(upload.statistics["moments"].classes.tolist()):
        own = x[y == label]
        assert int(upload.statistics["moments"].counts[i]) == len(own)
        torch.testing.assert_close(upload.statistics["moments"].means[i].double(), own.mean(0), rtol=1e-5, atol=1e-5)
        covariance = upload.statistics["moments"].covariances[i].dense()[0].double()
        torch.testing.assert_close(covariance, own.T.cov(correction=0), rtol=1e-4, atol=1e-4)


def test_a_large_mean_does_not_swallow_the_variance() -> None:
    scatter = Scatter((3,))
    x = torch.randn(1000, 3, generator=rng(), dtype=torch.float64) + 1e7
    for piece in x.split(90):
        scatter.add(piece)
    torch.testing.assert_close(scatter.covariance().dense()[0], x.T.cov(correction=0), rtol=1e-6, atol=1e-6)


def test_long_inputs_are_sketched_and_exact_up_to_the_sketch() -> None:
    x = torch.randn(SKETCH - 5, 1500, generator=rng(), dtype=torch.float64)
    kept = ClassScatter()
    for piece in x.split(100):
        kept.add(piece, None)
    covariance = kept.moments().covariances[0]
    assert covariance.rank <= SKETCH
    M = torch.randn(1, 2, 1500, generator=rng(), dtype=torch.float64)
    torch.testing.assert_close(covariance.after(M), M @ x.T.cov(correction=0), rtol=1e-6, atol=1e-8)


def test_a_long_sketch_keeps_the_leading_directions() -> None:
    draw = rng(5)
    basis = torch.linalg.qr(torch.randn(1200, 40, generator=draw, dtype=torch.float64))[0]
    x = torch.randn(3000, 40, generator=draw, dtype=torch.float64) @ basis.T
    scatter = Scatter((1200,))
    for piece in x.split(500):
        scatter.add(piece)
    torch.testing.assert_close(scatter.covariance().dense()[0], x.T.cov(correction=0), rtol=1e-6, atol=1e-8)
