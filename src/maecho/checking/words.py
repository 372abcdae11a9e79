"""A check as text for people, at most 80 columns wide."""

from __future__ import annotations

import itertools
import textwrap
from typing import TYPE_CHECKING

from maecho.errors import printable, shorten
from maecho.formatting import WIDTH, columns, folded, size

if TYPE_CHECKING:
    from maecho.checking.found import Check, LabelsFound, LayerFound, TimesFound

KIND, NAMES = 18, 28
"""Longer names of classes lose their middle. Names of methods get that much room."""


def text(check: Check) -> str:
    """All that was found: findings first, then what is read, lost and sent."""
    counts = [(len(check.of(level)), level) for level in ("error", "warning", "note")]
    parts = [
        "maecho check: " + ", ".join(f"{n} {level}{'s' if n != 1 else ''}" for n, level in counts),
        "\n".join(_wrapped(f"{one.level}: ", one.text) for one in check.findings),
        _layers(check),
        "\n".join([*_labels(check.labels), *_echo(check), *_spaces(check)]),
        _sizes(check),
        _times(check.times),
        _methods(check),
    ]
    return printable_lines("\n\n".join(part for part in parts if part))


def printable_lines(text: str) -> str:
    """The text without control characters, line by line."""
    return "\n".join(printable(line) for line in text.splitlines())


def _wrapped(head: str, words: str) -> str:
    return textwrap.fill(
        words, WIDTH, initial_indent=head, subsequent_indent=" " * min(len(head), 24), break_on_hyphens=False
    )


def _layers(check: Check) -> str:
    if not check.layers:
        return ""
    facts = [
        (one.kind, one.matrix, one.bias, one.inputs, one.read, one.why, one.calls, bool(one.shares))
        for one in check.layers
    ]
    groups = folded((one.name or "(the model)", fact) for one, fact in zip(check.layers, facts, strict=True))
    rows = [("layer", "kind", "matrix", "how it is read")]
    for name, members in groups.items():
        one = check.layers[members[0]]
        rows.append((name, shorten(one.kind, KIND), _matrix(one), _read(one, len(members), check.head)))
    return columns(rows) + "\n(matrix: outputs x inputs; +1 is the bias)"


def _matrix(one: LayerFound) -> str:
    if one.matrix is None:
        return ""
    groups, out, inputs = one.matrix
    return f"{f'{groups} of ' if groups > 1 else ''}{out} x {f'{inputs - 1}+1' if one.bias else inputs}"


def _read(one: LayerFound, count: int, head: str | None) -> str:
    words = {"verified": "verified", "averaged": "averaged", "idle": "idle: it did not run", "not tried": "not tried"}
    parts = [words[one.read] + (f": {one.why}" if one.why else "")]
    if one.read == "verified" and one.inputs != "numbers":
        parts.append(one.inputs)
    parts += [f"with {', '.join(one.shares)}"] if one.shares and count == 1 else ["shared"] if one.shares else []
    parts += [f"{one.calls} calls"] if one.calls > 1 else []
    parts += ["head"] if one.name == head and head is not None else []
    return ", ".join(parts) + (f" ({count} alike)" if count > 1 else "")


def _labels(found: LabelsFound | None) -> list[str]:
    if found is None:
        return []
    outputs = "no vector of scores" if found.outputs is None else f"{found.outputs} outputs"
    if found.unusable:
        return [_wrapped("Labels: ", f"none that can be used, since {found.unusable} ({outputs})")]
    held = ", ".join(f"{label}: {n}" for label, n in list(found.classes.items())[:12])
    more = f" and {len(found.classes) - 12} more" if len(found.classes) > 12 else ""
    what = f"{len(found.classes)} classes in the first batch of {found.examples} ({held}{more}); {outputs}"
    return [_wrapped("Labels: ", what)]


def _echo(check: Check) -> list[str]:
    if check.stages is None:
        return []
    names = folded(("; ".join(stage), ()) for stage in check.stages if len(stage) == 1)
    several = sum(len(stage) > 1 for stage in check.stages)
    shown = ", ".join(names) + (f" and {several} with several units" if several else "")
    count = sum(map(len, check.stages))
    return [_wrapped("Echo: ", f"{len(check.stages)} stages, a round each in a relay, of {count} units: {shown}")]


def _spaces(check: Check) -> list[str]:
    if check.spaces is None:
        return []
    names = folded((name, size) for name, size in check.spaces.items())
    sizes = list(check.spaces.values())
    shown = ", ".join(f"{name} ({sizes[members[0]]})" for name, members in names.items())
    return [_wrapped("Neurons that can be matched: ", shown or "none")]


def _sizes(check: Check) -> str:
    if not check.sizes:
        return ""
    rows = [("upload, estimated", "whole, at most", f"rank={check.rank}")]
    rows += [(one.part, size(one.whole), size(one.cut)) for one in check.sizes]
    rows.append(("all", size(sum(one.whole for one in check.sizes)), size(sum(one.cut for one in check.sizes))))
    return columns(rows, right=(1, 2))


def _times(found: TimesFound | None) -> str:
    if found is None:
        return ""
    step = "" if found.step is None else f", a step of training {_seconds(found.step)}"
    lines = [f"one batch: forward {_seconds(found.forward)}{step}, statistics {_seconds(found.statistics)}; "
             f"after the last batch {_seconds(found.once)}"]  # fmt: skip
    if found.seconds is not None:
        what = "this batch alone" if found.batches == 1 else f"all {found.batches} batches"
        epochs = "" if found.epochs is None else f", as long as {_number(found.epochs)} epochs of training"
        lines.append(f"{what}: about {_seconds(found.seconds)}{epochs}")
    elif found.step:
        lines.append(
            f"the statistics of a batch take as long as {_number(found.statistics / found.step)} steps of training"
        )
    return _wrapped("Time, estimated: ", ". ".join(line[0].upper() + line[1:] for line in lines) + ".")


def _number(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1 if seconds >= 0.001 else 2}f} ms"


def _methods(check: Check) -> str:
    if not check.methods:
        return ""
    groups: dict[str, list[str]] = {}
    for one in check.methods:
        words = f"yes{f', with {one.needs}' if one.needs else ''}" if one.usable else f"no: {one.needs}"
        groups.setdefault(words, []).append(one.name)
    rows = [(textwrap.wrap(", ".join(names), NAMES, break_on_hyphens=False), words) for words, names in groups.items()]
    lines = [f"{'method':{NAMES}}  can be used"]
    for names, words in rows:
        said = textwrap.wrap(words, WIDTH - NAMES - 2, break_on_hyphens=False)
        lines += [f"{a:{NAMES}}  {b}".rstrip() for a, b in itertools.zip_longest(names, said, fillvalue="")]
    return "\n".join(lines)
