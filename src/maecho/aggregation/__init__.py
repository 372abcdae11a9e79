"""Many uploads to one model: the table of methods and the one function that runs them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from torch import nn

from maecho import devices
from maecho.aggregation.afl import AFL
from maecho.aggregation.average import FedAvg
from maecho.aggregation.chain import EchoChain
from maecho.aggregation.dense import DENSE
from maecho.aggregation.fisher import Fisher
from maecho.aggregation.kronecker import Kronecker
from maecho.aggregation.ma_echo import Iteration, MAEcho
from maecho.aggregation.matching import PFNM, FedMA
from maecho.aggregation.method import Guide, Method
from maecho.aggregation.ot import OT, MAEchoOT
from maecho.aggregation.regmean import RegMean
from maecho.errors import InputError
from maecho.linalg.finite import is_finite
from maecho.upload.cohort import Cohort, Source
from maecho.upload.merged import Merged, make_recipe

METHODS: dict[str, Method] = {
    "fedavg": FedAvg(),
    "ma-echo": MAEcho(),
    "ma-echo+ot": MAEchoOT(),
    "ot": OT(),
    "pfnm": PFNM(),
    "fedma": FedMA(),
    "regmean": RegMean(),
    "fisher": Fisher(),
    "kronecker": Kronecker(),
    "afl": AFL(),
    "dense": DENSE(),
    "echo-chain": EchoChain(),
}

__all__ = [
    "AFL",
    "DENSE",
    "METHODS",
    "OT",
    "PFNM",
    "EchoChain",
    "FedAvg",
    "FedMA",
    "Fisher",
    "Guide",
    "Iteration",
    "Kronecker",
    "MAEcho",
    "MAEchoOT",
    "Merged",
    "Method",
    "RegMean",
    "aggregate",
    "choose",
]


def choose(
    method: str | Method, *, model: nn.Module | None = None, device: devices.Device | None = None, **options: Any
) -> tuple[str, Method]:
    """Find a method by its name, or take a method object, and change some of its options.

    Raises InputError if there is no such name or option. `model` and `device` are passed on to methods that have
    options of these names. Other methods do not need them.
    """
    if not isinstance(method, str):
        name = next((n for n, known in METHODS.items() if type(known) is type(method)), type(method).__name__)
        found = method
    elif method in METHODS:
        name, found = method, METHODS[method]
    else:
        raise InputError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise InputError(f"method must be a name or a method with its options, got {found!r}")
    known_options = [f.name for f in dataclasses.fields(found)]
    for option in options:
        if option not in known_options:
            raise InputError(f"{name} has the options {', '.join(known_options) or 'none'}, got {option!r}")
    if model is not None:
        if not isinstance(model, nn.Module):
            raise InputError(f"{name}: model must be a torch.nn.Module, got {type(model).__name__}")
        if "model" in known_options:
            options["model"] = model
    if device is not None and "device" in known_options:
        options["device"] = device
    return name, dataclasses.replace(found, **options)


def gathered_for(method: Method) -> frozenset[str]:
    """The statistics that a method needs, and the optional ones that it reads if an upload has them."""
    return method.needs | getattr(method, "uses", frozenset())


def aggregate(
    uploads: Iterable[Source],
    method: str | Method = "ma-echo",
    *,
    model: nn.Module | None = None,
    device: devices.Device | None = None,
    **options: Any,
) -> Merged:
    """Merge uploads, or the files that hold them, into one state_dict.

    Args:
        uploads: Upload objects or paths. Paths are read one at a time.
        method: a name from METHODS, or a method object.
        model: the network that the uploads are weights of. Methods that run it (`dense`, `echo-chain`, `ot` by
            activations) need it. All others ignore it, so it may always be given. It is not changed.
        device: where the work is done, e.g. "cuda". Each upload is moved there when its turn comes. By default the work
            is done where the uploads are; only `dense` takes CUDA if there is one.
        options: hyper-parameters of the method, e.g. `steps=30`.

    Returns:
        A state_dict on the device of the uploads (the CPU if they are files). Its attribute `averaged` names the
            weights that have no input matrix, and `recipe` says how it was made.
    """
    name, chosen = choose(method, model=model, device=device, **options)
    # A method that has an option `device` moves to it what it needs. These are models, not statistics.
    uses = gathered_for(chosen) - chosen.needs
    cohort = Cohort(uploads, chosen.needs, name, None if hasattr(chosen, "device") else device, uses)
    began = time.perf_counter()
    merged = chosen(cohort)
    lost = [key for key, tensor in merged.items() if not is_finite(tensor)]
    if lost:
        raise InputError(
            f"{name} must end in finite weights, got NaN or infinity in {lost[0]!r}; its steps diverged, or a sum was "
            f"too large for {merged[lost[0]].dtype}"
        )
    if cohort.device is not None:
        back = {id(tensor): tensor.to(cohort.home) for tensor in merged.values()}  # tied tensors stay tied
        merged.update({key: back[id(tensor)] for key, tensor in merged.items()})
    merged.recipe = make_recipe(
        name, repr(chosen), len(cohort), time.perf_counter() - began, upload_bytes=cohort.upload_bytes
    )
    return merged
