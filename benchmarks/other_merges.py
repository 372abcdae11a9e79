"""FusionBench's and mergekit's merges for `peers.py`, on what a `Case` holds. Importing it needs neither package."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from peer_merges import SMALLEST, Case, State


def average(weights: Sequence[State]) -> State:
    from fusion_bench.method.simple_average import simple_average

    found: State = simple_average([dict(one) for one in weights])
    return found


def average_of_files(paths: Sequence[Path]) -> State:
    """FusionBench has no reader of its own for such files; this is what its loaders call."""
    from safetensors.torch import load_file

    return average([load_file(path) for path in paths])


def loaded(path: Path) -> State:
    from safetensors.torch import load_file

    found: State = load_file(path)
    return found


def linear_of_files(paths: Sequence[Path], out: Path) -> None:
    """mergekit's linear merge as its command `mergekit-pytorch` runs it, into a folder of its own."""
    from mergekit.graph import Executor
    from mergekit.options import MergeOptions
    from mergekit.scripts import merge_raw_pytorch as raw

    shutil.rmtree(out, ignore_errors=True)
    raw.SimpleLoaderCache._instance = None
    models = [raw.InputModelDefinition(model=str(path), parameters={"weight": 1.0}) for path in paths]
    options = MergeOptions(device="cpu", quiet=True)
    tasks = raw.plan_flat_merge(
        raw.RawPyTorchMergeConfig(merge_method="linear", models=models), str(out), False, False, options
    )
    Executor(tasks, math_device="cpu", storage_device="cpu").execute()


def regmean(weights: Sequence[State], grams: Sequence[State], names: dict[str, str], keep: float = 1.0) -> State:
    """`keep`: the factor for entries off the diagonal."""
    from fusion_bench.method.regmean.regmean import merging_with_regmean_weights

    # It looks for the Gram of NAME.weight under NAME.
    inner = {layer: name.removesuffix(".weight") for layer, name in names.items()}
    with torch.no_grad():
        found: State = merging_with_regmean_weights(
            {name: [one[name] for one in weights] for name in weights[0]},
            [{inner[layer]: G for layer, G in one.items()} for one in grams],
            reduce_non_diagonal_ratio=keep,
        )
    return found


def fisher(weights: Sequence[State], fishers: Sequence[State], normalised: bool = True) -> State:
    from fusion_bench.method.fisher_merging.fisher_merging import merging_with_fisher_weights

    with torch.no_grad():
        found: State = merging_with_fisher_weights(
            {name: [one[name] for one in weights] for name in weights[0]},
            list(fishers),
            torch.ones(len(weights)) / len(weights),
            normalize_fisher_weight=normalised,
            minimal_fisher_weight=SMALLEST,
        )
    return found


class Trainer:
    """What FusionBench asks of a trainer of transformers."""

    def __init__(self, batches: Sequence[dict[str, Tensor]]):
        self._batches = [{name: tensor for name, tensor in one.items() if name != "labels"} for one in batches]
        self._train_batch_size = len(batches[0]["labels"])

    def get_train_dataloader(self) -> list[dict[str, Tensor]]:
        return self._batches

    def _prepare_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return inputs


def regmean_from_data(case: Case, dtype: torch.dtype = torch.float32) -> State:
    from fusion_bench.method.regmean.regmean import regmean_merging

    models, trainers, counts = _parts(case, dtype)
    found: State = regmean_merging(models, trainers, [], counts)
    return found


def gathered_grams(case: Case) -> list[dict[str, Tensor]]:
    """The Grams that FusionBench gathers, in float64, read on their way to its merge. They are means over rows."""
    from fusion_bench.method.regmean import regmean as module

    seen: list[dict[str, Tensor]] = []
    merge = module.merging_with_regmean_weights

    def reading(models_to_merge_param_dict: Any, models_to_merge_regmean_weights_list: Any, **options: Any) -> State:
        seen.extend(models_to_merge_regmean_weights_list)
        return {}

    module.merging_with_regmean_weights = reading
    try:
        regmean_from_data(case, torch.float64)
    finally:
        module.merging_with_regmean_weights = merge
    return seen


def fisher_from_data(case: Case, dtype: torch.dtype = torch.float32) -> State:
    from fusion_bench.method.fisher_merging.fisher_merging import fisher_merging

    models, trainers, counts = _parts(case, dtype)
    found: State = fisher_merging(models, trainers, [], counts, minimal_fisher_weight=SMALLEST)
    return {name: tensor.detach() for name, tensor in found.items()}


def _parts(case: Case, dtype: torch.dtype) -> tuple[list[nn.Module], list[Any], list[int]]:
    models = case.models if dtype is torch.float32 else [copy.deepcopy(model).to(dtype) for model in case.models]
    data = [[_as(batch, dtype) for batch in own] for own in case.data]
    return models, [Trainer(own) for own in data], [sum(len(batch["labels"]) for batch in own) for own in data]


def _as(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}


PACKAGES = {"FusionBench": "fusion_bench", "mergekit": "mergekit"}


def found() -> dict[str, SimpleNamespace]:
    """Each peer: its version, or why it cannot be used."""
    import importlib
    from importlib.metadata import PackageNotFoundError, version

    out = {}
    for name, package in PACKAGES.items():
        try:
            importlib.import_module(package)
            out[name] = SimpleNamespace(version=version(package.replace("_", "-")), reason=None)
        except (ImportError, PackageNotFoundError, RuntimeError, AttributeError) as error:
            out[name] = SimpleNamespace(version=None, reason=f"{type(error).__name__}: {error}")
    return out
