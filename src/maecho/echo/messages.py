"""What server and clients of a relay say to each other: plain dictionaries of tensors, for any network to carry.

    asked      round · open | unit/<name> · join/<layer>/<norm> · head/<name> · weights/<name>
    answered   examples · sum/<name>/gram|cross|prior|labels|counts|noise (with privacy: the variance on the gram)
               of a gram, being symmetric, the upper triangle in one row
    opening    also stage/<name> · join/… · head/… (how the network runs) · plain/<name> (n times what has no sums)

Names stand in the keys; the tensor under unit, join and head is a one. Of real numbers the server uses the total over
clients alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from maecho.errors import UploadError
from maecho.network.units import Unit

Message = dict[str, Tensor]
ONE = torch.ones((), dtype=torch.int64)


def asked(message: Mapping[str, Tensor], units: Mapping[str, Unit]) -> list[Unit]:
    """The units that a message names, joined with their BatchNorm as it says."""
    joined = dict(key.removeprefix("join/").split("/", 1) for key in message if key.startswith("join/"))
    names = [key.removeprefix("unit/") for key in message if key.startswith("unit/")]
    for wanted in (*names, *(joined[name] for name in names if name in joined)):
        if wanted not in units:
            raise UploadError(f"sums must be of layers of this network, got {wanted!r}, which it does not have")
    return [replace(units[name], norm=joined.get(name)) for name in names]


def to_send(message: Mapping[str, Tensor]) -> Message:
    """Every tensor on the CPU, in one piece and in memory of its own, as files want it; nobody's later work changes
    what was said."""
    return {key: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for key, t in message.items()}


def folded(A: Tensor) -> Tensor:
    """Symmetric [g, d, d] as its upper triangle [g, d (d + 1) / 2]; the one row of a diagonal [g, 1, d] as it is."""
    d = A.shape[-1]
    if A.shape[-2] != d:
        return A
    rows, columns = torch.triu_indices(d, d, device=A.device)
    return A[..., rows, columns]


def unfolded(A: Tensor, d: int) -> Tensor:
    """What `folded` was given, of d inputs."""
    if A.dim() == 3:
        return A
    rows, columns = torch.triu_indices(d, d, device=A.device)
    full = A.new_empty(len(A), d, d)
    full[:, rows, columns] = A
    full[:, columns, rows] = A
    return full


def sums_of(unit: Unit, shape: Sequence[int], total: Mapping[str, Tensor], device: torch.device) -> Message:
    """What was told of one unit, checked against the shape [g, o, d] of its matrix; the gram is whole again."""
    name, prefix = unit.name, f"sum/{unit.name}/"
    found = {key.removeprefix(prefix): t.to(device) for key, t in total.items() if key.startswith(prefix)}
    if not {"gram", "cross", "prior"} <= found.keys():
        raise UploadError(f"answers must hold the sums of {name!r}, got none")
    g, o, d = shape
    for part in ("cross", "prior"):
        if found[part].shape != (g, o, d):
            raise UploadError(f"the sums of {name!r} must be {(g, o, d)} as its weights, got {_shape(found[part])}")
    told = (g, 1, d) if unit.layer.one_hot else (g, d * (d + 1) // 2)
    if found["gram"].shape != told:
        raise UploadError(f"Σ h hᵀ of {name!r} must be told by {told} numbers, got {_shape(found['gram'])}")
    by_class = {"labels": d, "outputs": o, "counts": None}
    classes = len(found["counts"]) if "counts" in found and found["counts"].dim() else 0
    for part, width in by_class.items():
        wanted = (classes,) if width is None else (classes, width)
        if part in found and found[part].shape != wanted:
            raise UploadError(f"{part} of {name!r} must be {wanted}, got {_shape(found[part])}")
    odd = next((part for part, tensor in found.items() if not tensor.is_floating_point()), None)
    if odd is not None:
        raise UploadError(f"{odd} of {name!r} must be real numbers, got {found[odd].dtype}")
    return found | {"gram": unfolded(found["gram"], d)}


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def named(message: Mapping[str, Tensor], what: str) -> str | None:
    """The one name that stands in the keys under a heading."""
    return next((key.removeprefix(f"{what}/") for key in message if key.startswith(f"{what}/")), None)


def add_up(answers: Iterable[Mapping[str, Tensor]]) -> Message:
    """Totals of all real numbers. What is whole must be the same for all (of counters the largest is taken)."""
    total: Message = {}
    for heard, answer in enumerate(answers):
        who = f"answer {heard}"
        if not isinstance(answer, Mapping):
            raise UploadError(f"{who}: must be a dictionary of tensors, got {type(answer).__name__}")
        if heard and answer.keys() != total.keys():
            odd = sorted(answer.keys() ^ total.keys())[0]
            raise UploadError(
                f"{who}: must hold what the first one holds, got {odd!r} in one of them alone; all clients must run "
                "one network, and all have labels or none"
            )
        for key, tensor in answer.items():
            if not isinstance(tensor, Tensor) or (key in total and tensor.shape != total[key].shape):
                expected = tuple(total[key].shape) if key in total else "a tensor"
                got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise UploadError(f"{who}: {key!r} must be {expected}, got {got}")
            if tensor.is_floating_point():
                if not tensor.isfinite().all():
                    raise UploadError(f"{who}: {key!r} must be finite, got NaN or infinity")
                total[key] = total[key] + tensor.to(total[key]) if key in total else tensor.double()
            elif key.startswith("plain/"):
                total[key] = total[key].maximum(tensor.to(total[key])) if key in total else tensor
            else:
                if key in total and not torch.equal(total[key], tensor.to(total[key])):
                    raise UploadError(
                        f"{who}: {key!r} must be {total[key].tolist()} as for the others, got {tensor.tolist()}"
                    )
                total[key] = tensor
    return total
