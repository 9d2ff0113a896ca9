"""Writers of folders: a failure at any moment leaves the old folder or the new one; a mixture of two saves is refused."""

import json
import os
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

import redraft
from redraft import checkpoint
from redraft.checkpoint import CheckpointError, atomic_folder, load_checkpoint
from redraft.cli import main
from redraft.config import replace_file, write_text
from redraft.tokenizer.tokenizer import Tokenizer

SAVE = sys.modules["redraft.checkpoint.save"]
OLD_SEED, NEW_SEED = 0, 9


def templated_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer whose three files all differ from those of another seed."""
    tokenizer = Tokenizer.byte_level([*tiny.SPECIAL_TOKENS[:-1], f"<special {seed}>"])
    tokenizer.template = f"template {seed}"
    tokenizer.settings["seed"] = seed
    return tokenizer


def save(folder: Path, seed: int, **options) -> Path:
    """Saves a sharded checkpoint in which every file depends on the seed."""
    config = replace(tiny.BASE, rms_norm_eps=1e-6 * (seed + 1))
    sampler = tiny.sampler(max_new_tokens=32 + seed)
    parts = {"tokenizer": templated_tokenizer(seed), "sampler": sampler, "shard_bytes": 60_000, "force": True}
    return checkpoint.save(tiny.decided(config, seed), folder, **parts, **options)


def seed_of(folder: Path) -> int:
    """The seed of the only save that this folder can be: all of its parts must agree."""
    model, tokenizer, sampler = load_checkpoint(folder)
    seed = sampler.max_new_tokens - 32
    assert tokenizer.template == f"template {seed}"
    assert tokenizer.settings["seed"] == seed
    assert f"<special {seed}>" in tokenizer.special_tokens.values()
    assert model.config.rms_norm_eps == 1e-6 * (seed + 1)
    expected = tiny.decided(model.config, seed).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    return seed


class FailAt:
    """Counts the calls of functions that change the file system, and fails at one of them."""

    def __init__(self, monkeypatch, at: int) -> None:
        self.calls = 0
        self.at = at
        for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (SAVE, "save_tensors")):
            monkeypatch.setattr(module, name, self.counted(getattr(module, name)))
        monkeypatch.setattr(atomic_folder, "_exchange", self.counted(atomic_folder._exchange))

    def counted(self, function):
        def call(*arguments, **keywords):
            self.calls += 1
            if self.calls == self.at:
                raise OSError("disk full")
            return function(*arguments, **keywords)

        return call


@pytest.mark.soak
@pytest.mark.parametrize("exists", [True, False])
def test_a_failure_at_any_call_leaves_the_old_folder_or_the_new_one(tmp_path, exists):
    folder = tmp_path / "model"
    outcomes = []
    while not outcomes or outcomes[-1] is not None:
        shutil.rmtree(folder, ignore_errors=True)
        if exists:
            save(folder, OLD_SEED)
        with pytest.MonkeyPatch.context() as patch:
            counter = FailAt(patch, len(outcomes) + 1)
            try:
                save(folder, NEW_SEED)
                outcomes.append(None)
            except OSError:
                outcomes.append(seed_of(folder) if folder.exists() else "absent")
        assert os.listdir(tmp_path) == (["model"] if folder.exists() else [])
    assert seed_of(folder) == NEW_SEED
    assert counter.calls == len(outcomes) - 1 > 20
    before = OLD_SEED if exists else "absent"
    assert outcomes[:-2] == [before] * (len(outcomes) - 2)
    assert outcomes[-2] == NEW_SEED  # the last call syncs the parent folder, after the rename


def test_without_an_exchange_in_one_step_two_renames_do_it(tmp_path, monkeypatch):
    folder = save(tmp_path / "model", OLD_SEED)
    monkeypatch.setattr(atomic_folder, "RENAME_EXCHANGE", 1 << 20)  # the kernel answers EINVAL
    save(folder, NEW_SEED)
    assert seed_of(folder) == NEW_SEED
    assert os.listdir(tmp_path) == ["model"]
    rename = os.rename

    def fail_for_the_new_folder(source, target):
        if ".part-" in str(source):
            raise OSError("disk full")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_for_the_new_folder)
    with pytest.raises(OSError, match="disk full"):
        save(folder, OLD_SEED)
    assert seed_of(folder) == NEW_SEED
    assert os.listdir(tmp_path) == ["model"]


FILES = (
    "config.json generation_config.json model-00002-of-00006.safetensors model.safetensors.index.json tokenizer.json "
    "tokenizer_config.json chat_template.jinja"
).split()


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_save_is_refused(tmp_path, name):
    folder = save(tmp_path / "old", OLD_SEED)
    other = save(tmp_path / "new", NEW_SEED)
    if name == "model.safetensors.index.json":  # the same in both saves: another number of shards makes another index
        checkpoint.save(tiny.decided(tiny.BASE), other, shard_bytes=90_000, force=True)
    shutil.copy(other / name, folder / name)
    with pytest.raises(
        CheckpointError, match=r"is not the file that was saved with this checkpoint.*remove \"files\""
    ) as caught:
        redraft.load(folder)
    assert str(folder / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match="is missing; it was saved with this checkpoint"):
        redraft.load(folder)


def test_shards_of_a_save_of_equal_tensors_are_told_apart(tmp_path):
    """The weights are equal in size and names; only the id of the save differs."""
    folder, other = (save(tmp_path / name, OLD_SEED) for name in ("a", "b"))
    for shard in other.glob("*.safetensors"):
        shutil.copy(shard, folder)
    with pytest.raises(CheckpointError, match="is not the file that was saved"):
        checkpoint.load_model(folder)
    shutil.copy(other / "redraft.json", folder)
    assert seed_of(folder) == OLD_SEED  # now all files are of the second save, or equal to its files


def test_files_that_a_save_did_not_write_are_refused_if_a_loader_would_read_them(tmp_path):
    folder = tiny.save_folder(tmp_path / "model")
    sharded = save(tmp_path / "sharded", OLD_SEED)
    (folder / "notes.txt").write_text("not read by a loader")
    redraft.load(folder)
    for name in ("chat_template.jinja", "model.safetensors.index.json"):
        shutil.copy(sharded / name, folder)
        with pytest.raises(CheckpointError, match=name):
            redraft.load(folder)
        (folder / name).unlink()
    checkpoint.save(tiny.decided(tiny.BASE), tmp_path / "bare")
    tiny.byte_tokenizer().save(tmp_path / "bare")  # the save had none
    redraft.load(tmp_path / "bare")


@pytest.mark.parametrize(
    "files", [3, {}, "x", {"config.json": 3}, {"../config.json": {}}, {"": {}}, {"a\0b": {}}, {"none": {}}]
)
def test_odd_manifests_are_refused_in_one_sentence(tmp_path, files):
    folder = tiny.save_folder(tmp_path / "model")
    (folder / "redraft.json").write_text(json.dumps({"files": files}))
    if not files:  # as good as none
        checkpoint.load_model(folder)
        return
    with pytest.raises(ValueError) as caught:
        checkpoint.load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("moment", ["read_model_config", "CheckpointTensors"])
@pytest.mark.parametrize("had_manifest", [True, False])
def test_a_folder_replaced_during_a_load_is_noticed(tmp_path, monkeypatch, moment, had_manifest):
    folder = save(tmp_path / "model", OLD_SEED)
    if not had_manifest:
        tiny.remove_manifest(folder)
    loader = sys.modules["redraft.checkpoint.load"]
    function = getattr(loader, moment)

    def replace_folder_first(*arguments):
        save(folder, NEW_SEED)
        return function(*arguments)

    monkeypatch.setattr(loader, moment, replace_folder_first)
    for load in (checkpoint.load_model, redraft.load):
        with pytest.raises(CheckpointError, match="was replaced while it was read; load it again"):
            load(folder)
    monkeypatch.undo()
    assert seed_of(folder) == NEW_SEED


def test_the_check_covers_headers_and_not_the_values_of_tensors(tmp_path):
    """Reading all values would take as long as loading them."""
    folder = save(tmp_path / "model", OLD_SEED)
    shard = folder / "model-00002-of-00006.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with checkpoint.verify_files(folder):
        pass
    shard.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="is not the file"), checkpoint.verify_files(folder):
        pass


# What `force` may replace


def test_a_folder_that_exists_needs_force(tmp_path):
    model = tiny.decided(tiny.BASE)
    folder = tiny.save_folder(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match=r"exists already; replace it with --force \(Python: force=True\)"):
        checkpoint.save(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    checkpoint.save(model, tmp_path / "empty")
    checkpoint.save(model, tmp_path / "new" / "parents" / "too")
    checkpoint.save(model, folder, force=True)
    assert sorted(os.listdir(tmp_path)) == ["empty", "model", "new"]


def add_socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "config.json.part"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "thesis.txt").write_text("x"), "holds 'thesis.txt', which is no file of a checkpoint"),
        (lambda folder: (folder / "model_lora.safetensors").write_text("x"), "model_lora.safetensors"),
        (lambda folder: (folder / "model-fp32-backup.safetensors").write_text("x"), "model-fp32-backup.safetensors"),
        (lambda folder: (folder / ".git").mkdir(), "'.git'"),
        (lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()), "'config.json'"),
        (lambda folder: os.mkfifo(folder / "README.md"), "'README.md'"),
        (add_socket, "'config.json.part'"),
        (lambda folder: [path.rename(folder / "README.md") for path in folder.iterdir()], "is not a checkpoint"),
    ],
)
def test_force_deletes_nothing_but_a_checkpoint(tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    folder = tiny.save_folder(Path("model"))
    change(folder)
    before = sorted(os.listdir(folder))
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(tiny.decided(tiny.BASE), folder, force=True)
    assert sorted(os.listdir(folder)) == before
    assert os.listdir(tmp_path) == ["model"]


def test_a_file_that_arrives_during_a_save_stops_it(tmp_path, monkeypatch):
    folder = save(tmp_path / "model", OLD_SEED)
    monkeypatch.setattr(SAVE, "describe_files", lambda part: (folder / "thesis.txt").write_text("x") and {})
    with pytest.raises(CheckpointError, match=r"thesis\.txt"):
        save(folder, NEW_SEED)
    assert (folder / "thesis.txt").read_text() == "x"
    assert seed_of(folder) == OLD_SEED


def test_what_people_wrote_is_kept(tmp_path):
    folder = save(tmp_path / "model", OLD_SEED)
    for name in ("README.md", "LICENSE", ".gitattributes"):
        (folder / name).write_text(name)
    for name in ("tokenizer.json.part", ".tokenizer.json.part-0123abcd", "model.safetensors.part"):
        (folder / name).write_text("left behind by a killed save")
    save(folder, NEW_SEED)
    assert seed_of(folder) == NEW_SEED
    assert all((folder / name).read_text() == name for name in ("README.md", "LICENSE", ".gitattributes"))
    assert not [name for name in os.listdir(folder) if "part" in name]


def test_a_link_stays_a_link(tmp_path):
    real = save(tmp_path / "real", OLD_SEED)
    link = tmp_path / "link"
    link.symlink_to("real")
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.save(tiny.decided(tiny.BASE), link)
    save(link, NEW_SEED)
    assert link.is_symlink()
    assert seed_of(real) == seed_of(link) == NEW_SEED
    (tmp_path / "dangling").symlink_to("later")
    save(tmp_path / "dangling", OLD_SEED)
    assert seed_of(tmp_path / "later") == OLD_SEED


def test_places_that_cannot_be_replaced_are_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(CheckpointError, match="is a file; name a folder to write"):
            checkpoint.check_target(folder, force=True)
    with pytest.raises(CheckpointError, match="is a mount point"):
        checkpoint.check_target("/", force=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match="does not allow it"):
        checkpoint.check_target(tmp_path / "new")


def test_leftovers_of_killed_writers_are_removed_but_not_the_work_of_a_living_one(tmp_path):
    leftovers = [tmp_path / f".model.part-{number:08x}" for number in range(3)]
    others = [tmp_path / ".model.part-x", tmp_path / ".other.part-00000000", tmp_path / "model.part-00000000"]
    for folder in (*leftovers, *others):
        folder.mkdir()
        (folder / "file").write_text("x")
    with atomic_folder.lock_folder(leftovers[0]):
        save(tmp_path / "model", OLD_SEED)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "model", leftovers[0], *others])


# Callers


def test_vision_weights_can_come_from_the_folder_that_is_replaced(tmp_path):
    folder = save(tmp_path / "model", OLD_SEED)
    checkpoint.save(tiny.decided(tiny.BASE), folder, vision_from=folder, force=True)
    assert checkpoint.folder_with_vision(folder) == folder
    checkpoint.load_model(folder)


def test_quantize_replaces_a_folder_only_with_force(tmp_path, monkeypatch, capsys):
    source = save(tmp_path / "source", OLD_SEED)
    out = save(tmp_path / "out", NEW_SEED)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["redraft", "quantize", *arguments])
        with pytest.raises(SystemExit) as left:
            main.main()
        return left.value.code or 0, capsys.readouterr().err

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "load_model", lambda *_: pytest.fail("the model was loaded before the folder was checked"))
        code, error = run(str(source), str(out))
    assert code == 2
    assert "--force" in error
    assert error.count("\n") == 1
    assert seed_of(out) == NEW_SEED
    assert run(str(source), str(out), "--force")[0] == 0
    assert redraft.load(out).model.config.quant == "fp8"
    assert redraft.load(out).tokenizer.template == f"template {OLD_SEED}"
    assert run(str(source), str(source), "--force")[0] == 0  # onto itself
    assert redraft.load(source).write("Once", seed=1).ids == redraft.load(out).write("Once", seed=1).ids


def test_a_failed_save_of_a_tokenizer_leaves_no_mixture(tmp_path, monkeypatch):
    outcomes = []
    while not outcomes or outcomes[-1] is not None:
        templated_tokenizer(OLD_SEED).save(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            FailAt(patch, len(outcomes) + 1)
            try:
                templated_tokenizer(NEW_SEED).save(tmp_path)
                outcomes.append(None)
            except OSError:
                outcomes.append((tmp_path / "tokenizer.json").exists())
        assert not [name for name in os.listdir(tmp_path) if "part" in name]
    assert Tokenizer.from_folder(tmp_path).template == f"template {NEW_SEED}"
    assert len(outcomes) > 5
    assert not any(outcomes)  # without tokenizer.json, a folder does not load


# Single files


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text(path, "old")
    for module, name in ((os, "fsync"), (os, "replace")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                write_text(path, "new")
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["file"]


def test_links_permissions_and_line_ends_stay(tmp_path):
    real = tmp_path / "real"
    real.write_text("old")
    real.chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "a\r\nb\n")
    assert (tmp_path / "link").is_symlink()
    assert real.read_bytes() == b"a\r\nb\n"
    assert real.stat().st_mode & 0o777 == 0o600
    folder = save(tmp_path / "model", OLD_SEED)
    folder.chmod(0o700)
    save(folder, NEW_SEED)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("keep_unfinished", [True, False])
def test_the_first_error_is_the_one_that_is_raised(tmp_path, keep_unfinished):
    missing = tmp_path / "missing" / "a.txt"
    with pytest.raises(FileNotFoundError, match=r"missing/a\.txt'"), replace_file(missing, keep_unfinished=keep_unfinished):
        pass
    missing.parent.mkdir()
    with pytest.raises(ValueError, match="closed"), replace_file(missing, keep_unfinished=keep_unfinished) as file:
        fail_after_removal(file, missing.parent)


def fail_after_removal(file, folder) -> None:
    shutil.rmtree(folder)
    file.close()
    file.write("x")


def test_a_device_is_written_and_never_replaced(tmp_path):
    write_text("/dev/null", "x")
    assert not Path("/dev/null").is_file()
    reading, writing = os.pipe()
    write_text(f"/dev/fd/{writing}", "x")
    os.close(writing)
    assert os.read(reading, 9) == b"x"
    os.close(reading)
