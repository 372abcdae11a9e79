"""`maecho reproduce` for machines that have torch, numpy and safetensors alone, such as a GPU machine without internet.

PYTHONPATH=src python experiments/bare.py echo-cifar --columns local,echo-chain --jobs 6 --device cuda --out results
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from maecho.lab.experiment import Experiment
from maecho.lab.runs import reproduce
from maecho.lab.tables import markdown, summarise


def on_run(done: int, total: int, run: dict[str, Any]) -> None:
    figures = {name: column["accuracy"] for name, column in run["columns"].items()}
    print(f"{done} of {total}: {run['cell']} seed {run['seed']} {run['seconds']} {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a config of experiments/, or the path of one")
    parser.add_argument("--columns", help="only these, separated by commas")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    experiment = Experiment.load(options.name)
    columns = None if options.columns is None else options.columns.split(",")
    results = reproduce(experiment, options.out, options.jobs, options.device, on_run, columns)
    print(markdown(experiment, summarise(experiment, results)))


if __name__ == "__main__":
    main()
