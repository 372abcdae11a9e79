"""Which methods can merge uploads of this model."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from maecho.aggregation import METHODS, Method
from maecho.aggregation.matching import PFNM
from maecho.alignment.transport import Alignment
from maecho.checking.found import MethodFound
from maecho.upload.header import not_sent
from maecho.upload.upload import Upload

RELAY = "echo-relay"


def usable(
    upload: Upload, on_demand: Collection[str], refused: Mapping[str, str], no_stages: str
) -> tuple[MethodFound, ...]:
    """Every method, and the relay, with what it needs besides.

    Args:
        upload: the upload of one batch.
        on_demand: statistics that could be made if they are named.
        refused: statistics that could not be made, with the reasons.
        no_stages: why the network has no stages; empty if it has.
    """
    reasons = {**refused, **not_sent(upload.recipe)}
    found = [_one(name, method, upload, on_demand, reasons, no_stages) for name, method in METHODS.items()]
    return (*found, MethodFound(RELAY, not no_stages, no_stages))


def _one(
    name: str, method: Method, upload: Upload, on_demand: Collection[str], reasons: Mapping[str, str], no_stages: str
) -> MethodFound:
    missing = sorted(method.needs - upload.has)
    lost = [statistic for statistic in missing if statistic not in on_demand]
    why = ""
    if lost:
        why = f"no {lost[0]}: {reasons.get(lost[0], 'it is not sent')}"
    elif isinstance(method, Alignment) and upload.spaces is None:
        why = f"no neuron spaces: {reasons.get('spaces', 'the network could not be traced')}"
    elif isinstance(method, PFNM):
        why = method.complaint(upload) or ""
    elif _runs(method) and no_stages and name == "echo-chain":
        why = no_stages
    if why:
        return MethodFound(name, False, why)
    besides = [f"statistics={sorted(method.needs)}"] if missing else []
    besides += ["no neurons to match, so as without it"] if isinstance(method, Alignment) and not upload.spaces else []
    besides += ["the network's code at the server"] if _runs(method) else []
    return MethodFound(name, True, "; ".join(besides))


def _runs(method: Any) -> bool:
    """Whether the method runs the network."""
    return not isinstance(method, Alignment) and any(f.name == "model" for f in dataclasses.fields(method))
