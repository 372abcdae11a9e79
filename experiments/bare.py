"""`maecho reproduce` for machines that have torch, numpy and safetensors alone, such as a GPU machine without internet.

PYTHONPATH=src python experiments/bare.py echo-cifar --columns local,echo-chain --jobs 6 --device cuda --out results
"""

from __future__ import annotations

import argparse
from pathlib import Path

from maecho.lab.experiment import Experiment
from maecho.lab.harness.runs import Event, reproduce
from maecho.lab.report.tables import markdown, summarise


def on_event(event: Event) -> None:
    if event.what not in ("training", "fits"):
        print(f"{event.cell} seed {event.seed}: {event.column} {event.what} {event.text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a config of experiments/, or the path of one")
    parser.add_argument("--columns", help="only these, separated by commas")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    experiment = Experiment.load(options.name)
    columns = None if options.columns is None else experiment.columns_in(options.columns)
    results = reproduce(experiment, options.out, options.jobs, options.device, on_event, columns)
    print(markdown(experiment, summarise(experiment, results)))


if __name__ == "__main__":
    main()
