"""One model out of many: one-shot federated learning without server-side training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from maecho._version import __version__

if TYPE_CHECKING:
    from maecho.aggregation import METHODS, aggregate
    from maecho.checking.check import check
    from maecho.checking.found import Check
    from maecho.echo.client import RelayClient
    from maecho.echo.relay import relay
    from maecho.echo.server import RelayServer
    from maecho.errors import InputError, UploadError
    from maecho.evaluation import Ensemble, Evaluation, evaluate
    from maecho.privacy import Privacy
    from maecho.upload.client import make_upload
    from maecho.upload.merged import Merged
    from maecho.upload.upload import Upload

__all__ = [
    "METHODS",
    "Check",
    "Ensemble",
    "Evaluation",
    "InputError",
    "Merged",
    "Privacy",
    "RelayClient",
    "RelayServer",
    "Upload",
    "UploadError",
    "__version__",
    "aggregate",
    "check",
    "evaluate",
    "make_upload",
    "relay",
]

# Each public name is imported when it is first used. So `import maecho` is quick, and a program that only makes uploads
# does not load the methods.
_HOMES = {
    "METHODS": "aggregation",
    "Check": "checking.found",
    "Ensemble": "evaluation",
    "Evaluation": "evaluation",
    "InputError": "errors",
    "Merged": "upload.merged",
    "Privacy": "privacy",
    "RelayClient": "echo.client",
    "RelayServer": "echo.server",
    "Upload": "upload.upload",
    "UploadError": "errors",
    "aggregate": "aggregation",
    "check": "checking.check",
    "evaluate": "evaluation",
    "make_upload": "upload.client",
    "relay": "echo.relay",
}
"""Public name -> the module that has it."""
_ROOMS = (
    "aggregation",
    "alignment",
    "backbones",
    "checking",
    "echo",
    "evaluation",
    "lab",
    "linalg",
    "network",
    "statistics",
    "synthesis",
    "upload",
)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(import_module(f"maecho.{_HOMES[name]}"), name)
        globals()[name] = found  # from now on without this function
        return found
    if name in _ROOMS:
        return import_module(f"maecho.{name}")
    raise AttributeError(f"module 'maecho' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
