"""One model out of many: one-shot federated learning without server-side training."""

from maecho._version import __version__
from maecho.aggregation import METHODS, Merged, aggregate
from maecho.echo.client import RelayClient
from maecho.echo.relay import relay
from maecho.echo.server import RelayServer
from maecho.errors import InputError, UploadError
from maecho.evaluation import Ensemble, Evaluation, evaluate
from maecho.privacy import Privacy
from maecho.upload.client import make_upload
from maecho.upload.upload import Upload

__all__ = [
    "METHODS",
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
    "evaluate",
    "make_upload",
    "relay",
]
