"""The packaged model: small, usable offline, writes words, and gives the same tokens in transformers.

And the packaged drafter, whose model is not in the package.
"""

import os
import re
import subprocess
import sys

import pytest
import torch
import transformers_reference
from safetensors.torch import load_file
from transformers import DiffusionGemmaForBlockDiffusion

import redraft
from redraft import checkpoint
from redraft.diffusion.generate import Finished, generate
from redraft.train.evals import likelihood
from redraft.writer import DEFAULT_MODEL

CARD = (DEFAULT_MODEL / "README.md").read_text(encoding="utf-8")
STORY = (
    "Once upon a time, there was a little dog named Max. Max loved to play in the park with his red ball. One day, the "
    'ball rolled into the pond. Max was very sad. A kind duck saw him and said, "I will help you!" The duck swam to the '
    "ball and pushed it back with her beak. Max was so happy that he wagged his tail. From that day on, Max and the duck "
    "were best friends and played together every day."
)


@pytest.fixture(name="writer", scope="module")
def _writer():
    return redraft.load(dtype="float32")


def test_it_is_small_and_its_card_names_its_origin():
    assert sum(file.stat().st_size for file in DEFAULT_MODEL.iterdir()) <= 32 * 2**20
    for word in ("stories15M", "recipes/tiny.py", "CDLA", "H200", "Apache-2.0"):
        assert word in CARD, word


def test_the_drafter_of_smollm2_is_small_and_its_card_has_its_scores():
    folder = checkpoint.PACKAGED / "smollm2-drafter"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 20 * 2**20
    cfg, settings = checkpoint.read_drafter_config(folder)
    assert (settings["base"], cfg.canvas_length) == ("smollm2", 8)
    card = (folder / "README.md").read_text(encoding="utf-8")
    for name, row in (("tokens_per_round", "rows of 7 drafts"), ("tokens_per_round_in_trees", "trees of 31 drafts")):
        numbers = re.search(rf"^\| {row}[^|]*\|(.*)\|$", card, re.MULTILINE).group(1)
        assert [float(number) for number in numbers.split("|")] == [round(n, 2) for n in settings["scores"][name].values()]
    tensors = load_file(folder / "adapter.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) > 9e6
    assert all(tensor.dtype == torch.bfloat16 and bool(tensor.isfinite().all()) for tensor in tensors.values())


def test_the_page_adapter_of_smollm2_is_small_and_its_card_has_its_scores():
    folder = checkpoint.PACKAGED / "smollm2-page"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 20 * 2**20
    cfg, settings = checkpoint.read_drafter_config(folder)
    drafter_settings = checkpoint.read_drafter_config(checkpoint.PACKAGED / "smollm2-drafter")[1]
    assert settings["fingerprint"] == drafter_settings["fingerprint"]
    assert cfg.canvas_lengths == (32, 64, 128)
    card = (folder / "README.md").read_text(encoding="utf-8")
    for name, row in (("canvases", "canvases"), ("left_to_right", "left to right"), ("removed", "the true tokens")):
        numbers = re.search(rf"^\| {row} \|([^|]*)\|([^|]*)\|([^|]*)\|", card, re.MULTILINE).groups()
        score = settings["scores"]["gaps"][name]
        expected = (f"{score['exact_tokens']:.1%}", f"{score['exact_gaps']:.1%}", f"{score['nats_after']:.3f}")
        assert tuple(number.strip() for number in numbers) == expected
    tensors = load_file(folder / "adapter.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) > 7e6
    assert all(tensor.dtype == torch.bfloat16 and bool(tensor.isfinite().all()) for tensor in tensors.values())


def test_the_commands_of_the_card_name_eval_tasks():
    commands = re.findall(r"`redraft eval ([^`]+)`", CARD)
    assert len(commands) >= 3
    tasks = {re.search(r"--task (\w+)", command).group(1) for command in commands}
    assert tasks == {"stories", "samples", "code"}


NO_NETWORK = """
import socket, sys
def refuse(*a): raise SystemExit("a connection was opened")
socket.socket.connect = socket.getaddrinfo = refuse
import redraft
print(redraft.load().write("Once upon a time", max_steps=12, seed=1, max_tokens=64).text)
"""


def test_it_writes_without_a_network(tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", NO_NETWORK], capture_output=True, text=True, env=environment, check=True)
    assert len(run.stdout.split()) > 20


@pytest.mark.soak
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_stories_are_made_of_words(writer, count):
    known = set(re.findall(r"[a-z]+", (STORY + CARD).lower()))
    answers = writer.write(["Once upon a time"] * count, seed=0)
    words = [word for answer in answers for word in re.findall(r"[a-z]+", answer.text.lower())]
    assert len(words) > 200
    assert sum(word in known for word in words) / len(words) > 0.4  # a few hundred words make up most of a story
    assert all(answer.stats.tokens_per_forward >= 2.5 for answer in answers)


@pytest.mark.soak
def test_nine_of_ten_stories_double_no_word(writer):
    answers = writer.write(["Once upon a time"] * 10, seed=100)
    assert sum(not re.search(r"\b(\w+) \1\b", answer.text.lower()) for answer in answers) >= 9


def test_struck_words_are_mended_and_the_others_kept(writer):
    kept, repaired = likelihood.repair(writer.model, writer.tokenizer, [STORY], 64)[0.3]
    assert kept > 0.9
    assert repaired > 0.5


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1])
def test_transformers_loads_it_and_gives_the_same_tokens(writer, monkeypatch, seed):
    """The sampler settings for small models exist only here; without them the two samplers are equal."""
    other = DiffusionGemmaForBlockDiffusion.from_pretrained(DEFAULT_MODEL, dtype=torch.float32).eval()
    ids = writer.tokenizer.encode_prompt("Once upon a time")
    off = {"quota": False, "accept_at_end": False, "spread": 0, "stops_last": False}
    cfg = writer.sampler.changed(canvas_length=64, max_new_tokens=128, max_steps=12, **off)
    *_, end = generate(writer.model, [ids], cfg, seeds=[seed])
    assert isinstance(end, Finished)
    with transformers_reference.our_draws(monkeypatch, [seed]):
        expected = transformers_reference.generate(other, torch.tensor([ids]), cfg)
    new = end.ids_BT[0, : end.stats[0].new_tokens].tolist()
    assert expected.sequences[0, len(ids) :].tolist()[: len(new)] == new
