"""When to use which method: what `maecho methods` and the README say, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guide:
    """One method, for somebody who has to choose."""

    does: str
    uploads: str
    """What must be uploaded beside the weights."""
    different: str
    """Does it hold for clients that started from different initialisations?"""
    convolutions: str
    residual: str
    cost: str
    """On the server."""
    when: str


GUIDES: dict[str, Guide] = {
    "fedavg": Guide(
        "the average, by examples or uniform; `head=class-aware`: each class's row over the clients that have it",
        "nothing (class counts for that head)", "no", "yes", "yes", "one pass; memory of one upload",
        "models that are nearly alike; the baseline",
    ),
    "ma-echo": Guide(
        "moves all models together, each only where its own data do not look",
        "projectors (or Grams); class counts if there are any", "MLPs yes, CNNs less", "yes", "yes",
        "seconds; all uploads, or one with `solver=limit`", "the paper's method",
    ),
    "ma-echo+ot": Guide(
        "`ot`'s alignment, then `ma-echo`",
        "projectors (or Grams); neuron spaces (found by tracing)", "yes", "yes", "yes", "seconds; all uploads",
        "as `ma-echo`, where clients started differently",
    ),
    "ot": Guide(
        "neurons of all clients transported to one client's order, by weights or by activations on drawn inputs, then "
        "averaged",
        "neuron spaces (found by tracing); for activations moments and `model=`", "with similar data", "yes", "yes",
        "seconds; all uploads",
        "different initialisations, similar data",
    ),
    "pfnm": Guide(
        "neurons assigned to common ones, as many as the data ask for, then averaged; the network may grow",
        "neuron spaces (found by tracing)", "yes, by growing", "no", "no", "seconds; all uploads",
        "MLPs, where a wider network is welcome",
    ),
    "fedma": Guide(
        "the same for every layer that matching knows; by default widths stay",
        "neuron spaces (found by tracing)", "with similar data", "yes", "yes", "seconds; all uploads",
        "as `ot`, with more than two clients and no preferred one",
    ),
    "regmean": Guide(
        "the layer closest to every client's own on its own inputs, in closed form",
        "Grams", "yes", "yes", "yes", "one solve a layer; memory of one upload",
        "the first thing to try where the network itself is not at hand",
    ),
    "fisher": Guide(
        "every single weight averaged by how much it matters to each client's answers",
        "`fisher`, as large as the weights (backward passes at the client)", "no", "yes", "yes",
        "one pass; memory of one upload", "models from one initialisation; networks of which much is not matrices",
    ),
    "kronecker": Guide(
        "RegMean that also weighs outputs: A ⊗ B of inputs and of gradients (FedLPA, FedFisher)",
        "Grams, `gradients` (backward passes at the client)", "yes", "yes", "yes",
        "conjugate gradients, seconds to minutes; all uploads", "few classes a client",
    ),
    "afl": Guide(
        "a new head by ridge regression of the labels, exactly the one that all data in one place would give",
        "Grams and `targets`, with `rank=None` to be exact", "the backbone must be shared", "yes", "yes",
        "one solve; memory of one upload", "clients that share a frozen, pretrained backbone",
    ),
    "dense": Guide(
        "trains on the server: a generator against the clients' ensemble, then one model on what it generates",
        "the network itself (`model=`); moments, or only `input_shape=`", "yes", "yes", "yes",
        "a minute on a CPU at the small budget, minutes on a GPU at the paper's; all models",
        "when training on the server is allowed and the ensemble is good",
    ),
    "echo-chain": Guide(
        "layer after layer fitted to the clients' layers, on drawn inputs that have passed the merged layers before",
        "the network itself (`model=`); moments of the raw inputs; better with features", "yes", "yes", "yes",
        "seconds (of CNNs on a CPU minutes); memory of one upload, a chunk of inputs and, with features, up to 1 GiB",
        "the best in one shot; `maecho.relay` for more rounds",
    ),
}  # fmt: skip


def markdown() -> str:
    """The table of the README."""
    heads = ("method", "what it does", "uploaded beside the weights", "different initialisations", "convolutions",
             "residual networks", "cost on the server", "when to use it")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, g in GUIDES.items():
        cells = (f"`{name}`", g.does, g.uploads, g.different, g.convolutions, g.residual, g.cost, g.when)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
