"""Every cell of every mask, against its definition."""

import itertools

import pytest
import torch

from redraft.model import masks


@pytest.mark.parametrize("window", [None, 2, 3, 7])
def test_causal_cell_by_cell(window):
    queries = torch.tensor([[4, 5, 6, 7], [0, 1, 2, 3]])
    keys = torch.tensor([[2, 3, 4, 5, 6, 7], [-2, -1, 0, 1, 2, 3]])
    mask = masks.causal(queries, keys, window)
    for b, s, t in itertools.product(range(2), range(4), range(6)):
        q = int(queries[b, s])
        k = int(keys[b, t])
        assert bool(mask[b, s, t]) == (k >= 0 and k <= q and (window is None or k > q - window))


@pytest.mark.parametrize("window", [None, 2, 4, 9])
def test_canvas_cell_by_cell(window):
    lengths = torch.tensor([5, 2])
    keys = torch.tensor([[0, 1, 2, 3, 4], [-3, -2, -1, 0, 1]])
    mask = masks.canvas(lengths, keys, 3, window)
    assert mask.shape == (2, 1, 8)
    for b, t in itertools.product(range(2), range(8)):
        if t >= 5:
            assert mask[b, 0, t]
            continue
        k = int(keys[b, t])
        n = int(lengths[b])
        assert bool(mask[b, 0, t]) == (k >= 0 and (window is None or k >= n - (window - 1)))


def test_the_example_of_the_docstring():
    visible = masks.cached_for_canvas(torch.tensor([10]), torch.arange(10)[None], 4)
    assert visible[0].nonzero().flatten().tolist() == [7, 8, 9]
