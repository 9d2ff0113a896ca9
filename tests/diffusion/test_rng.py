"""Draws are a pure function of (seed, block, step, position), and look random."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redraft.diffusion.rng import draws

SEEDS = st.integers(-(2**70), 2**70)


@given(SEEDS, st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 40), st.integers(1, 2**18))
def test_draws_are_pure_and_in_range(seed, block, step, length, vocab):
    first = draws([seed], block)
    again = draws([seed], block)
    assert torch.equal(first.uniform(step, length), again.uniform(step, length))
    assert (first.uniform(step, length) >= 0).all()
    assert (first.uniform(step, length) < 1).all()
    noise = first.noise(step, length, vocab)
    assert noise.min() >= 0
    assert noise.max() < vocab
    assert torch.equal(first.noise(step, length + 9, vocab)[:, :length], noise)


@given(st.lists(SEEDS, min_size=1, max_size=5), st.integers(0, 9), st.integers(0, 9))
def test_a_row_draws_the_same_alone_and_in_a_batch(seeds, block, step):
    together = draws(seeds, block)
    for row, seed in enumerate(seeds):
        assert torch.equal(together.uniform(step, 16)[row], draws([seed], block).uniform(step, 16)[0])
        assert torch.equal(together.noise(step, 16, 100)[row], draws([seed], block).noise(step, 16, 100)[0])


def test_every_coordinate_matters():
    cases = [(s, b, t) for s in range(12) for b in range(12) for t in range(12)]
    numbers = torch.stack([draws([s], b).uniform(t, 8)[0] for s, b, t in cases])
    assert numbers.unique().numel() == numbers.numel()
    noise = torch.stack([draws([s], b).noise(t, 8, 2**31 - 1)[0] for s, b, t in cases])
    assert (noise.double() / 2**31 - numbers).abs().min() > 0  # the two streams differ


def test_draws_are_uniform_and_uncorrelated():
    rows = draws(list(range(200)), 0)
    u = torch.stack([rows.uniform(step, 64) for step in range(10)])  # 128,000 numbers
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / u.numel()) ** 0.5
    for shift in range(3):  # neighbours by step, row, position
        a, b = u.narrow(shift, 0, u.shape[shift] - 1), u.narrow(shift, 1, u.shape[shift] - 1)
        corr = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(corr) < 5 / a.numel() ** 0.5
    counts = torch.bincount(torch.cat([rows.noise(s, 64, 50).flatten() for s in range(10)]), minlength=50).double()
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi2 < 49 + 6 * (2 * 49) ** 0.5


def test_golden_values():
    """The draws of a seed must never change, or recorded runs could not be replayed."""
    assert draws([7], 1).noise(2, 6, 262_144).tolist() == [[90588, 234414, 63049, 246288, 41611, 27745]]
    assert draws([7], 1).uniform(2, 3)[0].tolist() == pytest.approx([0.637921765187, 0.840150609893, 0.672985557356])
