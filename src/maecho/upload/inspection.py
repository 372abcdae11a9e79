"""What leaves a client, said so that a person can decide whether to send it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from maecho.statistics.gaussians import NO_CLASS
from maecho.upload.upload import SPECTRA, Upload

REVEALS = {
    "weights": "The trained model. Like any shared model it can be probed for whether an example was in its training "
    "data, and it can hold traces of rare ones.",
    "gram": "Sums of products of a layer's inputs. At the first layer these are pixels or features themselves: which "
    "occur together, and how strongly. With fewer examples than inputs, the span of the examples is known exactly.",
    "projector": "Directions in which batch means of a layer's inputs lie. At the first layer the leading ones look "
    "like average inputs.",
    "classes": "How many examples of each class the client has.",
    "moments": "The average raw input of every class and how inputs vary around it. For aligned images the averages "
    "are recognisable pictures. An average of one example is that example.",
    "features": "The average of what reaches one layer, class by class, and how it varies: what the network makes of "
    "the inputs. Harder to turn back into inputs than moments of these, not safe from it.",
    "targets": "Sums of what reaches the last layer, class by class: with the counts, the average features of every "
    "class. The sum of one example is that example's features.",
    "fisher": "How much each single weight matters to the model's answers on the data. At the first layer it shows "
    "which pixels or features occur; all of it together, how sure the model is of these data.",
    "gradients": "Directions in which a layer's outputs would change the model's answers on the data. At the last "
    "layer these say which classes the model confuses; with labels='observed', which labels it gets wrong.",
}
"""In plain words, what each part can reveal."""

FEW = 10
"""Examples of a class up to which its mean says much about single ones."""


@dataclass(frozen=True)
class Entry:
    """One tensor of an upload."""

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    rank: int | None
    """Directions kept, of several covariances the most; None for a plain tensor."""


def entries(upload: Upload) -> list[Entry]:
    """Every tensor that travels."""
    ranks = {f"{kind}/{name}": s.rank for kind, part in SPECTRA.items() for name, s in getattr(upload, part).items()}
    moments = {f"features/{name}": m for name, m in upload.features.items()}
    if upload.moments is not None:
        moments["moments"] = upload.moments
    ranks |= {f"{key}/covariances": max(c.rank for c in m.covariances) for key, m in moments.items()}

    def entry(key: str, tensor: Tensor) -> Entry:
        part, _, name = key.partition("/")
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Entry(part, name or part, tuple(tensor.shape), dtype, tensor.nbytes, ranks.get(key.rpartition("/")[0]))

    return [entry(key, tensor) for key, tensor in upload.tensors().items()]


def averaged(upload: Upload) -> list[str]:
    """Names that have no input matrix: every method only averages them."""
    merged = {name for layer in upload.layers for name in (layer.weight, layer.bias)}
    return [name for name in upload.weights if name not in merged]


def privacy(upload: Upload) -> str | None:
    """What its maker promises of it, in one sentence, if anything."""
    said = upload.recipe.get("privacy")
    if not isinstance(said, Mapping):
        return None
    epsilon = said.get("epsilon")
    shown = f"{epsilon:.4g}" if isinstance(epsilon, int | float) else epsilon
    return (
        f"(ε, δ) = ({shown}, {said.get('delta')}) for {said.get('neighbouring')}, by noise of multiplier "
        f"{said.get('noise')} on inputs clipped to norm {said.get('clip')}. It covers {said.get('covers')}"
    )


def warnings(upload: Upload) -> list[str]:
    """What the sender should think about first. With privacy, counts are noisy and means say nothing for sure."""
    found: list[str] = []
    if privacy(upload) is not None:
        return found
    if upload.moments is not None:
        for label, count in zip(upload.moments.classes.tolist(), upload.moments.counts.tolist(), strict=True):
            which = "the data" if label == NO_CLASS else f"class {label}"
            if count == 1:
                found.append(f"{which} has 1 example: its mean IS that example")
            elif count <= FEW:
                found.append(f"{which} has only {count} examples: its mean and covariance nearly are those examples")
    if upload.targets is not None and upload.class_counts is not None:
        single = [str(label) for label, count in enumerate(upload.class_counts.tolist()) if count == 1]
        if single:
            found.append(f"1 example of class {', '.join(single)}: its row of targets IS its features")
    thin = [name for name, gram in upload.grams.items() if gram.basis is not None and upload.examples < gram.width]
    if thin:
        found.append(
            f"fewer examples ({upload.examples}) than inputs at {', '.join(thin)}: the Gram spans just those examples"
        )
    return found
