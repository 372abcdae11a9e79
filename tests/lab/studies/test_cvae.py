"""The auto-encoder: its loss against densities written out, its training, its networks."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Bernoulli, Normal, kl_divergence

from maecho.lab.studies.cvae import Shape, Training, divergence, drawn, negative_bound

SHAPE = Shape(classes=3, pixels=5, latent=2, hidden=(7, 6))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_networks_have_the_sizes_of_the_paper() -> None:
    paper = Shape(classes=10, pixels=784)
    sizes = [tuple(p.shape) for p in paper.decoder(generator()).parameters() if p.ndim == 2]
    assert sizes == [(256, 40), (512, 256), (784, 512)], "30 and the class, 256, 512, 784"
    sizes = [tuple(p.shape) for p in paper.encoder(generator()).parameters() if p.ndim == 2]
    assert sizes == [(512, 794), (256, 512), (60, 256)]


def test_one_generator_decides_the_initial_weights() -> None:
    one, same, other = (SHAPE.decoder(generator(seed)).state_dict() for seed in (0, 0, 1))
    assert torch.equal(one["fc1.weight"], same["fc1.weight"])
    assert not torch.equal(one["fc1.weight"], other["fc1.weight"])


def test_the_divergence_is_that_of_the_gaussians() -> None:
    mean, log_variance = torch.randn(2, 4, 3, generator=generator(), dtype=torch.float64)
    theirs = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(0.0, 1.0)).sum()
    assert float(divergence(mean, log_variance)) == pytest.approx(float(theirs))


def test_the_bound_is_that_of_the_densities() -> None:
    """With a posterior without spread z is its mean, and nothing is random."""
    encoder, decoder = SHAPE.encoder(generator(1)), SHAPE.decoder(generator(2))
    with torch.no_grad():
        encoder[-1].weight[2:] = 0
        encoder[-1].bias[2:] = -60
    x, y = torch.rand(4, 5, generator=generator(3)), torch.tensor([0, 2, 1, 0])
    one_hot = torch.eye(3)[y]
    for network in (encoder, decoder):
        network.requires_grad_(False)
    mean = encoder(torch.cat([x, one_hot], 1))[:, :2]
    likelihood = Bernoulli(logits=decoder(torch.cat([mean, one_hot], 1)), validate_args=False).log_prob(x).sum()
    divergences = divergence(mean, torch.full_like(mean, -60.0))
    ours = negative_bound(SHAPE, encoder, decoder, x, y)
    assert float(ours) == pytest.approx(float((divergences - likelihood) / 4), rel=1e-5)


def test_training_lowers_the_loss_and_draws_the_class() -> None:
    """Class k lights pixel k alone."""
    y = torch.arange(3).repeat(60)
    x = torch.eye(5)[y]
    encoder, decoder = SHAPE.encoder(generator(1)), SHAPE.decoder(generator(2))
    losses: list[float] = []
    Training(epochs=20, learning_rate=0.02, batch_size=20)(
        SHAPE, encoder, decoder, x, y, generator(3), lambda epoch, loss: losses.append(loss)
    )
    assert len(losses) == 20
    assert losses[-1] < 0.3 * losses[0]
    labels = torch.tensor([2, 0, 1])
    images = drawn(SHAPE, decoder, torch.randn(3, 2, generator=generator(4)), labels)
    assert images.argmax(1).tolist() == [2, 0, 1]
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1
    again = SHAPE.decoder(generator(2))
    Training(epochs=20, learning_rate=0.02, batch_size=20)(
        SHAPE, SHAPE.encoder(generator(1)), again, x, y, generator(3)
    )
    for one, other in zip(decoder.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="epochs and batch_size must be at least 1, got 0 and 128"):
        Training(epochs=0)
    with pytest.raises(ValueError, match="learning_rate must be positive and finite, got 0"):
        Training(learning_rate=0.0)
    x, y = torch.full((4, 5), torch.nan), torch.tensor([0, 1, 2, 0])
    with pytest.raises(FloatingPointError, match="the loss must stay finite, got nan in epoch 1"):
        Training(epochs=1)(SHAPE, SHAPE.encoder(generator()), SHAPE.decoder(generator()), x, y, generator())
