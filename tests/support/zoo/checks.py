"""What a merge must give back: one client alone, and twins, which share a model and differ in data.

A method may refuse a network in one sentence instead. Nothing may be averaged in silence.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import maecho
from maecho.network.plain import plain
from support.zoo import ZOO
from support.zoo.entry import Entry, labels

EXACT = ("fedavg", "ma-echo", "regmean", "fisher", "ot", "ma-echo+ot")
"""Methods that give twins back as they were."""
CLOSE = ("echo-chain", "relay")
"""Methods that fit the head to the labels, so that twins come back as good, but not as they were."""
METHODS = (*EXACT, *CLOSE)
STATISTICS = ("gram", "projector", "classes", "moments", "features", "fisher")
TOLERANCE, LOST_ACCURACY, PROBABILITY_GAP = 1e-4, 0.005, 0.05
KINDS = {"alone": 1, "twins": 2}
DRAWS = 1000
TRAINED, OWN, HELD_OUT = 160, 48, 200
"""So many examples are trained on, held by a client, and measured on."""


@dataclass(frozen=True)
class Outcome:
    """What a method made of a network."""

    method: str
    change: float = 0.0
    """‖outputs after − outputs before‖ / ‖outputs before‖ on examples that nobody held."""
    lost: float = 0.0
    """How much less accurate it is, in [−1, 1]."""
    gap: float = 0.0
    """How far the probabilities moved, as a mean over examples and classes."""
    averaged: tuple[str, ...] = ()
    refused: str = ""
    """Why the method did not merge it. Empty if it did."""
    warned: tuple[str, ...] = ()

    def complaint(self, exact: bool) -> str | None:
        """What is wrong. None if nothing is."""
        if self.refused:
            return None if "\n" not in self.refused and len(self.refused) > 20 else f"no sentence: {self.refused!r}"
        if exact:
            return None if self.change <= TOLERANCE else f"the outputs changed by {self.change:.1e}"
        if self.lost > LOST_ACCURACY:
            return f"{100 * self.lost:.1f} points of accuracy are lost"
        return None if self.gap <= PROBABILITY_GAP else f"probabilities moved by {self.gap:.3f}"


@dataclass(frozen=True)
class Case:
    """A trained network, the data of its clients, and what clients upload."""

    name: str
    entry: Entry
    model: nn.Module
    data: tuple[Sequence[Any], ...]
    uploads: tuple[maecho.Upload, ...]
    refused: str
    warned: tuple[str, ...]

    def outcome(self, method: str, clients: int) -> Outcome:
        """Merge the first clients, which all have the same model."""
        if self.refused and method != "relay":
            return Outcome(method, refused=self.refused, warned=self.warned)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                merged = self._merged(method, clients)
            except maecho.InputError as error:
                return Outcome(method, refused=str(error), warned=(*self.warned, *_words(caught)))
        held_out = self.entry.batches(labels(HELD_OUT, 5), 7)
        before, y = self.entry.outputs(plain(self.model), held_out)
        after, _ = self.entry.outputs(self.entry.loaded(self.model, dict(merged)), held_out)
        lost = (before.argmax(1) == y).double().mean() - (after.argmax(1) == y).double().mean()
        return Outcome(
            method,
            float((after - before).norm() / before.norm()),
            float(lost),
            float((after.softmax(1) - before.softmax(1)).abs().mean()),
            tuple(merged.averaged),
            "",
            (*(() if method == "relay" else self.warned), *_words(caught)),
        )

    def _merged(self, method: str, clients: int) -> maecho.Merged:
        if method == "relay":
            return maecho.relay(self.model, [(self.model, data) for data in self.data[:clients]], progress=False)
        options = {"draws": DRAWS} if method == "echo-chain" else {}
        return maecho.aggregate(self.uploads[:clients], method, model=self.model, **options)


@functools.lru_cache(maxsize=1)
def case(name: str) -> Case:
    """A network of the zoo, trained, and two clients that hold it with different data."""
    entry = ZOO[name]
    model = entry.train(0, labels(TRAINED, 0))
    data = tuple(entry.batches(labels(OWN, i, common), 20 + i) for i, common in enumerate(((0, 1), (2, 3))))
    uploads: tuple[maecho.Upload, ...] = ()
    refused = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            uploads = tuple(
                maecho.make_upload(model, own, f"client {i}", STATISTICS, progress=False) for i, own in enumerate(data)
            )
        except maecho.InputError as error:
            refused = str(error)
    return Case(name, entry, model, data, uploads, refused, _words(caught))


def accuracy(entry: Entry, model: nn.Module) -> float:
    outputs, y = entry.outputs(plain(model), entry.batches(labels(HELD_OUT, 5), 7))
    return float((outputs.argmax(1) == y).double().mean())


def unnamed(of: Case, outcome: Outcome) -> list[str]:
    """Parameters that are multiplied as matrices, are only averaged, and are in no warning."""
    matrices = multiplied(of.entry, plain(of.model), of.data[0][:1]) - expected(of, outcome.method)
    words = {word.strip(",;:()") for sentence in outcome.warned for word in sentence.split()}
    return [name for name in outcome.averaged if name in matrices and not words & {name, name.rpartition(".")[0]}]


def expected(of: Case, method: str) -> set[str]:
    """Parameters that a method averages by what it is, so that no warning has to name them."""
    if method not in ("ma-echo", "ma-echo+ot", "fisher"):
        return set()
    upload = of.uploads[0]
    if method == "fisher":
        # The loss does not depend on these: a step backwards of which only the first state is read, for example.
        fishers = [own.statistics["fisher"] for own in of.uploads]
        zero = [name for name in fishers[0] if not any(own[name].any() for own in fishers)]
        return set(upload.model_names(zero))
    # MA-Echo as released averages the last layer's rows by class.
    return set(upload.model_names(name for name in upload.weights if name.rpartition(".")[0] == upload.head))


def multiplied(entry: Entry, model: nn.Module, batches: Sequence[Any]) -> set[str]:
    """The parameters that are a factor of a matrix product, a convolution or a lookup in this network."""
    by_memory: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter) and sum(size > 1 for size in tensor.shape) > 1:
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    with _Factors() as seen:
        entry.outputs(model, batches)
    return {name for memory in seen.memories for name in by_memory.get(memory, ())}


class _Factors(TorchDispatchMode):
    """Notes which memory is a factor in products."""

    FACTORS: ClassVar = {
        "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "convolution": (1,),
        "embedding": (0,), "_grouped_mm": (1,), "_embedding_bag_forward_only": (0,), "_embedding_bag": (0,),
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.memories: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for k in self.FACTORS.get(func._schema.name.removeprefix("aten::"), ()):
            if isinstance(args[k], Tensor):
                self.memories.add(args[k].untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


def _words(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(one.message) for one in caught))


def findings(name: str) -> Iterator[tuple[str, Outcome, str | None]]:
    """Every check of a network, such as "alone: ot", with its outcome and what is wrong."""
    of = case(name)
    for kind, clients in KINDS.items():
        for method in METHODS:
            found = of.outcome(method, clients)
            yield f"{kind}: {method}", found, complaint(of, found, kind)


def complaint(of: Case, found: Outcome, kind: str) -> str | None:
    """What is wrong with an outcome. None if nothing is."""
    wrong = found.complaint(exact=kind == "alone" or found.method in EXACT)
    silent = [] if wrong or found.refused or found.method in ("fedavg", "ot") else unnamed(of, found)
    return f"averaged in silence: {', '.join(silent)}" if silent else wrong
