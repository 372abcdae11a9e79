"""What a column of a config asks for: a method with its options, and what stands beside them.

A column is a table of TOML, such as `{ method = "ma-echo", steps = 30 }`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from maecho.aggregation import METHODS, EchoChain, choose, gathered_for
from maecho.echo.fit import Regression
from maecho.echo.simulated import Drawing

NOT_METHODS = ("local", "pooled", "ensemble", "echo-relay")
"""Columns that are not in METHODS, since they need the clients' own models, and some of them the clients' data."""
BESIDE = ("upload", "network", "curve")
"""Entries that are no options of a method: how its uploads are made; the network whose clients have no training, of
which only the uploads count; the steps after which the accuracy is measured as well."""


def check(column: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError unless the column can be measured, and its name says what it is."""
    _check_name(column, options)
    method = options["method"]
    if method == "echo-relay":
        protocol(options, 0)
    elif method not in NOT_METHODS:
        choose(**plain(options))
    elif options.get("by", "probabilities") not in ("logits", "probabilities", "class-aware"):
        raise ValueError(f"by must be logits, probabilities or class-aware, got {options['by']!r}")
    unknown = sorted(set(options.get("upload", {})) - {"rank", "gaussians", "covariance", "labels", "mean_of"})
    if unknown:
        raise ValueError(f"upload may say rank, gaussians, covariance, labels and mean_of, got {unknown[0]!r}")
    if "network" in options and method in NOT_METHODS:
        raise ValueError(f"network: {method} has only the clients' own network")
    if "curve" in options:
        _check_curve(method, options["curve"])


def _check_curve(method: str, steps: Any) -> None:
    whole = isinstance(steps, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in steps)
    if not whole or not steps or steps != sorted(set(steps)) or steps[0] < 0:
        raise ValueError(f"curve must be a rising list of whole numbers, got {steps!r}")
    if method not in METHODS or not any(f.name == "watch" for f in fields(METHODS[method])):  # type: ignore[arg-type]
        raise ValueError(f"curve: {method} has no steps that can be watched")


def _check_name(column: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError unless the column's name fits: a method's own name is only for its defaults, and a column that
    changes an option must have another name."""
    method = options["method"]
    if changes(options):
        if column in (*METHODS, *NOT_METHODS):
            listed = ", ".join(changes(options))
            raise ValueError(f"the column {column!r}, which sets {listed}: only the defaults go by that name")
    elif column != method:
        raise ValueError(f"the column {column!r}: {method} with its defaults must be called {method!r}")


def changes(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a column sets to another value than the default. A curve is no such change: it only adds accuracies."""
    plain_settings = settings({"method": options["method"]})
    return {
        key: value
        for key, value in options.items()
        if key not in ("method", "curve")
        and (key in BESIDE or settings({"method": options["method"], key: value}) != plain_settings)
    }


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """A column's method and its options, without what stands beside them."""
    return {key: value for key, value in options.items() if key not in BESIDE}


def protocol(options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The arguments of `relay` for a column of echo-relay: its rounds, its Regression, and, unless real data are asked
    at every layer, its Drawing, with this seed if the column sets none."""
    given = {key: value for key, value in plain(options).items() if key not in ("method", "rounds")}
    rounds = options.get("rounds", "all")
    if rounds == 1:
        raise ValueError("rounds must be 2 or more, layers, or 'all', got 1: one round is echo-chain")
    of_drawing = {f.name: given.pop(f.name) for f in fields(Drawing) if f.name in given}
    found = {"rounds": rounds, "regression": Regression(**given)}
    if rounds != "all":
        return {**found, "drawing": Drawing(**{"seed": seed, **of_drawing})}
    if of_drawing:
        raise ValueError(f"{next(iter(of_drawing))!r}: with rounds='all' no inputs are drawn")
    return found


def drawn_by(options: Mapping[str, Any]) -> str | None:
    """A text of everything that decides how a column fits stages at drawn inputs. Columns with equal texts share these
    stages.

    None if the column has no such stages.
    """
    if options["method"] == "echo-chain":
        found = choose(**plain(options))[1]
        assert isinstance(found, EchoChain)
        return repr((*found.parts(), options.get("upload")))
    if options["method"] != "echo-relay" or options.get("rounds", "all") == "all":
        return None
    arguments = protocol(options, Drawing.seed)
    return repr((arguments["regression"], arguments["drawing"], options.get("upload")))


def gathered(options: Mapping[str, Any]) -> frozenset[str]:
    """The statistics that a column's uploads must carry."""
    if options["method"] == "echo-relay":
        drawing = protocol(options, Drawing.seed).get("drawing")
        return frozenset() if drawing is None else drawing.needs | drawing.uses
    return frozenset() if options["method"] in NOT_METHODS else gathered_for(choose(**plain(options))[1])


def settings(options: Mapping[str, Any]) -> str:
    """A column's method with its defaults filled in. So a changed default counts as another setting.

    The seed of a method that draws is that of the run, unless the column sets it, so it shows as the default.
    """
    if options["method"] == "echo-relay":
        found = repr(protocol(options, Drawing.seed))
    elif options["method"] == "ensemble":
        found = repr({"method": "ensemble", "by": "probabilities", **plain(options)})
    else:
        found = repr(plain(options) if options["method"] in NOT_METHODS else choose(**plain(options))[1])
    return ", ".join([found, *(f"{key} {options[key]}" for key in BESIDE if key in options)])
