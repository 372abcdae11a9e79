"""Uploads that are merged together: they are checked against each other, and read one at a time.

A file is opened when its turn comes and closed before the next. So a method that only sums needs the memory of one
file, however many there are. A file that changes after its header was first read is refused. If a device is given, each
upload is moved there when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from maecho import devices
from maecho.errors import UploadError
from maecho.upload.header import not_sent
from maecho.upload.upload import Upload, read, read_header

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
        self._sources = list(sources)
        self._needs, self._uses = frozenset(needs), frozenset(uses)
        self.device = None if device is None else devices.find(device)
        """Where uploads are moved to. None: each stays where it is."""
        if not self._sources:
            raise UploadError("there must be at least one upload to aggregate, got none")
        self._bytes: dict[int, int] = {}  # number of an upload that was read -> its size
        # All headers are read first, so that a bad last file is found before work on the first one begins.
        abouts = [self._about(source) for source in self._sources]
        self._digests = [about["digest"] for about in abouts]  # of the headers of files; None for uploads in memory
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

    def _about(self, source: Source) -> dict[str, Any]:
        if isinstance(source, Upload):
            return {
                "client": source.client,
                "examples": source.examples,
                "statistics": source.has,
                "recipe": source.recipe,
                "digest": None,
                "place": "in memory",
                "upload": source,
            }
        if not isinstance(source, str | Path):
            raise UploadError(f"uploads must be Upload objects or paths of their files, got {type(source).__name__}")
        header = read_header(Path(source))
        shown = ("client", "examples", "fingerprint", "statistics", "recipe", "digest")
        return {**{name: getattr(header, name) for name in shown}, "place": str(source)}

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
        found = [source for source in self._sources if isinstance(source, Upload)]
        return found if len(found) == len(self) and self.device is None else None

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
    def upload_bytes(self) -> int:
        """The size of the largest upload: its weights and the statistics that are read. This reads files that were not
        read yet."""
        wanted = self._needs | self._uses
        for at, source in enumerate(self._sources):
            if at not in self._bytes:
                self._bytes[at] = (source if isinstance(source, Upload) else self[at]).bytes(wanted)
        return max(self._bytes.values())

    def _read(self, at: int) -> Upload:
        source = self._sources[at]
        if isinstance(source, Upload):
            upload = source
        else:
            upload, _ = read(Path(source), self._needs | self._uses, digest=self._digests[at])
        self._bytes[at] = upload.bytes(self._needs | self._uses)
        return upload if self.device is None else upload.to(self.device)


def in_memory(uploads: Sequence[Upload]) -> list[Upload] | None:
    """All uploads, if they are in memory. None if one must be read or moved first."""
    return uploads.held if isinstance(uploads, Cohort) else list(uploads)


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
    return {**layers, **ties, "head": architecture["head"]}
