"""Makes one Upload from a client's trained model and its data."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.errors import InputError, one_line
from maecho.linalg.finite import is_finite
from maecho.linalg.gaussians import Covariance
from maecho.network import layers
from maecho.network.attention import slow_path
from maecho.network.batches.labels import NO_LABELS
from maecho.network.batches.reading import SAY_WHERE, Read, Reader, Reading
from maecho.network.directions import Labels
from maecho.network.forward import evaluating, forward
from maecho.network.packed.linears import Split
from maecho.network.packed.twin import Twin, compared, twin_of
from maecho.network.plain import plain
from maecho.network.spaces import Spaces
from maecho.network.tracing import proven
from maecho.network.verified import Peeked
from maecho.privacy import Privacy
from maecho.statistics import NEEDED_BY, STATISTICS, Options, Statistic
from maecho.statistics.features import NO_NARROW_LAYER
from maecho.statistics.of_layers import OfLayers
from maecho.statistics.parts import COUNTS, TENSORS
from maecho.statistics.passes.gather import Gathered, gather
from maecho.statistics.statistic import Setting
from maecho.upload import size
from maecho.upload.checks import not_finite
from maecho.upload.private import gather_privately
from maecho.upload.upload import Upload


@devices.outside_inference
def make_upload(
    model: nn.Module,
    batches: Iterable[Any],
    client: str,
    statistics: Iterable[str] | None = None,
    rank: int | float | str | Mapping[str, int] | None = "4x",
    progress: bool | None = None,
    labels: Labels | Read = "expected",
    generator: torch.Generator | None = None,
    gaussians: int = 1,
    covariance: Covariance = "class",
    mean_of: int | None = Options.mean_of,
    privacy: Privacy | None = None,
    inputs: Read | None = None,
    outputs: Read | None = None,
    for_methods: Iterable[str | Needing] | None = None,
) -> Upload:
    """Make what this client sends: the model's weights, and statistics of its layers' inputs on these batches.

    Args:
        model: the trained model. It is left unchanged.
        batches: (inputs, labels), inputs alone, dicts, or another form that docs/batches.md names. They are read once.
        client: the client's name. No other client may have the same one.
        statistics: names of the statistics to send. By default these are "gram", "projector", "classes", "moments" and
            "features" (moments of the inputs of the first fully connected layer after other layers), which need only
            forward passes. On demand there are "targets" (sums of the last layer's inputs by class, for AFL), "fisher"
            (one number for each weight, so as large as the weights) and "gradients" (one matrix for each layer). The
            last two need backward passes. With privacy only "moments" and "classes" can be sent, and they are the
            default.
        rank: how far Grams, projectors and covariances are cut. It may be a number of directions (64), one for each
            layer ({"fc1": 64}; what is not named stays whole), a share of their energy (0.999), a size for the whole
            upload, or None for no cut. A size is "5 MB", or "3x" the size of what cannot be cut: weights, counts, class
            means, "fisher" and "targets". Class means of large images can outweigh a small network. A size counts
            tensors, not the file's header. It keeps the largest share of energy that fits.
        progress: a progress bar: True, False, or None for one on a terminal if it takes long.
        labels: the labels for the gradients of "fisher" and "gradients". "expected" averages over the model's own
            predictions: it is exact, takes one backward pass for each class, and needs no labels. "sampled" takes one
            random combination of them for each example: it is right on average, takes one backward pass, and suits
            models of many classes. "observed" takes the batches' labels: the empirical Fisher. A function finds the
            labels in a batch, for all statistics; then the gradients are those of "expected".
        generator: the source of the random signs of "sampled".
        gaussians: how many Gaussians the "moments" hold for each class. K-means finds them. More describe the data
            better and take more room.
        covariance: "class" gives each Gaussian of "moments" and "features" its own covariance. "shared" gives all of
            them one, which takes less room.
        mean_of: how many examples in a row a mean is over, for the "projector". Batches are joined or cut to that. The
            paper's release takes 64. With None it is the smallest power of two that makes at most 128 means.
        privacy: adds noise to all that is sent about the data, including the number of examples. The weights are not
            covered.
        inputs: a function that finds the inputs in a batch, if the usual rules do not.
        outputs: a function that finds the scores in what the model returns, if the usual rules do not.
        for_methods: the methods that will merge the uploads, by name or as objects. Then what these can read is sent
            and nothing else, which takes less time and room. `statistics` come beside them.

    Warns of all that is lost: labels that cannot be used, statistics that cannot be made, layers that are not seen.
    """
    model = plain(model, f"{client}: the model")
    if for_methods is not None:
        statistics = [*_needed(client, for_methods, privacy), *(statistics or ())]
    wanted = _wanted(client, statistics, privacy)
    try:
        reading = Reading(inputs, labels if callable(labels) else None, outputs)
        options = Options("expected" if callable(labels) else labels, generator, gaussians, covariance, mean_of)
        if privacy is not None and gaussians > 1:
            raise InputError(f"with privacy there must be one Gaussian a class, got gaussians={gaussians}")
    except InputError as error:
        raise InputError(f"{client}: {error}") from error
    promise = {} if privacy is None else {"privacy": privacy.recipe()}
    rule = size.parse(rank)
    reader = Reader(model, client, reading)
    twin, batches = _twin(client, model, batches, reader)
    architecture = layers.read(twin.network)
    if isinstance(rule, size.ByLayer):
        rule.check(layer.name for layer in architecture.layers.values())
    weights = _weights(twin.network, architecture, client)
    matrices = sum(bool(statistic.kind not in (COUNTS, TENSORS)) for statistic in wanted)
    room = size.room(rule, sum(tensor.nbytes for tensor in weights.values()), matrices)
    setting = Setting(client, twin.network, architecture, options, room=room, reader=reader)
    if privacy is None:
        gathered = gather(setting, batches, wanted, progress)
    else:
        gathered = gather_privately(setting, batches, wanted, privacy, progress)
    architecture = gathered.architecture
    if architecture.unknown:
        warnings.warn(
            f"{client}: these are averaged without statistics, since maecho cannot read them as matrices: "
            f"{', '.join(architecture.unknown)}",
            stacklevel=3,
        )
    _warn(client, gathered, by_default=statistics is None)
    not_sent = dict(gathered.missing)
    known = replace(options, examples=gathered.found.examples)
    spaces = _spaces(client, twin.network, gathered.inputs, not_sent)
    upload = Upload(
        client=client,
        examples=gathered.found.examples,
        weights=weights,
        layers=gathered.found.layers,
        head=gathered.found.head,
        aliases=architecture.aliases,
        spaces=spaces,
        statistics=gathered.values,
        recipe={
            "statistics": [statistic.name for statistic in wanted],
            "rank": dict(rank) if isinstance(rank, Mapping) else rank,
            **{statistic.name: statistic.recipe(known) for statistic in wanted},
            "not_sent": not_sent,
            "unknown": list(architecture.unknown),
            **promise,
        },
        stored=twin.stored,
    )
    while True:
        try:
            return size.cut(upload, rule)
        except size.NotEnough:
            assert room is not None
            room *= 4
            upload = replace(upload, statistics=gathered.remade(room))


def _warn(client: str, gathered: Gathered, by_default: bool) -> None:
    """Warn of statistics that were asked for and could not be made, and of layers that are missing in others."""
    lost = []
    for reason in dict.fromkeys(gathered.missing.values()):
        if reason == NO_NARROW_LAYER or (by_default and reason == NO_LABELS):
            continue  # nothing is lost: such a network has no features to send, and such batches no labels
        names = ", ".join(name for name, why in gathered.missing.items() if why == reason)
        lost.append(f"not sent: {names}, since {reason}; {SAY_WHERE}, or name in statistics= what to send")
    of_layers = ", ".join(name for name in gathered.values if isinstance(STATISTICS[name], OfLayers))
    if gathered.idle and of_layers:
        lost.append(
            f"nothing of {', '.join(gathered.idle)} is in {of_layers}, since no module of that name ran on these "
            "batches; let forward() call the module itself, or give batches that reach it"
        )
    for sentence in lost:
        warnings.warn(one_line(f"{client}: {sentence}"), stacklevel=4)


class Needing(Protocol):
    """A method, of which only its needs count here."""

    @property
    def needs(self) -> frozenset[str]: ...


def _needed(client: str, methods: Iterable[str | Needing], privacy: Privacy | None) -> list[str]:
    """The statistics that methods need, and those that they read if they are there. With privacy, of the latter those
    that can be sent."""
    if isinstance(methods, str):
        raise InputError(f"{client}: for_methods must be a list from {', '.join(NEEDED_BY)}, got the text {methods!r}")
    names: set[str] = set()
    for method in methods:
        if isinstance(method, str) and method not in NEEDED_BY:
            raise InputError(f"{client}: for_methods must be among {', '.join(NEEDED_BY)}, got {method!r}")
        if isinstance(method, str):
            needs, uses = NEEDED_BY[method]
        else:
            needs, uses = method.needs, getattr(method, "uses", frozenset())
        names |= needs | {name for name in uses if privacy is None or STATISTICS[name].private}
    return [name for name in STATISTICS if name in names]


def _wanted(client: str, statistics: Iterable[str] | None, privacy: Privacy | None) -> list[Statistic]:
    """The rows of STATISTICS to send. With privacy, only those that can be sent with noise are allowed."""
    private = [name for name, statistic in STATISTICS.items() if statistic.private]
    if statistics is None:
        default = [name for name, statistic in STATISTICS.items() if statistic.by_default]
        statistics = default if privacy is None else private
    if isinstance(statistics, str):
        raise InputError(
            f"{client}: statistics must be a list from {', '.join(STATISTICS)}, got the text {statistics!r}"
        )
    names = list(dict.fromkeys(statistics))
    for name in names:
        if name not in STATISTICS:
            raise InputError(f"{client}: statistics must be among {', '.join(STATISTICS)}, got {name!r}")
        if privacy is not None and name not in private:
            raise InputError(f"{client}: with privacy the statistics must be among {', '.join(private)}, got {name!r}")
    return [STATISTICS[name] for name in names]


def _spaces(client: str, model: nn.Module, inputs: Any, not_sent: dict[str, str]) -> Spaces | None:
    """The neuron spaces that hold on these inputs. Why others are left out is noted in `not_sent`: only matching needs
    them."""
    try:
        spaces, left_out = proven(model, inputs)
    except InputError as error:
        not_sent["spaces"] = str(error)
        return None
    if left_out:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        warnings.warn(
            one_line(f"{client}: the neurons of these layers keep their order in matching: {reasons}"), stacklevel=4
        )
    not_sent |= {f"space {name!r}": reason for name, reason in left_out.items()}
    return spaces


def _twin(client: str, model: nn.Module, batches: Iterable[Any], reader: Reader) -> tuple[Twin, Iterable[Any]]:
    """The network on which statistics are gathered, and the batches. The first batch shows whether split modules
    compute what they did before. Those that do not stay whole. All do if the network does not run with them."""
    try:
        twin = twin_of(model, always_copy=False)
    except InputError:  # it cannot be copied
        return Twin(model, (), ()), batches
    split = {name for name, module in twin.network.named_modules() if isinstance(module, Split)}
    if not split:
        return twin, batches
    peeked = Peeked(batches, reader)
    with evaluating(model), slow_path(), compared(twin, model) as wrong:
        first = [] if peeked.first is None else [peeked.first]
        try:
            for _ in forward(twin.network, first, client, False, reader=reader):
                pass
        except InputError:  # it reads their packed weights itself, or does not take the batch at all
            wrong |= split
    return twin_of(model, wrong) if wrong else twin, peeked


def _weights(model: nn.Module, architecture: layers.Architecture, client: str) -> dict[str, Tensor]:
    weights = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{client}: every entry of the state_dict must be a tensor, got {name!r}: {type(value).__name__}"
            )
        if not is_finite(value):
            raise InputError(f"{client}: {not_finite(name)}")
        if name not in architecture.aliases:
            weights[name] = value.detach().to("cpu", copy=True)
    return weights
