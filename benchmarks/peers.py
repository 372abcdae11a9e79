"""Our merges beside those of FusionBench and mergekit: seconds, memory, exactness, and why results differ.

    make peers                                    # in an environment with both packages
    python benchmarks/peers.py                    # one line for a peer that is not there, and on with the others
    python benchmarks/peers.py --quick            # 5 clients of a small network, in a minute
    python benchmarks/peers.py --only Fisher      # rows whose name has this word
    python benchmarks/peers.py --write            # the table in docs/benchmarks.md, too

Both sides get the same models, Grams, Fisher values and batches, on one thread. Every measurement is a process of its
own, forked after all inputs were made; ours and theirs take turns. After a first call the second gives the memory: the
peak beyond what the process held before. Where a call is quick, those after it give the seconds. The table has medians
over the turns, as ratios ours by theirs. Seconds are those of the processor, so that other work on the machine counts
little.

"off float64" is the largest distance of a merged tensor to the same formula, with the same settings, computed plainly
in float64, as a share of its norm. "apart" is that distance between ours and theirs, both with their defaults. "apart
with the same settings" is the distance after the reason was taken away, where theirs computes in float64, too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import other_merges as other
import peer_merges as plain
from peer_rows import REASONS, SAME, Row, from_data, merges

MARKS = "<!-- peers: written by benchmarks/peers.py -->", "<!-- end of peers -->"


@dataclass
class Measured:
    seconds: float
    peak: float
    state: plain.State


def measured(work: Callable[[], plain.State], folder: Path) -> Measured:
    """Seconds and extra memory of one piece of work, in a forked process."""
    target = folder / "measured"
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 2)
            os.dup2(silent, 1)
            target.write_bytes(pickle.dumps(_timed(work)))
        except BaseException as error:
            target.write_bytes(pickle.dumps(f"{type(error).__name__}: {error}".split("\n")[0]))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    found = pickle.loads(target.read_bytes())
    target.unlink()
    if isinstance(found, str):
        raise RuntimeError(found)
    assert isinstance(found, Measured)
    return found


def _timed(work: Callable[[], plain.State]) -> Measured:
    began = time.process_time()
    work()
    first = time.process_time() - began
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    began = time.process_time()
    state = work()
    seconds = [time.process_time() - began]
    peak = _memory("VmHWM") - before
    if first < 0.5:
        seconds = []
        while not seconds or (sum(seconds) < 0.2 and len(seconds) < 25):
            began = time.process_time()
            work()
            seconds.append(time.process_time() - began)
    return Measured(statistics.median(seconds), peak, {name: tensor.clone() for name, tensor in state.items()})


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * float(next(line for line in lines if line.startswith(field)).split()[1])


def line(case: plain.Case, row: Row, turns: int, folder: Path) -> str:
    """One row of the table, as Markdown."""
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        return _line(case, row, turns, folder)


def _line(case: plain.Case, row: Row, turns: int, folder: Path) -> str:
    sides: tuple[list[Measured], list[Measured]] = [], []
    began = time.perf_counter()
    for turn in range(turns):
        for work, found in zip((row.ours, row.theirs), sides, strict=True):
            found.append(measured(work, folder))
        if turn >= 2 and time.perf_counter() - began > 15:
            break
    quick, slow = (statistics.median(one.seconds for one in found) for found in sides)
    ours, theirs = sides[0][-1].state, sides[1][-1].state
    if not ours and row.same:  # written into files
        ours, theirs = row.same()
        same = plain.distance(ours, theirs)
    else:
        same = plain.distance(*row.same()) if row.same else plain.distance(ours, theirs)
    cells = [case.name, row.name, row.peer, f"{1e3 * slow:.3g}", f"**{quick / slow:.2f}**", _ratio(*sides)]
    references = row.plain_ours(), row.plain_theirs()
    for state, reference in zip((ours, theirs), references, strict=True):
        bad = plain.not_finite(state)
        cells.append((f"{plain.distance(state, reference):.0e}" if reference else "") + (f", {bad} NaN" if bad else ""))
    cells += [f"{plain.distance(ours, theirs):.0e}", row.reason, f"{same:.0e}" + (" **!**" if same > SAME else "")]
    return f"| {' | '.join(cells)} |"


def _ratio(ours: list[Measured], theirs: list[Measured]) -> str:
    """Extra memory in MB, and as a ratio where it is more than pages by chance."""
    mine, yours = (statistics.median(one.peak for one in found) / 1e6 for found in (ours, theirs))
    return f"{mine:.1f} / {yours:.1f} = {mine / yours:.2f}" if yours > 0.5 else f"{mine:.1f} / {yours:.1f}"


HEAD = (
    "models", "merge", "peer", "theirs, ms", "seconds, ours by theirs", "extra memory in MB, ours by theirs",
    "ours off float64", "theirs off float64", "apart", "reason", "apart with the same settings",
)  # fmt: skip


def cases(quick: bool) -> Iterator[tuple[Callable[[], plain.Case], bool]]:
    """Each case, and whether both sides gather statistics from its data."""
    if quick:
        yield lambda: plain.mlps(5, 256, distinct=2), False
        yield lambda: plain.mlps(2, 256), True
        return
    for clients in (5, 20, 50):
        yield lambda clients=clients: plain.mlps(clients, 1024), False  # type: ignore[misc]
    yield lambda: plain.transformers(5, 8), False
    yield lambda: plain.mlps(5, 1024, distinct=5), True
    yield lambda: plain.transformers(2, 8), True


def warm(peers: Collection[str], folder: Path) -> None:
    """Call everything once on a tiny network, so that no measurement pays for imports."""
    tiny = plain.mlps(2, 64, (8, 6, 4))
    for row in (*merges(tiny, folder), *from_data(tiny)):
        if row.peer in peers:
            with contextlib.suppress(RuntimeError), contextlib.redirect_stderr(io.StringIO()):
                row.ours(), row.theirs()


def write(lines: list[str]) -> None:
    """Put the table into docs/benchmarks.md, between its two marks."""
    page = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n{chr(10).join(lines)}\n{MARKS[1]}{after}")


def table(chosen: argparse.Namespace) -> Iterator[str]:
    """The lines of the table, and what stands above and below it."""
    peers = other.found()
    yield (
        "; ".join(f"{n} {p.version}" if p.version else f"{n} is left out ({p.reason})" for n, p in peers.items()) + "."
    )
    yield f"\n| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|"
    with tempfile.TemporaryDirectory() as name:
        warm([peer for peer, found in peers.items() if found.version], Path(tempfile.mkdtemp(dir=name)))
        for make, gather in cases(chosen.quick):
            folder = Path(tempfile.mkdtemp(dir=name))
            case = make()
            for row in from_data(case) if gather else merges(case, folder):
                if chosen.only not in row.name or not peers[row.peer].version:
                    continue
                try:
                    yield line(case, row, 2 if chosen.quick else chosen.turns, folder)
                except RuntimeError as error:
                    yield f"| {case.name} | {row.name} | {row.peer} | failed: {error} |{' |' * (len(HEAD) - 4)}"
    yield "\n" + "\n".join(f"- **{key}**: {text}" for key, text in REASONS.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few clients and turns, in a minute")
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md, too")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for text in table(chosen):
        print(text, flush=True)
        lines.append(text)
    if chosen.write:
        write(lines)


if __name__ == "__main__":
    main()
