"""Writes docs/models.md: what every method does with the networks of the zoo, which nobody wrote for maecho.

    PYTHONPATH=tests python benchmarks/models.py              # checks and, for merges of different clients, three seeds
    PYTHONPATH=tests python benchmarks/models.py --only BERT  # prints the rows of some networks

What was measured is kept in the file of --cache, so a run goes on where it stopped. Delete it after a change of code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import maecho
from maecho.network.plain import plain
from support.zoo import ZOO
from support.zoo.checks import DRAWS, METHODS, accuracy, case, findings
from support.zoo.entry import Entry, labels

MERGES = ("fedavg", "regmean", "ma-echo", "echo-chain", "relay")
INTRODUCTION = f"""# Networks that people bring

`make models` writes this page. It trains small networks of transformers and of plain torch, none written for maecho,
and merges them. `tests/models` holds the same checks. A network is made with random weights, and trained for a few
steps on drawn data with four classes.

- **alone**: a single client comes back to 1e-4 (relative change of the outputs on data that nobody held).
- **twins**: two clients with one model and different data. The first six methods give the model back to 1e-4.
  echo-chain and relay fit the last layer to labels: they lose at most 0.5 points of accuracy, and probabilities move
  by at most 0.05 on average.

✓ holds for both, – means that the method refuses the network in one sentence, ✗ means that a check fails today.
echo-chain draws {DRAWS} inputs here. It refuses tokens, and `ot` refuses what torch.fx cannot trace.
"""
DIFFERENT = """
## Clients with different labels

Two clients start from the same random weights. Most examples of the first have one of two classes, those of the
second one of the other two. Accuracy in per cent on all four classes, SEEDS; "clients" is the mean of both before the
merge. –: the method refuses.
"""
MERGED = """
## What is merged

The share of the parameters that are read as matrices, so that methods merge them with the data's statistics. The rest
is averaged: scales and shifts of norms, and parameters that no matrix has. Matrices that are averaged all the same are
in the last two columns, with their type or the reason in brackets; `make_upload` and `relay` name them in a warning. A
matrix on hidden states is averaged by echo-chain and relay alone. –: no upload can be made.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ZOO), choices=list(ZOO), metavar="NETWORK")
    parser.add_argument("--out", type=Path, default=Path("docs/models.md"))
    parser.add_argument("--seeds", type=int, default=3, help="of clients with different labels; 0 leaves them out")
    parser.add_argument("--cache", type=Path, default=Path("models.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # those of make_upload are in the table
    found: dict[str, Any] = json.loads(options.cache.read_text()) if options.cache.exists() else {}
    for name in options.only:
        if name not in found:
            found[name] = checked(name) | {"different": different(ZOO[name], range(options.seeds))}
            options.cache.write_text(json.dumps(found, indent=1) + "\n")
            print(name, flush=True)
    rows = {name: found[name] for name in ZOO if name in found}
    page = f"{INTRODUCTION}\n{marks(rows)}\n{merged(rows)}{accuracies(rows, options.seeds)}"
    if set(rows) == set(ZOO):
        options.out.write_text(page)
    else:
        print(page)


def checked(name: str) -> dict[str, Any]:
    """The outcomes of all checks of a network, and what of it is merged."""
    of = case(name)
    wrong: dict[str, str] = {}
    refused: dict[str, str] = {}
    by_relay: list[str] = []
    for check, outcome, complaint in findings(name):
        method = check.split(": ")[1]
        if check == "alone: relay":
            by_relay = list(outcome.warned)
        if complaint:
            wrong[method] = f"{check}: {complaint}"
        elif outcome.refused:
            refused[method] = outcome.refused
    share, averaged = None, []
    weights = of.uploads[0].weights if of.uploads else plain(of.model).state_dict()
    numbers = {key: tensor.numel() for key, tensor in weights.items() if tensor.is_floating_point()}
    if of.uploads:
        upload = of.uploads[0]
        read = {key for layer in upload.layers for key in (layer.weight, layer.bias) if key in numbers}
        share = sum(numbers[key] for key in read) / sum(numbers.values())
        averaged = [str(name) for name in upload.recipe["unknown"]]
    return {
        "parameters": sum(numbers.values()),
        "accuracy": accuracy(of.entry, of.model),
        "share": share,
        "averaged": averaged,
        "by_relay": by_relay,
        "wrong": wrong,
        "refused": refused,
    }


def different(entry: Entry, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Accuracies of clients with different labels and of their merges, one for each seed. Empty for a refusal."""
    found: dict[str, list[float]] = {}
    for seed in seeds:
        own = [labels(120, 10 * seed + i, common) for i, common in enumerate(((0, 1), (2, 3)))]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            start = entry.make()
        models = [entry.train(10 * seed + i, y, start) for i, y in enumerate(own)]
        data = [entry.batches(y, 1000 + 10 * seed + i) for i, y in enumerate(own)]
        found.setdefault("clients", []).append(statistics.fmean(accuracy(entry, model) for model in models))
        try:
            uploads = [
                maecho.make_upload(model, batches, f"client {i}", progress=False)
                for i, (model, batches) in enumerate(zip(models, data, strict=True))
            ]
        except maecho.InputError:
            uploads = []
        for method in MERGES:
            several = found.setdefault(method, [])
            try:
                if not uploads and method != "relay":
                    continue
                if method == "relay":
                    state = maecho.relay(start, list(zip(models, data, strict=True)), progress=False)
                else:
                    chosen = {"draws": DRAWS} if method == "echo-chain" else {}
                    state = maecho.aggregate(uploads, method, model=start, **chosen)
            except maecho.InputError:
                continue
            several.append(accuracy(entry, entry.loaded(start, dict(state))))
    return found


def marks(rows: dict[str, Any]) -> str:
    lines = [f"| | {' | '.join(METHODS)} |", f"|---|{'---|' * len(METHODS)}"]
    for name, row in rows.items():
        cells = ["✗" if m in row["wrong"] else "–" if m in row["refused"] else "✓" for m in METHODS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    wrong = [f"- {name}, {why}" for name, row in rows.items() for why in row["wrong"].values()]
    waiting = [f"- {name}: {why}" for name in rows for why in dict.fromkeys(ZOO[name].waits_for.values())]
    return "\n".join([*lines, *(["", "What fails today:", "", *wrong] if wrong else []), *waiting]) + "\n"


def merged(rows: dict[str, Any]) -> str:
    lines = [
        MERGED,
        "| | parameters | merged | accuracy | averaged by all methods | by echo-chain and relay, too |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        share = "–" if row["share"] is None else f"{100 * row['share']:.0f} %"
        here, there = _shortened(row["averaged"]), _shortened(_named(row["by_relay"], row["averaged"]))
        lines.append(f"| {name} | {row['parameters']:,} | {share} | {100 * row['accuracy']:.0f} | {here} | {there} |")
    return "\n".join(lines) + "\n"


def _named(warned: Sequence[str], known: Sequence[str]) -> list[str]:
    """What the warnings of a relay name and those of an upload do not."""
    names = [name for sentence in warned for name in sentence.split(": ")[-1].split(";")[0].split(", ")]
    return [name for name in names if name not in known]


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def accuracies(rows: dict[str, Any], seeds: int) -> str:
    if not seeds:
        return ""
    columns = ("clients", *MERGES)
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, row in rows.items():
        cells = [
            f"{100 * statistics.fmean(several):.0f}" if (several := row["different"][column]) else "–"
            for column in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return (
        "\n".join(
            [DIFFERENT.replace("SEEDS", "from one seed" if seeds == 1 else f"as a mean over {seeds} seeds"), *lines]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
