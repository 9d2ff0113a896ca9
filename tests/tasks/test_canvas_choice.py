"""The canvas is as long as the answer needs: chosen from max_tokens, the constraints and the prompt."""

import pytest
import tiny

import redraft
from redraft import checkpoint
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Finished, generate
from redraft.engine import Replay
from redraft.tasks.generation import GenerationOptions
from redraft.train.recipe import load_recipe
from redraft.writer import Writer

TRAINED = tiny.sampler(max_new_tokens=40, canvas_lengths=(4, 8, 16))  # the checkpoint's canvas has 16 tokens
WRITER = Writer(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), TRAINED)
DATE = "[0-9]{2}-[0-9]{2}"


def chosen_length(prompt_tokens: int = 5, writer: Writer = WRITER, **keywords) -> int:
    """The canvas length that a Writer chooses for a prompt of so many tokens."""
    (cfg,), _ = writer.plan([[20] * prompt_tokens], GenerationOptions.from_keywords(None, **keywords))
    return cfg.canvas_length


@pytest.mark.parametrize(
    ("length", "keywords"),
    [
        (16, {}),
        (4, {"max_tokens": 1}),
        (4, {"max_tokens": 4}),
        (8, {"max_tokens": 5}),
        (16, {"max_tokens": 9}),
        (16, {"max_tokens": 300}),
        (8, {"regex": DATE}),  # five tokens and a stop token
        (4, {"regex": DATE, "max_tokens": 4}),
        (4, {"choices": ["yes", "no"]}),
        (8, {"choices": ["yes", "never"]}),
        (16, {"regex": "[a-z]+"}),  # matches have any length
        (16, {"regex": "(ab)*"}),
        (16, {"regex": DATE, "constraints": Constraints(pins={9: 1})}),
        (16, {"max_tokens": 4, "canvas_length": 16}),  # the caller's own length
        (32, {"max_tokens": 4, "canvas_length": 32}),
        (4, {"max_tokens": 4, "canvas_length": "auto"}),
        (16, {"max_tokens": 4, "draft": "a text to start from"}),
        (8, {"max_tokens": 40, "replay": Replay(canvases=((20,) * 8,))}),  # the run that is resumed had canvases of 8
        (16, {"max_tokens": 20, "prompt_tokens": 480}),  # two canvases of 16 fill the context of 512
        (8, {"max_tokens": 20, "prompt_tokens": 481}),
        (4, {"max_tokens": 20, "prompt_tokens": 489}),
        (16, {"max_tokens": 20, "prompt_tokens": 500}),  # nothing fits: the request is refused as it stands
    ],
)
def test_the_canvas_is_the_shortest_trained_length_that_holds_the_answer(length, keywords):
    assert chosen_length(**keywords) == length


def test_a_checkpoint_trained_at_one_length_gets_another_only_on_request():
    published = Writer(WRITER.model, WRITER.tokenizer, tiny.sampler(max_new_tokens=256, canvas_length=256))
    assert chosen_length(writer=published, max_tokens=8) == 256
    asked = {most: chosen_length(writer=published, max_tokens=most, canvas_length="auto") for most in (8, 33, 128, 129)}
    assert asked == {8: 32, 33: 64, 128: 128, 129: 256}


@pytest.mark.parametrize("keywords", [{"max_tokens": 3}, {"regex": DATE}, {"max_tokens": 3, "check": "checked"}])
def test_a_short_answer_is_that_of_its_canvas_length_alone_and_in_a_batch(keywords):
    prompts = ["Once", "x" * 470]
    together = WRITER.write(prompts, seed=3, **keywords)
    for row, prompt in enumerate(prompts):
        length = chosen_length(len(WRITER.encode_prompt(prompt)), **keywords)
        alone = WRITER.write(prompt, seed=3 + row, canvas_length=length, **keywords)
        assert (together[row].ids, together[row].reason) == (alone.ids, alone.reason)


def test_a_chosen_canvas_gives_the_tokens_of_the_plain_loop():
    answer = WRITER.write("Once", seed=5, max_tokens=7)
    cfg = TRAINED.changed(canvas_length=8, max_new_tokens=7)
    *_, end = generate(WRITER.model, [WRITER.encode_prompt("Once")], cfg, seeds=[5])
    assert isinstance(end, Finished)
    assert answer.stats.new_tokens == end.stats[0].new_tokens
    assert list(answer.ids) == end.ids_BT[0, : len(answer.ids)].tolist()


def test_a_streamer_takes_prompts_of_one_canvas_length_only():
    with pytest.raises(ValueError, match="give canvas_length"):
        WRITER.write(["Once", "x" * 481], max_tokens=20, streamer=object())


def test_the_packaged_model_names_the_lengths_it_was_trained_at(tmp_path):
    folder = checkpoint.PACKAGED / "tiny"
    sampler = checkpoint.read_sampler_config(folder, checkpoint.read_model_config(folder))
    for recipe in ("tiny", "toy"):
        config = load_recipe(recipe, tmp_path)
        assert config.sampler.canvas_lengths == tuple(sorted(config.data.canvas_lengths))
    assert sampler.canvas_lengths == load_recipe("tiny", tmp_path).sampler.canvas_lengths


@pytest.mark.parametrize("lengths", [8, "auto", (0,), (1.5,), ("8",), tuple(range(1, 100))])
def test_odd_lengths_are_refused_by_name(lengths):
    with pytest.raises(redraft.ConfigError, match="canvas_lengths"):
        TRAINED.changed(canvas_lengths=lengths)
