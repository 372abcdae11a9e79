"""`python -m support.fuzz` reads thousands of bad files and kills writers. It prints the outcome as JSON.

`make fuzz` is a long run, the test suite has a short one. Each is a separate process whose memory is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from maecho import Upload, UploadError
from maecho.errors import LONGEST
from maecho.network.layers import Layer
from maecho.network.packed.storage import Stored
from support.mutations import Case, draw, flip

FIXTURES = Path(__file__).resolve().parent.parent / "upload" / "version_1"
PATIENCE = 20


class Hang(BaseException):
    """Reading a file takes too long."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, count in (("cases", 20_000), ("flips", 20_000), ("kills", 300), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=count)
    chosen = parser.parse_args()
    rng = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(Path(folder), rng, chosen.cases, chosen.flips)
        found |= kill(Path(folder), rng, chosen.kills)
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["wrong"] or found["killed_wrong"] else 0)


def fuzz(folder: Path, rng: random.Random, cases: int, flips: int) -> dict[str, Any]:
    """Read so many bad files. `wrong` lists the cases with a wrong outcome, by their numbers."""
    old = [path.read_bytes() for path in sorted(FIXTURES.glob("upload-*"))]
    new = [_rewritten(path, folder / "new") for path in sorted(FIXTURES.glob("upload-*"))]
    new.append(_packed(folder / "new"))
    signal.signal(signal.SIGALRM, _hang)
    path, outcomes, wrong = folder / "case.safetensors", Counter[str](), []
    longest_sentence, slowest = 0, 0.0
    for index in range(cases + flips):
        case = draw(rng, new * 3 + old) if index < cases else flip(rng, rng.choice(new))
        case.write(path)
        began = time.perf_counter()
        outcome, sentence = attempt(path)
        slowest = max(slowest, time.perf_counter() - began)
        longest_sentence = max(longest_sentence, len(sentence))
        outcomes[f"{case.kind}: {outcome}"] += 1
        if _is_wrong(case, outcome, sentence):
            wrong.append(f"{index}, {case.kind}: {outcome} {sentence[:200]}")
        path.unlink()
    return {
        "cases": cases,
        "flips": flips,
        "flips_accepted": outcomes["flip: accepted"],
        "wrong": wrong,
        "hangs": sum(count for key, count in outcomes.items() if key.endswith("Hang")),
        "longest_sentence": longest_sentence,
        "slowest_seconds": round(slowest, 3),
        "peak_megabytes": _peak_kilobytes() // 1024,
        "outcomes": dict(sorted(outcomes.items())),
    }


def attempt(path: Path) -> tuple[str, str]:
    """Read a file. The outcome is "accepted" or the name of the error, and the sentence of the error."""
    signal.alarm(PATIENCE)
    try:
        Upload.load(path)
    except BaseException as error:  # whatever it is: that is the question
        return type(error).__name__, str(error)
    finally:
        signal.alarm(0)
    return "accepted", ""


def _is_wrong(case: Case, outcome: str, sentence: str) -> bool:
    if outcome == "accepted":
        return case.must_fail
    return outcome != UploadError.__name__ or len(sentence) > LONGEST or not sentence.isprintable()


def _hang(*_: object) -> None:
    raise Hang


def _peak_kilobytes() -> int:
    """The most memory that this process has had.

    Linux's getrusage would also count what the process that started this one had, so /proc is asked where it is there.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        return int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _packed(place: Path) -> bytes:
    """A file of a network whose state_dict is made of other weights."""
    weights = {f"attn.{part}.weight": torch.ones(2, 2) for part in "qkv"} | {"head.weight": torch.ones(3, 2)}
    stored = (
        Stored("attn.in_proj_weight", ("attn.q.weight", "attn.k.weight", "attn.v.weight")),
        Stored("head.weight_g", ("head.weight",), "norm"),
        Stored("head.weight_v", ("head.weight",), "direction"),
    )
    layers = tuple(Layer(name, f"{name}.weight") for name in ("attn.q", "attn.k", "attn.v", "head"))
    Upload("ann", 3, weights, layers, "head", stored=stored).save(place)
    return place.read_bytes()


def _rewritten(path: Path, place: Path) -> bytes:
    """The same upload in today's format."""
    Upload.load(path).save(place)
    return place.read_bytes()


def kill(folder: Path, rng: random.Random, times: int) -> dict[str, Any]:
    """Kill a writer so many times. The file must always be one of the two uploads, whole."""
    uploads = [Upload.load(path) for path in sorted(FIXTURES.glob("upload-cnn-*"))]
    path, wrong, parts = folder / "killed" / "upload.safetensors", [], 0
    uploads[0].save(path)
    for index in range(times):
        writer = os.fork()
        if writer == 0:
            while True:
                for upload in uploads:
                    upload.save(path)
        time.sleep(rng.random() * 0.05)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        parts = max(parts, len(list(path.parent.iterdir())) - 1)
        outcome, sentence = attempt(path)
        if outcome != "accepted":
            wrong.append(f"kill {index}: {outcome} {sentence}")
    uploads[0].save(path)
    if [one.name for one in path.parent.iterdir()] != [path.name]:
        wrong.append("a part file was left behind")
    return {"kills": times, "killed_wrong": wrong, "most_parts_left": parts}


if __name__ == "__main__":
    main()
