"""Uploads that are merged together: they are checked against each other, and read one at a time.

A file is opened when its turn comes and closed before the next. So a method that only sums needs the memory of one
file, however many there are, and that of one layer if it reads part by part. A header is read and checked once. A file
that changes after that is refused. If a device is given, each upload is moved there when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from maecho import devices
from maecho.errors import UploadError
from maecho.upload import storage
from maecho.upload.header import Header, not_sent
from maecho.upload.parted import Parted
from maecho.upload.upload import Upload, of_file, unread

Source = Upload | str | Path


class Cohort(Sequence[Upload]):
    """A sequence of at least one upload, all of one architecture, with no client twice.

    Args:
        sources: uploads, or the paths of their files.
        needs: names of statistics that every upload must have.
        method: the name of the method, for errors.
        device: where uploads are moved to. None: they stay where they are.
        uses: names of optional statistics. They are read if an upload has them.
    """

    def __init__(
        self,
        sources: Iterable[Source],
        needs: Iterable[str] = (),
        method: str = "this method",
        device: devices.Device | None = None,
        uses: Iterable[str] = (),
    ):
        if isinstance(sources, Upload | str | Path):
            sources = [sources]
        self._sources: list[Any] = list(sources)
        self._needs, self._uses = frozenset(needs), frozenset(uses)
        self.device = None if device is None else devices.find(device)
        """Where uploads are moved to. None: each stays where it is."""
        if not self._sources:
            raise UploadError("there must be at least one upload to aggregate, got none")
        # All headers are read first, so that a bad last file is found before work on the first one begins.
        self._files = [None if isinstance(source, Upload) else _unread(source) for source in self._sources]
        abouts = [self._about(at) for at in range(len(self))]
        seen: dict[str, Any] = {}
        for index, about in enumerate(abouts):
            client = about["client"]
            if client in seen:
                raise UploadError(
                    f"{client}: every client must come once, got it twice ({seen[client]} and {about['place']})"
                )
            seen[client] = about["place"]
            for name in sorted(self._needs - set(about["statistics"])):
                raise UploadError(_missing(about, name, sorted(self._needs), method))
            if not self._alike(abouts[0], about):
                raise UploadError(difference(self[0], self[index]))

        self.has = frozenset.intersection(*(frozenset(about["statistics"]) for about in abouts))
        """The statistics that every upload carries."""
        self.examples = tuple(int(about["examples"]) for about in abouts)
        """The number of examples of every client."""
        self.clients = tuple(seen)
        """Their names, in the order of the uploads."""

    def _about(self, at: int) -> dict[str, Any]:
        source, found = self._sources[at], self._files[at]
        if found is None:
            return {
                "client": source.client,
                "examples": source.examples,
                "statistics": source.has,
                "recipe": source.recipe,
                "place": "in memory",
                "upload": source,
            }
        shown = ("client", "examples", "fingerprint", "statistics", "recipe")
        return {**{name: getattr(found[1], name) for name in shown}, "place": str(source)}

    @staticmethod
    def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether two uploads have one architecture. In memory a comparison is quicker than two fingerprints."""
        if "upload" in one and "upload" in other and one["upload"].is_like(other["upload"]):
            return True
        found = [about["upload"].fingerprint if "upload" in about else about["fingerprint"] for about in (one, other)]
        return bool(found[0] == found[1])

    @property
    def held(self) -> list[Upload] | None:
        """All uploads, if they are in memory and stay where they are. None if one must be read or moved."""
        return self._sources if self.device is None and not any(self._files) else None

    @property
    def home(self) -> torch.device:
        """Where the uploads are before they are moved to `device`."""
        first = self._sources[0]
        return next(iter(first.weights.values())).device if isinstance(first, Upload) else torch.device("cpu")

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, index: int) -> Upload: ...
    @overload
    def __getitem__(self, index: slice) -> list[Upload]: ...
    def __getitem__(self, index: int | slice) -> Upload | list[Upload]:
        if isinstance(index, slice):
            return [self._read(at) for at in range(len(self))[index]]
        return self._read(range(len(self))[index])

    def __iter__(self) -> Iterator[Upload]:
        return map(self._read, range(len(self)))

    @property
    def parted(self) -> list[Parted]:
        """The uploads, of which one part at a time is read and checked."""
        wanted = self._needs | self._uses
        return [
            Parted.of_upload(source, self.device) if found is None else Parted.of_file(*found, wanted, self.device)
            for source, found in zip(self._sources, self._files, strict=True)
        ]

    @property
    def upload_bytes(self) -> int:
        """The size of the largest upload: its weights and the statistics that are read."""
        wanted = self._needs | self._uses
        return max(
            source.bytes(wanted) if found is None else _bytes(found[0], wanted)
            for source, found in zip(self._sources, self._files, strict=True)
        )

    def _read(self, at: int) -> Upload:
        source, found = self._sources[at], self._files[at]
        if found is None:
            upload: Upload = source
        else:
            with storage.reopened(found[0]) as file:
                upload = of_file(file, found[1], self._needs | self._uses)
        return upload if self.device is None else upload.to(self.device)


def in_memory(uploads: Sequence[Upload]) -> list[Upload] | None:
    """All uploads, if they are in memory. None if one must be read or moved first."""
    return uploads.held if isinstance(uploads, Cohort) else list(uploads)


def _unread(source: object) -> tuple[storage.File, Header]:
    if not isinstance(source, str | Path):
        raise UploadError(f"uploads must be Upload objects or paths of their files, got {type(source).__name__}")
    return unread(Path(source))


def _bytes(file: storage.File, statistics: Iterable[str]) -> int:
    """The size of the weights and of these statistics in a file."""
    wanted = {"weights", *statistics}
    return sum(one.end - one.begin for name, one in file.listing.items() if name.split("/")[0] in wanted)


def _missing(about: Mapping[str, Any], name: str, needs: list[str], method: str) -> str:
    """The sentence for a missing statistic: the client's own reason if it gave one, and what to do."""
    reason = not_sent(about["recipe"]).get(name)
    lack = f"{about['client']}: {method} needs the statistic {name!r}, got"
    if reason is None:
        carried = ", ".join(sorted(about["statistics"])) or "none"
        return f"{lack} an upload with {carried}; make it with statistics={needs}"
    instead = "; echo-relay works on real data and needs no statistics" if method == "echo-chain" else ""
    return f"{lack} none, because {reason}{instead}"


def difference(one: Upload, other: Upload) -> str:
    """One sentence about the first difference between two architectures."""
    words: Callable[[list[Any]], str] = lambda w: f"{w[0]} {'x'.join(map(str, w[1:])) or 'scalar'}"  # noqa: E731
    a, b = one.architecture(), other.architecture()
    for name in sorted(a["weights"].keys() - b["weights"].keys()):
        return f"{other.client}: weight {name!r} must be there as in {one.client}, got none"
    for name in sorted(b["weights"].keys() - a["weights"].keys()):
        return f"{other.client}: weights must be those of {one.client}, got {name!r} besides"
    for name, expected in a["weights"].items():
        got = b["weights"][name]
        if got != expected:
            return f"{other.client}: weight {name!r} must be {words(expected)} as in {one.client}, got {words(got)}"
    facts, others = _facts(a), _facts(b)
    for fact in {**facts, **others}:
        if facts.get(fact) != others.get(fact):
            return f"{other.client}: {fact} must be {facts.get(fact)} as in {one.client}, got {others.get(fact)}"
    return f"{other.client}: architecture must be as in {one.client}"


def _facts(architecture: Mapping[str, Any]) -> dict[str, object]:
    """How weights are read as matrices, fact by fact: all at once would be too much for one sentence."""
    layers = {
        f"the {fact} of layer {name!r}": value
        for name, layer in architecture["layers"].items()
        for fact, value in layer.items()
    }
    ties = {f"the tie of {alias!r}": kept for alias, kept in architecture["aliases"].items()}
    stored = {f"the way in which {name!r} is stored": how for name, how in architecture.get("stored", {}).items()}
    return {**layers, **ties, **stored, "head": architecture["head"]}
