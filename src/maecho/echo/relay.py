"""echo-relay in one process: the server and all its clients, with no network between them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from maecho import devices
from maecho.echo.client import RelayClient
from maecho.echo.fit import Regression
from maecho.echo.rounds import Rounds
from maecho.echo.server import RelayServer
from maecho.echo.simulated import Drawing
from maecho.errors import InputError
from maecho.network.batches.reading import Read
from maecho.privacy import Privacy
from maecho.progress import track
from maecho.upload.client import make_upload
from maecho.upload.merged import Merged
from maecho.upload.upload import Upload


@devices.outside_inference
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
    minimum: int | None = None,
    inputs: Read | None = None,
    labels: Read | None = None,
    outputs: Read | None = None,
) -> Merged:
    """Run echo-relay in one process, or one of the methods between it and echo-chain.

    Args:
        model: a network of the clients' architecture, with any weights. It is not changed.
        clients: pairs of a trained model and its batches. The batches are read once in each round.
        rounds, regression, prior: as for RelayServer.
        drawing, start: as for RelayServer. They are refused with rounds="all".
        uploads: earlier uploads, one of each client, with moments. They are refused with rounds="all", which draws no
            inputs, and with rounds=1, which then has no use for the clients. By default uploads are made here, without
            a cut.
        progress: a progress bar: True, False, or None for one on a terminal if it takes long.
        privacy: noise on all that every client says about its data. The recipe states the total cost.
        minimum, inputs, labels, outputs: as for RelayClient.
    """
    began = time.perf_counter()
    pairs = list(clients)
    if not pairs:
        raise InputError("there must be at least one client to relay, got none")
    before = 0 if rounds == "all" else 1  # the upload is the first release
    relay_clients = [
        RelayClient(
            own,
            batches,
            f"client {i}",
            progress=False,
            privacy=privacy,
            released=before,
            minimum=minimum,
            inputs=inputs,
            labels=labels,
            outputs=outputs,
        )
        for i, (own, batches) in enumerate(pairs)
    ]
    if rounds != "all":
        drawing = drawing or Drawing()
        if uploads is None:
            statistics = sorted(drawing.needs | (drawing.uses if privacy is None else frozenset()))
            uploads = [
                make_upload(
                    own,
                    batches,
                    f"client {i}",
                    statistics,
                    rank=None,
                    progress=progress,
                    labels=labels or "expected",
                    privacy=privacy,
                    inputs=inputs,
                    outputs=outputs,
                )
                for i, (own, batches) in enumerate(pairs)
            ]
        else:
            uploads = _checked(list(uploads), privacy)
            if rounds == 1 and start is None:
                raise InputError(
                    "rounds=1 asks no client once there are uploads, so clients would have no use; call "
                    f"aggregate(uploads, 'echo-chain', model=network), got {len(pairs)} clients"
                )
            if len(uploads) != len(pairs):
                raise InputError(
                    f"uploads must be one of each of the {len(pairs)} clients, in any order, got {len(uploads)}"
                )
    server = RelayServer(
        model,
        rounds=rounds,
        uploads=uploads,
        start=start,
        regression=regression,
        drawing=drawing,
        prior=prior,
        progress=progress,
        outputs=outputs,
    )
    while not server.done:
        question = server.broadcast()
        label = f"echo-relay, stage {question.round + 1}"
        server.collect(client.answer(question) for client in track(relay_clients, label, show=progress))
    merged = server.result()
    merged.recipe["seconds"] = round(time.perf_counter() - began, 3)
    if privacy is not None:
        merged.recipe["privacy"] = privacy.recipe(max(client.released for client in relay_clients))
    return merged


def _checked(uploads: list[Upload], privacy: Privacy | None) -> list[Upload]:
    """Check earlier uploads. With privacy, each must be one release with the noise of a round. Its clip may differ."""
    for upload in uploads:
        if not isinstance(upload, Upload):
            raise InputError(f"uploads must be Upload objects, got {type(upload).__name__}")
        promised = upload.recipe.get("privacy", {})
        if privacy is not None and (promised.get("noise"), promised.get("delta")) != (privacy.noise, privacy.delta):
            raise InputError(
                f"{upload.client}: with privacy an upload must be made with noise={privacy.noise} and "
                f"delta={privacy.delta}, got noise={promised.get('noise')} and delta={promised.get('delta')}"
            )
    return uploads
