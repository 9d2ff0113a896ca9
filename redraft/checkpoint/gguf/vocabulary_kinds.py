"""The kinds of vocabulary that GGUF files hold, built with the `tokenizers` library.

gemma4  BPE over a text whose spaces became U+2581; bytes without a token are written as <0x00> to <0xFF>
gpt2    byte-level BPE: a text is cut by a pattern, which `tokenizer.ggml.pre` names, and its bytes are merged
llama   SentencePiece BPE: as gemma4, but a text begins with a space, and scores stand for the list of merges
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary

SPACE = "\u2581"
NORMAL = 1  # the type of tokens that merges make
Merges = list[tuple[str, str]]


@dataclass(frozen=True)
class Lists:
    """The lists of a file that a vocabulary is made of."""

    ids: Mapping[str, int]
    types: Sequence[int]  # by id
    merges: Merges  # in the order of their rank; empty for the kind "llama"
    scores: Sequence[float]  # by id; empty for the other kinds
    unknown: str | None
    has_space_prefix: bool


def build_gemma(lists: Lists) -> Vocabulary:
    """Gemma's vocabulary."""
    vocabulary = Vocabulary(_byte_fallback_bpe(lists, lists.merges))
    vocabulary.normalizer = normalizers.Replace(" ", SPACE)
    vocabulary.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    vocabulary.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return vocabulary


def build_sentencepiece(lists: Lists) -> Vocabulary:
    """The vocabulary of Llama 2 and Mistral. A text begins with a space, which its decoder takes away again."""
    vocabulary = Vocabulary(_byte_fallback_bpe(lists, derive_merges(lists)))
    replace = normalizers.Replace(" ", SPACE)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if lists.has_space_prefix:
        vocabulary.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        vocabulary.normalizer = replace
    vocabulary.decoder = decoders.Sequence(parts)
    return vocabulary


def derive_merges(lists: Lists) -> Merges:
    """The pairs that SentencePiece would join, the best score first: of all adjacent pairs it joins the best one."""
    ids = lists.ids
    pairs = []
    for token, number in ids.items():
        if lists.types[number] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in ids and right in ids:
                pairs.append((-lists.scores[number], -len(left), ids[left], ids[right], left, right))
    pairs.sort()
    return [(left, right) for *_, left, right in pairs]


def _byte_fallback_bpe(lists: Lists, merges: Merges) -> models.BPE:
    return models.BPE(vocab=dict(lists.ids), merges=merges, unk_token=lists.unknown, fuse_unk=True, byte_fallback=True)


# Byte-level BPE. The patterns are those of the models' tokenizer.json.

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(numbers: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(f"{WORDS}|{numbers}|{REST}"), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True)
class Cutting:
    """How a kind of byte-level BPE cuts a text before it merges."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizes: bool = False  # to Unicode's NFC
    ignores_merges: bool = False  # a piece that is a token is not merged from its parts
    adds_bos: bool = False  # where a file does not say


CUTTINGS = {  # by `tokenizer.ggml.pre`
    "gpt-2": Cutting(_gpt2),
    "smollm": Cutting(_smollm),
    "qwen2": Cutting(lambda: _pattern(r"\p{N}"), normalizes=True),
    "llama-bpe": Cutting(lambda: _pattern(r"\p{N}{1,3}"), ignores_merges=True, adds_bos=True),
}


def build_byte_level(lists: Lists, cutting: Cutting) -> Vocabulary:
    """A vocabulary of byte-level BPE."""
    vocabulary = Vocabulary(models.BPE(vocab=dict(lists.ids), merges=lists.merges, ignore_merges=cutting.ignores_merges))
    if cutting.normalizes:
        vocabulary.normalizer = normalizers.NFC()
    vocabulary.pre_tokenizer = cutting.pre_tokenizer()
    vocabulary.decoder = decoders.ByteLevel()
    return vocabulary
