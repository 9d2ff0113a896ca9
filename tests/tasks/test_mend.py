"""Mending: scores are those of the causal half, repairs change nothing else, and the shipped model mends mistakes."""

import threading

import pytest
import tiny
import torch

import redraft
from redraft.engine import RequestError, Stopped
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
    word_at = {tokens.first_token(start): number for number, (start, _) in enumerate(words)}
    unlikely = dict(mend.find_unlikely_words(WRITER.engine, [2], tokens.ids, word_at, None))
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
            self.word_of = {40: "three", 41: "free"}
            self.words = frozenset(self.word_of.values())

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


class UnreadDict(dict):
    """A dictionary whose keys are looked up one at a time."""

    def __iter__(self):
        raise AssertionError("the whole dictionary is read for one word")

    items = values = __iter__


@pytest.fixture(name="spelled")
def _spelled(monkeypatch) -> list[str]:
    """The words whose spellings are tried. The whole dictionary is read for none of them."""
    words = []
    monkeypatch.setattr(mend, "edits_of", lambda word, edits_of=mend.edits_of: words.append(word) or edits_of(word))
    monkeypatch.setattr(WRITER.mender.dictionary, "word_of", UnreadDict(WRITER.mender.dictionary.word_of))
    return words


def test_a_long_run_of_letters_is_no_word(spelled):
    """A word of 400 letters has 20,825 spellings one mistake away."""
    WRITER.suggest(f"{'ab' * 200} {'z' * 25} {'z' * 24}.")
    assert spelled == ["z" * 24]


@pytest.mark.parametrize("between", ["z" * 200, "-" * 200])
def test_scores_see_no_long_text_between_two_words(monkeypatch, between):
    scored = []
    score = mend.score_texts
    monkeypatch.setattr(mend, "score_texts", lambda engine, ids, *rest: scored.extend(ids) or score(engine, ids, *rest))
    WRITER.suggest(f"too mnay {between} hree")
    assert scored
    assert max(map(len, scored)) < 150


def test_no_word_is_spelled_once_the_client_has_left(spelled, monkeypatch):
    stop = threading.Event()
    propose = mend.propose_repairs

    def leave(*args, **options):
        yield from propose(*args, **options)
        stop.set()

    monkeypatch.setattr(mend, "propose_repairs", leave)
    with pytest.raises(Stopped):
        WRITER.suggest("hree hree hree hree", stop=stop)
    assert spelled == ["hree"]
    assert WRITER.engine.is_idle


def test_a_text_of_unlikely_words_is_refused_before_all_are_spelled(spelled, monkeypatch):
    monkeypatch.setattr(mend, "MAX_PLACES", 3)
    text = "hree mnay " * 20
    with pytest.raises(RequestError, match=r"more than 3 words of this text unlikely.*take it in parts"):
        WRITER.suggest(text)
    assert len(spelled) == 4
    assert WRITER.edit(text, keep=[(10, len(text))]).text.endswith(text[10:])  # the way out


def test_only_words_that_may_change_are_spelled_and_no_text_behind_them_is_read(spelled, monkeypatch):
    text = "hree mnay " * 20
    read = []
    encode = WRITER.model.encode
    monkeypatch.setattr(WRITER.model, "encode", lambda ids, *rest: read.append(ids.shape) or encode(ids, *rest))
    WRITER.edit(text, keep=[(0, 10), (15, len(text))])
    assert spelled == ["hree"]
    assert read[0] == (1, 16)  # up to the word behind it, whose repairs may delete it


def test_an_edit_counts_its_own_forwards_while_another_one_runs(monkeypatch):
    alone = WRITER.edit("hree mnay", seed=1)
    score = mend.score_texts

    def score_beside_another(*args):
        monkeypatch.setattr(mend, "score_texts", score)
        WRITER.edit("a " * mend.CHUNK, keep=[(0, 2 * mend.CHUNK - 2)])  # reads a chunk more
        return score(*args)

    monkeypatch.setattr(mend, "score_texts", score_beside_another)
    assert WRITER.edit("hree mnay", seed=1) == alone


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


def test_scores_see_the_last_tokens_of_the_text_and_little_is_tokenized_for_them(shipped, monkeypatch):
    text = "They drank water the, üben\n\nand  felt 12,000 times hapy. " * 20
    tokens = edit.TokenizedText(shipped.tokenizer, text)
    begins = [begin for span in mend.find_words(text) for begin in span]
    expected = [shipped.tokenizer.encode(text[:begin])[-mend.CONTEXT_TOKENS :] for begin in begins]
    lengths = []
    encode = shipped.tokenizer.encode
    monkeypatch.setattr(shipped.tokenizer, "encode", lambda text, *rest: lengths.append(len(text)) or encode(text, *rest))
    assert [shipped.mender._last_tokens(text, tokens, begin) for begin in begins] == expected
    assert max(lengths) < len(text) // 2


def test_the_whole_text_is_tokenized_once(monkeypatch):
    text = TEXT * 9
    lengths = []
    encode = WRITER.tokenizer.encode
    monkeypatch.setattr(WRITER.tokenizer, "encode", lambda text, *rest: lengths.append(len(text)) or encode(text, *rest))
    assert WRITER.edit(text, keep=[(0, len(text) - len(TEXT))]).changes
    assert [length for length in lengths if length > len(text) // 2] == [len(text)]


def test_no_place_is_tokenized_once_the_client_has_left(monkeypatch):
    stop = threading.Event()
    seen = []
    usual = mend.Mender._last_tokens
    monkeypatch.setattr(mend.Mender, "_last_tokens", lambda *args: (stop.set(), seen.append(args[-1]), usual(*args))[2])
    with pytest.raises(Stopped):
        WRITER.suggest(TEXT, stop=stop)
    assert len(seen) == 1
    assert WRITER.engine.is_idle


@pytest.mark.parametrize(("word", "kept"), [("are hree", "hree"), ("too mnay", "mnay")])
def test_no_repair_touches_a_kept_span_inside_of_it(word, kept, monkeypatch):
    """A repair of two words, of which the second is kept: its first character may change, and another may not."""
    start = TEXT.index(word) + word.rindex(kept)
    scored = []
    score = mend.Mender._score
    monkeypatch.setattr(mend.Mender, "_score", lambda *args: scored.extend(args[4]) or score(*args))
    WRITER.edit(TEXT, keep=[(start, start + len(kept))])
    repairs = [repair for place in scored for repair in place]
    assert repairs
    assert all(repair.end <= start or repair.start >= start + len(kept) for repair in repairs)


def test_a_repair_must_make_the_text_much_more_likely(shipped):
    wrong = "She was was very happy to see him."
    (suggestion,) = shipped.suggest(wrong)
    ratio = suggestion.alternatives[0][1] / suggestion.probability
    assert shipped.suggest(wrong, least=2 * ratio) == []
