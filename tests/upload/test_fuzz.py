"""Two thousand bad files and a few killed writers; `make fuzz` runs ten times as many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_bad_files_end_in_one_sentence_and_nothing_else() -> None:
    command = [sys.executable, "-m", "support.fuzz", "--cases", "2000", "--flips", "500", "--kills", "20"]
    paths = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths})
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["killed_wrong"] == []
    assert done.returncode == 0
    assert found["flips_accepted"] == found["hangs"] == 0
    assert found["longest_sentence"] <= 500
    assert found["slowest_seconds"] < 20
    assert found["peak_megabytes"] < 1000
    accepted = sum(count for key, count in found["outcomes"].items() if key.endswith("accepted"))
    assert accepted > 50, "damage that does no harm shows that the checks behind the digest are reached"
