"""MA-Echo: the fast version against the literal one, the limits against long iterations, the options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import maecho
import one_shot
from maecho.aggregation import Iteration, MAEcho
from maecho.linalg.simplex import capped_simplex
from maecho.linalg.spectra import Spectrum, projector
from maecho.linalg.steps.iteration import Coefficients, Columns, Iterates, iterates
from maecho.linalg.steps.limits import Limit
from maecho.linalg.symmetric import Diagonal
from maecho.upload.upload import Upload
from support.clients import batches, clients, network, rng
from support.units import scales


def problem(
    n: int = 4,
    out: int = 3,
    d: int = 12,
    rank: int = 3,
    low: float = 0.2,
    high: float = 0.9,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], list[Spectrum]]:
    """Clients' matrices and projectors with eigenvalues in [low, high]."""
    draw = rng(7)
    W, P = [], []
    for _ in range(n):
        W.append(torch.randn(1, out, d, generator=draw, dtype=torch.float64).to(dtype))
        U = torch.linalg.qr(torch.randn(1, d, rank, generator=draw, dtype=torch.float64))[0]
        s = low + (high - low) * torch.rand(1, rank, generator=draw, dtype=torch.float64)
        P.append(Spectrum(s, U.to(dtype)))
    return W, P


def dense(spectra: Sequence[Spectrum]) -> list[Tensor]:
    return [spectrum.dense()[0] for spectrum in spectra]


def average(W: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(W)).mean(0)


def run(form: Coefficients, steps: int, W: list[Tensor], P: list[Spectrum], start: Tensor | None = None) -> Iterates:
    one = iterates(average(W) if start is None else start, W, P, form)
    for _ in range(steps):
        one.step()
    return one


def by_qp(cap: float) -> Callable[[Tensor], Tensor]:
    return lambda gradients: torch.from_numpy(capped_simplex((gradients @ gradients.T).double().numpy(), cap))


@pytest.mark.parametrize("rank", [1, 3, 12], ids="rank {}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_released_equals_the_literal_loop(rank: int, dtype: torch.dtype) -> None:
    W, P = problem(rank=rank, dtype=dtype)
    literal = one_shot.as_released([w[0] for w in W], dense(P))
    fast = run(Coefficients(1.6, 1.6, 1.6), 60, W, P).mean()[0]
    assert float((fast - literal).norm() / literal.norm()) < 1e-5


@pytest.mark.parametrize("mu", [1.0, 200.0])
@pytest.mark.parametrize("cap", [None, 0.6, 1.0])
def test_printed_equals_algorithm_1(mu: float, cap: float | None) -> None:
    W, P = problem()
    literal = one_shot.algorithm_1(
        [w[0] for w in W], dense(P), 30, 0.4, mu, one_shot.uniform if cap is None else by_qp(cap)
    )
    method = MAEcho(form="printed", step_size=0.4, mu=mu, cap=cap or 1.0, alpha="uniform" if cap is None else "qp")
    fast = run(method._for(clients(1)[0], True)._coefficients(), 30, W, P).merged()[0]
    assert float((fast - literal).norm() / literal.norm()) < 1e-5


def test_norm_equals_the_literal_loop() -> None:
    W, P = problem()
    literal = one_shot.as_released([w[0] for w in W], dense(P), 40, 0.05, norm=True)
    fast = run(Coefficients(0.05, 0.05, 0.05, normalised=True), 40, W, P).mean()[0]
    torch.testing.assert_close(fast, literal)


def test_anchored_equals_its_equation() -> None:
    W, P = problem()
    matrices, projectors, identity = [w[0] for w in W], dense(P), torch.eye(12, dtype=torch.float64)
    G, V = average(W)[0], [w[0] for w in W]
    for _ in range(25):
        G = G - 2 * 0.3 / 4 * sum((G - v) @ p for v, p in zip(V, projectors, strict=True))
        V = [w + (G - w) @ (identity - 0.75 * p) for w, p in zip(matrices, projectors, strict=True)]
    fast = run(Coefficients(0.6, 1.0, 0.75, anchored=True), 25, W, P)
    torch.testing.assert_close(fast.merged()[0], G)
    for i, v in enumerate(V):
        torch.testing.assert_close(fast.client(i)[0], v)


def skewed(gram: Tensor) -> Tensor:
    """Weights far from uniform that depend on the gradients: the smaller a client's, the more it counts."""
    return torch.softmax(torch.tensor([2.0, 0.0, -1.0, 1.0]).double() - gram.diagonal() / gram.diagonal().max(), 0)


WEIGHTS: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, object]]] = {
    "quadratic program": (by_qp(0.38), {"alpha": "qp", "cap": 0.38}),
    "skewed": (lambda gradients: skewed(gradients @ gradients.T), {}),
}


def weighted(weights: str, **options: object) -> tuple[Coefficients, Callable[[Tensor], Tensor]]:
    """The coefficients of MA-Echo with weights of the clients, and the weights for gradients [clients, out · in]."""
    literal, chosen = WEIGHTS[weights]
    form = MAEcho(step_size=0.3, head="iterate", **options, **chosen)._for(clients(1)[0], True)._coefficients()  # type: ignore[arg-type]
    return form if chosen else replace(form, alpha=skewed), literal


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("form", ["released", "printed", "anchored", "released, Norm", "printed, Norm"])
def test_steps_with_weights_are_the_literal_ones(form: str, weights: str) -> None:
    """Eq. (6) and (7) in every form: W ← W − ω Σ α_i (W − V_i) P_i, with α from the gradients 2 (W − V_i) P_i."""
    W, spectra = problem()
    name, norm = form.split(",")[0], "Norm" in form
    coefficients, alpha_of = weighted(weights, form=name, normalise=norm, mu=3.0)
    step, hold, follow = (0.3, 1.0, 0.3) if name == "released" else (0.6, 0.75, 1.0)
    own, P = [w[0] for w in W], dense(spectra)
    G, V = average(W)[0], list(own)
    fast = iterates(average(W), W, spectra, coefficients)
    for _ in range(3):
        pulls = [(G - v) @ p for v, p in zip(V, P, strict=True)]
        alpha = alpha_of(torch.stack([2 * pull.flatten() for pull in pulls]))
        assert float(alpha.max() - alpha.min()) > 0.25, "weights must be far from uniform"
        G = G - step * sum(a * pull for a, pull in zip(alpha, pulls, strict=True))
        begin = own if name == "anchored" else V
        moves = [(G - v) - hold * (G - v) @ p for v, p in zip(begin, P, strict=True)]
        if norm:
            moves = [move / move.norm(dim=1, keepdim=True) for move in moves]
        V = [v + follow * move for v, move in zip(begin, moves, strict=True)]
        fast.step()
        torch.testing.assert_close(fast.merged()[0], G)
        for i, v in enumerate(V):
            torch.testing.assert_close(fast.client(i)[0], v)


FORMS = {
    "released": Coefficients(1.6, 1.6, 1.6),
    "released, small steps": Coefficients(0.3, 0.3, 0.3),
    "printed": Coefficients(0.8, 1.0, 0.5),
    "printed, mu 200": Coefficients(0.8, 1.0, 200 / 201),
    "anchored": Coefficients(0.8, 1.0, 0.5, anchored=True),
}


@pytest.mark.parametrize("start", ["average", "random"])
@pytest.mark.parametrize("name", FORMS)
def test_limit_equals_20000_iterations(name: str, start: str) -> None:
    W, P = problem(rank=4)
    W0 = average(W) if start == "average" else torch.randn(1, 3, 12, generator=rng(3), dtype=torch.float64)
    limit = Limit(FORMS[name])
    for w, p in zip(W, P, strict=True):
        limit.add(w, p)
    iterated = run(FORMS[name], 20_000, W, P, W0)
    reached = iterated.mean() if name.startswith("released") else iterated.merged()
    torch.testing.assert_close(limit.matrix(W0), reached, rtol=1e-6, atol=1e-6)


def test_released_limit_is_regmean_with_a_prior() -> None:
    """With soft projectors R = G / z. So for z → 0 only the data decide."""
    draw = rng(4)
    X = [torch.randn(30, 12, generator=draw, dtype=torch.float64) for _ in range(3)]
    W = [torch.randn(1, 3, 12, generator=draw, dtype=torch.float64) for _ in X]
    grams = [(x.T @ x).unsqueeze(0) for x in X]
    limit = Limit(Coefficients(1.6, 1.6, 1.6))
    for w, G in zip(W, grams, strict=True):
        limit.add(w, projector(Spectrum.of_dense(G), 1e-6))
    regmean = sum(w @ G for w, G in zip(W, grams, strict=True)) @ torch.linalg.inv(sum(grams))  # type: ignore[arg-type]
    torch.testing.assert_close(limit.matrix(average(W)), regmean, rtol=1e-5, atol=1e-5)


def test_a_diagonal_is_iterated_like_its_matrix() -> None:
    W, _ = problem(n=3, d=5)
    s = torch.rand(3, 1, 5, generator=rng(2), dtype=torch.float64) * 0.9
    diagonal = [Diagonal(row) for row in s]
    full = [Spectrum(row, torch.eye(5, dtype=torch.float64).unsqueeze(0)) for row in s]
    for form in (*FORMS.values(), Coefficients(0.5, 1.0, 0.5, alpha=lambda Q: torch.softmax(Q.diagonal(), 0))):
        one, other = run(form, 10, W, diagonal), run(form, 10, W, full)
        torch.testing.assert_close(one.merged(), other.merged())
        torch.testing.assert_close(one.mean(), other.mean())
        torch.testing.assert_close(one.client(1), other.client(1))


@pytest.mark.parametrize("rank", [2, 12])
def test_mean_is_the_mean_of_the_clients_and_the_gram_that_of_the_gradients(rank: int) -> None:
    W, P = problem(rank=rank)
    one = run(FORMS["released"], 7, W, P)
    torch.testing.assert_close(one.mean(), torch.stack([one.client(i) for i in range(4)]).mean(0))
    columns = Columns(P, torch.float64)
    D = torch.randn(1, 3, 4 * rank, generator=rng(), dtype=torch.float64)
    gradients = torch.stack([(2 * columns.one(D, i)).flatten() for i in range(4)])
    torch.testing.assert_close(columns.gram(D), gradients @ gradients.T)


def test_clients_may_have_different_ranks() -> None:
    W, P = problem(n=3, rank=5)
    P = [P[0].cut(0), P[1].cut(2), P[2]]
    literal = one_shot.as_released([w[0] for w in W], dense(P), 20)
    torch.testing.assert_close(run(FORMS["released"], 20, W, P).mean()[0], literal)


def test_the_whole_method_on_uploads_is_the_literal_loop_on_every_layer() -> None:
    uploads = clients(3, torch.float64, rank=None)
    merged = maecho.aggregate(uploads, "ma-echo", steps=25)
    for layer in uploads[0].layers[:-1]:
        W = [layer.matrix(u.weights)[0] for u in uploads]
        P = [u.statistics["projector"][layer.name].dense()[0] for u in uploads]
        torch.testing.assert_close(layer.matrix(merged)[0], one_shot.as_released(W, P, 25))


def test_a_layer_of_which_nobody_saw_inputs_is_named_as_averaged() -> None:
    """Not one of which a single client saw none, nor one with directions in which nobody saw any."""
    plain = maecho.aggregate(clients(2, rank=None), "ma-echo").averaged

    def zeroed(uploads: list[Upload], share: float, who: Sequence[int]) -> list[Upload]:
        out = list(uploads)
        for i in who:
            projectors = dict(uploads[i].statistics["projector"])
            found = projectors["0"]
            keep = int(share * found.rank)
            values = torch.cat([found.values[:, :keep], torch.zeros_like(found.values[:, keep:])], -1)
            projectors["0"] = Spectrum(values, found.basis)
            out[i] = replace(uploads[i], statistics={**uploads[i].statistics, "projector": projectors})
        return out

    given = clients(2, rank=None)
    for share, who in ((0.5, (0, 1)), (0.0, (0,)), (0.0, (1,))):
        assert maecho.aggregate(zeroed(given, share, who), "ma-echo").averaged == plain
    assert set(maecho.aggregate(zeroed(given, 0.0, (0, 1)), "ma-echo").averaged) - set(plain) == {"0.weight", "0.bias"}


def test_class_aware_head_averages_over_the_clients_that_have_the_class() -> None:
    draw = rng(9)
    labels = [torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1, 1, 2, 2, 3]), torch.tensor([2, 2, 2, 2, 2])]
    uploads = [
        maecho.make_upload(network(i), [(torch.randn(5, 12, generator=draw), y)], f"client-{i}")
        for i, y in enumerate(labels)
    ]
    W = torch.stack([u.weights["4.weight"] for u in uploads])
    for method in (MAEcho(), maecho.METHODS["fedavg"].__class__("uniform", "class-aware")):
        got = maecho.aggregate(uploads, method)["4.weight"]
        torch.testing.assert_close(got[0], W[0, 0])
        torch.testing.assert_close(got[1], (W[0, 1] + W[1, 1]) / 2)
        torch.testing.assert_close(got[2], (W[1, 2] + W[2, 2]) / 2)
        torch.testing.assert_close(got[3], W[:, 3].mean(0))  # one example does not count as having the class
        torch.testing.assert_close(got[4], W[:, 4].mean(0))  # a class that nobody has


def starts(W: list[Tensor]) -> list[Tensor]:
    return [average(W), W[2], torch.randn(W[0].shape, generator=rng(), dtype=torch.float64)]


@pytest.mark.parametrize(("low", "high", "apart"), [(0.99, 0.999, 0.01), (0.999, 0.9999, 0.001)])
def test_three_starts_end_alike(low: float, high: float, apart: float) -> None:
    """Paper, Fig. 6: whatever the start, MA-Echo converges to similar models. The nearer the eigenvalues of the
    projectors are to 1, the less of the start is left."""
    W, P = problem(n=4, d=6, rank=6, low=low, high=high)
    found = [run(FORMS["released"], 300, W, P, start).mean() for start in starts(W)]
    for start, other in zip(starts(W)[1:], found[1:], strict=True):
        assert float((start - average(W)).norm() / found[0].norm()) > 2, "they begin far apart"
        assert float((other - found[0]).norm() / found[0].norm()) < apart


def test_soft_projectors_leave_as_much_of_the_start_as_the_equation_says() -> None:
    """W∞ holds W⁰ (I − ω P̄) [I − ω P̄ + (ω/N) Σ K_i]⁻¹, with K_i = P_i (I − P_i)⁻¹ / ω in the released form."""
    W, P = problem(n=4, d=6, rank=6, low=0.5)
    identity = torch.eye(6, dtype=torch.float64)
    kept = identity - 1.6 * sum(dense(P)) / 4
    left = kept @ torch.linalg.inv(kept + sum(p @ torch.linalg.inv(identity - p) for p in dense(P)) / 4)
    first, *others = (run(FORMS["released"], 300, W, P, start).mean() for start in starts(W))
    for start, other in zip(starts(W)[1:], others, strict=True):
        torch.testing.assert_close(other - first, (start - average(W)) @ left, rtol=1e-5, atol=1e-6)


def start_of(uploads: list[Upload], **options: object) -> maecho.Merged:
    return maecho.aggregate(uploads, "ma-echo", steps=0, form="printed", **options)


def test_a_start_is_the_client_or_noise_of_the_seed_as_large_as_the_average() -> None:
    uploads = clients(3, torch.float64)
    torch.testing.assert_close(start_of(uploads, start="client-1")["0.weight"], uploads[1].weights["0.weight"])
    D = scales(uploads, "0", "uniform")
    mean = average([uploads[0].layers[0].matrix(u.weights) / D for u in uploads])
    for seed in (0, 1, 7):
        noise = torch.randn(mean.shape, generator=rng(seed), dtype=torch.float64)
        merged = start_of(uploads, start="random", seed=seed)
        expected = noise * mean.square().mean().sqrt() * D
        torch.testing.assert_close(uploads[0].layers[0].matrix(merged), expected)
    with pytest.raises(ValueError, match="start must be average, random or the name of a client, got 'client-9'"):
        maecho.aggregate(uploads, "ma-echo", start="client-9")


def test_watch_sees_every_iteration() -> None:
    uploads, seen = clients(3), []

    def watch(iteration: Iteration) -> None:
        seen.append((iteration.step, iteration.merged(), iteration.client(1)))

    merged = maecho.aggregate(uploads, "ma-echo", steps=4, watch=watch)
    assert [step for step, _, _ in seen] == [0, 1, 2, 3, 4]
    torch.testing.assert_close(seen[0][2]["0.weight"], uploads[1].weights["0.weight"])
    for key in merged:
        torch.testing.assert_close(seen[-1][1][key], merged[key])
    assert not torch.equal(seen[1][1]["0.weight"], seen[2][1]["0.weight"])


def test_normalised_steps_give_the_same_to_the_bit_in_every_order_and_watch_names_clients_by_their_place() -> None:
    uploads, seen = clients(4)[::-1], []
    merged = maecho.aggregate(uploads, "ma-echo", normalise=True, steps=200, watch=lambda it: seen.append(it))
    again = maecho.aggregate([uploads[k] for k in (2, 0, 3, 1)], "ma-echo", normalise=True, steps=200)
    for key in merged:
        assert torch.equal(merged[key], again[key]), key
    merged = maecho.aggregate(uploads, "ma-echo", normalise=True, steps=0, watch=lambda it: seen.append(it.client(1)))
    torch.testing.assert_close(seen[-1]["0.weight"], uploads[1].weights["0.weight"])


def test_released_settings_depend_on_convolutions() -> None:
    plain = MAEcho()._for(clients(1)[0], True)
    assert (plain.steps, plain.step_size, plain.normalise, plain.head) == (60, 1.6, False, "class-aware")
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(20, 5))
    upload = maecho.make_upload(model, [(x.unsqueeze(1), y) for x, y in batches()], "a")
    with_convolutions = MAEcho()._for(upload, True)
    assert (with_convolutions.steps, with_convolutions.step_size, with_convolutions.normalise) == (300, 0.05, True)


def test_exact_projector_comes_from_the_gram() -> None:
    upload = clients(1, torch.float64, rank=None)[0]
    P = MAEcho(projector="exact", damping=0.1).spectrum(upload, "0").dense()[0]
    D = scales([upload], "0").diag()
    G = D @ upload.statistics["gram"]["0"].dense()[0] @ D
    z = 0.1 * G.trace() / len(G)
    torch.testing.assert_close(P, G @ torch.linalg.inv(G + z * torch.eye(len(G), dtype=torch.float64)))


BAD: list[tuple[dict[str, object], str]] = [
    ({"form": "improved"}, "form must be one of released, printed, anchored, got 'improved'"),
    ({"steps": -1}, "steps must be a whole number, at least 0, got -1"),
    ({"step_size": 0.0}, "step_size must be positive and finite, got 0.0"),
    ({"mu": float("nan")}, "mu must be positive and finite, got nan"),
    ({"normalise": True, "form": "anchored"}, "normalise must be off in the anchored form"),
    ({"solver": "limit", "step_size": 2.5}, "step_size must be below 2 for a limit in the released form, got 2.5"),
    ({"solver": "limit", "step_size": 1.6, "form": "printed"}, "must be below 1.5 for a limit in the printed form"),
    ({"solver": "limit", "step_size": 2.0, "form": "anchored"}, "must be below 2 for a limit in the anchored form"),
    ({"solver": "limit", "alpha": "qp"}, "solver must be iterate with alpha='qp'"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MAEcho(**options)  # type: ignore[arg-type]


def test_a_cap_that_cannot_be_met_is_named() -> None:
    with pytest.raises(ValueError, match=r"cap must be at least 1/3 for 3 clients, got 0\.2"):
        maecho.aggregate(clients(3), "ma-echo", alpha="qp", cap=0.2)


def test_cap_of_one_over_n_is_uniform() -> None:
    uploads: list[Upload] = clients(3, torch.float64)
    one = maecho.aggregate(uploads, "ma-echo", form="printed", alpha="qp", cap=1 / 3)
    other = maecho.aggregate(uploads, "ma-echo", form="printed")
    for key in one:
        np.testing.assert_allclose(one[key], other[key], rtol=1e-9, atol=1e-9)
