"""The known content of every data set: counts and checksums. Other content is accepted only when it is asked for.

A checksum is the SHA-256 of the decoded values in row-major order: bytes for pixels and labels, little-endian 32-bit
numbers for QMNIST's table (the rows that belong to MNIST). So it does not matter how a file was compressed. For PACS it
covers names and content of a domain's pictures. docs/data.md has the same table; a test holds them together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from maecho.errors import InputError
from maecho.lab.data.places import unchecked

if TYPE_CHECKING:
    from pathlib import Path


_OWN = "MAECHO_DATA_UNCHECKED=1 takes files of your own"


@dataclass(frozen=True)
class Known:
    """The known content of one part of a data set."""

    shape: tuple[int, ...]
    sha256: str


KNOWN: dict[str, dict[str, Known]] = {
    "mnist": {
        "train-images-idx3-ubyte": Known(
            (60_000, 28, 28), "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757"
        ),
        "train-labels-idx1-ubyte": Known((60_000,), "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13"),
        "t10k-images-idx3-ubyte": Known(
            (10_000, 28, 28), "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161"
        ),
        "t10k-labels-idx1-ubyte": Known((10_000,), "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5"),
    },
    "mnist-writers": {
        "qmnist-train-labels-idx2-int": Known(
            (60_000, 8), "fd35ae63b9cc2c3937b192ae4c64dd6209616c4bad08ac80c12c2671eb4a021f"
        ),
        "qmnist-test-labels-idx2-int": Known(
            (10_000, 8), "08cff2f13059be8fbca4fb2d3811b298febd917fc385e81f4a11c243e5d2be35"
        ),
    },
    "usps": {
        "x_train": Known((7_291, 16, 16), "b3aea71639e9f07b0000e170f269551297d36369654afbe43330a543ceeb8e5e"),
        "y_train": Known((7_291,), "ee5027fd47b76715ac18ca27e72fa1332bde98e0b8ce593b503bb2bdb6c03da0"),
        "x_test": Known((2_007, 16, 16), "418e84c15696e0dc49487494268870b9c65670c1539d487d775caeea7877b253"),
        "y_test": Known((2_007,), "0b8b792b8ca1c5c704fd9d5bbd1b261623a359e6c8c65b23db428257beea7800"),
    },
    "cifar10": {
        "x_train": Known((50_000, 32, 32, 3), "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"),
        "y_train": Known((50_000,), "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"),
        "x_test": Known((10_000, 32, 32, 3), "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"),
        "y_test": Known((10_000,), "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"),
    },
    "cifar100": {
        "x_train": Known((50_000, 32, 32, 3), "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430"),
        "y_train": Known((50_000,), "9f11b9f97aad759ba6df0a33e3218b01d8deaf4ed3a14aa1185d69b9ad7ebcb3"),
        "x_test": Known((10_000, 32, 32, 3), "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19"),
        "y_test": Known((10_000,), "4dad7d09c7c97d33f6cb928d705cf4196221316fd6e31bdd978a08ed9103ee0b"),
    },
    "pacs": {
        "art_painting": Known((2_048,), "1a4832e1286686a1b49a3886f5832af81c4acf725579a68a9715e61a2bcda0f6"),
        "cartoon": Known((2_344,), "3ec0aa7984f6381a97cd12ff461c5cada2919a31ae7c2878251d6e528a1d0ce3"),
        "photo": Known((1_670,), "3ef13ceaf23c67eaac8bee476586bf0c1421a9f8e765659009b53f85425f1329"),
        "sketch": Known((3_929,), "8417338e81d5d88e67a4b2c6b7bf8d407fe5100ce2a746b5045ca53098e57639"),
    },
}
"""Data set -> its parts, by the name of the file, of the array in it or of the domain."""


def check(name: str, part: str, path: Path, values: np.ndarray) -> None:
    """Refuse values that are not the known ones, unless MAECHO_DATA_UNCHECKED=1."""
    if unchecked():
        return
    check_shape(name, part, path, values.shape)
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    check_sum(name, part, path, hashlib.sha256(little.data).hexdigest())


def check_shape(name: str, part: str, path: Path, shape: tuple[int, ...]) -> None:
    """Refuse another shape than the known one, unless MAECHO_DATA_UNCHECKED=1."""
    known = KNOWN[name][part].shape
    if not unchecked() and shape != known:
        raise InputError(f"{path}: {part} of {name} must have shape {known}, got {shape}; {_OWN}")


def check_sum(name: str, part: str, path: Path, found: str) -> None:
    """Refuse another checksum than the known one, unless MAECHO_DATA_UNCHECKED=1."""
    known = KNOWN[name][part].sha256
    if not unchecked() and found != known:
        raise InputError(
            f"{path}: {part} of {name} must have the SHA-256 {known[:16]}…, got {found[:16]}…: it is damaged or "
            f"another edition; {_OWN}"
        )
