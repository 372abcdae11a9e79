"""The runs of a study, one for each seed, and the file of their results.

A run is written as soon as it is done. What is there already and still fits is not run again. What does not fit is
named and run again.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from maecho import disk
from maecho.errors import InputError
from maecho.lab import charts, data
from maecho.lab.harness import machine
from maecho.lab.harness.code import Code, changed
from maecho.lab.harness.results import FORMAT, results_path
from maecho.lab.studies.config import Study
from maecho.lab.studies.found import Question, Task

Listener = Callable[[int, float, str], None]
"""Called with a seed, the share of its run that is done, and words for people."""
DIGITS = 6
"""How many digits of a number are kept."""
ROW = re.compile(r"\[\n([-+.,\d\seE]*)\]")
"""A list of numbers in JSON over several lines, which no text can hold. It is written on one line, since a picture has
thousands of numbers."""


def reproduce_study(
    study: Study,
    out: Path | None = None,
    device: str = "cpu",
    on_event: Listener | None = None,
    run: bool = True,
    trust: bool = False,
) -> dict[str, Any]:
    """Run every seed that is missing or does not fit any more, and return the results as they are on disk.

    Args:
        study: what to run.
        out: the folder of the results; see `results_path`.
        device: where models are trained.
        on_event: called for everything that happens.
        run: whether to run anything.
        trust: keep runs that were made with other data or code, if their settings are those of now. The run says so
            from then on.
    """
    machine.check(device)
    path = results_path(study, out)
    results = read_results(path, study)
    if not run:
        return results
    tell = on_event or (lambda seed, share, text: None)
    question = study.question
    dataset = data.load(question.data) if question.data else None
    code = Code.of(type(question), *question.rows)
    wanted = {"settings": settings(question), "data": "" if dataset is None else dataset.digest, "code": code.digest}
    for seed in study.seeds:
        old = next((one for one in results["runs"] if one["seed"] == seed), None)
        reasons = [] if old is None else differences(old, wanted, code, results)
        if old is not None and not reasons:
            tell(seed, 1.0, "fits")
            continue
        if old is not None and trust and old["settings"] == wanted["settings"]:
            trusted = {**wanted, "because": reasons}
            results = put(path, study, {**old, "trusted": trusted}, code)
            tell(seed, 1.0, f"is kept as it is, though {'; '.join(reasons)}")
            continue
        tell(seed, 0.0, f"is run again, since {'; '.join(reasons)}" if reasons else "starts")
        began = time.perf_counter()

        def on_share(share: float, text: str, seed: int = seed) -> None:
            tell(seed, min(share, 0.999), text)

        found = question(Task(seed, dataset, device, on_share))
        about = {
            "seed": seed,
            **wanted,
            "numbers": {name: float(value) for name, value in short(found.numbers).items()},
            "charts": [short(charts.write(one)) for one in found.charts],
            "seconds": round(time.perf_counter() - began, 3),
            "device": machine.machine(device),
            "versions": machine.versions(),
        }
        results = put(path, study, about, code)
        tell(seed, 1.0, "is done")
    return results


def short(content: Any) -> Any:
    """The same content with DIGITS digits of every float."""
    if isinstance(content, Mapping):
        return {key: short(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [short(value) for value in content]
    return float(f"{content:.{DIGITS}g}") if isinstance(content, float) else content


def settings(question: Question) -> dict[str, Any]:
    """Its settings with their defaults filled in, as they come back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(question)))  # type: ignore[call-overload]
    return {"study": type(question).__name__, **found}


def read_results(path: Path, study: Study) -> dict[str, Any]:
    """Read all results. Without a file there are none. A damaged file raises InputError and stays as it is."""
    empty = {
        "study": study.name, "title": study.title, "format": FORMAT, "quick": study.quick,
        "text": study.document.text.strip(), "runs": [], "code": {},
    }  # fmt: skip
    if not path.exists():
        return empty
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError
        for one in found["runs"]:
            _check(one)
        return {**empty, "runs": found["runs"], "code": {k: dict(modules) for k, modules in found["code"].items()}}
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise InputError(f"{path} must hold results of {study.name}, got something else; move it away") from error


def _check(run: Mapping[str, Any]) -> None:
    """Raise an error unless everything is there that is read later."""
    int(run["seed"]), str(run["data"]), str(run["code"]), dict(run["settings"])
    for value in run["numbers"].values():
        float(value)
    for chart in run["charts"]:
        charts.read(chart)


def differences(run: Mapping[str, Any], wanted: Mapping[str, Any], code: Code, results: Mapping[str, Any]) -> list[str]:
    """Sentences that say why a run does not fit what would be found now."""
    accepted = run.get("trusted", {})
    found = []
    if run["settings"] != wanted["settings"]:
        found.append("it has other settings")
    if wanted["data"] not in (run["data"], accepted.get("data")):
        found.append("the data are others")
    if code.digest not in (run["code"], accepted.get("code")):
        modules = changed(results["code"].get(run["code"], {}), code.modules)
        found.append(f"its code has changed ({', '.join(modules)})")
    return found


def put(path: Path, study: Study, run: Mapping[str, Any], code: Code) -> dict[str, Any]:
    """Write a run into the file, and return the results as of now. Other processes may write to the file too, so it is
    read again under a lock."""
    with disk.locked(path):
        results = read_results(path, study)
        order = {seed: place for place, seed in enumerate(study.seeds)}
        results["runs"] = sorted(
            [*(one for one in results["runs"] if one["seed"] != run["seed"]), run],
            key=lambda one: (order.get(one["seed"], len(order)), one["seed"]),
        )
        modules = {**results["code"], code.digest: dict(code.modules)}
        used = {one["code"] for one in results["runs"]}
        results["code"] = {digest: modules[digest] for digest in sorted(used) if digest in modules}
        text = ROW.sub(lambda row: f"[{' '.join(row[1].split())}]", json.dumps(results, indent=1)) + "\n"
        disk.write_whole(path, lambda file: file.write(text.encode()))
    return results
