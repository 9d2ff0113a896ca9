"""Compiled patterns are kept on disk by content: a server that starts again compiles none of them a second time."""

import os

import numpy as np
import pytest
from serving import make

from redraft.constraints import compiled_files
from redraft.constraints.pattern_compiler import CompilerProcess, Pattern
from redraft.constraints.prefix_grammar import PrefixGrammar

TREE = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
PATTERNS = [Pattern(regex="ab+"), Pattern(schema={"type": "integer"}), Pattern(schema=TREE)]


@pytest.fixture(name="start")
def _start(tmp_path):
    """Starts a compiler over the folder of compiled patterns; all are closed at the end."""
    writer = make()
    compilers = []

    def start(stops=writer.sampler.eos_token_ids):
        compilers.append(CompilerProcess(writer.token_bytes, stops, 60, tmp_path))
        return compilers[-1]

    yield start
    for compiler in compilers:
        compiler.close()


def test_what_is_kept_equals_what_was_compiled_and_needs_no_process(start):
    first, second = start(), start()
    for pattern in PATTERNS:
        (compiled,), (kept,) = first.compile([pattern]), second.compile([pattern])
        if isinstance(compiled, PrefixGrammar):
            assert compiled.grammar == kept.grammar
        else:
            assert all(np.array_equal(array, kept.to_arrays()[name]) for name, array in compiled.to_arrays().items())
    assert second.process.starts == 0


def test_another_vocabulary_and_another_compiler_have_files_of_their_own(start, monkeypatch):
    start().compile(PATTERNS[:1])
    other = start(stops=(0, 1))
    other.compile(PATTERNS[:1])
    assert other.process.starts == 1
    monkeypatch.setattr(compiled_files, "_compiler_hash", lambda: b"another one")
    changed = start()
    changed.compile(PATTERNS[:1])
    assert changed.process.starts == 1


def test_a_damaged_file_counts_as_absent(start, tmp_path):
    start().compile(PATTERNS[:1])
    (file,) = tmp_path.iterdir()
    for content in (b"", file.read_bytes()[:-1], b"x" * 100):
        file.write_bytes(content)
        again = start()
        assert again.compile(PATTERNS[:1])
        assert again.process.starts == 1


def test_the_files_that_were_not_used_for_longest_are_removed(tmp_path, monkeypatch):
    files = compiled_files.CompiledFiles(tmp_path, b"")
    monkeypatch.setattr(compiled_files, "MAX_BYTES", 3 * (32 + 1000))
    for number in range(3):
        files.write(str(number), b"x" * 1000)
        os.utime(files._path(str(number)), (number, number))
    assert files.read("0") is not None  # used now
    files.write("3", b"x" * 1000)
    assert [files.read(str(number)) is not None for number in range(4)] == [True, False, True, True]
    files.folder = tmp_path / "a file"
    files.folder.write_text("")
    files.write("4", b"")  # keeps nothing, and fails nobody
    assert files.read("4") is None
