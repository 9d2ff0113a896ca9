"""Mending: plants one mistake in each of some sentences; counts what `suggest` finds and what `edit` repairs.

    python benchmarks/bench_mend.py FOLDER/tinystories_val_a.txt.xz --count 200

A mistake is a word doubled, dropped, exchanged with the next one, or misspelt. Only words that a sentence needs are dropped
(`NEEDED`): without its adjectives a sentence is still correct. `edit` makes the first alternative of each suggestion, so its
changes are the places that `suggest` marks. Ends with a line of JSON.
"""

import argparse
import json
import lzma
import random
import re
import time
from collections import Counter
from pathlib import Path

import redraft
from redraft.tasks.mend import find_words

KINDS = ("doubled", "dropped", "exchanged", "misspelt")
NEEDED = set("a an the to of was were is had has and it he she they his her in on at with for".split())
Planted = tuple[str, tuple[int, int]]  # the text with a mistake, and the characters of the mistake


def read_sentences(path: Path, count: int, seed: int) -> list[str]:
    """Sentences of 6 to 20 words, with a full stop and without quotation marks."""
    text = lzma.decompress(path.read_bytes()).decode("utf-8")
    sentences = re.findall(r"(?<=[.!?] )[A-Z][^.!?\"“”\n]*\.(?=\s)", text)
    chosen = sorted({sentence for sentence in sentences if 6 <= len(find_words(sentence)) <= 20})
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


def plant(sentence: str, kind: str, draw: random.Random) -> Planted | None:
    """The sentence with a mistake of this kind; None if it has no word for it. The first word is left alone."""
    words = find_words(sentence)
    inner = [number for number in range(1, len(words) - 1) if sentence[words[number][0] - 1] == " "]
    if kind == "dropped":
        inner = [number for number in inner if sentence[slice(*words[number])] in NEEDED]
    if kind == "misspelt":
        inner = [number for number in inner if len(sentence[slice(*words[number])]) >= 4]
    if kind == "exchanged":
        inner = [n for n in inner if sentence[words[n][1] : words[n + 1][0]] == " " and n + 2 < len(words)]
    if not inner:
        return None
    number = draw.choice(inner)
    start, end = words[number]
    word = sentence[start:end]
    if kind == "doubled":
        return f"{sentence[:end]} {word}{sentence[end:]}", (start, end + 1 + len(word))
    if kind == "dropped":
        if sentence[end] != " ":
            return None
        before, after = words[number - 1], words[number + 1]
        return sentence[:start] + sentence[end + 1 :], (before[0], after[1] - (end + 1 - start))
    if kind == "exchanged":
        until = words[number + 1][1]
        other = sentence[words[number + 1][0] : until]
        if other.lower() == word.lower():
            return None
        return f"{sentence[:start]}{other} {word}{sentence[until:]}", (start, until)
    new = misspell(word, draw)
    return (sentence[:start] + new + sentence[end:], (start, start + len(new))) if new != word else None


def misspell(word: str, draw: random.Random) -> str:
    """Exchanges, leaves out, doubles or replaces a letter behind the first."""
    at = draw.randrange(1, len(word) - 1)
    match draw.choice(("exchange", "leave out", "double", "replace")):
        case "exchange":
            return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        case "leave out":
            return word[:at] + word[at + 1 :]
        case "double":
            return word[:at] + word[at] + word[at:]
        case _:
            return word[:at] + draw.choice("abcdefghijklmnopqrstuvwxyz") + word[at + 1 :]


def main() -> None:
    """Prints the counts of each kind, then all of them as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print each sentence that was not repaired")
    arguments = parser.parse_args()
    writer = redraft.load(arguments.model, dtype="float32")
    draw = random.Random(arguments.seed)
    counts: Counter[str] = Counter()
    begin = time.perf_counter()
    for number, sentence in enumerate(read_sentences(arguments.file, arguments.count, arguments.seed)):
        kind = KINDS[number % len(KINDS)]
        planted = plant(sentence, kind, draw)
        if planted is None:
            continue
        text, (first, last) = planted
        edited = writer.edit(text)
        words = find_words(text)
        good = [word for word in words if not (word[0] < last and first < word[1])]
        marked = [word for word in good if any(c.start < word[1] and word[0] < c.end for c in edited.changes)]
        is_found = any(change.start < last and first < change.end for change in edited.changes)
        counts.update({
            f"{kind} planted": 1,
            f"{kind} found": int(is_found),
            f"{kind} repaired": int(edited.text == sentence),
            "planted": 1,
            "found": int(is_found),
            "repaired": int(edited.text == sentence),
            "good words": len(good),
            "good words marked": len(marked),
        })  # fmt: skip
        if arguments.show and edited.text != sentence:
            print(f"{kind:9} {text}\n       -> {edited.text}", flush=True)
    seconds = time.perf_counter() - begin
    for kind in KINDS:
        print(f"{kind:10}", *(f"{counts[f'{kind} {what}']:4} {what}" for what in ("planted", "found", "repaired")))
    print(json.dumps({"count": counts["planted"], "seconds": round(seconds, 1), **counts}))


if __name__ == "__main__":
    main()
