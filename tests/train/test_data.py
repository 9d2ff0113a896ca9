"""Packed = whole, resumed = unbroken, shards add up, and bad records are named."""

import gzip
import json
import lzma
import random

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.data import (
    Batches,
    InterleavedBatches,
    Position,
    PrefetchedBatches,
    Rows,
    stack_rows,
    to_batch,
    train_tokenizer,
)
from redraft.train.documents import to_documents
from redraft.train.records import BadRecord, DataConfig, Source, read_records

TOKENIZER = tiny.byte_tokenizer()
STOP, PAD, BOS = 1, 0, 2


@pytest.fixture(name="files")
def _files(tmp_path):
    """Three files, three formats, two compressed: 30 documents of 1 to 120 letters."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh ", k=rng.randint(0, 119))) + "." for _ in range(30)]
    with lzma.open(tmp_path / "a.txt.xz", "wt") as file:
        file.write("\n<|endofstory|>\n".join(texts[:10]))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps({"text": text}) for text in texts[10:20]))
    lines = [{"prompt": "Say: ", "completion": text} for text in texts[20:25]]
    lines += [
        {"messages": [{"role": "user", "content": "Say"}, {"role": "assistant", "content": text}]} for text in texts[25:]
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return tuple(str(path) for path in sorted(tmp_path.iterdir())), texts


def rows(files, count, position=None, source=None, **changes):
    source = source or {}
    cfg = DataConfig(
        sources=(Source(files=files, **source),),
        **{"length": 64, "canvas_lengths": (8, 16), "shuffle": 7, "lookahead": 3, **changes},
    )
    stream = Rows(cfg, TOKENIZER, stop=STOP, pad=PAD, position=position)
    return [next(stream) for _ in range(count)], stream


def answers(found) -> str:
    """The learned text in order, without fill and special tokens."""
    ids = [i for row in found for i, start in zip(row.ids, row.starts, strict=True) if start >= 0]
    return TOKENIZER.decode([i for i in ids if i not in (STOP, 5)])


@pytest.mark.parametrize("canvas_lengths", [(8,), (8, 16, 64), (5,), (1,)])
def test_every_document_is_packed_exactly_once(files, canvas_lengths):
    paths, texts = files
    found, stream = rows(paths, 1, canvas_lengths=canvas_lengths, shuffle=1)
    while stream.position.epochs == [0]:
        found.append(next(stream))
    waiting = "".join(TOKENIZER.decode(document.answer) for document in stream.position.waiting)
    learned = answers(found)
    for text in texts:
        assert text in learned or text[-20:] in waiting
        assert learned.count(text) <= 2 or len(text) < 8  # the last row may hold what the next epoch begins with
    assert sum(text in learned for text in texts) >= 25


def test_rows_have_little_padding(files):
    found, _ = rows(files[0], 40, length=512, lookahead=32)
    assert sum(d == -1 for row in found for d in row.documents) < 0.1 * 40 * 512


def test_a_row_has_the_layout_of_its_tokens(files):
    found, _ = rows(files[0], 60)
    for number, row in enumerate(found):
        block = (8, 16)[number % 2]
        assert len(row.ids) == len(row.positions) == len(row.starts) == len(row.documents) == 64
        for document in sorted(set(row.documents) - {-1}):
            at = [i for i, d in enumerate(row.documents) if d == document]
            assert [row.positions[i] for i in at] == list(range(len(at)))
            prompt = sum(row.starts[i] == -1 for i in at)
            assert all(row.starts[i] == -1 for i in at[:prompt])
            assert [row.starts[i] for i in at[prompt:]] == [prompt + j // block * block for j in range(len(at) - prompt)]
            assert (len(at) - prompt) % block == 0  # filled to the end of its last block
            assert len(at) > prompt
        padding = [i for i, d in enumerate(row.documents) if d == -1]
        assert all(row.ids[i] == PAD and row.starts[i] == -1 for i in padding)


@settings(max_examples=25)
@given(st.integers(0, 80), st.sampled_from([1, 3, 50]))
def test_resumed_equals_unbroken(tmp_path_factory, cut, shuffle):
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"text": chr(97 + i % 26) * (1 + i * 7 % 90)}) for i in range(20)]
    (folder / "a.jsonl").write_text("\n".join(lines[:9]))
    (folder / "b.jsonl").write_text("\n".join(lines[9:]))
    paths = (str(folder / "a.jsonl"), str(folder / "b.jsonl"))
    unbroken, _ = rows(paths, 100, shuffle=shuffle)
    _, stream = rows(paths, cut, shuffle=shuffle)
    saved = json.loads(json.dumps(stream.position.to_json()))  # as a checkpoint would keep it
    resumed, _ = rows(paths, 100 - cut, position=Position.from_json(saved), shuffle=shuffle)
    assert resumed == unbroken[cut:]


def test_shards_partition_the_records(files):
    cfg = DataConfig(sources=(Source(files=files[0]),), length=256, canvas_lengths=(8,), shuffle=5, lookahead=1)
    learned = []
    for shard in range(3):
        stream = Rows(cfg, TOKENIZER, stop=STOP, pad=PAD, shard=shard, shards=3)
        found = []
        while stream.position.epochs == [0]:
            found.append(next(stream))
        learned.append(answers(found[:-1]))
    long = [text for text in files[1] if len(text) > 20]
    held = [sum(text in part for part in learned) for text in long]
    assert max(held) == 1
    assert sum(held) > 0.6 * len(long)  # the rest waits for a row that the next epoch completes
    with pytest.raises(ValueError, match="shard 3 of 3"):
        Rows(cfg, TOKENIZER, stop=STOP, pad=PAD, shard=3, shards=3)


def test_epochs_differ_and_seeds_do(files):
    order = [answers(rows(files[0], 10, seed=seed)[0]) for seed in (0, 0, 1)]
    assert order[0] == order[1]
    assert order[0] != order[2]
    _, stream = rows(files[0], 1)
    first = [next(stream) for _ in range(10)]
    while stream.position.epochs == [0]:
        next(stream)
    assert [next(stream) for _ in range(10)] != first


def test_the_last_canvas_may_be_cut_after_the_end(files):
    whole, _ = rows(files[0], 40, canvas_lengths=(16,), length=512)
    short, stream = rows(files[0], 40, canvas_lengths=(16,), length=512, short_fill=0.5)
    fills = [sum(i == STOP for row in found for i in row.ids) for found in (whole, short)]
    assert fills[1] < 0.9 * fills[0]
    lengths = set()
    for row in short:
        for document in set(row.documents) - {-1}:
            ids = [i for i, d, s in zip(row.ids, row.documents, row.starts, strict=True) if d == document and s >= 0]
            lengths.add(len(ids) % 16)
            assert {STOP, 5} & set(ids) or len(ids) % 16 == 0  # cut after the end, never before it
    assert len(lengths) > 10
    saved = Position.from_json(json.loads(json.dumps(stream.position.to_json())))
    again, _ = rows(files[0], 5, position=saved, canvas_lengths=(16,), length=512, short_fill=0.5)
    assert again == [next(stream) for _ in range(5)]


def test_sources_are_mixed_by_share_and_repeat_at_their_own_pace(tmp_path):
    (tmp_path / "few.jsonl").write_text("\n".join(json.dumps({"code": "x" * 9}) for _ in range(5)))
    (tmp_path / "many.jsonl").write_text("\n".join(json.dumps({"text": "y" * 9}) for _ in range(500)))
    few = Source(files=(str(tmp_path / "few.jsonl"),), share=1.0, text="code")
    many = Source(files=(str(tmp_path / "many.jsonl"),), share=3.0)
    cfg = DataConfig(sources=(few, many), length=64, canvas_lengths=(10,))
    stream = Rows(cfg, TOKENIZER, stop=STOP, pad=PAD)
    learned = answers([next(stream) for _ in range(100)])
    assert 0.2 < learned.count("x") / len(learned) < 0.3
    assert stream.position.epochs[0] > 5 * stream.position.epochs[1]
    saved = Position.from_json(json.loads(json.dumps(stream.position.to_json())))
    resumed = Rows(cfg, TOKENIZER, stop=STOP, pad=PAD, position=saved)
    assert [next(resumed) for _ in range(20)] == [next(stream) for _ in range(20)]
    with pytest.raises(ValueError, match="position is one of 2 sources"):
        Rows(DataConfig(sources=(few,), length=64, canvas_lengths=(10,)), TOKENIZER, stop=STOP, pad=PAD, position=saved)


def test_a_text_may_start_at_any_of_its_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\nthree")
    found, _ = rows((str(tmp_path / "a.txt"),), 60, source={"mid_start": 1.0}, canvas_lengths=(16,))
    texts = set()
    for row in found:
        for document in set(row.documents) - {-1}:
            here = [i for i, d, s in zip(row.ids, row.documents, row.starts, strict=True) if d == document and s >= 0]
            texts.add(TOKENIZER.decode([i for i in here if i != STOP]))
    assert texts == {"one\ntwo\nthree", "two\nthree", "three"}


BAD = ["{", "[1]", '{"text": 5}', '{"text": ""}', '{"other": 1}', '{"prompt": "x"}', '{"messages": []}', '{"messages": [3]}']
BAD += [
    '{"messages": [{"role": "user", "content": "x"}]}',
    '{"text": "a", "prompt": "b"}',
    '{"prompt": 1, "completion": "x"}',
]


@pytest.mark.parametrize("line", BAD)
def test_a_bad_record_is_named_and_stops_the_run_or_is_counted(tmp_path, line):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + '\n{"text": "good"}\n')
    with pytest.raises(BadRecord, match=r"d\.jsonl:3: "):
        rows((str(path),), 5, shuffle=1)
    for source in ({}, {"drop_prompt_share": 0.5}):
        found, stream = rows((str(path),), 5, shuffle=1, skip_bad=True, source=source)
        assert stream.position.bad >= 1
        assert set(answers(found)) == set("good")


def test_an_empty_source_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ValueError, match="nothing to learn"):
        rows((str(tmp_path / "empty.txt"),), 1)
    with pytest.raises(FileNotFoundError):
        rows((str(tmp_path / "none.txt"),), 1)


def test_a_separator_line_splits_text_files(tmp_path):
    (tmp_path / "s.txt").write_text("One\ntwo\n<|endofstory|>\nThree\n\n<|endofstory|>\nFour")
    got = list(read_records(tmp_path / "s.txt", "<|endofstory|>"))
    assert [record["text"] for _, record in got] == ["One\ntwo", "Three", "Four"]
    assert [where.rsplit(":", 1)[1] for where, _ in got] == ["1", "4", "7"]


def test_rows_become_a_batch(files):
    found, _ = rows(files[0], 4)
    batch = to_batch(stack_rows(found))
    assert batch.ids_BL.shape == (4, 64)
    assert int(batch.canvas_BL.sum()) == sum(start >= 0 for row in found for start in row.starts)
    assert batch.ids_BL.tolist() == [row.ids for row in found]


@pytest.mark.soak
def test_prefetch_gives_the_same_batches(files):
    cfg = DataConfig(sources=(Source(files=files[0]),), length=64, canvas_lengths=(8,))
    here = Batches(Rows(cfg, TOKENIZER, stop=STOP, pad=PAD), 3)
    there = PrefetchedBatches(Batches(Rows(cfg, TOKENIZER, stop=STOP, pad=PAD), 3))
    try:
        for _ in range(8):
            (a, position), (b, other) = next(here), next(there)
            assert (a == b).all()
            assert position == other
    finally:
        there.close()


def test_streams_are_interleaved(files):
    cfg = DataConfig(sources=(Source(files=files[0]),), length=64, canvas_lengths=(8,))
    streams = [[Batches(Rows(cfg, TOKENIZER, stop=STOP, pad=PAD, shard=s, shards=2), 3) for s in range(2)] for _ in range(2)]
    columns, positions = next(InterleavedBatches(streams[0]))
    for number, stream in enumerate(streams[1]):
        alone, position = next(stream)
        assert (columns[:, number::2] == alone).all()
        assert positions[number] == position


@pytest.mark.soak
def test_prefetch_raises_the_readers_error(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{")
    cfg = DataConfig(sources=(Source(files=(str(tmp_path / "bad.jsonl"),)),), length=64, canvas_lengths=(8,))
    there = PrefetchedBatches(Batches(Rows(cfg, TOKENIZER, stop=STOP, pad=PAD), 3))
    with pytest.raises(BadRecord, match=r"bad\.jsonl:1"):
        next(there)
    there.close()


@pytest.mark.soak
def test_a_killed_reader_raises_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 50)
    cfg = DataConfig(sources=(Source(files=(str(tmp_path / "a.txt"),)),), length=4096, canvas_lengths=(8,))
    there = PrefetchedBatches(Batches(Rows(cfg, TOKENIZER, stop=STOP, pad=PAD), 32))
    next(there)
    there.process.kill()

    def drain() -> None:
        while True:  # what was ready may still come
            next(there)

    with pytest.raises(RuntimeError, match="reading process ended with code -9"):
        drain()
    there.close()


def test_the_start_of_a_text_may_become_prompt(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 40)
    found, _ = rows((str(tmp_path / "a.txt"),), 40, source={"prompt_share": 0.5}, canvas_lengths=(16,))
    prompt_lengths = {sum(start == -1 for start in row.starts[: row.documents.count(0)]) - 1 for row in found}
    assert min(prompt_lengths) == 0
    assert 5 <= max(prompt_lengths) <= 10
    assert len(prompt_lengths) > 3


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_own_answers_may_be_learned_without_their_prompt(tmp_path, share):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt_ids": [BOS, 10, 11], "ids": [20, 21, STOP]}))
    found, _ = rows((str(tmp_path / "a.jsonl"),), 30, source={"drop_prompt_share": share})
    behind_bos = {row.ids[i + 1] for row in found for i, token in enumerate(row.ids) if token == BOS}
    assert behind_bos == {0.0: {10}, 0.5: {10, 20}, 1.0: {20}}[share]


def test_without_a_bos_token_a_text_begins_behind_the_token_between_documents():
    tokenizer = Tokenizer.byte_level(["<eos>", "<|endoftext|>"])
    assert tokenizer.bos_id is None
    for record, answer in (({"ids": [20, 21]}, [20, 21]), ({"text": "hi"}, [*tokenizer.encode("hi"), STOP])):
        (document,) = to_documents(record, "a.jsonl:1", tokenizer, STOP)
        assert (document.prompt, document.answer) == (tokenizer.start_ids, answer)
        assert len(document.prompt) == 1


def test_a_trained_vocabulary_encodes_every_text(tmp_path):
    texts = ["the cat sat on the mat, " * 20, "naïve café 🦙 " * 20]
    tokenizer = train_tokenizer(iter(texts), 300, ["<pad>", "<eos>", "<bos>"])
    assert 259 < tokenizer.size <= 300
    assert tokenizer.bos_id == 2
    for text in (*texts, "\x00 unseen Ω 你好\n\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(texts[0])) < 0.5 * len(texts[0])
    with pytest.raises(ValueError, match="no room"):
        train_tokenizer(iter(texts), 100, [])


@pytest.mark.parametrize(
    "change", [{"sources": ()}, {"length": 0}, {"canvas_lengths": (100,)}, {"canvas_lengths": ()}, {"shuffle": 0}]
)
def test_nonsense_is_refused(change):
    with pytest.raises(ValueError):
        DataConfig(**{"sources": (Source(files=("x",)),), "length": 64, **change})


@pytest.mark.parametrize("change", [{"files": ()}, {"share": 0.0}, {"mid_start": 2.0}, {"drop_prompt_share": 1.5}])
def test_a_source_refuses_nonsense(change):
    with pytest.raises(ValueError):
        Source(**{"files": ("x",), **change})
