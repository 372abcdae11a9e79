"""One model out of many: one-shot federated learning without server-side training."""

from maecho._version import __version__
from maecho.aggregation import METHODS, Merged, aggregate
from maecho.aggregation.relay import relay
from maecho.aggregation.server import RelayServer
from maecho.client import make_upload
from maecho.errors import UploadError
from maecho.evaluation import Ensemble, Evaluation, evaluate
from maecho.privacy import Privacy
from maecho.respondent import RelayClient
from maecho.upload import Upload

__all__ = [
    "METHODS",
    "Ensemble",
    "Evaluation",
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
