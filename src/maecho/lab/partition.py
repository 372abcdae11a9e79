"""How the examples of one data set are divided among clients.

A part is one client's array of indices. The paper's one-shot experiments use `dirichlet`, those with shifted domains
`by_groups`, those that draw images `by_labels`, and its multi-round ones `by_classes`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from jaxtyping import Bool, Float, Int
    from numpy.typing import ArrayLike

# The most integers in one block of tries: many tries in one numpy call, in a few megabytes.
_BLOCK = 2**18


def dirichlet(
    labels: ArrayLike,
    clients: int,
    beta: float,
    rng: np.random.Generator,
    min_size: int = 10,
    max_tries: int = 1_000_000,
) -> list[np.ndarray]:
    """Divide every class among clients by proportions p ~ Dir(β·1). With a smaller β fewer clients get a class.

    The rule is that of Yurochkin et al. (2019) and of the MA-Echo release. It draws p for one class after the other. A
    client that already holds its fair share, n/clients examples, gets nothing of the class, and the rest of p is
    renormalised. The class of n_c examples is cut at floor(cumsum(p)·n_c). The whole draw is repeated until every
    client holds at least `min_size` examples.

    The last condition needs only counts. So tries are made on counts, many at once, and the first one that passes is
    kept, which gives the same distribution as trying one after the other. Indices are shuffled and cut once, at the
    end. On MNIST at β = 0.01 about one try in 5 passes for 10 clients, one in 1,750 for 20, none in a million for 50.
    """
    labels = _as_labels("dirichlet", labels)
    if clients < 1:
        raise ValueError(f"dirichlet: clients must be at least 1, got {clients}")
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"dirichlet: beta must be positive and finite, got {beta}")
    if min_size < 0:
        raise ValueError(f"dirichlet: min_size must be at least 0, got {min_size}")
    if max_tries < 1:
        raise ValueError(f"dirichlet: max_tries must be at least 1, got {max_tries}")
    if clients * min_size > len(labels):
        raise ValueError(
            f"dirichlet: {clients} clients with at least {min_size} examples each need {clients * min_size}, "
            f"got {len(labels)}"
        )
    values, sizes = np.unique(labels, return_counts=True)
    cuts = _accepted_cuts(sizes, clients, beta, rng, min_size, max_tries)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for value, cut in zip(values, cuts, strict=True):
        pieces = np.split(rng.permutation(np.flatnonzero(labels == value)), cut[:-1])
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return [rng.permutation(np.concatenate(part)) for part in parts]


def by_classes(labels: ArrayLike, clients: int, classes_per_client: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Give every client `classes_per_client` classes, and divide a class evenly over the clients that hold it.

    Clients choose in turn, each at random among the classes with the fewest holders, so the numbers of holders differ
    by at most one. With fewer places (clients · classes_per_client) than classes some classes have no holder: their
    examples go unused, and the parts do not cover the data.
    """
    labels = _as_labels("by_classes", labels)
    values = np.unique(labels)
    if clients < 1:
        raise ValueError(f"by_classes: clients must be at least 1, got {clients}")
    if not 1 <= classes_per_client <= len(values):
        raise ValueError(
            f"by_classes: classes_per_client must lie between 1 and the {len(values)} classes of the labels, "
            f"got {classes_per_client}"
        )
    holders: list[list[int]] = [[] for _ in values]
    # Clients choose in a random order; otherwise the first ones would always hold disjoint classes.
    for client in rng.permutation(clients):
        rarest_first = np.lexsort((rng.random(len(values)), np.array([len(h) for h in holders])))
        for c in rarest_first[:classes_per_client]:
            holders[c].append(int(client))
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for value, holding in zip(values, holders, strict=True):
        indices = rng.permutation(np.flatnonzero(labels == value))
        if len(indices) < len(holding):
            raise ValueError(
                f"by_classes: class {value} has {len(indices)} examples, too few for the {len(holding)} clients that "
                "hold it; ask for fewer clients or fewer classes_per_client"
            )
        if holding:
            for client, piece in zip(holding, np.array_split(indices, len(holding)), strict=True):
                parts[client].append(piece)
    return [rng.permutation(np.concatenate(part)) for part in parts]


def by_groups(groups: ArrayLike, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide examples by their origin: a writer, a hospital, a domain.

    If there are at least as many groups as clients, every group goes to one client as a whole. Groups come in random
    order, and each goes to the client with the fewest examples so far. If there are fewer groups, every client gets a
    part of one group. Then every group is divided evenly among its clients. All groups have the same number of clients,
    and if some clients are left over, the largest groups have one more.
    """
    groups = _as_labels("by_groups", groups)
    values, sizes = np.unique(groups, return_counts=True)
    if clients < 1:
        raise ValueError(f"by_groups: clients must be at least 1, got {clients}")
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    if len(values) >= clients:
        held = np.zeros(clients, dtype=np.int64)
        for g in rng.permutation(len(values)):
            smallest = int(held.argmin())
            parts[smallest].append(np.flatnonzero(groups == values[g]))
            held[smallest] += sizes[g]
    else:
        holders = np.full(len(values), clients // len(values))
        holders[np.argsort(-sizes, kind="stable")[: clients % len(values)]] += 1
        client = 0
        for value, size, number in zip(values, sizes, holders, strict=True):
            if size < number:
                raise ValueError(f"by_groups: group {value} has {size} examples, too few for its {number} clients")
            for piece in np.array_split(rng.permutation(np.flatnonzero(groups == value)), number):
                parts[client].append(piece)
                client += 1
    return [rng.permutation(np.concatenate(part)) for part in parts]


def by_labels(labels: ArrayLike, sets: Sequence[Collection[int]], rng: np.random.Generator) -> list[np.ndarray]:
    """Give client i the examples of the labels `sets[i]`. A label that several clients list is divided evenly among
    them. Examples of labels that nobody lists go unused."""
    labels = _as_labels("by_labels", labels)
    if not sets or not all(len(one) for one in sets):
        raise ValueError(f"by_labels: every client must have one label or more, got {[list(one) for one in sets]}")
    parts: list[list[np.ndarray]] = [[] for _ in sets]
    for label in sorted({label for one in sets for label in one}):
        holding = [client for client, one in enumerate(sets) if label in one]
        indices = rng.permutation(np.flatnonzero(labels == label))
        if len(indices) < len(holding):
            raise ValueError(
                f"by_labels: label {label} has {len(indices)} examples, too few for the {len(holding)} clients that "
                "list it"
            )
        for client, piece in zip(holding, np.array_split(indices, len(holding)), strict=True):
            parts[client].append(piece)
    return [rng.permutation(np.concatenate(part)) for part in parts]


def class_counts(labels: ArrayLike, parts: list[np.ndarray], classes: int) -> Int[np.ndarray, "clients classes"]:
    """How many examples of class 0, 1, ... each part holds."""
    labels = _as_labels("class_counts", labels)
    if not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"class_counts: labels must lie in 0..{classes - 1}, got {labels.min()}..{labels.max()} "
            f"for classes={classes}"
        )
    return np.array([np.bincount(labels[part], minlength=classes) for part in parts]).reshape(len(parts), classes)


def _accepted_cuts(
    sizes: Int[np.ndarray, " classes"],
    clients: int,
    beta: float,
    rng: np.random.Generator,
    min_size: int,
    max_tries: int,
) -> Int[np.ndarray, "classes clients"]:
    """The cuts of the first try after which every client holds at least `min_size` examples."""
    largest = max(1, _BLOCK // (len(sizes) * clients))
    done, block = 0, 1
    while done < max_tries:
        # Blocks double: an easy request needs one try, a hard one thousands.
        block = min(block, max_tries - done, largest)
        cuts = _try_cuts(sizes, clients, beta, rng, block)
        held = np.diff(cuts, axis=2, prepend=0).sum(axis=1)
        passed = np.flatnonzero((held >= min_size).all(axis=1))
        if passed.size:
            first: np.ndarray = cuts[passed[0]]
            return first
        done, block = done + block, 2 * block
    raise ValueError(
        f"dirichlet: none of {max_tries} tries gave each of {clients} clients {min_size} examples at beta={beta} "
        f"({len(sizes)} classes, {sizes.sum()} examples): raise beta or max_tries, lower clients or min_size"
    )


def _try_cuts(
    sizes: Int[np.ndarray, " classes"], clients: int, beta: float, rng: np.random.Generator, tries: int
) -> Int[np.ndarray, "tries classes clients"]:
    """Independent tries of the rule. Of class c, client k gets the examples between cut k-1 and cut k."""
    fair_share = sizes.sum() / clients
    held = np.zeros((tries, clients), dtype=np.int64)
    cuts = np.empty((tries, len(sizes), clients), dtype=np.int64)
    for c, size in enumerate(sizes):
        cuts[:, c] = np.floor(_cumulative(beta, held < fair_share, rng) * size)
        held += np.diff(cuts[:, c], axis=1, prepend=0)
    return cuts


def _cumulative(
    beta: float, is_open: Bool[np.ndarray, "tries clients"], rng: np.random.Generator
) -> Float[np.ndarray, "tries clients"]:
    """Cumulative sums of p ~ Dir(β·1), restricted to the clients that are open (may get more) and renormalised.

    At small β an ordinary Dirichlet draw underflows: nearly all of p is exactly 0. If all open clients have zeros,
    renormalising computes 0/0. So the draw is made in logarithms. It is a softmax of logarithms of gamma draws G(β),
    and log G(β) has the same distribution as log G(β+1) + log(U)/β, which does not underflow for any β.
    """
    log_weight = np.log(rng.standard_gamma(beta + 1, is_open.shape))
    # Below 1e-300 the division would overflow, and the largest weight takes everything long before that.
    log_weight -= rng.standard_exponential(is_open.shape) / max(beta, 1e-300)
    log_weight[~is_open] = -np.inf
    # Somebody is always open: with classes left to deal, not everyone can hold a fair share of all examples.
    weight = np.exp(log_weight - log_weight.max(axis=1, keepdims=True))
    sums: np.ndarray = np.cumsum(weight, axis=1)
    # Dividing by the last sum ends every row at exactly 1, so rounding leaves nothing to a closed last client.
    sums /= sums[:, -1:]
    return sums


def _as_labels(who: str, labels: ArrayLike) -> Int[np.ndarray, " n"]:
    array = np.asarray(labels)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{who}: labels must be one non-empty row of integers, got shape {array.shape} of {array.dtype}"
        )
    return array
