"""Times every method from upload files, as multiples of reading the same bytes.

    python benchmarks/server.py                          # 5, 20 and 50 clients of the paper's MLP
    python benchmarks/server.py --against OTHER/src      # in turns with the code of another checkout
    python benchmarks/server.py --clients 50 --only "fedavg;ma-echo, limit"

Everything runs on one thread, from files that the system holds in memory ("warm"). The unit is the time to read the
bytes that a method needs into new memory (median): weights and the named statistics, of AFL the head's Gram
alone. Times are of the processor, since other work may run on the machine. Every
measurement is a process of its own. Peak memory is what a process takes beyond what it had when all was
imported. With `--against`, the results of both versions are compared, too: the largest distance of a tensor to its
other version, as a share of its norm.

Uploads are made once and kept in a folder below the system's temporary one. Their clients have a few hundred rows of
ten classes each and models of one light training: time depends on shapes and ranks, not on what pictures show.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MOST, ROWS, TURNS = 50, 1200, 3
LIMIT = 6 * 10**9
"""The most memory of one measurement."""

METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fedavg": ("default", "fedavg", {}),
    "fisher": ("fisher", "fisher", {}),
    "afl": ("afl", "afl", {}),
    "regmean": ("default", "regmean", {}),
    "ma-echo": ("default", "ma-echo", {}),
    "ma-echo, limit": ("default", "ma-echo", {"solver": "limit"}),
    "ma-echo, qp": ("default", "ma-echo", {"alpha": "qp", "form": "printed"}),
    "echo-chain": ("default", "echo-chain", {}),
}
"""Row -> the kind of its files, the method, its options."""
LOAD = "Upload.load"
KINDS = {"default": None, "fisher": ["fisher"], "afl": ["gram", "targets"]}
"""Kind of files -> the statistics that they hold. None: the default upload."""


def make(folder: Path) -> None:
    """Write the uploads of all clients in all kinds."""
    import torch

    import maecho
    from maecho.lab.networks import build

    rng = torch.Generator().manual_seed(0)
    centres = torch.rand(10, 784, generator=rng) * (torch.rand(10, 784, generator=rng) < 0.2)
    start = build("mlp", torch.Generator().manual_seed(0))
    for i in range(MOST):
        y = torch.randint(0, 10, (ROWS,), generator=rng)
        x = (centres[y] + 0.3 * torch.randn(ROWS, 784, generator=rng)).clamp(0, 1)
        model = build("mlp", torch.Generator().manual_seed(0))
        model.load_state_dict(start.state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        for rows in torch.arange(ROWS).split(64):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
        body = {f"{name}.weight": start.state_dict()[f"{name}.weight"] for name in ("fc1", "fc2", "fc3")}
        batches = [(x[rows], y[rows]) for rows in torch.arange(ROWS).split(64)]
        for kind, wanted in KINDS.items():
            if kind == "afl":  # its clients share all that comes before the head
                model.load_state_dict({**model.state_dict(), **body})
            rank = None if kind == "afl" else "4x"
            upload = maecho.make_upload(model, batches, f"client-{i:02}", wanted, rank=rank, progress=False)
            upload.save(folder / kind / f"{i:02}.safetensors")


def paths(folder: Path, kind: str, clients: int) -> list[Path]:
    return sorted((folder / kind).glob("*.safetensors"))[:clients]


def needed(row: str, file: Path) -> list[tuple[int, int]]:
    """Where the bytes lie in a file that a row needs: (begin, length)."""
    from maecho.aggregation import choose, gathered_for

    with file.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        listed = json.loads(raw.read(length))
    listed.pop("__metadata__")
    wanted = set(KINDS)
    if row == LOAD:
        parts = [name.split("/")[0] for name in listed]
        wanted = set(parts)
    else:
        _, name, options = METHODS[row]
        wanted = {"weights"} | set(gathered_for(choose(name, **options)[1]))
    names = [n for n in listed if n.split("/")[0] in wanted]
    if row == "afl":
        names = [n for n in names if not n.startswith("gram/") or n.startswith("gram/fc4/")]
    places = (listed[name]["data_offsets"] for name in names)
    return [(8 + length + begin, end - begin) for begin, end in places]


def measure(folder: Path, row: str, clients: int, keep: Path) -> dict[str, float]:
    """Time of a row and of reading its bytes, both in seconds; peak memory in bytes."""
    import resource
    import time

    import torch

    import maecho
    from maecho.lab.networks import build

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    kind, name, options = METHODS.get(row, ("default", "", {}))
    files = paths(folder, kind, clients)
    model = build("mlp", torch.Generator().manual_seed(0))
    ranges = [needed(row, file) for file in files]

    def read() -> mmap.mmap:
        # Pages that the system hands out anew, as for the first upload that a process reads.
        held, at = mmap.mmap(-1, sum(length for places in ranges for _, length in places)), 0
        view = memoryview(held)
        for file, places in zip(files, ranges, strict=True):
            with file.open("rb", buffering=0) as raw:
                for begin, length in places:
                    raw.seek(begin)
                    raw.readinto(view[at : at + length])
                    at += length
        return held

    def work() -> object:
        if row == LOAD:
            return [maecho.Upload.load(file).examples for file in files]
        return maecho.aggregate(files, name, model=model, **options)

    def timed(function: object) -> float:
        began = time.process_time()
        function()  # type: ignore[operator]
        return time.process_time() - began

    torch.linalg.cholesky(torch.eye(4).double() @ torch.eye(4).double())  # libraries that load on their first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if isinstance(result, maecho.Merged):
        result.save(keep)
    del result
    repeats = 1 if row == "echo-chain" else 5
    return {
        "read": min(timed(read) for _ in range(5)),
        "work": min([timed(work) for _ in range(repeats)]),
        "peak": float(peak),
        "bytes": float(sum(length for places in ranges for _, length in places)),
    }


def in_process(source: Path, *arguments: str) -> str:
    """Run this file in a process that imports maecho from `source`."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def difference(one: Path, other: Path) -> float:
    from maecho import Merged

    a, b = Merged.load(one), Merged.load(other)
    return max(float((a[n].double() - b[n].double()).norm() / b[n].double().norm()) for n in a)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, help="the src folder of another checkout")
    parser.add_argument("--clients", default="5,20,50")
    parser.add_argument("--only", default=";".join([LOAD, *METHODS]))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--measure", nargs=4, metavar=("FOLDER", "ROW", "CLIENTS", "KEEP"))
    parser.add_argument("--make", type=Path)
    chosen = parser.parse_args()
    if chosen.make:
        make(chosen.make)
        return
    if chosen.measure:
        folder, row, clients, keep = chosen.measure
        print(json.dumps(measure(Path(folder), row, int(clients), Path(keep))))
        return
    folder = Path(tempfile.gettempdir()) / f"maecho-server-benchmark-{os.getuid()}"
    if not (folder / "done").exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        in_process(ROOT / "src", "--make", str(folder))
        (folder / "done").touch()
    versions = {"now": ROOT / "src"}
    if chosen.against:
        versions["before"] = chosen.against.resolve()
    rows = chosen.only.split(";")
    heads = " | ".join(f"{label}: x reading, peak MB" for label in versions)
    print(f"| clients | method | MB read (ms) | {heads} |{' difference |' if len(versions) == 2 else ''}")
    print("|---" * (3 + len(versions) + (len(versions) == 2)) + "|")
    for clients in map(int, chosen.clients.split(",")):
        for row in rows:
            print(line(folder, row, clients, versions, chosen.turns), flush=True)


def line(folder: Path, row: str, clients: int, versions: dict[str, Path], turns: int) -> str:
    found: dict[str, list[dict[str, float]]] = {label: [] for label in versions}
    kept = {label: folder / f"{label}.safetensors" for label in versions}
    for _ in range(turns):
        for label, source in versions.items():
            try:
                answer = in_process(source, "--measure", str(folder), row, str(clients), str(kept[label]))
                found[label].append(json.loads(answer))
            except subprocess.CalledProcessError:
                kept[label].unlink(missing_ok=True)
    read = statistics.median(one["read"] for seen in found.values() for one in seen)
    cells = []
    for seen in found.values():
        if not seen:
            cells.append(f"no memory (more than {LIMIT / 1e9:.0f} GB)")
            continue
        work, peak = min(one["work"] for one in seen), min(one["peak"] for one in seen)
        cells.append(f"{work / read:.1f} ({1e3 * work:.0f} ms), {peak / 1e6:.0f}")
    size = next(seen for seen in found.values() if seen)[0]["bytes"] / 1e6
    out = f"| {clients} | {row} | {size:.0f} ({1e3 * read:.0f}) | {' | '.join(cells)} |"
    if len(versions) == 2:
        out += " – |" if row == LOAD or not all(found.values()) else f" {difference(kept['now'], kept['before']):.1g} |"
    return out


if __name__ == "__main__":
    main()
