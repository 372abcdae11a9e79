"""Networks inside wrappers: what is inside is used, or the wrapper is refused. Hooks see compiled networks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from maecho import InputError, aggregate, make_upload, relay
from maecho.network.attention import slow_path
from maecho.network.hooks import watching
from maecho.network.plain import plain
from support.clients import rng

X, Y = torch.randn(30, 4, generator=rng(0)), torch.arange(30) % 3


def mlp(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def compiled() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Compiles without a compiler, and runs what was compiled, as a training loop has done before an upload."""

    def run(model: nn.Module) -> nn.Module:
        wrapped: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
        wrapped(X)
        return wrapped

    yield run
    torch.compiler.reset()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "twice": lambda model: nn.DataParallel(nn.DataParallel(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_client_fits_beside_a_plain_one(wrapper: str) -> None:
    uploads = [make_upload(WRAPPERS[wrapper](mlp(1)), [(X, Y)], "a"), make_upload(mlp(2), [(X, Y)], "b")]
    assert list(uploads[0].weights) == list(mlp().state_dict())
    mlp().load_state_dict(dict(aggregate(uploads, "regmean")))
    wrapped = aggregate(uploads, "echo-chain", model=WRAPPERS[wrapper](mlp(1)), draws=50)
    torch.testing.assert_close(dict(wrapped), dict(aggregate(uploads, "echo-chain", model=mlp(1), draws=50)))
    mlp().load_state_dict(dict(relay(WRAPPERS[wrapper](mlp(1)), [(WRAPPERS[wrapper](mlp(1)), [(X, Y)])])))


def test_a_compiled_network_is_seen(compiled: Callable[[nn.Module], nn.Module]) -> None:
    """No hook fires in compiled code: every Gram was 0, and nobody was told."""
    plain_one, given = mlp(), mlp()
    inside = mlp()
    inside.compile(backend="eager")
    inside(X)
    expected = make_upload(plain_one, [(X, Y)], "a", rank=None)
    for model in (compiled(given), inside):
        upload = make_upload(model, [(X, Y)], "a", rank=None)
        assert list(upload.weights) == list(expected.weights)
        for name, gram in expected.statistics["gram"].items():
            torch.testing.assert_close(upload.statistics["gram"][name].dense(), gram.dense())


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_what_is_refused(compiled: Callable[[nn.Module], nn.Module]) -> None:
    part = mlp()
    part[0] = nn.DataParallel(part[0])
    for model, sentence in (
        (torch.jit.trace(mlp(), X), "the model must be the module that was scripted or traced, got a TopLevelTraced"),
        (part, "must be compiled or wrapped as a whole or not at all, got a DataParallel in '0'; give the network as"),
        (nn.Sequential(compiled(mlp())), "got a OptimizedModule in '0'"),
        ("mlp", "the model must be a torch.nn.Module, got str"),
    ):
        with pytest.raises(InputError, match=sentence):
            plain(model)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^ann: the model must be compiled or wrapped as a whole"):
        make_upload(part, [(X, Y)], "ann")
    with pytest.raises(InputError, match="FSDP has sharded"):
        plain(type("FullyShardedDataParallel", (nn.Sequential,), {})(mlp()))


def test_a_network_of_which_no_layer_runs_is_refused() -> None:
    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.inner.weight.T

    with pytest.raises(InputError, match=r"^ann: some layer must run in a pass over the batches, got none of inner$"):
        make_upload(Elsewhere(), [(X, Y)], "ann")


def test_a_model_that_serves_another_thread_meanwhile_shows_nothing_of_it() -> None:
    """Strangers' rows were in the Gram."""
    model, stop = mlp(), threading.Event()
    began = threading.Event()

    def serve() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(100 * torch.ones(50, 4))
                began.set()

    alone = make_upload(model, [(X, Y)] * 20, "a", rank=None)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        began.wait()
        upload = make_upload(model, [(X, Y)] * 20, "a", rank=None)
    finally:
        stop.set()
        thread.join()
    for name, gram in alone.statistics["gram"].items():
        torch.testing.assert_close(upload.statistics["gram"][name].dense(), gram.dense())


def test_hooks_of_two_threads_see_their_own_passes() -> None:
    model, found = mlp(), {}

    def run(value: float) -> None:
        seen: list[float] = []
        with watching(model, ["0"], before=lambda name, module, x: seen.append(float(x[0, 0]))):
            for _ in range(50):
                model(value * torch.ones(2, 4))
        found[value] = seen

    threads = [threading.Thread(target=run, args=(value,)) for value in (1.0, 2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {value: [value] * 50 for value in (1.0, 2.0, 3.0)}


def test_the_slow_path_ends_with_the_last_who_needs_it() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    one, two = slow_path(), slow_path()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled(), "the other one still needs it"
    two.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled() == before
