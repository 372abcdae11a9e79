"""The iterates of one layer, with each kind of projector, against a loop over dense matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from maecho.linalg.spectra import Spectrum
from maecho.linalg.steps.iteration import Coefficients, Columns, SeparateIterates, SharedIterates, iterates
from maecho.linalg.symmetric import Diagonal
from support.clients import rng

OUT, WIDTH, CLIENTS = 3, 8, 4

Projectors = Sequence[Spectrum | Diagonal]


def spectra(kind: str, groups: int = 2) -> Projectors:
    """Projectors of every kind: thin, of full rank, of ranks that differ (0 among them), diagonal."""
    draw = rng(3)
    ranks = {"thin": [2] * 4, "full": [WIDTH] * 4, "mixed": [1, WIDTH, 0, 3], "diagonal": [WIDTH] * 4}[kind]
    found: list[Spectrum | Diagonal] = []
    for rank in ranks:
        s = 0.2 + 0.7 * torch.rand(groups, rank, generator=draw, dtype=torch.float64)
        if kind == "diagonal":
            found.append(Diagonal(s))
        else:
            U = torch.linalg.qr(torch.randn(groups, WIDTH, WIDTH, generator=draw, dtype=torch.float64))[0]
            found.append(Spectrum(s, U[..., :rank]))
    return found


def weights(groups: int = 2) -> list[Tensor]:
    draw = rng(5)
    return [torch.randn(groups, OUT, WIDTH, generator=draw, dtype=torch.float64) for _ in range(CLIENTS)]


def unequal(gram: Tensor) -> Tensor:
    """Weights of the clients that depend on every entry of the Gram matrix."""
    return torch.softmax(gram.sum(1) / gram.abs().max(), 0)


KINDS = ["thin", "full", "mixed", "diagonal"]
FORMS = {
    "released": Coefficients(0.7, 0.7, 0.7),
    "printed": Coefficients(0.8, 1.0, 0.4),
    "all different": Coefficients(0.5, 0.9, 0.3),
    "anchored": Coefficients(0.6, 1.0, 0.75, anchored=True),
    "Norm": Coefficients(0.5, 0.2, 0.1, normalised=True),
}


def literal(form: Coefficients, start: Tensor, local: list[Tensor], P: list[Tensor], steps: int) -> list[Tensor]:
    """W and then every V_i, by the two steps at the top of `iteration.py`."""
    W, V = start, list(local)
    for _ in range(steps):
        pulls = torch.stack([(W - v) @ p for v, p in zip(V, P, strict=True)])
        gradients = 2 * pulls.flatten(1)
        alpha = torch.full((CLIENTS,), 1 / CLIENTS) if form.alpha is None else form.alpha(gradients @ gradients.T)
        W = W - form.pull * sum(a * pull for a, pull in zip(alpha, pulls, strict=True))
        begin = local if form.anchored else V
        moves = [form.follow * (W - v) - form.hold * (W - v) @ p for v, p in zip(begin, P, strict=True)]
        if form.normalised:
            moves = [form.follow * move / move.norm(dim=-1, keepdim=True) for move in moves]
        V = [v + move for v, move in zip(begin, moves, strict=True)]
    return [W, *V]


@pytest.mark.parametrize("alpha", [None, unequal], ids=["uniform", "unequal"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMS)
def test_steps_are_the_literal_ones(name: str, kind: str, alpha: Callable[[Tensor], Tensor] | None) -> None:
    form = replace(FORMS[name], alpha=alpha)
    P, local = spectra(kind), weights()
    start = torch.randn(2, OUT, WIDTH, generator=rng(9), dtype=torch.float64)
    kept = start.clone(), [w.clone() for w in local], [one.values.clone() for one in P]
    fast = iterates(start, local, P, form)
    torch.testing.assert_close(fast.merged(), start)
    for i in range(CLIENTS):
        torch.testing.assert_close(fast.client(i), local[i])
    for steps in (1, 2, 3):
        fast.step()
        expected = literal(form, start, local, [one.dense() for one in P], steps)
        torch.testing.assert_close(fast.merged(), expected[0])
        for i in range(CLIENTS):
            torch.testing.assert_close(fast.client(i), expected[1 + i])
        torch.testing.assert_close(fast.mean(), torch.stack(expected[1:]).mean(0))
    assert torch.equal(start, kept[0])
    assert all(torch.equal(w, before) for w, before in zip(local, kept[1], strict=True))
    assert all(torch.equal(one.values, before) for one, before in zip(P, kept[2], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_products_with_the_columns_are_those_with_dense_matrices(kind: str) -> None:
    P, local = spectra(kind), weights()
    eye = torch.eye(WIDTH, dtype=torch.float64).expand(2, -1, -1)
    bases = [one.basis if isinstance(one, Spectrum) else eye for one in P]
    U = torch.cat(bases, -1)
    columns, E = Columns(P, torch.float64), torch.randn(2, OUT, U.shape[-1], generator=rng(6), dtype=torch.float64)
    torch.testing.assert_close(columns.into(local[0]), local[0] @ U)
    torch.testing.assert_close(columns.back(E), E @ U.mT)
    torch.testing.assert_close(columns.through(E), E @ U.mT @ U)
    torch.testing.assert_close(columns.each(local), torch.cat([w @ u for w, u in zip(local, bases, strict=True)], -1))
    torch.testing.assert_close(columns.s, torch.cat([one.values for one in P], -1).unsqueeze(-2))
    parts = [own @ u.mT for own, u in zip(E.split([one.rank for one in P], -1), bases, strict=True)]
    for i, part in enumerate(parts):
        torch.testing.assert_close(columns.one(E, i), part)
        assert int((columns.owner == i).sum()) == P[i].rank
    flat = 2 * torch.stack(parts).flatten(1)
    torch.testing.assert_close(columns.gram(E), flat @ flat.T)


@pytest.mark.parametrize("kind", ["thin", "full", "diagonal"])
def test_float32_iterates_have_gram_matrices_in_float64(kind: str) -> None:
    seen = []

    def look(gram: Tensor) -> Tensor:
        seen.append(gram)
        return torch.full((CLIENTS,), 1 / CLIENTS, dtype=torch.float64)

    local = [w.float() for w in weights()]
    for normalised in (False, True):
        one = iterates(local[1], local, spectra(kind), Coefficients(0.5, 0.5, 0.5, normalised=normalised, alpha=look))
        one.step()
        assert one.merged().dtype == one.client(0).dtype == one.mean().dtype == torch.float32
        assert seen[-1].dtype == torch.float64
        torch.testing.assert_close(seen[-1], seen[-1].T, rtol=1e-12, atol=1e-12)


def test_a_client_that_is_where_w_is_stays_there_with_norm() -> None:
    """Its step has length 0, which must not be divided by."""
    local = [weights()[0]] * CLIENTS
    one = iterates(local[0], local, spectra("thin"), FORMS["Norm"])
    for _ in range(2):
        one.step()
    assert torch.equal(one.merged(), local[0])
    assert torch.equal(one.client(1), local[0])


def test_only_norm_keeps_every_client_by_itself() -> None:
    local, P = weights(), spectra("thin")
    assert isinstance(iterates(local[0], local, P, FORMS["released"]), SharedIterates)
    assert isinstance(iterates(local[0], local, P, FORMS["Norm"]), SeparateIterates)


@pytest.mark.parametrize(("clients", "ranks"), [(6, (1, 2)), (3, (5, 4)), (2, (6, 6)), (7, (3, 3))])
@pytest.mark.parametrize("at_once", [1, 60, 2**22])
def test_the_gram_of_gradients_by_columns_and_by_gradients(
    monkeypatch: pytest.MonkeyPatch, clients: int, ranks: tuple[int, int], at_once: int
) -> None:
    """Both ways give the products of the gradients themselves, whichever takes less work."""
    monkeypatch.setattr("maecho.linalg.steps.iteration.AT_ONCE", at_once)
    draw = torch.Generator().manual_seed(0)
    spectra = [
        Spectrum(torch.rand(2, r, generator=draw), torch.linalg.qr(torch.randn(2, 6, r, generator=draw)).Q)
        for r in [ranks[i % 2] for i in range(clients)]
    ]
    columns = Columns(spectra, torch.float32)
    D = torch.randn(2, 4, sum(columns.ranks), generator=draw)
    parts = zip(D.double().split(columns.ranks, -1), spectra, strict=True)
    gradients = torch.stack([2 * own @ P.basis.double().mT for own, P in parts])
    expected = torch.einsum("igod,jgod->ij", gradients, gradients)
    scale = float(expected.abs().max())
    for thin in (True, False):
        monkeypatch.setattr(Columns, "_thin_is_cheaper", lambda columns, thin=thin: thin)
        assert float((columns.gram(D) - expected).abs().max()) < 1e-12 * scale


def test_many_clients_of_high_rank_take_gradients() -> None:
    """50 clients of rank 100 in 100 dimensions: 5,000 columns squared would take 30 times the work."""
    full = Spectrum(torch.ones(1, 100), torch.eye(100).unsqueeze(0))
    assert not Columns([full] * 50, torch.float32)._thin_is_cheaper()
    thin = Spectrum(torch.ones(1, 2), torch.eye(100, 2).unsqueeze(0))
    assert Columns([thin] * 5, torch.float32)._thin_is_cheaper()
