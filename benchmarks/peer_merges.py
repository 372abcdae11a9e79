"""The merges of `peers.py`, three times each: ours, plainly in float64, and with the setting of the other package.

Nothing here needs the other packages. `other_merges.py` has theirs.

A case is N models of one network with Grams and Fisher values of their own. All clients have as many examples, so that
an average by number of examples is the plain one, which is the only one that the peers have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import maecho
from maecho.linalg.spectra import Spectrum

State = Mapping[str, Tensor]
SMALLEST = 1e-6
"""What FusionBench adds to every Fisher value by default."""


@dataclass
class Case:
    """What both sides get."""

    name: str
    models: list[nn.Module]
    data: list[list[dict[str, Tensor]]]
    """Batches of each client: the inputs by name, and `labels`."""
    uploads: list[maecho.Upload] = field(default_factory=list)
    """Weights, and with them Grams of the weights without biases (`gram`) and Fisher values (`fisher`)."""

    @property
    def weights(self) -> list[State]:
        return [upload.weights for upload in self.uploads]

    def grams(self, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
        """The Grams as plain matrices."""
        found = []
        for upload in self.uploads:
            double = {n: Spectrum(G.values, G.basis.double()) for n, G in upload.statistics["gram"].items()}
            found.append({name: G.dense()[0].to(dtype) for name, G in double.items()})
        return found

    @property
    def matrices(self) -> dict[str, str]:
        """Layer -> the name of its weight."""
        return {layer.name: layer.weight for layer in self.uploads[0].layers}

    def fishers(self) -> list[State]:
        return [upload.statistics["fisher"] for upload in self.uploads]


class Logits(nn.Sequential):
    """A network whose answer has its logits under that name, as the models of transformers have."""

    def forward(self, input: Tensor) -> Any:  # noqa: A002 - the name of a batch's entry
        return _Answer(super().forward(input))  # type: ignore[no-untyped-call]


@dataclass
class _Answer:
    logits: Tensor


def mlps(clients: int, rows: int, sizes: Sequence[int] = (784, 400, 200, 100, 10), distinct: int = 10) -> Case:
    """The paper's MLP, from one initialisation. Statistics of `distinct` clients are used again for the others: time
    depends on shapes and ranks."""
    rng = torch.Generator().manual_seed(0)
    start = _network(sizes, rng)
    models: list[nn.Module] = []
    data = []
    for _ in range(clients):
        models.append(Logits(*(_moved(part, rng) if isinstance(part, nn.Linear) else nn.ReLU() for part in start)))
        x = torch.randn(rows, sizes[0], generator=rng)
        y = torch.randint(0, sizes[-1], (rows,), generator=rng)
        data.append([{"input": a, "labels": b} for a, b in zip(x.split(64), y.split(64), strict=True)])
    case = Case(f"MLP, {clients} clients", models, data)
    case.uploads = uploads(case, distinct)
    return case


def _network(sizes: Sequence[int], rng: torch.Generator) -> list[nn.Module]:
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        linear = nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = torch.randn(outputs, inputs, generator=rng) / inputs**0.5
        parts += [linear, nn.ReLU()]
    return parts[:-1]


def _moved(part: nn.Linear, rng: torch.Generator) -> nn.Linear:
    """A layer that has moved away from its initialisation by a tenth of its norm."""
    new = nn.Linear(part.in_features, part.out_features, bias=False)
    W = part.weight.detach()
    new.weight.data = W + 0.1 * W.std() * torch.randn(W.shape, generator=rng)
    return new


def transformers(clients: int, sequences: int, layers: int = 9, width: int = 384, words: int = 24_000) -> Case:
    """A network like BERT of 20 M parameters, made from a config."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=6,
        intermediate_size=2 * width,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = 3
    rng = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [BertForSequenceClassification(config)]
    start = models[0].state_dict()
    for _ in range(clients - 1):
        model = BertForSequenceClassification(config)
        model.load_state_dict({n: t + 0.002 * torch.randn(t.shape, generator=rng) for n, t in start.items()})
        models.append(model)
    for model in models:
        model.train(False)
    data = []
    for _ in range(clients):
        x = torch.randint(0, words, (sequences, 64), generator=rng)
        y = torch.randint(0, 3, (sequences,), generator=rng)
        data.append([{"input_ids": a, "labels": b} for a, b in zip(x.split(4), y.split(4), strict=True)])
    case = Case(f"transformer, {clients} clients", list(models), data)
    case.uploads = uploads(case, distinct=2, fisher=False)
    values = [{n: (0.01 * torch.randn(t.shape, generator=rng)) ** 2 for n, t in start.items()} for _ in range(2)]
    case.uploads = with_fisher(case.uploads, [values[i % 2] for i in range(clients)])
    return case


def gathered(case: Case, client: int, statistics: Sequence[str], **options: Any) -> maecho.Upload:
    """The upload of a client, at full rank."""
    if options.get("labels") == "sampled":
        options["generator"] = torch.Generator().manual_seed(client)
    return maecho.make_upload(
        case.models[client], case.data[client], f"client-{client:03}", statistics, rank=None, progress=False, **options
    )


def uploads(case: Case, distinct: int, fisher: bool = True) -> list[maecho.Upload]:
    """The uploads of all clients with Grams of the matrices alone, which is what FusionBench merges."""
    statistics = ["gram", "fisher"] if fisher else ["gram"]
    made = [
        matrices_only(gathered(case, i, statistics, labels="sampled")) for i in range(min(distinct, len(case.models)))
    ]
    found = []
    for i, model in enumerate(case.models):
        like = made[i % len(made)]
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items() if name in like.weights}
        found.append(replace(like, client=f"client-{i:03}", weights=weights))
    return found


def matrices_only(upload: maecho.Upload) -> maecho.Upload:
    """The same upload with layers that have no bias, and none whose inputs are tokens."""
    layers, grams = [], {}
    for layer in upload.layers:
        if layer.one_hot:
            continue
        layers.append(replace(layer, bias=None))
        G = upload.statistics["gram"][layer.name]
        if layer.bias is not None:
            # The last entry of every eigenvector is that of the constant input.
            K = G.basis[..., :-1, :].double() * G.values.sqrt().unsqueeze(-2)
            G = Spectrum.of_dense(K @ K.mT).to(dtype=torch.float32)
        grams[layer.name] = G
    statistics = {**upload.statistics, "gram": grams}
    head = upload.head if upload.head in grams else None
    return replace(upload, layers=tuple(layers), head=head, spaces=None, statistics=statistics)


def with_fisher(uploads: Sequence[maecho.Upload], fishers: Sequence[State]) -> list[maecho.Upload]:
    return [replace(u, statistics={**u.statistics, "fisher": dict(F)}) for u, F in zip(uploads, fishers, strict=True)]


def with_gram(uploads: Sequence[maecho.Upload], grams: Sequence[State]) -> list[maecho.Upload]:
    return [replace(u, statistics={**u.statistics, "gram": dict(G)}) for u, G in zip(uploads, grams, strict=True)]


# Plainly, in float64.


def plain_average(weights: Sequence[State]) -> dict[str, Tensor]:
    return {name: torch.stack([w[name].double() for w in weights]).mean(0) for name in weights[0]}


def plain_regmean(
    weights: Sequence[State], grams: Sequence[State], names: Mapping[str, str], ridge: float = 0.0, shrink: float = 1.0
) -> dict[str, Tensor]:
    """(Σ W G + ε W̄) (Σ G + ε I)⁻¹, where ε is a share of the mean eigenvalue of Σ G. `names`: a Gram -> its weight."""
    out = plain_average(weights)
    for layer, name in names.items():
        mine = [G[layer].double() for G in grams]
        mine = [shrink * G + (1 - shrink) * G.diag().diag() for G in mine]
        total, eye = sum(mine, torch.zeros_like(mine[0])), torch.eye(len(mine[0]), dtype=torch.float64)
        pull = ridge * total.diag().mean()
        top = sum((w[name].double() @ G for w, G in zip(weights, mine, strict=True)), pull * out[name])
        out[name] = torch.linalg.solve(total + pull * eye, top, left=False)
    return out


def plain_fisher(weights: Sequence[State], fishers: Sequence[State], ridge: float = 0.0) -> dict[str, Tensor]:
    """(Σ F W + ε W̄) / (Σ F + ε), where ε is a share of the mean of Σ F; the average where that is 0 / 0."""
    out = plain_average(weights)
    for name in fishers[0]:
        Fs = [F[name].double() for F in fishers]
        total = sum(Fs, torch.zeros_like(Fs[0]))
        pull = ridge * total.mean()
        top = sum((F * w[name].double() for F, w in zip(Fs, weights, strict=True)), pull * out[name])
        out[name] = torch.where(total + pull > 0, top / (total + pull), out[name])
    return out


def as_fusionbench_weighs(fishers: Sequence[State], normalised: bool = True) -> list[dict[str, Tensor]]:
    """What FusionBench makes of Fisher values before it averages: SMALLEST is added, and each client's values are
    divided by their norm (and by the sum of these factors)."""
    plus = [{name: F.double() + SMALLEST for name, F in one.items()} for one in fishers]
    if not normalised:
        return plus
    norms = [sum(float(F.double().square().sum()) for F in one.values()) ** 0.5 for one in fishers]
    factors = [1 / (norm + SMALLEST) for norm in norms]
    return [
        {name: F * factor / sum(factors) for name, F in one.items()} for one, factor in zip(plus, factors, strict=True)
    ]


def as_fusionbench_gathers(model: nn.Module, data: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """FusionBench's Fisher values: of each batch the square of one summed gradient, of Σ_x Σ_y √p(y|x) log p(y|x)."""
    found: dict[str, Tensor] = {}
    examples = 0
    for batch in data:
        logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
        logs = logits.log_softmax(-1)
        gradients = torch.autograd.grad((logs.detach().exp().sqrt() * logs).sum(), list(model.parameters()))
        for (name, _), g in zip(model.named_parameters(), gradients, strict=True):
            found[name] = found.get(name, torch.zeros_like(g)) + g**2
        examples += len(logits)
    return {name: F / examples for name, F in found.items()}


def ridged(grams: Sequence[State], share: float = 1e-3) -> list[dict[str, Tensor]]:
    """The same Grams with a share of their mean eigenvalue on the diagonal, so that their sum can be inverted."""
    return [
        {n: G + share * G.diag().mean() * torch.eye(len(G), dtype=G.dtype) for n, G in one.items()} for one in grams
    ]


def distance(one: State, other: State) -> float:
    """The largest distance of a tensor to its other version, as a share of its norm; infinite where it is no number."""
    worst = 0.0
    for name, wanted in other.items():
        gap = float((one[name].double() - wanted.double()).norm() / wanted.double().norm())
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def not_finite(state: State) -> int:
    return sum(int((~tensor.isfinite()).sum()) for tensor in state.values())
