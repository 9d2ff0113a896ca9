"""Own text: the fixed cache equals the growing one, beginnings stay, texts end at their stop token, loops are found."""

import json
from dataclasses import replace

import pytest
import tiny
import torch

from redraft.train.data import Rows
from redraft.train.own_text import FixedCache, OwnTextConfig, OwnTextSampler, find_loops, read_beginnings, write_own_text
from redraft.train.records import DataConfig, Source

TOKENIZER = tiny.byte_tokenizer()
CONFIG = replace(tiny.BASE, eos_token_ids=(1,))
SMALL = OwnTextConfig(tokens=150, rows=6, length=40, longest_beginning=12, most_repeats=30, seed=3)


@pytest.fixture(name="corpus")
def _corpus(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n<|endofstory|>\n".join(f"story {n} about the number {n + 1}\nand more" for n in range(40)))
    return DataConfig(sources=(Source(files=(str(path),), mid_start=0.5),), length=64, canvas_lengths=(8,))


def test_a_fixed_cache_gives_the_hidden_states_of_encode():
    model = tiny.build(tiny.CONFIGS["short window"])
    ids_BT = torch.randint(0, tiny.VOCAB, (3, 20), generator=torch.Generator().manual_seed(0))
    expected = model.encode(ids_BT, model.new_cache(3, 20))
    cache = FixedCache(model.config, 3, 32, model.dtype, model.device)
    for position in range(20):
        cache.width = 8 * (position // 8 + 1)
        hidden_B1D = model.encode(ids_BT[:, position : position + 1], cache)
        assert (hidden_B1D[:, 0] - expected[:, position]).abs().max() < 1e-4


def test_at_a_low_temperature_the_text_is_the_greedy_one():
    model = tiny.build(CONFIG)
    beginnings = [[2, 30, 40, 50], [2], [2, 77]]
    texts = OwnTextSampler(model, replace(SMALL, rows=3)).sample(beginnings, [1e-4] * 3)
    assert len(texts) == 3
    for beginning, text in zip(beginnings, texts, strict=True):
        ids = list(beginning)
        while len(ids) < SMALL.length and ids[-1] != 1:
            hidden_1SD = model.encode(torch.tensor([ids]), model.new_cache(1, len(ids)))
            ids.append(int(model.head(hidden_1SD[0, -1]).argmax()))
        assert text == ids[1:]


def test_a_text_ends_at_the_stop_token_it_wrote_itself():
    model = tiny.build(CONFIG)
    sampler = OwnTextSampler(model, replace(SMALL, rows=2))
    sampler.ids_BT[0, :6] = torch.tensor([2, 1, 9, 9, 1, 7])
    sampler.ids_BT[1, :6] = torch.tensor([2, 8, 8, 8, 8, 8])
    assert sampler._collect(torch.tensor([[3], [1]]), 6) == [[2, 1, 9, 9, 1], [2, 8, 8, 8, 8, 8]]


def test_loops_are_four_tokens_that_occur_more_often_than_allowed():
    loop = [5, 6, 7, 8] * 7
    often = [5, 6, 7, 8] * 6 + [10, 11, 12, 13]
    ids_BT = torch.tensor([loop, often, loop])
    ends = torch.tensor([28, 28, 20])
    assert find_loops(ids_BT, ends, 6).tolist() == [True, False, False]
    assert find_loops(ids_BT, ends, 4).tolist() == [True, True, True]
    assert find_loops(ids_BT[:, :5], ends, 6).tolist() == [False] * 3


def test_beginnings_are_those_of_documents_or_only_the_start_token(corpus):
    found = [ids for ids, _ in zip(read_beginnings(corpus, TOKENIZER, SMALL), range(300), strict=False)]
    bare = sum(ids == [TOKENIZER.bos_id] for ids in found)
    assert 40 < bare < 110
    texts = {TOKENIZER.decode(ids[1:]) for ids in found if len(ids) > 1}
    assert all(text.startswith(("s", "a")) for text in texts)
    assert max(len(ids) for ids in found) == SMALL.longest_beginning + 1
    again = [ids for ids, _ in zip(read_beginnings(corpus, TOKENIZER, SMALL), range(300), strict=False)]
    assert found == again


def test_the_file_is_a_source_whose_tokens_come_back(corpus, tmp_path):
    path = tmp_path / "own.jsonl"
    counts = write_own_text(tiny.build(CONFIG), TOKENIZER, corpus, path, SMALL)
    records = [json.loads(line)["ids"] for line in path.read_text().splitlines()]
    assert counts["tokens"] == sum(map(len, records)) >= SMALL.tokens
    assert counts["texts"] == len(records)
    source = Source(files=(str(path),), own=True)
    cfg = DataConfig(sources=(source,), length=96, canvas_lengths=(8,), shuffle=1, lookahead=1)
    stream = Rows(cfg, TOKENIZER, stop=1, pad=0)
    row = next(stream)
    assert row.ids[: len(records[0]) + 1] == [TOKENIZER.bos_id, *records[0]]
    assert all(row.own[i] == (row.documents[i] >= 0) for i in range(96))


def test_a_text_that_was_cut_is_not_filled_with_stop_tokens(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"ids": [20, 21, 22]}\n{"ids": [30, 31, 1]}\n')
    cfg = DataConfig(sources=(Source(files=(str(path),), own=True),), length=16, canvas_lengths=(4,), shuffle=1, lookahead=1)
    row = next(Rows(cfg, TOKENIZER, stop=1, pad=0))
    assert row.ids[:9] == [2, 20, 21, 22, 2, 30, 31, 1, 1]


@pytest.mark.parametrize("ids", ["[]", "[1, 999999]", "[true]", "7", "[1.5]"])
def test_ids_that_are_no_tokens_are_refused(tmp_path, ids):
    path = tmp_path / "own.jsonl"
    path.write_text(f'{{"ids": {ids}}}\n')
    cfg = DataConfig(sources=(Source(files=(str(path),)),), length=16, canvas_lengths=(4,))
    with pytest.raises(ValueError, match="ids must be a list of tokens"):
        next(Rows(cfg, TOKENIZER, stop=1, pad=0))
