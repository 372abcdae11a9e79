"""echo-chain: one shot from drawn inputs, with the same result for the same seed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maecho
from maecho import InputError, RelayServer, make_upload
from maecho.aggregation import EchoChain
from maecho.echo.fit import Regression
from maecho.echo.simulated import Drawing
from maecho.synthesis.pseudo import PseudoInputs
from support.clients import batches, rng
from support.clients import network as mlp
from support.tiny import refused, refused_input

PLAIN = {"head": "regression", "pull": 0.0}
"""To the clients' own outputs alone, whatever the labels."""


def uploads(count: int = 3, dtype: torch.dtype = torch.float32, **options: Any) -> list[maecho.Upload]:
    options = {"statistics": ["moments", "classes"], "rank": None, **options}
    return [make_upload(mlp(i, dtype), batches(i, 3 + i, dtype=dtype), f"client-{i}", **options) for i in range(count)]


def chain(given: Any = None, **options: Any) -> maecho.Merged:
    options = {"draws": 400, "model": mlp(), **options}
    return EchoChain(**options)(uploads() if given is None else given)


def close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(
            one[key], other[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_the_seed_decides_and_nothing_global_changes() -> None:
    state = torch.get_rng_state()
    one, same, other = (chain(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    close(one, same)
    assert not torch.allclose(one["0.weight"], other["0.weight"], atol=1e-3)


def test_the_weights_of_the_model_given_do_not_matter_and_stay() -> None:
    model = mlp(7).train()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    close(chain(model=model), chain(model=mlp(8)))
    close(model.state_dict(), before)
    assert model.training


def test_order_of_clients_does_not_matter() -> None:
    given = uploads(dtype=torch.float64)
    close(chain(given), chain(given[::-1]), 1e-8)
    # Streams go by name: the same client draws the same, whoever else is there.
    renamed = [replace(given[0], client="other"), *given[1:]]
    assert not torch.allclose(chain(given)["0.weight"], chain(renamed)["0.weight"], atol=1e-3)


def test_chunks_are_other_draws_of_the_same_number() -> None:
    """How many come from each Gaussian does not hang on the chunk. Which ones does, as on the seed (torch fills sixteen
    numbers at a time): with many draws, as little as that."""
    given = uploads()
    moments = given[0].statistics["moments"]
    assert moments is not None
    numbers = [[y.tolist() for _, y in PseudoInputs(moments, 333, chunk) if y is not None] for chunk in (7, 50, 10**6)]
    flat = [[label for labels in chunks for label in labels] for chunks in numbers]
    assert flat[0] == flat[1] == flat[2]
    odd, whole = (chain(given, chunk=chunk, draws=50_000, **PLAIN) for chunk in (777, 10**6))
    close(odd, whole, 0.1)


@pytest.mark.parametrize("options", [{}, {"gaussians": 3}, {"covariance": "shared"}, {"rank": 4}])
def test_files_and_objects_give_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    given = uploads(**options)
    paths = [tmp_path / f"{upload.client}.safetensors" for upload in given]
    for upload, path in zip(given, paths, strict=True):
        upload.save(path)
    close(chain(paths), chain(given))
    close(maecho.aggregate(paths, "echo-chain", model=mlp(), draws=400), chain(given))


def test_one_client_gives_its_outputs_back() -> None:
    state, own = chain(uploads(1)), mlp(0)
    x = torch.cat([x for x, _ in batches(0)])
    expected = own(x).detach()
    own.load_state_dict(state)
    torch.testing.assert_close(own(x).detach(), expected, rtol=1e-3, atol=1e-3)


def test_it_is_the_relay_with_clients_that_the_server_plays() -> None:
    server = RelayServer(mlp(), rounds=1, uploads=uploads(), drawing=Drawing(400), regression=Regression())
    close(server.result(), chain())
    assert server.clients_answered == [0, 0, 0]
    assert server.result().recipe["method"] == "echo-chain"


def test_many_draws_come_close_to_the_relay_where_the_inputs_are_gaussian() -> None:
    pairs = [(mlp(i, bias=True), batches(i, 40)) for i in range(2)]
    given = [make_upload(m, d, f"{i}", ["moments"], rank=None) for i, (m, d) in enumerate(pairs)]
    real = maecho.relay(mlp(), pairs, regression=Regression().plain)
    far, near = (chain(given, draws=draws, **PLAIN) for draws in (50, 40_000))
    gap = [max(float((state[k] - real[k]).abs().max()) for k in real) for state in (far, near)]
    assert gap[1] < 0.25 < gap[0]


def test_without_labels_the_head_is_regression() -> None:
    bare = [make_upload(mlp(i), [x for x, _ in batches(i)], f"{i}", ["moments"], rank=None) for i in range(2)]
    for head in ("lda", "ridge"):
        close(chain(bare, head=head), chain(bare, **PLAIN))
    labelled = [make_upload(mlp(i), batches(i), f"{i}", ["moments"], rank=None) for i in range(2)]
    assert not torch.allclose(chain(labelled)["4.weight"], chain(labelled, **PLAIN)["4.weight"], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    merged = chain(uploads(dtype=dtype))
    assert {t.dtype for t in merged.values()} == {dtype}
    assert all(t.isfinite().all() for t in merged.values())
    if dtype == torch.float64:
        assert float((merged["0.weight"].float().double() - merged["0.weight"]).abs().max()) > 0


def test_images_with_constant_pixels_and_batchnorm() -> None:
    def model(seed: int) -> nn.Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    given = []
    for i in range(2):
        x = torch.rand(30, 1, 6, 6, generator=rng(i))
        x[:, :, 0], x[:, :, -1] = 0, 1
        data = [(x, torch.arange(30) % 3)]
        given.append(make_upload(model(i), data, f"{i}", ["moments"]))
    merged = chain(given, model=model(5))
    assert all(t.isfinite().all() for t in merged.values())
    assert float(merged["1.running_var"].min()) > 0
    model(0).load_state_dict(merged)


class TestBadInput:
    """One sentence each."""

    def tokens(self) -> tuple[nn.Module, maecho.Upload]:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
        return model, make_upload(model, [(torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1]))], "ann", ["moments"])

    @pytest.mark.filterwarnings("ignore:.*not sent")
    @pytest.mark.parametrize("source", ["memory", "file"])
    def test_tokens_have_no_gaussian(self, source: str, tmp_path: Path) -> None:
        model, upload = self.tokens()
        upload.save(tmp_path / "ann.safetensors")
        given = [upload if source == "memory" else tmp_path / "ann.safetensors"]
        said = (
            "ann",
            "echo-chain",
            "moments",
            "got none, because the inputs are not one tensor of real numbers",
            "echo-relay",
        )
        with refused(*said):
            chain(given, model=model)
        with refused(*said):
            maecho.aggregate(given, "echo-chain", model=model)
        with refused(*said):
            RelayServer(model, rounds=1, uploads=given)

    def test_uploads_without_moments(self) -> None:
        with refused("client-0", "echo-chain needs the statistic 'moments'", "got an upload with classes"):
            chain(uploads(statistics=["classes"]))
        with refused("at least one upload", "got none"):
            chain([])
        with refused("uploads must be Upload objects or paths", "got int"):
            chain([3])

    def test_no_model_or_another(self) -> None:
        expected = ("model must be the network that the uploads are weights of", "echo-chain runs it", "got none")
        with refused(*expected, error=InputError):
            EchoChain()(uploads())
        with refused("model must have 9x12 for '0.weight'", "client-0", "got 8x12", error=InputError):
            chain(model=nn.Sequential(nn.Linear(12, 8)))

    def test_a_model_that_cannot_be_copied(self) -> None:
        class Stubborn(nn.Sequential):
            def __deepcopy__(self, memo: object) -> nn.Module:
                raise TypeError("not this one")

        with refused_input("copy.deepcopy", "got Stubborn: not this one"):
            chain(model=Stubborn(*mlp()))

    def test_labels_beyond_the_outputs(self) -> None:
        x, _ = batches()[0]
        odd = make_upload(mlp(), [(x, torch.full((16,), 4))], "ann", ["moments"])
        moments = replace(odd.statistics["moments"], classes=torch.tensor([7]))
        odd = replace(odd, statistics={"moments": moments})
        with refused_input("ann: labels must lie in 0 … 4", "got 7"):
            chain([odd, *uploads(1)])

    @pytest.mark.parametrize(
        ("option", "value"),
        [("draws", 0), ("chunk", 0), ("seed", -1), ("seed", 1.5), ("ridge", -1), ("head", "svm"), ("pull", 2)],
    )
    def test_options(self, option: str, value: Any) -> None:
        with refused(f"{option} must be", f"got {value!r}", error=ValueError):
            EchoChain(**{option: value})


class Sequences(nn.Module):
    """A transformer over rows of numbers. The network is narrow after it, so uploads have features."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.middle, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.encoder(x).mean(1)).relu())


def test_features_behind_a_transformer_are_put_right() -> None:
    """Torch's fused path stays off, since it would not call the modules of a split attention."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Sequences().eval()
    x = torch.randn(40, 3, 4, generator=rng())
    upload = make_upload(model, [(x, torch.arange(40) % 3)], "ann", rank=None)
    assert "encoder.self_attn.k" in {layer.name for layer in upload.layers}
    assert upload.statistics["features"].keys() == {"middle"}
    merged = copy.deepcopy(model)
    merged.load_state_dict(maecho.aggregate([upload], "echo-chain", model=model, draws=600))
    torch.testing.assert_close(merged(x), model(x), rtol=1e-3, atol=1e-3)
