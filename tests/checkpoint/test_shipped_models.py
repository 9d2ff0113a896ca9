"""The model that ships: small, offline, quick, as good as a guard can check, and the same in transformers."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
import transformers_reference
from transformers import DiffusionGemmaForBlockDiffusion

import redraft
from redraft.diffusion.generate import Finished, generate
from redraft.train.evals import measures
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


def test_it_is_small_and_says_where_it_comes_from():
    assert sum(file.stat().st_size for file in DEFAULT_MODEL.iterdir()) <= 32 * 2**20
    for word in ("stories15M", "recipes/tiny.py", "CDLA", "H200", "Apache-2.0"):
        assert word in CARD, word


def test_the_cards_commands_are_commands():
    commands = re.findall(r"`redraft eval ([^`]+)`", CARD)
    assert len(commands) >= 3
    tasks = {re.search(r"--task (\w+)", command).group(1) for command in commands}
    assert tasks == {"stories", "samples", "code"}


NO_NETWORK = """
import socket, sys
def refuse(*a): raise SystemExit("the network was asked for")
socket.socket.connect = socket.getaddrinfo = refuse
import redraft
print(redraft.load().write("Once upon a time", seed=1, max_tokens=64).text)
"""


def test_it_writes_without_a_network(tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", NO_NETWORK], capture_output=True, text=True, env=environment, check=True)
    assert len(run.stdout.split()) > 20


def test_stories_are_made_of_words(writer):
    known = set(re.findall(r"[a-z]+", (STORY + CARD).lower()))
    answers = writer.write(["Once upon a time"] * 4, seed=0)
    words = [word for answer in answers for word in re.findall(r"[a-z]+", answer.text.lower())]
    assert len(words) > 200
    assert sum(word in known for word in words) / len(words) > 0.4  # a few hundred words make up most of a story
    assert all(answer.stats.tokens_per_forward >= 4 for answer in answers)


def test_struck_words_are_mended_and_the_others_kept(writer):
    kept, mended = measures.repair(writer.model, writer.tokenizer, [STORY], 64)[0.3]
    assert kept > 0.9
    assert mended > 0.5


@pytest.mark.parametrize("seed", [0, 1])
def test_transformers_loads_it_and_gives_the_same_tokens(writer, monkeypatch, seed):
    """The constraints for small models are ours; without them the two samplers are one."""
    other = DiffusionGemmaForBlockDiffusion.from_pretrained(DEFAULT_MODEL, dtype=torch.float32).eval()
    ids = writer.tokenizer.encode_prompt("Once upon a time")
    off = {"quota": False, "accept_at_end": False, "spread": 0, "stops_last": False}
    cfg = writer.sampler.changed(canvas_length=64, max_new_tokens=128, max_steps=12, **off)
    *_, end = generate(writer.model, [ids], cfg, seeds=[seed])
    assert isinstance(end, Finished)
    with transformers_reference.our_draws(monkeypatch, [seed]):
        found = transformers_reference.generate(other, torch.tensor([ids]), cfg)
    new = end.ids_BT[0, : end.stats[0].new_tokens].tolist()
    assert found.sequences[0, len(ids) :].tolist()[: len(new)] == new


FIRST_FRAME = """
import sys
from redraft.engine import request
watched = request.make_draft
def told(*a):
    print("frame", file=sys.stderr, flush=True)
    return watched(*a)
request.make_draft = told
from redraft.cli import main
sys.argv = ["redraft", "Once upon a time", "--seed", "1", "--json"]
main()
"""


@pytest.mark.timed
def test_the_first_frame_comes_within_three_seconds_and_the_story_within_ten():
    """From the start of the process; the best of three, for a machine that does other things too."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run = subprocess.Popen(
            [sys.executable, "-c", FIRST_FRAME], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert run.stderr.readline() == "frame\n"
        first = time.perf_counter() - began
        out, _ = run.communicate()
        times.append((first, time.perf_counter() - began))
        assert json.loads(out)["text"]
    assert min(first for first, _ in times) < 3, times
    assert min(whole for _, whole in times) < 10, times
