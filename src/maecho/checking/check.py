"""`maecho.check`: runs one batch and says all that `make_upload`, the methods and a relay would say of it.

It makes an upload of the first batch, so it says what `make_upload` says, in the same words. What is wrong is mended in
a copy, so that one mistake does not hide the next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from maecho import devices
from maecho.checking import first_batch, layers, methods, sizes, timing
from maecho.checking.found import LEVELS, Check, Finding, LabelsFound, LayerFound, TimesFound
from maecho.echo.client import RelayClient
from maecho.errors import InputError, one_line, text_of
from maecho.network.batches.inputs import examples, few
from maecho.network.batches.labels import classes_of, complaint
from maecho.network.batches.reading import Read, Reader, Reading
from maecho.network.directions import Labels
from maecho.network.forward import call, evaluating
from maecho.network.plain import plain
from maecho.network.stages import Plan
from maecho.statistics import STATISTICS
from maecho.upload import inspection, size
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload


def check(
    model: nn.Module,
    batches: Any,
    client: str = "client",
    statistics: list[str] | None = None,
    rank: Any = "4x",
    labels: Labels | Read = "expected",
    inputs: Read | None = None,
    outputs: Read | None = None,
) -> Check:
    """Look at a model and its first batch before any work, and say everything at once.

    The result says how each layer is read, what the labels look like, what an upload would lose, how large it would be
    and how long it would take, which stages echo would fit, which methods can be used, and what is wrong. `print` shows
    it, `ok` says whether an upload can be made. Nothing is raised for what is wrong with the model or the batches.

    The model, the data and all random generators stay as they are. Only the first batch is read. Of an iterator, which
    can be read once, it is gone afterwards.

    Args:
        model: the trained model.
        batches: its data, as for `make_upload`.
        client: the client's name.
        statistics, rank, labels, inputs, outputs: as for `make_upload`.
    """
    size.parse(rank)
    with first_batch.undisturbed(batches):
        return _Checking(client, statistics, rank, labels, inputs, outputs).of(model, batches)


class _Checking:
    """A check that is under way."""

    def __init__(self, client: str, statistics: Any, rank: Any, labels: Any, inputs: Any, outputs: Any):
        self._client, self._statistics, self._rank = client, statistics, rank
        self._reading = Reading(inputs, labels if callable(labels) else None, outputs)
        self._labels, self._outputs = "expected" if callable(labels) else labels, outputs
        self._findings: dict[Finding, None] = {}

    def of(self, model: nn.Module, batches: Any) -> Check:
        with first_batch.heard(self._add, self._client):
            found = self._looked_at(model, batches)
        return replace(found, findings=tuple(sorted(self._findings, key=lambda one: LEVELS.index(one.level))))

    def _looked_at(self, model: nn.Module, batches: Any) -> Check:
        try:
            model = plain(model, "the model")
        except InputError as error:
            self._error(error)
            return self._done()
        run = first_batch.copied(model, self._add)
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()} if run is model else {}
        try:
            return self._of_copy(run, batches)
        finally:
            with torch.no_grad():
                for name, tensor in kept.items():
                    model.state_dict()[name].copy_(tensor)

    def _of_copy(self, model: nn.Module, batches: Any) -> Check:
        first_batch.finite_weights(model, self._add)
        reader = Reader(model, self._client, self._reading)
        batch = first_batch.first(batches, reader, self._client, self._add)
        if batch is None:
            return self._done(layers=tuple(layers.found(model, None, None)))
        x, y, count = first_batch.finite_inputs(batch.inputs, self._add), batch.labels, batch.count
        labels = self._labels_of(model, x, y)
        if labels is None:
            return self._done(layers=tuple(layers.found(model, None, None)))
        upload, times = self._uploaded(model, (x, y), count)
        plan, no_stages = self._plan(model, (x, y), () if upload is None else upload.recipe["unknown"])
        calls = layers.counted(model, x, self._outputs)
        found = layers.found(model, calls, upload)
        self._notes(found)
        stages = None if plan is None else tuple(tuple(unit.name for unit in stage) for stage in plan.stages)
        if upload is None:
            return self._done(layers=tuple(found), labels=labels, stages=stages)
        on_demand, refused = self._on_demand(model, x, y)
        return self._done(
            layers=tuple(found),
            averaged=tuple(inspection.averaged(upload)),
            labels=labels,
            stages=stages,
            head=upload.head,
            spaces=None if upload.spaces is None else {space.name: space.size for space in upload.spaces},
            sizes=self._sizes(upload, count, labels),
            rank="all" if self._rank is None else str(self._rank),
            times=times,
            methods=methods.usable(upload, on_demand, refused, no_stages),
        )

    def _labels_of(self, model: nn.Module, x: Any, y: Any) -> LabelsFound | None:
        """What the labels look like beside the model's outputs. None if the model does not take its inputs."""
        device = devices.of(model)
        try:
            with evaluating(model), torch.no_grad():
                output = call(model, x, device, self._outputs)
        except Exception as error:  # the user's own forward may raise anything
            self._refused(model, x, y, error)
            return None
        vector = isinstance(output, Tensor) and output.dim() == 2 and len(output) == examples(x)
        classes = output.shape[1] if vector else None
        found, why = classes_of(y, examples(x))
        if found is not None and classes is not None:
            why = complaint(found, classes)
        held = {} if found is None or why else dict(enumerate(found.cpu().bincount().tolist()))
        return LabelsFound(examples(x), {label: n for label, n in held.items() if n}, classes, why)

    def _refused(self, model: nn.Module, x: Any, y: Any, error: Exception) -> None:
        """Say why the model does not take its inputs, in the words of an upload if it has some."""
        try:
            self._make(model, [(x, y)], [])
        except InputError as sentence:
            text = str(sentence)
        except Exception as other:  # the user's own forward may raise anything
            text = f"the model must take its own batches, got {type(other).__name__}: {text_of(other)}"
        else:
            text = f"the model must take its own batches, got {type(error).__name__}: {text_of(error)}"
        advice = "; if its arguments follow from a batch in another way, say how with inputs="
        self._add(first_batch.without_name(one_line(text + advice), self._client, "error"))

    def _make(self, model: nn.Module, batches: Any, statistics: Any, labels: Any = "expected") -> Upload:
        """The upload of batches that were read already: pairs of inputs and labels."""
        generator = torch.Generator().manual_seed(0) if labels == "sampled" else None
        return make_upload(
            model, batches, self._client, statistics, rank=None, progress=False, labels=labels, generator=generator,
            inputs=lambda pair: pair[0], outputs=self._outputs,
        )  # fmt: skip

    def _uploaded(self, model: nn.Module, pair: Any, count: int | None) -> tuple[Upload | None, TimesFound | None]:
        """The upload of the batch without a cut, and how long its parts take."""
        device = devices.of(model)
        twice = timing.Twice(pair, device)
        try:
            forward, step = timing.forward_and_step(model, pair[0], self._outputs)
            upload = self._make(model, twice, self._statistics, self._labels)
            once = timing.now(device) - twice.ended
        except InputError as error:
            self._error(error)
            return None, None
        except Exception as error:  # the user's own code may raise anything
            self._add(Finding("error", one_line(f"the upload failed: {type(error).__name__}: {text_of(error)}")))
            return None, None
        return upload, TimesFound(forward, step, twice.seconds, once, count)

    def _sizes(self, upload: Upload, count: int | None, labels: LabelsFound) -> Any:
        rule = size.parse(self._rank)
        try:
            if isinstance(rule, size.ByLayer):
                rule.check(layer.name for layer in upload.layers)
            size.cut(upload, rule)
        except InputError as error:
            self._error(error)
        return sizes.estimated(upload, rule, labels.examples, count, labels.outputs)

    def _plan(self, model: nn.Module, pair: Any, unknown: Collection[str]) -> tuple[Plan | None, str]:
        """The stages of echo, or why there are none. What a relay warns of is said unless it is `unknown` already."""
        warned: list[Finding] = []
        try:
            with first_batch.heard(warned.append, self._client):
                relay = RelayClient(
                    model, [pair], self._client, inputs=lambda given: given[0], outputs=self._outputs, progress=False
                )
                found = relay.plan
        except InputError as error:
            why = first_batch.without_name(str(error), self._client).text
            self._add(Finding("note", f"echo-chain and echo-relay cannot be used, since {why}"))
            return None, why
        except Exception as error:  # the user's own code may raise anything
            why = one_line(f"{type(error).__name__}: {text_of(error)}")
            self._add(Finding("note", f"echo-chain and echo-relay cannot be used, got {why}"))
            return None, why
        if not set(found.averaged) <= set(unknown):
            for finding in warned:
                self._add(finding)
        return found, ""

    def _on_demand(self, model: nn.Module, x: Any, y: Any) -> tuple[set[str], dict[str, str]]:
        """The other statistics that could be made, tried on a few examples, and why others could not."""
        names = [name for name, statistic in STATISTICS.items() if not statistic.by_default]
        small = few(x)
        known = classes_of(y, examples(x))[0]
        beside = None if known is None else known[: examples(small)]
        with first_batch.heard(lambda finding: None, self._client):
            try:
                upload = self._make(model, [(small, beside)], names, "sampled")
            except Exception as error:  # the user's own code may raise anything
                return set(), dict.fromkeys(names, one_line(text_of(error)))
        missing = {name: str(why) for name, why in upload.recipe["not_sent"].items()}
        return set(upload.statistics), missing

    def _notes(self, found: list[LayerFound]) -> None:
        for one in found:
            if one.calls > 1:
                self._add(Finding("note", f"{one.name!r} runs {one.calls} times in a pass; all its inputs count"))

    def _add(self, finding: Finding) -> None:
        self._findings.setdefault(finding)

    def _error(self, error: InputError) -> None:
        self._add(first_batch.without_name(str(error), self._client, "error"))

    def _done(self, **found: Any) -> Check:
        return Check(self._client, (), **found)
