"""Records: mistakes have a line number, held-out records are never trained on, files stream, positions name records."""

import gzip
import io
import itertools
import json
import random
import subprocess
import sys

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.train import data_check, records
from redraft.train.data import Batches, Position, PrefetchedBatches, Row, Rows, cut_prompt
from redraft.train.data_check import SAMPLE, check_records, estimate_tokens, packed_size
from redraft.train.documents import to_documents
from redraft.train.records import BadRecord, DataConfig, Source, read_records, read_shuffled

TOKENIZER = tiny.byte_tokenizer()
STOP, PAD, BOS = 1, 0, 2


def chat(*answers, question="Say"):
    """A conversation with these answers."""
    turns = [[{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for answer in answers]
    return {"messages": [message for turn in turns for message in turn]}


def write(path, lines):
    """A file of JSON lines; bytes are written as they are."""
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return str(path)


def config(*files, source=None, **changes):
    usual = {"length": 64, "canvas_lengths": (8,), "shuffle": 1, "lookahead": 3}
    return DataConfig(sources=(Source(files=files, **(source or {})),), **{**usual, **changes})


def open_rows(cfg, **changes):
    return Rows(cfg, TOKENIZER, stop=STOP, pad=PAD, **changes)


def learned_texts(cfg, count):
    """The answers of the first documents that a stream reads."""
    stream = open_rows(cfg)
    return [TOKENIZER.decode(stream._next_document().answer) for _ in range(count)]


# 1. Lines


BAD_LINES = [
    (b'{"text": "caf\xe9"}', "not UTF-8: byte 14 is 0xe9"),
    (b'{"text": "x"', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"n": ' + b"9" * 5000 + b"}", "not JSON"),
    (b"\x00\xff", "not UTF-8"),
    (b'"text"', "a JSON str, not an object"),
    (b'{"messages": [{"role": "wizard", "content": "x"}]}', "message 0 has the role 'wizard'"),
    (json.dumps(chat("")).encode(), "is empty"),
]


@pytest.mark.parametrize(("line", "why"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_has_its_number_and_is_skipped_only_on_request(tmp_path, line, why):
    path = write(tmp_path / "a.jsonl", [chat("good"), b"", line, chat("fine")])
    with pytest.raises(BadRecord, match=rf"a\.jsonl:3: .*{why}"):
        list(check_records(config(path)))
    with pytest.raises(BadRecord, match=rf"a\.jsonl:3: .*{why}"):
        learned_texts(config(path), 2)
    stream = Batches(open_rows(config(path, skip_bad=True)), 9)
    _, position = next(stream)
    assert position["bad"] == 1  # once, however many epochs
    assert position["epochs"] > [1]
    ((where, note),) = position["notes"]
    assert where.endswith("a.jsonl:3")
    assert why.split(":")[0] in note
    assert next(stream)[1]["notes"] == []


def test_bytes_around_records_do_not_matter(tmp_path):
    lines = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  {"text": "\xe2\x80\xa8"}\r\n{"text": "c"}'  # U+2028 is no line break
    (tmp_path / "a.jsonl").write_bytes(lines)
    got = list(read_records(tmp_path / "a.jsonl", "-"))
    assert [(where.rsplit(":", 1)[1], record["text"]) for where, record in got] == [("1", "a"), ("3", "\u2028"), ("4", "c")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.json.gz"])
def test_names_of_files_with_json_lines(tmp_path, name):
    content = b'{"text": "a"}\n[\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (_, good), (_, bad) = read_records(tmp_path / name, "-")
    assert good == {"text": "a"}
    assert isinstance(bad, BadRecord)


def test_a_text_file_has_bad_texts_too(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n--\r\nx\xff\n--\nthree")
    first, second, third = read_records(tmp_path / "a.txt", "--")
    assert first == (f"{tmp_path}/a.txt:1", {"text": "one\ntwo"})
    assert isinstance(second[1], BadRecord)
    assert str(second[1]) == f"{tmp_path}/a.txt:4: not UTF-8: byte 2 is 0xff"
    assert third[1] == {"text": "three"}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz"])
def test_half_a_compressed_file_is_named(tmp_path, name):
    whole = gzip.compress(json.dumps({"text": "x" * 50}).encode() * 20)
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"{name} is not a whole \.(gz|xz) file"):
        list(read_records(tmp_path / name, "-"))


def test_a_line_without_end_is_never_held(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE", 1000)
    path = write(tmp_path / "a.jsonl", [{"text": "a" * 980}, {"text": "b" * 5000}, {"text": "c"}])
    first, second, third = read_records(path, "-")
    assert first[1]["text"] == "a" * 980
    assert "2: a line of more than 1,000 bytes" in str(second[1])
    assert third == (f"{path}:3", {"text": "c"})
    (tmp_path / "a.txt").write_text("line\n" * 300 + "-\n" + "x" * 5000 + "\n-\nshort")
    first, second, third = read_records(tmp_path / "a.txt", "-")
    assert "a.txt:1: a text of more than 1,000 bytes" in str(first[1])
    assert "a.txt:302: a text of more than 1,000 bytes" in str(second[1])
    assert third == (f"{tmp_path}/a.txt:304", {"text": "short"})


# 2. Held-out records


def test_held_out_and_trained_records_are_all_records(tmp_path):
    first = write(tmp_path / "a.jsonl", [{"text": f"a{number}"} for number in range(10)])
    second = write(tmp_path / "b.jsonl", [{"text": f"b{number}"} for number in range(3)])
    texts = {}
    for is_held_out in (False, True):
        cfg = config(first, second, shuffle=5, source={"every": 4, "is_held_out": is_held_out})
        for epoch in (0, 1):
            texts[is_held_out, epoch] = {record["text"] for _, record in read_shuffled(cfg, cfg.sources[0], epoch)}
    assert texts[True, 0] == texts[True, 1] == {"a3", "a7"}
    assert texts[False, 0] == texts[False, 1]
    assert texts[False, 0] | texts[True, 0] == {f"a{n}" for n in range(10)} | {f"b{n}" for n in range(3)}
    assert len(texts[False, 0]) == 11
    *_, check = check_records(config(first, second, source={"every": 4}))
    assert (check.records, check.held_out) == (13, 2)


@pytest.mark.parametrize("change", [{"every": 1}, {"every": -1}, {"is_held_out": True}])
def test_a_source_refuses_nonsense(change):
    with pytest.raises(ValueError, match="every"):
        Source(files=("x",), **change)


# 3. Rows of conversations


@pytest.mark.soak
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 60), st.sampled_from([1, 5]))
def test_resumed_equals_unbroken_with_several_documents_of_a_record(tmp_path_factory, cut, shuffle):
    lines = [chat(*(chr(97 + n) * (1 + 7 * n * turn % 90) for turn in range(1 + n % 5))) for n in range(9)]
    path = write(tmp_path_factory.mktemp("data") / "a.jsonl", lines)
    cfg = config(path, length=128, shuffle=shuffle)
    unbroken = list(itertools.islice(open_rows(cfg), 80))
    stream = open_rows(cfg)
    assert list(itertools.islice(stream, cut)) == unbroken[:cut]
    saved = json.loads(json.dumps(stream.position.to_json()))
    resumed = open_rows(cfg, position=Position.from_json(saved))
    assert list(itertools.islice(resumed, 80 - cut)) == unbroken[cut:]


def test_canvases_stand_where_generation_would_place_them(tmp_path):
    record = chat("One.", "Two.")
    row = next(open_rows(config(write(tmp_path / "a.jsonl", [record]), length=512, lookahead=1)))
    for number, turn in ((0, 1), (1, 3)):
        at = [index for index, document in enumerate(row.documents) if document == number]
        prompt = TOKENIZER.encode_chat(record["messages"][:turn])
        assert [row.ids[index] for index in at[: len(prompt)]] == prompt
        assert [row.starts[index] for index in at[: len(prompt)]] == [-1] * len(prompt)
        assert {row.starts[index] for index in at[len(prompt) :]} == {len(prompt)}  # one canvas
        assert [row.ids[index] for index in at[len(prompt) :]] == [
            *TOKENIZER.encode("One." if turn == 1 else "Two."),
            5,
            *[STOP] * 3,
        ]


def test_a_conversation_longer_than_the_context_is_cut_at_canvases_and_noted(tmp_path):
    answer = "".join(random.Random(0).choices("abc", k=150))
    record = chat("first", answer, question="Say " * 20)
    path = write(tmp_path / "a.jsonl", [chat("short"), record])
    cfg = config(path, keeps_bos=True)
    batches = Batches(open_rows(cfg), 12)
    _, position = next(batches)
    assert position["shortened"] == 1
    assert position["records"] == [f"{path}:1", f"{path}:2"]
    ((where, note),) = position["notes"]
    assert where == f"{path}:2"
    longest = len(TOKENIZER.encode_chat(record["messages"][:3]))
    assert note == (
        f"2 of 2 prompts cut to 56 tokens (the longest has {longest}); "
        "1 of 2 answers divided between rows (the longest has 151 tokens)"
    )
    pieces = []
    for row in itertools.islice(open_rows(cfg), 12):
        assert all(row.ids[index] == BOS for index in range(64) if row.positions[index] == 0 and row.documents[index] >= 0)
        learned = [token for token, start in zip(row.ids, row.starts, strict=True) if start >= 0]
        pieces += [TOKENIZER.decode(learned)] if f"{path}:2" in row.records else []
    assert answer in "".join(pieces)  # no token of an answer is lost


@pytest.mark.soak
def test_a_batch_names_its_records(tmp_path):
    path = write(tmp_path / "a.jsonl", [chat("x" * 30) for _ in range(40)])
    batches = Batches(open_rows(config(path)), 2)
    prefetched = PrefetchedBatches(Batches(open_rows(config(path)), 2))
    try:
        for _ in range(4):
            _, position = next(batches)
            assert position["records"]
            assert next(prefetched)[1] == position
    finally:
        prefetched.close()


def test_fewer_records_than_shards_is_explained(tmp_path):
    path = write(tmp_path / "a.jsonl", [chat("x")])
    with pytest.raises(ValueError, match=r"nothing to learn from in .*: 1 records, 0 skipped, 4 shards"):
        next(open_rows(config(path), shard=2, shards=4))


# 4. The check before a run


def test_the_check_counts_kinds_and_names_bad_records(tmp_path):
    lines = [chat("x"), {"text": "y"}, b"{", {"prompt": "a", "completion": "b"}, {"ids": [3]}, *[b"[]"] * 30, chat("z")]
    path = write(tmp_path / "a.jsonl", lines)
    *_, check = check_records(config(path, skip_bad=True))
    assert check.kinds == {"messages": 2, "text": 1, "completion": 1, "ids": 1}
    assert (check.records, check.bad, len(check.named)) == (5, 31, 20)
    assert check.named[0].startswith(f"{path}:3: not JSON")
    assert check.read_bytes == check.total_bytes == (tmp_path / "a.jsonl").stat().st_size
    with pytest.raises(BadRecord, match=r"a\.jsonl:3: not JSON"):
        list(check_records(config(path)))


def test_a_sample_of_large_records_is_not_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(data_check, "MAX_SAMPLED_BYTES", 10)
    cfg = config(write(tmp_path / "a.jsonl", [chat("x" * 50)] * 3))
    *_, check = check_records(cfg)
    assert len(check.sample) == 1
    assert estimate_tokens(check, cfg, TOKENIZER, STOP).answer == 3 * 51
    *_, check = check_records(config(write(tmp_path / "empty.jsonl", [])))
    with pytest.raises(ValueError, match="nothing to learn from"):
        estimate_tokens(check, cfg, TOKENIZER, STOP)


def test_the_check_reports_progress(tmp_path):
    plain = write(tmp_path / "a.jsonl", [{"text": "x" * (1 + n % 50)} for n in range(3500)])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    seen = [check.read_bytes / check.total_bytes for check in check_records(config(plain, str(tmp_path / "b.jsonl.gz")))]
    assert len(seen) == 7
    assert seen == sorted(seen)
    assert seen[0] < 0.5
    assert seen[-1] == 1


@pytest.mark.soak
def test_the_estimate_is_near_the_tokens_of_all_records(tmp_path):
    rng = random.Random(0)
    lines = [chat(*("y" * rng.randint(1, 90) for _ in range(rng.randint(1, 3)))) for _ in range(1000)]
    cfg = config(write(tmp_path / "a.jsonl", lines), source={"every": 10}, length=128)
    *_, check = check_records(cfg)
    assert len(check.sample) == SAMPLE
    got = estimate_tokens(check, cfg, TOKENIZER, STOP)
    trained = [line for number, line in enumerate(lines) if number % 10 != 9]
    documents = [document for line in trained for document in to_documents(line, "", TOKENIZER, STOP)]
    exact = {
        "documents": len(documents),
        "prompt": sum(len(document.prompt) for document in documents),
        "answer": sum(len(document.answer) for document in documents),
        "packed": sum(packed_size(document, 128, 8) for document in documents),
    }
    for name, value in exact.items():
        assert 0.85 < getattr(got, name) / value < 1.15, name
    assert got.steps(1000) == -(-got.packed // 1000)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200), st.integers(1, 400), st.sampled_from([8, 16, 64]))
def test_the_packed_size_is_what_rows_hold(prompt, answer, canvas_length):
    (document,) = to_documents({"prompt": "x" * prompt, "completion": "y" * answer}, "", TOKENIZER, STOP)
    expected = packed_size(document, 64, canvas_length)
    held = 0
    rest = document
    while rest is not None:  # as Rows packs a document that begins a row
        row = Row()
        rest = row.append(cut_prompt(rest, 64 - canvas_length, None), canvas_length, 64, STOP, canvas_length)
        rest = cut_prompt(rest, 64 // 4, None) if rest is not None else None
        held += len(row.ids)
    assert held == expected


# 5. Memory


def test_nothing_reads_a_whole_file(tmp_path, monkeypatch):
    class Counted(io.FileIO):
        """A file that counts the bytes which are read from it."""

        taken = 0

        def readinto(self, buffer):
            count = super().readinto(buffer)
            Counted.taken += count
            return count

        def readall(self):
            raise AssertionError("the whole file is read at once")

    path = write(tmp_path / "a.jsonl", [chat("x" * 1000) for _ in range(5000)])
    monkeypatch.setattr(records, "open", lambda name, mode: io.BufferedReader(Counted(name, "r")), raising=False)
    next(open_rows(config(path, length=2048)))
    assert 0 < Counted.taken < 1_000_000
    Counted.taken = 0
    next(check_records(config(path)))
    assert Counted.taken < 2_000_000


def test_long_records_leave_the_shuffle_buffer_early(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_SHUFFLED", 10_000)
    path = write(tmp_path / "a.jsonl", [{"text": f"{n} " + "x" * 3000} for n in range(50)])
    cfg = config(path, shuffle=4096)
    first, *rest = (record["text"].split()[0] for _, record in read_shuffled(cfg, cfg.sources[0], 0))
    assert int(first) < 4  # at most four of them fit
    assert sorted(int(name) for name in (first, *rest)) == list(range(50))


STREAMED = """
import resource, sys
sys.path.insert(0, sys.argv[2])
import tiny
from redraft.train.data import Batches, Rows
from redraft.train.data_check import check_records
from redraft.train.records import DataConfig, Source

cfg = DataConfig(sources=(Source(files=(sys.argv[1],)),), length=4096)
stream = Batches(Rows(cfg, tiny.byte_tokenizer(), stop=1, pad=0), 4)
next(stream)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
*_, check = check_records(cfg)
for _ in range(20):
    next(stream)
print(check.records, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.soak
def test_a_large_file_streams_in_bounded_memory(tmp_path):
    path = tmp_path / "large.jsonl"
    line = json.dumps(chat("word " * 200, "more " * 200)).encode() + b"\n"
    count = 300_000_000 // len(line)
    with open(path, "wb") as file:
        for _ in range(count // 1000):
            file.write(line * 1000)
    tests = str(tiny.__file__).rsplit("/", 1)[0]
    run = subprocess.run([sys.executable, "-c", STREAMED, path, tests], capture_output=True, text=True, check=True)
    checked, grown = map(int, run.stdout.split())
    assert checked == count // 1000 * 1000
    assert grown < 50_000  # KiB: a sixth of the file
