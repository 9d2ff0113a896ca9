"""Noise of training canvases: how much each gets, and which of its tokens are replaced.

A canvas draws a noise level t: the probability that noise replaces a token. Noise hits single tokens or spans. In some
canvases it can hit the first tokens only, as in infilling.
Shapes: B rows, L tokens of a row, N canvases of a batch.
"""

import torch
from torch import Tensor

from redraft.model.masks import Layout


def number_canvases(layout: Layout) -> tuple[Tensor, int]:
    """Numbers the canvases of a batch: the canvas index of each token (-1 outside), and how many canvases there are."""
    starts = layout.starts
    documents = layout.documents
    is_first_BL = torch.ones_like(starts, dtype=torch.bool)
    is_first_BL[:, 1:] = (starts[:, 1:] != starts[:, :-1]) | (documents[:, 1:] != documents[:, :-1])
    canvas_BL = (starts >= 0) & (documents >= 0)
    index_BL = (is_first_BL & canvas_BL).flatten().cumsum(0).view_as(starts) - 1
    return torch.where(canvas_BL, index_BL, -1), int(index_BL[-1, -1]) + 1


def draw_levels(count: int, generator: torch.Generator, *, power: float = 1.0, full: float = 0.0) -> Tensor:
    """Draws t for every canvas: one from each of `count` equal slices of (0, 1), in random order, raised to `power`.

    Stratified sampling: no batch is all easy or all hard. With probability `full` a canvas has t = 1.
    """
    slices = torch.randperm(count, generator=generator)
    offset = torch.rand(1, generator=generator)
    t_N = ((slices + offset) / max(1, count)).pow(power).clamp(1e-4, 1 - 1e-4)
    return torch.where(torch.rand(count, generator=generator) < full, 1.0, t_N)


def select_noised(layout: Layout, t_N: Tensor, index_BL: Tensor, span_noise: float, generator: torch.Generator) -> Tensor:
    """Selects the tokens that noise replaces, bool_BL: each token of a canvas with probability t, or each span as a whole.

    Spans of one canvas have equal lengths.
    """
    uniform_BL = torch.rand(index_BL.shape, generator=generator)
    if span_noise:
        canvases = len(t_N)
        length_N = torch.bincount(index_BL[index_BL >= 0], minlength=canvases)
        size_N = draw_sizes(length_N, generator)
        size_N = torch.where(torch.rand(canvases, generator=generator) < span_noise, size_N, 1)
        shift_N = (torch.rand(canvases, generator=generator) * size_N).long()
        offset_BL = layout.positions - layout.starts
        offset_in_span_BL = torch.minimum(offset_BL, (offset_BL + shift_N[index_BL]) % size_N[index_BL])
        span_start_BL = torch.arange(index_BL.shape[1]) - torch.where(index_BL >= 0, offset_in_span_BL, 0)
        uniform_BL = uniform_BL.gather(1, span_start_BL)
    return (uniform_BL < t_N[index_BL]) & (index_BL >= 0)


def limit_to_gaps(layout: Layout, index_BL: Tensor, count: int, gap_noise: float, generator: torch.Generator) -> Tensor:
    """Selects the tokens that noise may hit, bool_BL: the first ones of some canvases, all tokens of the others.

    Infilling has such canvases: a gap, and the text after it. `gap_noise` is their share. Values outside canvases mean
    nothing.
    """
    length_N = torch.bincount(index_BL[index_BL >= 0], minlength=count)
    gap_N = draw_sizes(length_N, generator)
    gap_N = torch.where(torch.rand(count, generator=generator) < gap_noise, gap_N, length_N)
    return layout.positions - layout.starts < gap_N[index_BL]


def draw_sizes(length_N: Tensor, generator: torch.Generator) -> Tensor:
    """Draws a size for every canvas: 2 tokens up to its half, uniform on a logarithmic scale; at least 2."""
    return (2 * (length_N / 4).clamp(min=1) ** torch.rand(len(length_N), generator=generator)).long()
