"""The cache by itself: appended tokens are in the view, in order of position, and can be cut back."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import FULL, SLIDING
from redraft.model.kv_cache import KVCache

CONFIG = replace(tiny.BASE, layer_types=(SLIDING, FULL), sliding_window=4)


def append(cache: KVCache, contents: list[list[int]], new: list[list[int]]) -> None:
    """Appends tokens whose keys are their own numbers and whose values are the negative of that."""
    width = max(map(len, new))
    padded = torch.tensor([row + [99] * (width - len(row)) for row in new], dtype=torch.float32)
    for layer in range(2):
        heads, size = CONFIG.layer_heads(layer)
        k = padded[:, :, None, None].expand(-1, -1, heads, size)
        cache.append(layer, k, -k, [len(row) for row in new])
    cache.advance([len(row) for row in new])
    for content, row in zip(contents, new, strict=True):
        content.extend(row)


def check_view(cache: KVCache, contents: list[list[int]]) -> None:
    """The view of each layer holds the end of each row's content, at the right positions."""
    for layer, window in ((0, 4), (1, None)):
        keys, values = cache.view(layer)
        positions = cache.key_positions(layer).expand(len(contents), -1)
        assert torch.equal(keys, -values)
        for row, content in enumerate(contents):
            length = len(content)
            expected = content if window is None else content[length - min(length, window - 1) :]
            visible = positions[row] >= max(0, length - (window - 1) if window else 0)
            assert keys[row, visible, 0, 0].tolist() == expected
            assert positions[row, visible].tolist() == list(range(length - len(expected), length))


@settings(max_examples=80)
@given(st.data())
def test_any_sequence_of_appends_and_rewinds_can_be_viewed(data):
    rows = data.draw(st.integers(1, 3))
    rewind = data.draw(st.sampled_from([None, 0, 2, 5]))
    cache = KVCache(CONFIG, rows, 40, rewind=rewind)
    contents: list[list[int]] = [[] for _ in range(rows)]
    number = 0
    has_equal_lengths = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 8))):
        if rewind is None and data.draw(st.booleans()):
            contents = [row[: data.draw(st.integers(0, len(row)))] for row in contents]
            cache.rewind([len(row) for row in contents])
        else:
            sizes = [data.draw(st.integers(0, 9)) for _ in range(rows)]
            sizes = [sizes[0]] * rows if has_equal_lengths else sizes
            if any(len(row) + size > 40 for row, size in zip(contents, sizes, strict=True)):
                continue
            append(cache, contents, [list(range(number, number + size)) for size in sizes])
            number += 10
        check_view(cache, contents)


def test_the_example_of_the_docstring():
    cache = KVCache(CONFIG, 1, 40, rewind=2)
    contents: list[list[int]] = [[]]
    append(cache, contents, [[0, 1, 2, 3]])
    append(cache, contents, [[4, 5, 6]])
    assert cache._keys[0][0, :, 0, 0].tolist() == [5, 6, 2, 3, 4]
    assert cache.view(0)[0][0, :, 0, 0].tolist() == [4, 5, 6]


def test_a_limited_rewind_refuses_to_cut_further():
    cache = KVCache(CONFIG, 1, 40, rewind=3)
    contents: list[list[int]] = [[]]
    append(cache, contents, [list(range(20))])
    with pytest.raises(ValueError, match="cut to 16"):
        cache.rewind([16])
    cache.rewind([17])
    contents = [contents[0][:17]]
    check_view(cache, contents)
    append(cache, contents, [[50, 51]])
    check_view(cache, contents)
    with pytest.raises(ValueError, match="from 14 on"):  # the first 20 tokens overwrote the older ones
        cache.rewind([16])
    with pytest.raises(ValueError, match="cannot be cut to 30"):
        cache.rewind([30])


def test_more_tokens_than_fit_are_refused_with_the_numbers():
    cache = KVCache(CONFIG, 1, 5)
    append(cache, [[]], [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"holds 5 tokens, 3 are used and 4 more"):
        append(cache, [[]], [[4, 5, 6, 7]])


def test_sliding_layers_do_not_grow_with_the_context():
    small, large = (KVCache(CONFIG, 1, capacity, rewind=0) for capacity in (100, 200))
    heads, size = CONFIG.layer_heads(1)
    assert large.nbytes - small.nbytes == 2 * 100 * heads * size * 4
    assert small._keys[0].shape[1] == 3


@pytest.mark.parametrize("capacity", [12, 20, 40])
def test_a_copied_prefix_is_the_context_cut_back(capacity):
    """Equal to a copy that is rewound and moved; the cache itself stays. Moving gives the old tensors up."""
    cache = KVCache(CONFIG, 1, 20, rewind=4)
    contents: list[list[int]] = [[]]
    append(cache, contents, [list(range(13))])
    copied = cache.copy_prefix(11, capacity)
    check_view(cache, [list(range(13))])
    check_view(copied, [list(range(11))])
    assert copied.nbytes == KVCache.count_bytes(CONFIG, capacity, torch.float32, 4)
    moved = cache.select_rows([0])
    moved.rewind([11])
    old = moved._keys
    moved = moved.with_capacity(capacity)
    for layer in range(2):
        assert all(torch.equal(a, b) for a, b in zip(copied.view(layer), moved.view(layer), strict=True))
        assert capacity == 20 or old[layer] is moved._keys[layer]
    with pytest.raises(ValueError, match="cannot be cut to 3"):
        cache.copy_prefix(3, capacity)
