"""Methods and their options: unknown names and senseless values are refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from maecho import aggregate
from support.tiny import INF, NAN, cases, refused, upload

OPTIONS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    f"{method} {options}": (method, options, parts)
    for method, options, parts in [
        ("fedavgg", {}, ("fedavg, ma-echo", "regmean", "'fedavgg'")),
        ("fedavg", {"steps": 3}, ("fedavg", "weighting, head", "'steps'")),
        ("fedavg", {"weighting": "fair"}, ("weighting", "examples, uniform", "'fair'")),
        ("fedavg", {"head": "iterate"}, ("head", "average, class-aware", "'iterate'")),
        ("regmean", {"ridge": -1.0}, ("ridge", "at least 0", "-1.0")),
        ("regmean", {"ridge": NAN}, ("ridge", "at least 0", "nan")),
        ("regmean", {"ridge": INF}, ("ridge", "inf")),
        ("regmean", {"ridge": "little"}, ("ridge", "'little'")),
        ("regmean", {"shrink": 1.5}, ("shrink", "[0, 1]", "1.5")),
        ("regmean", {"shrink": "half"}, ("shrink", "'half'")),
        ("fisher", {"ridge": -1.0}, ("ridge", "at least 0", "-1.0")),
        ("fisher", {"weighting": "fair"}, ("weighting", "examples, uniform", "'fair'")),
        ("kronecker", {"ridge": NAN}, ("ridge", "at least 0", "nan")),
        ("kronecker", {"damping": -1}, ("damping", "released, or at least 0", "-1")),
        ("kronecker", {"weighting": "fair"}, ("weighting", "examples, uniform", "'fair'")),
        ("kronecker", {"tolerance": 0}, ("tolerance", "positive", "0")),
        ("kronecker", {"iterations": 1.5}, ("iterations", "whole number", "1.5")),
        ("afl", {"ridge": "little"}, ("ridge", "'little'")),
        ("afl", {"backbone": "none"}, ("backbone", "shared, average", "'none'")),
        ("ma-echo", {"step": 3}, ("ma-echo", "steps, step_size", "'step'")),
        ("ma-echo", {"form": "new"}, ("form", "released, printed, anchored", "'new'")),
        ("ma-echo", {"steps": -1}, ("steps", "at least 0", "-1")),
        ("ma-echo", {"steps": 1.5}, ("steps", "1.5")),
        ("ma-echo", {"steps": "many"}, ("steps", "'many'")),
        ("ma-echo", {"step_size": 0}, ("step_size", "positive", "0")),
        ("ma-echo", {"step_size": NAN}, ("step_size", "positive", "nan")),
        ("ma-echo", {"step_size": INF}, ("step_size", "inf")),
        ("ma-echo", {"step_size": "small"}, ("step_size", "'small'")),
        ("ma-echo", {"normalise": "no"}, ("normalise", "'no'")),
        ("ma-echo", {"mu": 0.0}, ("mu", "positive", "0")),
        ("ma-echo", {"mu": INF, "form": "printed"}, ("mu", "inf")),
        ("ma-echo", {"alpha": "best"}, ("alpha", "uniform, qp", "'best'")),
        ("ma-echo", {"cap": 0.0}, ("cap", "positive", "0")),
        ("ma-echo", {"cap": 0.3, "alpha": "qp"}, ("cap", "1/2", "2 clients", "0.3")),
        ("ma-echo", {"projector": "soft"}, ("projector", "batch-mean, exact", "'soft'")),
        ("ma-echo", {"damping": -1.0}, ("damping", "positive", "-1.0")),
        ("ma-echo", {"solver": "newton"}, ("solver", "iterate, limit", "'newton'")),
        ("ma-echo", {"start": "carl"}, ("start", "average, random", "'carl'")),
        ("ma-echo", {"seed": "x", "start": "random"}, ("seed", "'x'")),
        ("ma-echo", {"head": "average"}, ("head", "class-aware, iterate", "'average'")),
        ("ma-echo", {"watch": 3}, ("watch", "3")),
    ]
}


@pytest.mark.parametrize(("method", "options", "parts"), **cases(OPTIONS))
def test_a_method_and_its_options(method: str, options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused(*parts, error=ValueError):
        aggregate([upload(), upload("bob")], method, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"normalise": True, "form": "anchored"}, "normalise must be off in the anchored form"),
        ({"solver": "limit", "alpha": "qp"}, "solver must be iterate with alpha='qp'"),
        ({"solver": "limit", "normalise": True}, "solver must be iterate with .*normalise"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        aggregate([upload(), upload("bob")], "ma-echo", **options)


def test_a_model_that_diverged_is_not_given_out() -> None:
    with refused("finite", error=ValueError):
        aggregate([upload(), upload("bob")], "ma-echo", step_size=1e30)
