"""The cache by itself: what is appended can be seen, in order, and cut back."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import FULL, SLIDING
from redraft.model.kv_cache import KVCache

CONFIG = replace(tiny.BASE, layer_types=(SLIDING, FULL), sliding_window=4)


def put(cache: KVCache, contents: list[list[int]], new: list[list[int]]) -> None:
    """Appends tokens whose keys are their own numbers, values the negative of that."""
    width = max(map(len, new))
    padded = torch.tensor([row + [99] * (width - len(row)) for row in new], dtype=torch.float32)
    for layer in range(2):
        heads, size = CONFIG.layer_heads(layer)
        k = padded[:, :, None, None].expand(-1, -1, heads, size)
        cache.append(layer, k, -k, [len(row) for row in new])
    cache.advance([len(row) for row in new])
    for held, row in zip(contents, new, strict=True):
        held.extend(row)


def check(cache: KVCache, contents: list[list[int]]) -> None:
    for layer, window in ((0, 4), (1, None)):
        keys, values = cache.view(layer)
        positions = cache.key_positions(layer).expand(len(contents), -1)
        assert torch.equal(keys, -values)
        for row, held in enumerate(contents):
            expected = held if window is None else held[len(held) - min(len(held), window - 1) :]
            seen = positions[row] >= max(0, len(held) - (window - 1) if window else 0)
            assert keys[row, seen, 0, 0].tolist() == expected
            assert positions[row, seen].tolist() == list(range(len(held) - len(expected), len(held)))


@settings(max_examples=80)
@given(st.data())
def test_any_history_can_be_read_back(data):
    rows = data.draw(st.integers(1, 3))
    rewind = data.draw(st.sampled_from([None, 0, 2, 5]))
    cache, contents, number = KVCache(CONFIG, rows, 40, rewind=rewind), [[] for _ in range(rows)], 0
    even = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 8))):
        if rewind is None and data.draw(st.booleans()):
            contents = [row[: data.draw(st.integers(0, len(row)))] for row in contents]
            cache.rewind([len(row) for row in contents])
        else:
            sizes = [data.draw(st.integers(0, 9))] * rows if even else [data.draw(st.integers(0, 9)) for _ in range(rows)]
            if any(len(row) + size > 40 for row, size in zip(contents, sizes, strict=True)):
                continue
            put(cache, contents, [list(range(number, number + size)) for size in sizes])
            number += 10
        check(cache, contents)


def test_the_worked_example():
    cache, contents = KVCache(CONFIG, 1, 40, rewind=2), [[]]
    put(cache, contents, [[0, 1, 2, 3]])
    put(cache, contents, [[4, 5, 6]])
    assert cache._keys[0][0, :, 0, 0].tolist() == [5, 6, 2, 3, 4]
    assert cache.view(0)[0][0, :, 0, 0].tolist() == [4, 5, 6]


def test_a_limited_rewind_gives_what_it_promises_and_refuses_more():
    cache, contents = KVCache(CONFIG, 1, 40, rewind=3), [[]]
    put(cache, contents, [list(range(20))])
    with pytest.raises(ValueError, match="cut to 16"):
        cache.rewind([16])
    cache.rewind([17])
    contents = [contents[0][:17]]
    check(cache, contents)
    put(cache, contents, [[50, 51]])
    check(cache, contents)
    with pytest.raises(ValueError, match="from 14 on"):  # 20 were written once; what that overwrote stays lost
        cache.rewind([16])
    with pytest.raises(ValueError, match="cannot be cut to 30"):
        cache.rewind([30])


def test_too_much_is_refused_with_the_numbers():
    cache = KVCache(CONFIG, 1, 5)
    put(cache, [[]], [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"holds 5 tokens, 3 are used and 4 more"):
        put(cache, [[]], [[4, 5, 6, 7]])


def test_sliding_layers_do_not_grow_with_the_context():
    small, large = (KVCache(CONFIG, 1, capacity, rewind=0) for capacity in (100, 200))
    heads, size = CONFIG.layer_heads(1)
    assert large.nbytes - small.nbytes == 2 * 100 * heads * size * 4
    assert small._keys[0].shape[1] == 3
