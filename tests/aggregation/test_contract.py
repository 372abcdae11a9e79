"""What every row of METHODS owes its users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import maecho
from maecho import aggregation
from maecho.aggregation.method import Method
from maecho.linalg.spectra import Spectrum
from maecho.network.spaces import load
from maecho.statistics import STATISTICS
from maecho.upload.client import make_upload
from maecho.upload.merged import Merged
from support.clients import batches, clients, network
from support.contract import EVERY, Everything, close, everything, skip_pfnm, skip_tokens


def without_new_head(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave AFL's head out of a comparison: AFL solves for a new head, so it gives no client's head back."""
    return {k: t for k, t in state.items() if not (name == "afl" and k.startswith(("4.", "head.")))}


@pytest.fixture(params=["mlp", "everything"])
def uploads(request: pytest.FixtureRequest) -> list[maecho.Upload]:
    if request.param == "mlp":
        return clients(3)
    skip_tokens(request.node.callspec.params["name"])
    return everything(3)


@pytest.mark.parametrize("name", EVERY)
def test_one_client_gives_that_client_back(name: str, uploads: list[maecho.Upload]) -> None:
    merged, own = maecho.aggregate(uploads[:1], EVERY[name]), uploads[0].state_dict()
    close(without_new_head(name, merged), without_new_head(name, own), 1e-4)


@pytest.mark.parametrize("make", [clients, everything])
@pytest.mark.parametrize("name", EVERY)
def test_order_of_clients_does_not_matter(name: str, make: Callable[..., list[maecho.Upload]]) -> None:
    if make is everything:
        skip_tokens(name)
    uploads = make(3, torch.float64)
    close(maecho.aggregate(uploads, EVERY[name]), maecho.aggregate(uploads[::-1], EVERY[name]), 1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_identical_models_are_a_fixed_point(name: str) -> None:
    """If all clients have one model, the merged model is that one, whatever their data."""
    skip_pfnm(
        name, "the most probable weights are a little nearer to 0 than those of the clients; the next row's are not"
    )
    if name == "echo-chain":
        pytest.skip("echo-chain fits the last layers to the labels; without (the next row) the clause holds")
    same = [make_upload(network(0), batches(i, 3 + i), f"client-{i}", STATISTICS) for i in range(3)]
    merged = maecho.aggregate(same, EVERY[name])
    close(without_new_head(name, merged), without_new_head(name, same[0].state_dict()), 1e-4)


@pytest.mark.parametrize("name", EVERY)
def test_inputs_are_not_changed(name: str, uploads: list[maecho.Upload]) -> None:
    before = [{k: t.clone() for k, t in upload.tensors().items()} for upload in uploads]
    merged = maecho.aggregate(uploads, EVERY[name])
    for tensor in merged.values():
        tensor.zero_()  # what is returned shares no memory with what was given
    for upload, old in zip(uploads, before, strict=True):
        for key, tensor in upload.tensors().items():
            assert torch.equal(tensor, old[key]), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", EVERY)
def test_dtype_and_device_are_kept(name: str, dtype: torch.dtype) -> None:
    merged = maecho.aggregate(clients(2, dtype), EVERY[name])
    assert {t.dtype for t in merged.values()} == {dtype}
    assert {t.device.type for t in merged.values()} == {"cpu"}
    assert all(t.isfinite().all() for t in merged.values())


@pytest.mark.parametrize("name", EVERY)
def test_the_result_loads_and_knows_how_it_was_made(name: str, tmp_path: Path) -> None:
    skip_tokens(name)
    uploads = everything(2)
    merged = maecho.aggregate(uploads, EVERY[name])
    Everything().load_state_dict(merged)
    assert merged.recipe["clients"] == 2
    # What has no input matrix is averaged, but Fisher knows more of every parameter.
    rest = set() if "fisher" in name else {"scale", "one.bias"}
    assert {"norm.running_mean", *rest} <= set(merged.averaged)
    # Integer buffers come from the largest client, which saw four batches.
    assert int(merged["norm.num_batches_tracked"]) == 4
    merged.save(tmp_path / "merged.safetensors")
    loaded = maecho.Merged.load(tmp_path / "merged.safetensors")
    close(loaded, merged, 0)
    assert (loaded.averaged, loaded.recipe) == (merged.averaged, merged.recipe)


RECIPE = {
    "method": str,
    "options": str,
    "clients": int,
    "seconds": float,
    "rounds": list,
    "upload_bytes": int,
    "privacy": dict,
    "made_by": str,
}
ROUND = {"layers": list, "inputs": str, "clients": int, "bytes": int}


def check_recipe(merged: maecho.Merged, path: Path) -> None:
    """A recipe has the same entries for every method, in memory and in a file."""
    assert {key: type(value) for key, value in merged.recipe.items()} == RECIPE
    for stage in merged.recipe["rounds"]:
        assert {key: type(value) for key, value in stage.items()} == ROUND
    merged.save(path / "merged.safetensors")
    assert maecho.Merged.load(path / "merged.safetensors").recipe == merged.recipe


@pytest.mark.parametrize("name", maecho.METHODS)
def test_every_method_leaves_a_recipe_of_one_shape(name: str, tmp_path: Path) -> None:
    uploads = clients(2)
    merged = maecho.aggregate(uploads, EVERY[name])
    check_recipe(merged, tmp_path)
    assert (merged.recipe["method"], merged.recipe["clients"], merged.recipe["rounds"]) == (name, 2, [])
    read = EVERY[name].needs | getattr(EVERY[name], "uses", frozenset())
    assert merged.recipe["upload_bytes"] == max(upload.bytes(read) for upload in uploads)
    for upload in uploads:
        upload.save(tmp_path / f"{upload.client}.safetensors")
    files = [tmp_path / f"{upload.client}.safetensors" for upload in uploads]
    assert maecho.aggregate(files, EVERY[name]).recipe["upload_bytes"] == merged.recipe["upload_bytes"]


@pytest.mark.parametrize("rounds", ["all", 1, 2])
@pytest.mark.parametrize("private", [False, True])
def test_a_relay_leaves_a_recipe_of_the_same_shape(rounds: str | int, private: bool, tmp_path: Path) -> None:
    pairs = [(network(i), batches(i)) for i in range(2)]
    merged = maecho.relay(network(), pairs, rounds=rounds, privacy=maecho.Privacy(1.0, 5.0) if private else None)
    check_recipe(merged, tmp_path)
    assert merged.recipe["clients"] == 2
    assert bool(merged.recipe["privacy"]) is private
    inputs = {"all": ["real"] * 3, 1: ["drawn"] * 3, 2: ["drawn", "drawn", "real"]}[rounds]
    assert [stage["inputs"] for stage in merged.recipe["rounds"]] == inputs
    assert [stage["layers"] for stage in merged.recipe["rounds"]] == [["0"], ["2"], ["4"]]
    assert [stage["bytes"] > 0 for stage in merged.recipe["rounds"]] == [where == "real" for where in inputs]
    assert (merged.recipe["upload_bytes"] > 0) is (rounds != "all")


def test_a_server_leaves_a_recipe_of_the_same_shape(tmp_path: Path) -> None:
    uploads = [make_upload(network(i), batches(i), f"client-{i}", ["moments"]) for i in range(3)]
    paths = [tmp_path / f"{upload.client}.safetensors" for upload in uploads]
    for upload, path in zip(uploads, paths, strict=True):
        upload.save(path)
    chain = maecho.aggregate(uploads, "echo-chain", model=network(), draws=100)
    server = maecho.RelayServer(network(), rounds=2, uploads=paths, start=chain)
    client = maecho.RelayClient(network(1), batches(1))
    server.collect([client.answer(server.broadcast())])
    merged = server.result()
    check_recipe(merged, tmp_path)
    assert [stage["inputs"] for stage in merged.recipe["rounds"]] == ["start", "start", "real"]
    assert merged.recipe["clients"] == 3, "as many as have uploaded, though one answered"
    assert merged.recipe["upload_bytes"] == max(upload.bytes() for upload in uploads)


@pytest.mark.parametrize("name", EVERY)
def test_files_and_objects_give_the_same(name: str, tmp_path: Path) -> None:
    uploads = clients(3)
    for upload in uploads:
        upload.save(tmp_path / f"{upload.client}.safetensors")
    paths = [tmp_path / f"{upload.client}.safetensors" for upload in uploads]
    close(maecho.aggregate(paths, EVERY[name]), maecho.aggregate(uploads, EVERY[name]), 0)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_scale_of_the_data_does_no_harm(name: str, scale: float) -> None:
    """The merged model gives out nothing much larger than the clients do. Its weights may rightly be large if inputs
    are small, and its biases if inputs are large."""
    data = [[(x * scale, y) for x, y in batches(i)] for i in range(3)]
    uploads = [make_upload(network(i), own, f"client-{i}", STATISTICS) for i, own in enumerate(data)]
    merged = maecho.aggregate(uploads, EVERY[name])
    x, states = torch.cat([x for own in data for x, _ in own]), [upload.state_dict() for upload in uploads]
    largest = [float(load(network(), state)(x).detach().abs().max()) for state in (merged, *states)]
    assert largest[0] < 10 * max(largest[1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_a_gpu_is_uploaded_from_there() -> None:
    model = network().cuda()
    upload = make_upload(model, batches(), "a")
    assert next(model.parameters()).is_cuda
    close(upload.state_dict(), network().state_dict(), 0)


@pytest.mark.parametrize(
    "method",
    [
        aggregation.RegMean(),
        aggregation.RegMean(ridge=0, shrink=0.5),
        aggregation.Kronecker(),
        aggregation.Kronecker(damping=0.01),
        aggregation.MAEcho(form="printed", steps=5),
        aggregation.MAEcho(form="printed", steps=5, normalise=True),
        aggregation.MAEcho(form="printed", solver="limit"),
        aggregation.MAEcho(form="anchored", solver="limit"),
    ],
    ids=str,
)
def test_the_rest_of_a_cut_matrix_counts_as_the_eigenvalues_that_it_stands_for(method: Method) -> None:
    uploads = clients(3, torch.float64, rank=1)
    wanted = {"gram", "gradients"}

    def with_matrices(change: Callable[[Spectrum], Spectrum]) -> Merged:
        changed = [
            replace(
                u, statistics={n: {k: change(s) for k, s in v.items()} for n, v in u.statistics.items() if n in wanted}
            )
            for u in uploads
        ]
        return maecho.aggregate(changed, method)

    cut, whole, held = (with_matrices(f) for f in (Spectrum.to, Spectrum.completed, Spectrum.held))
    for name, tensor in whole.items():
        torch.testing.assert_close(cut[name], tensor, rtol=1e-6, atol=1e-8)
    assert any(not torch.allclose(cut[name], tensor, rtol=1e-4, atol=1e-6) for name, tensor in held.items())
