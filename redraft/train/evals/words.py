"""Words of samples: doubled words, and words that no training story has.

A word is a run of letters, with apostrophes inside. Case does not count. All rates are per 1,000 words.
Run as a script, it writes the words of the training stories to a file, for a machine that has no stories:
`python -m redraft.train.evals.words data/stories words.txt`.
"""

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from redraft.config import write_text
from redraft.train.records import open_text

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
DOUBLED = re.compile(rf"\b({WORD.pattern})(?=\s+\1\b(?!['’]))")  # nothing but white space between the two
STORIES = "stories_*.txt.xz"


def split_words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return WORD.findall(text.lower())


def drop_last_word(text: str) -> str:
    """A text without the word at its very end: an answer that was cut at max_tokens may end inside a word."""
    return re.sub(rf"(?:{WORD.pattern}['’]?)$", "", text)


def doubled_words(texts: Sequence[str]) -> float:
    """Words equal to the word before them, whatever stands between the two ("No, no!" counts), per 1,000 words."""
    words_of = [split_words(text) for text in texts]
    doubled = sum(word == before for words in words_of for before, word in itertools.pairwise(words))
    return 1000 * doubled / max(1, sum(map(len, words_of)))


def doubled_adjacent(texts: Sequence[str]) -> float:
    """Words equal to the word before them with only white space between the two ("came came"), per 1,000 words."""
    words = sum(len(split_words(text)) for text in texts)
    return 1000 * sum(len(DOUBLED.findall(text.lower())) for text in texts) / max(1, words)


def unknown_words(texts: Sequence[str], known: frozenset[str]) -> float:
    """Words of letters only that are not among the known ones, per 1,000 words."""
    words = [word for text in texts for word in split_words(text)]
    return 1000 * sum(word.isalpha() and word not in known for word in words) / max(1, len(words))


def list_unknown(texts: Sequence[str], known: frozenset[str]) -> list[str]:
    """The unknown words themselves, each once, in order."""
    words = dict.fromkeys(word for text in texts for word in split_words(text))
    return [word for word in words if word.isalpha() and word not in known]


def find_words(file: str | None, stories: Path) -> frozenset[str] | None:
    """The known words: those of a file with one word a line, else of the training stories; None if there are none."""
    if file is not None:
        return frozenset(split_words(Path(file).read_text(encoding="utf-8")))
    return collect_words(stories) if any(stories.glob(STORIES)) else None


def collect_words(stories: Path) -> frozenset[str]:
    """All words of the training stories in a folder."""
    pieces: set[str] = set()
    for path in sorted(stories.glob(STORIES)):
        with open_text(path) as file:
            pieces |= set(file.read().lower().split())  # far fewer pieces than words: only they are searched
    return frozenset(word for piece in pieces for word in WORD.findall(piece))


if __name__ == "__main__":
    write_text(sys.argv[2], "\n".join(sorted(collect_words(Path(sys.argv[1])))) + "\n")
