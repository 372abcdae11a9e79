"""Damaged and hostile uploads from a seed: as a bad disk leaves them, or made by a person who knows the format."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from maecho.upload import envelope, storage
from support.damage import digest, joined, resealed, split

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 2**31, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0,
    1e308, "", " ", "x", "0", "0.weight", "weights/0.weight", "\x1b[31m", "[/red]", "\u202eevil", "\ud800", "é" * 150,
    "x" * 300, "x" * 100_000, "../../etc/passwd", [], {}, [[]], [None], [1] * 50, {"a": {"b": [1, {"c": None}]}},
    {"kind": "upload"}, "classes", "gram", ["gram", "gram"], "__metadata__", "F8_E4M3", "float32",
)  # fmt: skip
RAW = (
    "NaN", "-Infinity", "1e999", "9" * 5000, "1" + "0" * 4000, "[" * 5000, "[" * 20 + "]" * 20, "[" * 200 + "]" * 200,
    '{"a":' * 100 + "1" + "}" * 100, '{"client":1,"client":2}', "tru", '"\\ud800"', '"\\u0000"', '"\\x"', '"open', "",
)  # fmt: skip
"""JSON that Python's own writer never writes, and texts that are not JSON."""
LENGTHS = (0, 1, 7, 2**16, 2**23, 2**23 + 1, 10**8, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
SMALL = 2**26
"""Files of fewer bytes are read although they are sparse."""
SIZES = (2**20, 2**24, SMALL - 2**16, 2**28, 2**31, 3 * 2**30, 2**32, 20 * 10**9)


@dataclass(frozen=True)
class Case:
    """One file."""

    kind: str
    content: bytes
    size: int | None = None
    """The size of the file if a hole follows the content."""
    must_fail: bool = False

    def write(self, path: Path) -> None:
        path.write_bytes(self.content)
        if self.size is not None:
            with path.open("r+b") as file:
                file.truncate(self.size)


def flip(rng: random.Random, content: bytes) -> Case:
    """Flip one bit. Every such file must be refused if it carries digests."""
    place, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
    return Case("flip", content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :], must_fail=True)


def draw(rng: random.Random, sources: list[bytes]) -> Case:
    """Damage any of these files in any way."""
    content = rng.choice(sources)
    change = rng.choices(list(CHANGES), weights=list(CHANGES.values()))[0]
    found = change(rng, content)
    has_digest = b'"sha256":"' in content[: len(split(content)[0]) + 8]
    return found if has_digest else Case(f"{found.kind}, format 1", found.content, found.size)


def _cut(rng: random.Random, content: bytes) -> Case:
    return Case("cut", content[: rng.randrange(len(content))], must_fail=True)


def _overwrite(rng: random.Random, content: bytes) -> Case:
    length = rng.choice((1, 2, 8, 64, 1000))
    start = rng.randrange(len(content))
    changed = content[:start] + rng.randbytes(length) + content[start + length :]
    return Case("overwritten", changed, must_fail=changed != content)


def _move(rng: random.Random, content: bytes) -> Case:
    """Leave bytes out, or repeat them."""
    one, other = sorted(rng.randrange(len(content)) for _ in range(2))
    kept = content[:one] + (content[one:other] * 2 if rng.random() < 0.5 else b"") + content[other:]
    return Case("moved", kept, must_fail=kept != content)


def _foreign(rng: random.Random, content: bytes) -> Case:
    start = b"" if rng.random() < 0.5 else content[: rng.randrange(300)]
    return Case("foreign", start + rng.randbytes(rng.randrange(1000)))


def _length(rng: random.Random, content: bytes) -> Case:
    return Case("length", rng.choice(LENGTHS).to_bytes(8, "little") + content[8:], rng.choice((None, *SIZES)))


def _hole(rng: random.Random, content: bytes) -> Case:
    """Make a sparse file: it is as long as its header says but takes no room on the sender's disk."""
    size = rng.choice(SIZES)
    if rng.random() < 0.2:
        return Case("hole", content, size)
    name = rng.choice([name for name in json.loads(split(content)[0]) if name != envelope.METADATA])
    return with_hole(content, name, rng.choice(("F32", "F16", "F64", "I64", "U8")), size)


def with_hole(content: bytes, name: str, dtype: str, size: int) -> Case:
    """About so large a file whose last tensor is a hole. It has this name and dtype, and replaces another of the name.
    If it is not too large to read it here, its digest is right."""
    header, data = split(content)
    listed = json.loads(header)
    begin, end = listed.pop(name)["data_offsets"]
    for one in (entry for key, entry in listed.items() if key != envelope.METADATA):
        one["data_offsets"] = [offset - (end - begin) * (offset >= end) for offset in one["data_offsets"]]
    width = envelope.DTYPES[dtype].itemsize
    kept, count = data[:begin] + data[end:], (size - len(content)) // width
    listed[name] = {"dtype": dtype, "shape": [count], "data_offsets": [len(kept), len(kept) + count * width]}
    about = json.loads(listed[envelope.METADATA][storage.KEY])
    if about["version"] == 1:
        about.setdefault("tensors", {})[name] = [str(envelope.DTYPES[dtype]).removeprefix("torch."), count]
    elif count * width <= SMALL:
        about["tensors"][name] = hashlib.sha256(bytes(count * width)).hexdigest()
    listed[envelope.METADATA][storage.KEY] = json.dumps(about)
    made = joined(resealed(_dump(listed)), kept)
    return Case("hole", made, len(made) + count * width)


def _listing(rng: random.Random, content: bytes) -> Case:
    """Change the safetensors header, and compute its digest anew."""
    header, data = split(content)
    listed = json.loads(header)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(list(listed))
        entry = listed[name]
        part = rng.choice(list(entry)) if isinstance(entry, dict) and entry and rng.random() < 0.8 else None
        if part is None:
            listed[rng.choice((name, "weights/other", "gram/0/values", "x" * 1000))] = rng.choice(
                (rng.choice(HOSTILE), listed.pop(name))
            )
        elif part == "dtype":
            listed[name][part] = rng.choice((*envelope.DTYPES, "F8_E5M2", "C64", "U64", "f32"))
        else:
            value = listed[name][part]
            if isinstance(value, list) and value and rng.random() < 0.8:
                value[rng.randrange(len(value))] = rng.choice((*HOSTILE, value[0]))
            else:
                listed[name][part] = rng.choice(HOSTILE)
    return Case("listing", joined(resealed(_dump(listed)), data))


def _about(rng: random.Random, content: bytes) -> Case:
    """Change some values of the JSON text."""
    header, data = split(content)
    listed = json.loads(header)
    about = json.loads(listed[envelope.METADATA][storage.KEY])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _edit(rng, about)
    listed[envelope.METADATA][storage.KEY] = json.dumps(about)
    return Case("about", joined(resealed(_dump(listed)), data))


def _raw_about(rng: random.Random, content: bytes) -> Case:
    """Put JSON that no writer writes into the JSON text."""
    header, data = split(content)
    listed = json.loads(header)
    about = json.loads(listed[envelope.METADATA][storage.KEY])
    key = rng.choice(list(about))
    about[key] = "PLACE"
    text = json.dumps(about).replace('"PLACE"', rng.choice(RAW))
    listed[envelope.METADATA][storage.KEY] = text if rng.random() < 0.8 else rng.choice(RAW)
    raw = _dump(listed)
    if rng.random() < 0.2:
        raw = raw.replace(b'"dtype"', rng.choice(RAW).encode(errors="ignore"), 1)
    return Case("raw JSON", joined(resealed(raw), data))


def _numbers(rng: random.Random, content: bytes) -> Case:
    """Change the numbers, dtypes and shapes of tensors, and list them correctly, with new digests."""
    header, _ = split(content)
    metadata = json.loads(header)[envelope.METADATA]
    about, tensors = json.loads(metadata[storage.KEY]), load(content)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(list(tensors))
        tensors[name] = _other(rng, tensors[name])
    if storage.DIGEST in metadata:
        about["tensors"] = {name: digest(tensor) for name, tensor in tensors.items()}
    else:
        about["tensors"] = {n: [str(t.dtype).removeprefix("torch."), *t.shape] for n, t in tensors.items()}
    raw = envelope.header_of(tensors, {storage.KEY: json.dumps(about)}, storage.DIGEST)
    if storage.DIGEST not in metadata:
        listed = json.loads(raw)
        del listed[envelope.METADATA][storage.DIGEST]
        raw = _dump(listed)
    data = b"".join(bytes(envelope.as_bytes(tensors[name])) for name in envelope.in_order(tensors))
    return Case("numbers", joined(raw, data))


def _other(rng: random.Random, tensor: Tensor) -> Tensor:
    largest = torch.finfo(tensor.dtype).max if tensor.is_floating_point() else 0.0
    choice = rng.randrange(0 if tensor.is_floating_point() or tensor.dtype == torch.int64 else 2, 6)
    if choice == 0 and tensor.numel():
        flat = tensor.clone().reshape(-1)
        whole = (-1, 0, 2**62, 2**63 - 1, -(2**63), 10**9)
        real = (float("nan"), float("inf"), -1.0, min(1e38, largest), -min(1e38, largest), 1e-40, 0.0)
        flat[rng.randrange(len(flat))] = rng.choice(real if tensor.is_floating_point() else whole)
        return flat.reshape(tensor.shape)
    if choice == 1:  # sums that wrap
        return torch.full_like(tensor, 2**62 if not tensor.is_floating_point() else min(1e38, largest))
    if choice == 2:
        return tensor.to(rng.choice(list(envelope.DTYPES.values())))
    if choice == 3:
        return tensor.reshape(-1)[: rng.randrange(tensor.numel() + 1)]
    if choice == 4:
        return rng.choice(
            (tensor.unsqueeze(0), tensor.sum(), tensor.reshape(-1), tensor.mT if tensor.dim() > 1 else tensor)
        )
    raw = torch.frombuffer(bytearray(rng.randbytes(max(tensor.nbytes, 1))), dtype=torch.uint8)[: tensor.nbytes]
    return raw.view(tensor.dtype).reshape(tensor.shape)


def _edit(rng: random.Random, about: dict[str, Any]) -> None:
    """Change, remove, copy or add one value somewhere."""
    node: Any = about
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = rng.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.75:
            node = node[key]
            continue
        action = rng.random()
        if action < 0.6:
            node[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif action < 0.75:
            del node[key]
        elif isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        else:
            node[str(rng.choice(HOSTILE))] = copy.deepcopy(node[key])
        return


def _dump(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


CHANGES: dict[Callable[[random.Random, bytes], Case], float] = {
    flip: 2, _cut: 1, _overwrite: 2, _move: 1, _foreign: 0.5, _length: 1, _hole: 1, _listing: 3, _about: 5,
    _raw_about: 1, _numbers: 4,
}  # fmt: skip
