"""Many rounds in one process: local training, a server that merges, and a record of every round."""

from maecho.rounds.choices import find_server
from maecho.rounds.engine import Rounds
from maecho.rounds.history import DivergedError, History, RoundRecord
from maecho.rounds.merging import Merging, Relaying
from maecho.rounds.paced import Paced
from maecho.rounds.peers import PEERS
from maecho.rounds.servers import Outcome, Round, Server
from maecho.rounds.training.local import Correction, Local
from maecho.rounds.training.losses import LOSSES
from maecho.rounds.training.sphere import Sphere

__all__ = [
    "LOSSES",
    "PEERS",
    "Correction",
    "DivergedError",
    "History",
    "Local",
    "Merging",
    "Outcome",
    "Paced",
    "Relaying",
    "Round",
    "RoundRecord",
    "Rounds",
    "Server",
    "Sphere",
    "find_server",
]
