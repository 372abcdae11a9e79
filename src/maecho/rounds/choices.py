"""Servers by name: the peers, the methods of METHODS, and the relay, each with its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from maecho.aggregation import METHODS, choose
from maecho.echo.fit import Regression
from maecho.errors import InputError
from maecho.rounds.merging import Merging, Relaying
from maecho.rounds.paced import Paced
from maecho.rounds.peers import PEERS
from maecho.rounds.servers import Server

RELAY = "echo-relay"
SERVERS = (*PEERS, *(name for name in METHODS if name not in PEERS), RELAY)
"""All names."""
STABLE: Mapping[str, Any] = {"kept": 0.9, "pace": 0.3}
"""What the relay gets unless something else is given: with less, its weights grow from round to round. They were chosen
on training images that no client had; see docs/rounds.md."""


def find_server(name: str, options: Mapping[str, Any] | None = None) -> Server:
    """The server of that name with some of its options changed.

    Every server has `pace` beside its own. Methods of METHODS and the relay have `kept`, the former `once` too; the
    relay has those of STABLE unless others are given. Raises InputError for a name or an option that there is not.
    """
    given = {**(STABLE if name == RELAY else {}), **(options or {})}
    pace = given.pop("pace", 1.0)
    found = _at_full_pace(name, given)
    return found if pace == 1 else Paced(found, pace)


def _at_full_pace(name: str, given: dict[str, Any]) -> Server:
    if name in PEERS:
        peer: Any = PEERS[name]
        known = [field.name for field in dataclasses.fields(peer)]
        _check(name, given, known)
        found: Server = dataclasses.replace(peer, **given)
        return found
    if name == RELAY:
        known = [field.name for field in dataclasses.fields(Regression)]
        _check(name, given, [*known, "kept"])
        kept = given.pop("kept", 0.0)
        return Relaying(Regression(**given), kept)
    if name in METHODS:
        own = {key: given.pop(key) for key in ("kept", "once") if key in given}
        return Merging(choose(name, **given)[1] if given else name, **own)
    raise InputError(f"server must be one of {', '.join(SERVERS)}, got {name!r}")


def _check(name: str, given: Mapping[str, Any], known: list[str]) -> None:
    for option in given:
        if option not in known:
            raise InputError(f"{name} has the options {', '.join([*known, 'pace'])}, got {option!r}")
