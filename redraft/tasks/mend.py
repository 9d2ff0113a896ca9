"""Mending: finds what is wrong in a text with the causal half of the model, and repairs it.

    text -> [1 words] -> [2 one causal forward: which words are unlikely here?] -> [3 candidate repairs of each such word]
         -> [4 log-probability of the text with each repair] -> [5 repairs that make the text much more likely]

A repair deletes a word, inserts one, exchanges two neighbours, or changes the spelling of one. It is a noisy channel: the
score of a repair is how much more likely it makes the text, minus the cost of its kind (`COSTS`), because a text with a word
less is always more likely. All other text is the user's own string. Only words that may change are looked at, and the work
of one text is bounded: a word has at most LONGEST_WORD letters, a text at most MAX_PLACES unlikely words. Shapes: N repairs,
S tokens, V vocabulary.
"""

import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redraft.config import require_int, require_number
from redraft.engine import Engine, RequestError, Stopped
from redraft.tasks.edit import Change, Edited, Span, Suggestion, TokenizedText, apply_changes, check_context, start_tokens
from redraft.tokenizer.tokenizer import Tokenizer

WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
LONGEST_WORD = 24  # letters; a longer run of letters is no word, and has 50 strings one mistake away for each of them
MAX_PLACES = 512  # unlikely words of one text: each takes up to 1,269 spellings and 16 scores
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DEFAULT_LEAST = 20.0  # how many times as likely a repair must make the text
MIN_MARGIN = 3.0  # nats by which another token is likelier at the start of a word, before repairs of it are tried
CONTEXT_TOKENS = 48  # before a repair, that its score sees
HORIZON = 30  # characters after a repair that its score sees
INSERTED = 6  # likeliest words that are tried as inserted ones
SPELLINGS = 6  # likeliest spellings that are tried
NEAR = 12  # characters between two places that may show the same mistake
CHUNK = 64  # tokens of the text in one forward
BATCH = 32  # repairs in one forward
# Nats that a repair must win beyond `least`. On 17 sentences, 4 to 8 for `delete` and 0 to 2 for `exchange` were no better.
COSTS = {"delete": 6.0, "doubled": 0.0, "insert": 2.0, "exchange": 1.0, "spell": 1.0}


@dataclass(frozen=True)
class Repair:
    """Replaces the characters of a span. `gain` is how much more likely the text is, less the cost, in nats."""

    start: int
    end: int
    new: str
    kind: str
    gain: float = 0.0


# 1. Words


def find_words(text: str) -> list[Span]:
    """The spans of the words."""
    return [match.span() for match in WORD.finditer(text) if len(match[0]) <= LONGEST_WORD]


class Dictionary:
    """The words that are one token, with the space before them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.word_of: dict[int, str] = {}  # by token
        for token, piece in enumerate(tokenizer.token_bytes):
            if piece and piece.startswith(b" ") and piece[1:].isalpha():
                self.word_of[token] = piece[1:].decode("ascii")
        self.words = frozenset(self.word_of.values())

    def spellings(self, word: str, logprobs_V: Tensor) -> Iterator[str]:
        """Words one mistake away, the likeliest first: known ones, and ones of fewer tokens than the word has."""
        length = len(self.tokenizer.encode(f" {word}"))
        likely = []
        for spelling in edits_of(word):
            ids = self.tokenizer.encode(f" {spelling}")
            if len(ids) < length or spelling in self.words:
                likely.append((float(logprobs_V[ids[0]]), spelling))
        yield from (spelling for _, spelling in sorted(likely, reverse=True)[:SPELLINGS])


def edits_of(word: str) -> set[str]:
    """The words one mistake away: a letter too many, too few or another one, or two neighbours exchanged."""
    splits = [(word[:position], word[position:]) for position in range(len(word) + 1)]
    edits = {left + right[1:] for left, right in splits if right}
    edits |= {left + right[1] + right[0] + right[2:] for left, right in splits if len(right) > 1}
    edits |= {left + letter + right[1:] for left, right in splits if right for letter in LETTERS}
    edits |= {left + letter + right for left, right in splits for letter in LETTERS}
    return edits - {word, ""}


# 2. Unlikely words


@torch.inference_mode()
def find_unlikely_words(
    engine: Engine, prompt: Sequence[int], ids: Sequence[int], word_at: Mapping[int, int], stop: threading.Event | None
) -> Iterator[tuple[int, Tensor]]:
    """Yields the number of each word that is unlikely after the text before it, and logprobs_V at its first token.

    `word_at` has the numbers of the words by the position of their first token. Text behind the last one is not read.
    """
    model = engine.model
    context = [prompt[-1], *ids[: max(word_at)]]
    with engine.reserve(len(prompt) + len(context), stop=stop) as cache:
        engine.prefill_beside(prompt[:-1], cache, stop)
        for begin in range(0, len(context), CHUNK):
            _check_stop(stop)
            ids_1S = torch.tensor([context[begin : begin + CHUNK]], device=model.device)
            with engine.take_turn(ids_1S.shape[1], stop):
                logprobs_SV = model.head(model.encode(ids_1S, cache)[0]).float().log_softmax(dim=-1).cpu()
            for row, logprobs_V in enumerate(logprobs_SV):
                word = word_at.get(begin + row)
                if word is not None and logprobs_V.max() - logprobs_V[ids[begin + row]] >= MIN_MARGIN:
                    _check_stop(stop)
                    yield word, logprobs_V


def _check_stop(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Stopped


# 3. Candidates


def propose_repairs(
    text: str, words: Sequence[Span], number: int, logprobs_V: Tensor, dictionary: Dictionary, *, is_kept: bool = False
) -> Iterator[Repair]:
    """Repairs of one unlikely word, or of the one before it. Of a kept word, only those of its neighbours."""
    start, end = words[number]
    word = text[start:end]
    has_neighbour = number > 0 and start - words[number - 1][1] <= NEAR  # else what stands between them is scored too
    near = (number - 1, number) if has_neighbour else (number,)
    for at in near:
        if at > 0 and text[words[at - 1][1] : words[at][0]] == " ":
            is_doubled = text[slice(*words[at])].lower() == text[slice(*words[at - 1])].lower()
            yield Repair(words[at - 1][1], words[at][1], "", "doubled" if is_doubled else "delete")
    for left in near:
        if left + 1 < len(words) and text[words[left][1] : words[left + 1][0]] == " ":
            first, second = text[slice(*words[left])], text[slice(*words[left + 1])]
            if first != second:
                yield Repair(words[left][0], words[left + 1][1], f"{second} {first}", "exchange")
    if is_kept:
        return
    if number > 0 and text[start - 1] == " ":
        likeliest = logprobs_V.topk(min(4 * INSERTED, len(logprobs_V))).indices.tolist()
        known = [dictionary.word_of[token] for token in likeliest if token in dictionary.word_of]
        inserted = [other for other in known if other != word][:INSERTED]
        yield from (Repair(start, end, f"{other} {word}", "insert") for other in inserted)
    if len(word) > 2 and word not in dictionary.words:
        yield from (Repair(start, end, spelling, "spell") for spelling in dictionary.spellings(word, logprobs_V))


# 4. Scores


@torch.inference_mode()
def score_texts(
    engine: Engine, sequences: Sequence[Sequence[int]], stop: threading.Event | None = None
) -> tuple[list[float], int]:
    """The log-probability of each sequence after its first token, by the causal half, and the number of forwards."""
    model = engine.model
    totals: list[float] = []
    for begin in range(0, len(sequences), BATCH):
        batch = sequences[begin : begin + BATCH]
        longest = max(map(len, batch))
        ids_NS = torch.zeros(len(batch), longest, dtype=torch.long, device=model.device)
        for row, ids in enumerate(batch):
            ids_NS[row, : len(ids)] = torch.tensor(ids)
        counts = [len(ids) for ids in batch]
        with engine.reserve(longest, rows=len(batch), stop=stop) as cache, engine.take_turn(ids_NS.numel(), stop):
            hidden_NSD = model.encode(ids_NS, cache, counts)
            for row, count in enumerate(counts):
                logprobs_SV = model.head(hidden_NSD[row, : count - 1]).float().log_softmax(dim=-1)
                totals.append(float(logprobs_SV.gather(1, ids_NS[row, 1:count, None]).sum()))
    return totals, -(-len(sequences) // BATCH)


# 5. Repairs


class Mender:
    """Finds the repairs of texts with one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.dictionary = Dictionary(tokenizer)

    def suggest(
        self, text: str, *, least: float, most: int, keep: Sequence[Span] = (), stop: threading.Event | None = None
    ) -> list[Suggestion]:
        """The places where some repair makes the text at least `least` times as likely, each with at most `most` repairs."""
        return self._suggest(text, least, most, keep, stop)[0]

    def mend(
        self, text: str, *, least: float, keep: Sequence[Span] = (), seed: int, stop: threading.Event | None = None
    ) -> Edited:
        """The text with the best repair of each place. `seed` is reported only: mending draws no random numbers."""
        suggestions, forwards = self._suggest(text, least, 1, keep, stop)
        changes = tuple(Change(s.start, s.end, s.text, s.alternatives[0][0]) for s in suggestions)
        return Edited(apply_changes(text, changes), text, changes, True, forwards, seed)

    def _suggest(
        self, text: str, least: float, most: int, keep: Sequence[Span], stop: threading.Event | None
    ) -> tuple[list[Suggestion], int]:
        """Suggestions, and the number of forwards that they took."""
        require_number("least", least, 1)
        require_int("most", most)
        prompt = start_tokens(self.tokenizer)
        tokens = TokenizedText(self.tokenizer, text, self.engine.model.config.max_position_embeddings)
        check_context(self.engine.model.config, len(prompt), len(tokens.ids))
        tokens.positions_in(keep, text)  # refuses spans outside of the text
        is_kept = bytearray(len(text))  # of each character
        for start, end in keep:
            is_kept[start:end] = b"\1" * (end - start)
        words = find_words(text)
        word_is_kept = [any(is_kept[start:end]) for start, end in words]
        word_at: dict[int, int] = {}  # position of a word's first token -> the word's number
        for number, (start, _) in enumerate(words):
            if not all(word_is_kept[max(number - 1, 0) : number + 1]):  # it or the word before it may change
                word_at.setdefault(tokens.first_token(start), number)
        if not word_at:
            return [], 0
        places = []
        for number, logprobs_V in find_unlikely_words(self.engine, prompt, tokens.ids, word_at, stop):
            repairs = propose_repairs(text, words, number, logprobs_V, self.dictionary, is_kept=word_is_kept[number])
            allowed = dict.fromkeys(repair for repair in repairs if not any(is_kept[repair.start : repair.end]))
            if allowed:
                places.append(list(allowed))
            if len(places) > MAX_PLACES:
                raise RequestError(
                    f"the model finds more than {MAX_PLACES} words of this text unlikely, too many to mend at once: take it "
                    "in parts, or keep parts of it"
                )
        scored, forwards = self._score(text, tokens, prompt, places, stop)
        likely = [repairs for repairs in scored if repairs[0].gain >= math.log(least)]
        suggestions = [self._describe(text, repairs, most) for repairs in _choose_places(likely)]
        return suggestions, forwards + max(word_at) // CHUNK + 1

    def _score(
        self,
        text: str,
        tokens: TokenizedText,
        prompt: Sequence[int],
        places: Sequence[Sequence[Repair]],
        stop: threading.Event | None,
    ) -> tuple[list[list[Repair]], int]:
        """The repairs of each place with their gains, the best first, and the number of forwards."""
        sequences = []
        for repairs in places:
            _check_stop(stop)
            begin = min(repair.start for repair in repairs)
            until = max(repair.end for repair in repairs) + HORIZON
            before = [*prompt, *self._last_tokens(text, tokens, begin)]
            texts = [text[begin:until]]
            texts += [text[begin : repair.start] + repair.new + text[repair.end : until] for repair in repairs]
            sequences += [[*before, *self.tokenizer.encode(changed)] for changed in texts]
        totals, forwards = score_texts(self.engine, sequences, stop)
        scored = []
        for repairs in places:
            own, *rest = totals[: len(repairs) + 1]
            totals = totals[len(repairs) + 1 :]
            gains = [total - own - COSTS[repair.kind] for repair, total in zip(repairs, rest, strict=True)]
            with_gains = [replace(repair, gain=gain) for repair, gain in zip(repairs, gains, strict=True)]
            scored.append(sorted(with_gains, key=lambda repair: -repair.gain))
        return scored, forwards

    def _last_tokens(self, text: str, tokens: TokenizedText, begin: int) -> list[int]:
        """The last tokens before a character, as those of the whole text before it: twice as many are tokenized anew."""
        last = tokens.first_token(begin)
        start, _ = tokens.to_characters(max(0, last - 2 * CONTEXT_TOKENS), last)
        return self.tokenizer.encode(text[start:begin])[-CONTEXT_TOKENS:]

    def _describe(self, text: str, repairs: Sequence[Repair], most: int) -> Suggestion:
        """The place of the best repair, with the probability of the text as it is and of the repairs within the place."""
        best = repairs[0]
        weights = torch.tensor([0.0, *(repair.gain for repair in repairs)], dtype=torch.float64).softmax(dim=0).tolist()
        alternatives: dict[str, float] = {}
        for repair, weight in zip(repairs, weights[1:], strict=True):
            if best.start <= repair.start and repair.end <= best.end:
                new = text[best.start : repair.start] + repair.new + text[repair.end : best.end]
                alternatives.setdefault(new, weight)
        own = text[best.start : best.end]
        return Suggestion(best.start, best.end, own, weights[0], tuple(alternatives.items())[:most])


def _choose_places(places: Sequence[list[Repair]]) -> list[list[Repair]]:
    """Places in the order of the text. Of those that are near, the one with the largest gain: they show the same mistake."""
    chosen: list[list[Repair]] = []
    for repairs in sorted(places, key=lambda repairs: -repairs[0].gain):
        best = repairs[0]
        if all(best.end + NEAR < other[0].start or other[0].end + NEAR < best.start for other in chosen):
            chosen.append(repairs)
    return sorted(chosen, key=lambda repairs: repairs[0].start)
