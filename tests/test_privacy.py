"""Differential privacy: the noise, the total cost of releases, settings that are refused, the command line."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from maecho import InputError, Privacy, Upload, make_upload
from maecho.privacy import normal
from support.private import rng
from support.tiny import batches, network

ROOT = Path(__file__).resolve().parent.parent


def test_noise_of_the_operating_system_is_normal_and_never_twice_the_same() -> None:
    drawn = normal((300, 400))
    assert drawn.dtype == torch.float64
    assert not torch.equal(drawn, normal((300, 400)))
    assert float(drawn.mean()) == pytest.approx(0, abs=0.02)
    assert float(drawn.std()) == pytest.approx(1, abs=0.02)
    inside = (drawn.abs() < 1.959964).double().mean()
    assert float(inside) == pytest.approx(0.95, abs=0.005)
    assert normal((0, 3)).shape == (0, 3)
    assert Privacy(1.0, 1.0).generator is None
    x = torch.zeros(3, 3)
    assert not torch.equal(Privacy(1.0, 1.0).noisy(x, "gram", 1), Privacy(1.0, 1.0).noisy(x, "gram", 1))
    same = [Privacy(1.0, 1.0, generator=rng(1)).noisy(x, "cross", 1) for _ in range(2)]
    assert torch.equal(*same)


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


@pytest.mark.parametrize("noise", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("releases", [1, 5, 60])
def test_the_accountant_agrees_with_gaussian_differential_privacy(noise: float, releases: int) -> None:
    """δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) with μ = √R/σ (Dong, Roth and Su, 2022)."""
    privacy = Privacy(noise, 1.0, delta=1e-4)
    epsilon, mu, phi = privacy.epsilon(releases), math.sqrt(releases) / noise, _phi
    if epsilon < 500:  # e^ε and Φ leave the range of float64 beyond
        delta = phi(-epsilon / mu + mu / 2) - math.exp(epsilon) * phi(-epsilon / mu - mu / 2)
        assert delta == pytest.approx(1e-4, rel=1e-5)
    else:
        assert phi(-epsilon / mu + mu / 2) >= 1e-4
    assert privacy.epsilon(0) == 0


def test_what_one_example_can_change_and_the_noise_for_it() -> None:
    privacy = Privacy(noise=3.0, clip=7.0, clip_output=5.0)
    bounds = {"gram": 49, "cross": 35, "labels": 7, "outputs": 5, "totals": 7, "counts": 1, "examples": 1}
    for part, bound in bounds.items():
        assert privacy.sensitivity(part) == bound
        assert privacy.deviation(part, 4) == 3 * 2 * bound


def test_rows_are_scaled_down_to_both_norms_and_left_out_where_they_are_not_finite() -> None:
    privacy = Privacy(noise=1.0, clip=2.0, clip_output=5.0)
    h = torch.tensor([1.0, 8.0, 1.0, torch.inf, 1.0]).reshape(1, 5, 1, 1)
    z = torch.tensor([1.0, 1.0, 50.0, 1.0, torch.nan]).reshape(1, 5, 1, 1)
    assert privacy.factor(h, z).tolist() == pytest.approx([1, 0.25, 0.1, 0, 0])


def test_noise_for_an_epsilon() -> None:
    privacy = Privacy.for_epsilon(2.5, 1e-6, 7, clip=3.0, clip_output=4.0)
    assert privacy.epsilon(7) <= 2.5
    assert privacy.epsilon(7) == pytest.approx(2.5)
    assert (privacy.clip, privacy.clip_output, privacy.delta, privacy.releases) == (3.0, 4.0, 1e-6, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": 0.0}, "noise must be positive and finite, got 0.0"),
        ({"noise": True}, "noise must be positive and finite, got True"),
        ({"clip": float("inf")}, "clip must be positive and finite, got inf"),
        ({"clip_output": -1}, "clip_output must be positive and finite, got -1"),
        ({"delta": 0}, "delta must lie between 0 and 1, got 0"),
        ({"delta": 1}, "delta must lie between 0 and 1, got 1"),
        ({"delta": "small"}, "delta must lie between 0 and 1, got 'small'"),
        ({"releases": 0}, "releases must be a whole number, at least 1, got 0"),
        ({"releases": 2.5}, "releases must be a whole number, at least 1, got 2.5"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Privacy(**{"noise": 1.0, "clip": 1.0, **options})


def test_an_epsilon_that_is_refused() -> None:
    with pytest.raises(ValueError, match="epsilon must be positive and finite, got -1"):
        Privacy.for_epsilon(-1, 1e-5, 1, clip=1.0)


def test_without_the_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"computed by dp-accounting, got none: pip install 'maecho\[privacy\]'"):
        make_upload(network(), batches(), "ann", privacy=Privacy(1.0, 1.0))


def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "clinic.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def network(): return nn.Linear(4, 3)\n"
        "def train(): return [(torch.randn(300, 4), torch.arange(300) % 3)]\n"
    )

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split("upload --model clinic:network --data clinic:train --client ann --out ann.safetensors")
        command = [sys.executable, "-m", "maecho", *words, *more]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("--privacy-noise", "1.5", "--privacy-clip", "2", "--privacy-delta", "1e-6")
    assert done.returncode == 0, done.stderr
    assert "Privacy, as the client says: (ε, δ) = (" in done.stdout
    assert Upload.load(tmp_path / "ann.safetensors").recipe["privacy"]["delta"] == 1e-6
    failed = run("--privacy-noise", "1.5")
    assert failed.returncode == 2
    assert "--privacy-noise and --privacy-clip must be given together, got one of them" in failed.stderr


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "privacy.md").read_text(), re.S)
    with torch.random.fork_rng():
        exec(compile(block, "privacy.md", "exec"), {})
    first, last = (float(line.split()[0]) for line in capsys.readouterr().out.strip().splitlines())
    assert first == pytest.approx(3)
    assert last == pytest.approx(3)
