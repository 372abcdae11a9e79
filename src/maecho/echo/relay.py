"""echo-relay in one process: the server and all its clients, with nothing between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from maecho.echo.client import RelayClient
from maecho.echo.fit import Regression
from maecho.echo.players import Drawing
from maecho.echo.server import RelayServer, Rounds
from maecho.errors import UploadError
from maecho.privacy import Privacy
from maecho.progress import track
from maecho.upload.client import make_upload
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload


def relay(
    model: nn.Module,
    clients: Sequence[tuple[nn.Module, Iterable[Any]]],
    *,
    rounds: Rounds = "all",
    regression: Regression | None = None,
    drawing: Drawing | None = None,
    prior: Mapping[str, Tensor] | None = None,
    uploads: Sequence[Upload] | None = None,
    start: Mapping[str, Tensor] | None = None,
    progress: bool | None = None,
    privacy: Privacy | None = None,
) -> Merged:
    """echo-relay in one process, or what lies between it and echo-chain.

    Args:
        model: a network of the clients' architecture, any weights. Left as it is.
        clients: pairs of a trained model and its batches (something that can be gone through again).
        rounds, regression, drawing, prior, start: as of RelayServer.
        uploads: what the clients have uploaded before, with moments, for rounds other than "all". Made here, uncut, if
            there are none.
        progress: a progress bar: True, False, or None for one on a terminal if it takes long.
        privacy: noise on all that every client says of its data; the recipe tells what it adds up to.
    """
    pairs = list(clients)
    if not pairs:
        raise UploadError("there must be at least one client to relay, got none")
    drawing = drawing or Drawing()
    before = 0 if rounds == "all" else 1  # an upload comes first
    respondents = [
        RelayClient(own, batches, f"client {i}", progress=False, privacy=privacy, released=before)
        for i, (own, batches) in enumerate(pairs)
    ]
    if rounds == "all":
        uploads = None  # nothing is drawn
    elif uploads is not None:
        uploads = _checked(list(uploads), privacy)
    elif uploads is None:
        statistics = sorted(drawing.needs | (drawing.uses if privacy is None else frozenset()))
        uploads = [
            make_upload(own, batches, f"client {i}", statistics, rank=None, progress=progress, privacy=privacy)
            for i, (own, batches) in enumerate(pairs)
        ]
    server = RelayServer(
        model,
        rounds=rounds,
        uploads=uploads,
        start=start,
        regression=regression,
        drawing=drawing,
        prior=prior,
        progress=progress,
    )
    while not server.done:
        question = server.broadcast()
        label = f"echo-relay, stage {len(server.clients_heard) + 1}"
        server.collect(client.answer(question) for client in track(respondents, label, show=progress))
    merged = server.result()
    drawn_from = drawing.needs | drawing.uses
    merged.recipe["upload_bytes"] = max((upload.bytes(drawn_from) for upload in uploads or ()), default=0)
    if privacy is not None:
        merged.recipe["privacy"] = privacy.recipe(max(client.released for client in respondents))
    return merged


def _checked(uploads: list[Upload], privacy: Privacy | None) -> list[Upload]:
    """With privacy, an upload must be one release of the same noise as each round after it; it may clip otherwise."""
    for upload in uploads:
        if not isinstance(upload, Upload):
            raise UploadError(f"uploads must be Upload objects, got {type(upload).__name__}")
        promised = upload.recipe.get("privacy", {})
        if privacy is not None and (promised.get("noise"), promised.get("delta")) != (privacy.noise, privacy.delta):
            raise UploadError(
                f"{upload.client}: with privacy an upload must be made with noise={privacy.noise} and "
                f"delta={privacy.delta}, got noise={promised.get('noise')} and delta={promised.get('delta')}"
            )
    return uploads
