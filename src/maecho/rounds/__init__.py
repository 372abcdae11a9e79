"""Many rounds in one process: local training, a server that merges, and a record of every round."""

from maecho.rounds.engine import Rounds
from maecho.rounds.history import DivergedError, History, RoundRecord
from maecho.rounds.local import Correction, Local
from maecho.rounds.losses import LOSSES
from maecho.rounds.merging import Merging, Relaying
from maecho.rounds.peers import PEERS
from maecho.rounds.servers import Outcome, Round, Server

__all__ = [
    "LOSSES",
    "PEERS",
    "Correction",
    "DivergedError",
    "History",
    "Local",
    "Merging",
    "Outcome",
    "Relaying",
    "Round",
    "RoundRecord",
    "Rounds",
    "Server",
]
