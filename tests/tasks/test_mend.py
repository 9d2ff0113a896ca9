"""Mending: scores are those of the causal half, repairs change nothing else, and the shipped model mends mistakes."""

import pytest
import tiny
import torch

import redraft
from redraft.tasks import edit, infill, mend
from redraft.writer import Writer

WRITER = Writer(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16, max_steps=3))
TEXT = "Some words are are hree, üben and too mnay."


def test_batched_scores_equal_those_of_one_text_at_a_time():
    sequences = [[2, *range(30, 30 + length)] for length in (5, 11, 3)]
    totals, forwards = mend.score_texts(WRITER.engine, sequences)
    alone = infill.sequence_logprobs(WRITER.engine, [2], [ids[1:] for ids in sequences])
    assert totals == pytest.approx(alone, abs=1e-3)
    assert forwards == 1
    assert WRITER.engine.is_idle


def test_an_unlikely_word_is_one_that_the_causal_half_would_not_write():
    """One forward in chunks = the causal logits behind each word's prefix."""
    tokens = edit.TokenizedText(WRITER.tokenizer, TEXT * 3)
    words = mend.find_words(TEXT * 3)
    unlikely = dict(mend.find_unlikely_words(WRITER.engine, [2], tokens, words, None))
    assert unlikely
    assert len(tokens.ids) > mend.CHUNK
    for number, (start, _) in enumerate(words):
        before = tokens.ids[: tokens.first_token(start)]
        cache = WRITER.model.new_cache(1, len(before) + 1)
        with torch.inference_mode():
            hidden_1SD = WRITER.model.encode(torch.tensor([[2, *before]]), cache)
            logprobs_V = WRITER.model.head(hidden_1SD[0, -1:])[0].float().log_softmax(dim=-1)
        margin = logprobs_V.max() - logprobs_V[tokens.ids[len(before)]]
        assert (number in unlikely) == bool(margin >= mend.MIN_MARGIN)
        if number in unlikely:
            assert torch.allclose(unlikely[number], logprobs_V, atol=1e-3)


def test_an_edit_makes_the_first_alternative_of_each_suggestion():
    suggestions = WRITER.suggest(TEXT)
    assert suggestions
    rebuilt, at = "", 0
    for suggestion in suggestions:
        assert TEXT[suggestion.start : suggestion.end] == suggestion.text
        assert suggestion.alternatives[0][1] >= 20 * suggestion.probability
        assert len(suggestion.alternatives) <= 3
        rebuilt += TEXT[at : suggestion.start] + suggestion.alternatives[0][0]
        at = suggestion.end
    edited = WRITER.edit(TEXT, seed=5)
    assert (edited.text, edited.before, edited.seed) == (rebuilt + TEXT[at:], TEXT, 5)
    assert WRITER.edit(TEXT, seed=6).text == edited.text


def test_kept_characters_are_not_repaired():
    place = WRITER.suggest(TEXT)[0]
    kept = WRITER.edit(TEXT, keep=[(place.start, place.end)])
    assert all(change.end <= place.start or change.start >= place.end for change in kept.changes)
    assert WRITER.edit(TEXT, keep=[(0, len(TEXT))]).text == TEXT


def test_repairs_of_a_word():
    class Words(mend.Dictionary):
        def __init__(self) -> None:
            self.tokenizer = WRITER.tokenizer
            self.token_of = {"three": 40, "free": 41}

    logprobs_V = torch.zeros(tiny.VOCAB)
    logprobs_V[40] = 1.0
    words = mend.find_words(TEXT)
    repairs = list(mend.propose_repairs(TEXT, words, 4, logprobs_V, Words()))
    texts = {kind: [] for kind in mend.COSTS}
    for repair in repairs:
        texts[repair.kind].append(TEXT[: repair.start] + repair.new + TEXT[repair.end :])
    assert texts["doubled"] == [TEXT.replace("are are", "are")]
    assert texts["delete"] == [TEXT.replace(" hree", "")]
    assert texts["exchange"] == [TEXT.replace("are hree", "hree are")]
    assert TEXT.replace("hree", "three hree") in texts["insert"]
    assert {TEXT.replace("hree", "three"), TEXT.replace("hree", "free")} <= set(texts["spell"])
    assert mend.edits_of("ab") >= {"b", "a", "ba", "cb", "ac", "cab", "abc"}


@pytest.fixture(name="shipped", scope="module")
def _shipped() -> Writer:
    return redraft.load(dtype="float32")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("They drank water the and felt very happy.", "They drank the water and felt very happy."),
        ("The little girl wanted to play wiht her ball.", "The little girl wanted to play with her ball."),
    ],
)
def test_the_shipped_model_mends_a_sentence(shipped, wrong, right):
    edited = shipped.edit(wrong)
    assert edited.text == right
    assert len(edited.changes) == 1


def test_a_repair_must_make_the_text_much_more_likely(shipped):
    wrong = "She was was very happy to see him."
    (suggestion,) = shipped.suggest(wrong)
    ratio = suggestion.alternatives[0][1] / suggestion.probability
    assert shipped.suggest(wrong, least=2 * ratio) == []
