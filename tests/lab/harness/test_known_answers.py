"""Every kind of column on data whose accuracies are known: each wrong reading would give another number."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maecho import aggregate, relay
from maecho.aggregation.average import HOLDS
from maecho.lab import partition
from maecho.lab.harness import columns
from maecho.lab.harness.runs import reproduce
from maecho.lab.harness.streams import Streams
from maecho.upload import storage
from support import known

BETA = 0.1


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> known.Training:
    monkeypatch.setenv("MAECHO_CACHE", str(tmp_path / "cache"))
    return known.Training(monkeypatch)


def run(tmp_path: Path, methods: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    (found,) = reproduce(known.experiment(methods, **changes), tmp_path)["runs"]
    return found


def matrices(found: dict[str, Any]) -> list[np.ndarray]:
    """What `known.fit` has given the clients, from the partition that the run reports."""
    held = [[c for c, n in enumerate(counts) if n] for counts in found["partition"]]
    return [known.weights(one, known.SCALES[i]) for i, one in enumerate(held)]


def softmax(scores: np.ndarray) -> np.ndarray:
    shares: np.ndarray = np.exp(scores) / np.exp(scores).sum(0)
    return shares


@pytest.mark.parametrize("batch", [1000, 30])
def test_accuracy_is_that_on_the_test_examples(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """A perfect model is right on all training examples, and on three quarters of the test. The last batch counts."""
    monkeypatch.setattr(columns, "TEST_BATCH", batch)
    found = run(tmp_path, {"pooled": {"method": "pooled"}})
    assert found["columns"]["pooled"]["accuracy"] == known.PERFECT == known.accuracy(np.eye(4))
    assert training.count == 1, "one model, trained on all data"


def test_every_run_is_split_as_its_own_cell_and_seed_say(tmp_path: Path, training: known.Training) -> None:
    cells = tuple({"clients": n, "beta": beta} for n in (2, 3) for beta in (0.1, 10.0))
    experiment = known.experiment({"local": {"method": "local"}}, cells=cells, seeds=(0, 1))
    labels = known.dataset().y_train.numpy()
    found = reproduce(experiment, tmp_path)["runs"]
    assert [(one["cell"], one["seed"]) for one in found] == [(cell, seed) for cell in cells for seed in (0, 1)]
    for one in found:
        rng = Streams.of(experiment, one["cell"], one["seed"]).partition()
        parts = partition.dirichlet(labels, one["cell"]["clients"], one["cell"]["beta"], rng)
        assert one["partition"] == partition.class_counts(labels, parts, known.CLASSES).tolist()
    assert len({str(one["partition"]) for one in found}) == len(found)


def test_local_is_the_mean_over_all_clients(tmp_path: Path, training: known.Training) -> None:
    found = run(tmp_path, {"local": {"method": "local"}})
    each = [known.accuracy(W) for W in matrices(found)]
    assert len(set(each)) == 3, "otherwise one client could stand for all"
    assert found["columns"]["local"]["accuracy"] == round(sum(each) / 3, 2)


def test_ensembles_combine_as_they_say(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients' scores are drawn so that every kind of ensemble decides otherwise."""

    def drawn(held: list[int], scale: float) -> np.ndarray:
        return scale * np.random.default_rng(11 + round(10 * scale)).normal(size=(known.CLASSES, known.CLASSES))

    monkeypatch.setattr(known, "weights", drawn)
    found = run(
        tmp_path,
        {
            "ensemble": {"method": "ensemble"},
            "ensemble, logits": {"method": "ensemble", "by": "logits"},
            "ensemble, class-aware": {"method": "ensemble", "by": "class-aware"},
        },
        cells=({"clients": 3, "beta": 0.5},),
        seeds=(11,),
    )
    Ws, counts = np.stack(matrices(found)), np.array(found["partition"])
    held = counts >= HOLDS
    assert (held.sum(0) > 1).any(), "a class of several clients"
    assert (counts[~held] > 0).any(), "a client with a single example of a class"
    expected = {
        "ensemble": softmax_mean(Ws),
        "ensemble, logits": Ws.mean(0),
        "ensemble, class-aware": class_mean(Ws, held),
    }
    accuracies = {name: known.accuracy(scores) for name, scores in expected.items()}
    assert len({*accuracies.values(), known.accuracy(class_mean(Ws, counts > 0))}) == 4, "one could stand for another"
    assert {name: column["accuracy"] for name, column in found["columns"].items()} == accuracies


def class_mean(Ws: np.ndarray, held: np.ndarray) -> np.ndarray:
    """The mean score of every class over the clients that hold it."""
    mean: np.ndarray = np.einsum("nkj,nk->kj", Ws, held.astype(float)) / held.sum(0)[:, None]
    return mean


def softmax_mean(Ws: np.ndarray) -> np.ndarray:
    return np.mean([softmax(W) for W in Ws], axis=0)


def test_a_method_of_the_table_merges_the_clients(tmp_path: Path, training: known.Training) -> None:
    """The average by examples, which differs from that without weights."""
    found = run(
        tmp_path,
        {"fedavg": {"method": "fedavg"}, "average, uniform": {"method": "fedavg", "weighting": "uniform"}},
    )
    Ws = np.stack(matrices(found))
    examples = np.array(found["partition"]).sum(1)
    assert found["columns"]["fedavg"]["accuracy"] == known.accuracy(np.average(Ws, axis=0, weights=examples))
    assert found["columns"]["average, uniform"]["accuracy"] == known.accuracy(Ws.mean(0))


@pytest.mark.parametrize("method", ["echo-relay", "echo-chain", "regmean", "ma-echo"])
def test_one_client_alone_comes_back(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Its model takes class 0 for class 1 and the other way round, so nothing that learns the labels would equal it."""
    monkeypatch.setattr(known, "weights", lambda held, scale: np.eye(4)[[1, 0, 2, 3]])
    found = run(tmp_path, {method: {"method": method}}, cells=({"clients": 1, "beta": 10},))
    swapped = known.accuracy(np.eye(4)[[1, 0, 2, 3]])
    assert found["columns"][method]["accuracy"] == swapped != known.PERFECT


def test_initialisations_are_the_same_or_different(tmp_path: Path, training: known.Training) -> None:
    run(tmp_path, {"local": {"method": "local"}})
    same, training.starts = training.starts, []
    run(
        tmp_path / "different",
        {"local": {"method": "local"}},
        cells=({"clients": 3, "beta": BETA, "init": "different"},),
    )
    assert len(same) == len(training.starts) == 3
    assert all(torch.equal(start, same[0]) for start in same)
    assert len({tuple(start.flatten().tolist()) for start in training.starts}) == 3


def test_every_client_has_a_random_stream_of_its_own(tmp_path: Path, training: known.Training) -> None:
    run(tmp_path, {"local": {"method": "local"}})
    assert len(set(training.seeds)) == 3


def test_the_order_of_batches_and_the_signs_of_labels_differ_between_clients_and_seeds(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = columns.make_upload, []

    def watched(model: Any, batches: Any, client: str, *args: Any, **options: Any) -> Any:
        seen.append((batches.rng.initial_seed(), options["generator"].initial_seed()))
        return made(model, batches, client, *args, **options)

    monkeypatch.setattr(columns, "make_upload", watched)
    for seed in (0, 1):
        run(tmp_path / str(seed), {"fedavg": {"method": "fedavg"}}, seeds=(seed,))
    orders, signs = zip(*seen, strict=True)
    assert len(set(orders) | set(signs)) == 12


def test_methods_that_draw_have_the_seed_of_the_run_unless_the_config_sets_it(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of one run share it, so that they draw the same inputs; runs do not."""
    seen: dict[str, list[int]] = {"ot": [], "ma-echo": [], "echo-relay": []}

    def watched(uploads: Any, method: str, **options: Any) -> Any:
        seen[method].append(options["seed"])
        return aggregate(uploads, method, **options)

    def relayed(*args: Any, **options: Any) -> Any:
        seen["echo-relay"].append(options["drawing"].seed)
        return relay(*args, **options)

    monkeypatch.setattr(columns, "aggregate", watched)
    monkeypatch.setattr(columns, "relay", relayed)
    methods = {
        "ma-echo": {"method": "ma-echo"},
        "ma-echo, seed 5": {"method": "ma-echo", "seed": 5},
        "ot": {"method": "ot"},
        "two rounds": {"method": "echo-relay", "rounds": 2, "draws": 20},
        "two rounds, seed 6": {"method": "echo-relay", "rounds": 2, "draws": 20, "seed": 6},
    }
    experiment = known.experiment(methods, seeds=(0, 1))
    reproduce(experiment, tmp_path)
    seeds = [Streams.of(experiment, experiment.cells[0], seed).method() for seed in (0, 1)]
    assert len({*seeds, 0}) == 3
    assert seen == {
        "ot": seeds,
        "ma-echo": [seeds[0], 5, seeds[1], 5],
        "echo-relay": [seeds[0], 6, seeds[1], 6],
    }


def test_bytes_are_those_of_the_client_that_sends_most(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of more classes sends more moments. The first client here sends least."""
    made, sizes = columns.make_upload, []

    def watched(*args: Any, **options: Any) -> Any:
        upload = made(*args, **options)
        sizes.append(upload.bytes({"moments", "features"}))
        return upload

    monkeypatch.setattr(columns, "make_upload", watched)
    found = run(tmp_path, {"echo-chain": {"method": "echo-chain"}})
    assert sizes[0] == min(sizes) < max(sizes)
    assert found["columns"]["echo-chain"]["bytes"] == max(sizes)


def test_uploads_are_whole_unless_the_column_says_otherwise(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = columns.make_upload, []

    def watched(*args: Any, **options: Any) -> Any:
        seen.append((args[3], options["rank"]))
        return made(*args, **options)

    monkeypatch.setattr(columns, "make_upload", watched)
    run(tmp_path, {"regmean": {"method": "regmean"}, "cut": {"method": "regmean", "upload": {"rank": 2}}})
    assert seen == [(["gram"], None)] * 3 + [(["gram"], 2)] * 3


def test_seconds_are_of_training_gathering_and_merging(
    tmp_path: Path, training: known.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds of training are kept with the client: a run that reads it from the cache says the same."""
    made = columns.make_upload

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return made(*args, **options)

    first = run(tmp_path, {"fedavg": {"method": "fedavg"}})["columns"]["fedavg"]
    monkeypatch.setattr(columns, "make_upload", slow)
    second = run(tmp_path / "again", {"fedavg": {"method": "fedavg"}})["columns"]["fedavg"]
    assert training.count == 3
    assert first["seconds"]["training"] == pytest.approx(sum(cached_seconds(tmp_path))), "of all clients together"
    assert set(first["seconds"]) == {"training", "gathering", "merging"}
    assert first["seconds"]["training"] == second["seconds"]["training"] > 0
    assert second["seconds"]["gathering"] >= 0.3, "measured each time, of three clients together"


def test_pooled_has_the_seconds_of_its_own_model(tmp_path: Path, training: known.Training) -> None:
    found = run(tmp_path, {"pooled": {"method": "pooled"}})["columns"]["pooled"]
    assert [found["seconds"]["training"]] == cached_seconds(tmp_path)


def test_of_a_client_from_the_cache_is_told_how_it_was_trained(tmp_path: Path, training: known.Training) -> None:
    """Seconds and device are those of its training, perhaps on another machine; the rest is measured here."""
    run(tmp_path, {"local": {"method": "local"}})
    for path in (tmp_path / "cache" / "clients").glob("*.safetensors"):
        trained = {**storage.read_about(path, "model")["trained"], "seconds": 100.0, "device": "an old machine"}
        storage.write_tensors(path, "model", storage.read_tensors(path), {"recipe": {}, "trained": trained})
    again = run(tmp_path / "again", {"local": {"method": "local"}})["columns"]["local"]
    assert training.count == 3
    assert (again["seconds"]["training"], again["trained_on"], again["device"]) == (300.0, "an old machine", "cpu")


def cached_seconds(tmp_path: Path) -> list[float]:
    """The seconds of training that stand in the cache, a number for every model."""
    files = (tmp_path / "cache" / "clients").glob("*.safetensors")
    return [storage.read_about(path, "model")["trained"]["seconds"] for path in files]
