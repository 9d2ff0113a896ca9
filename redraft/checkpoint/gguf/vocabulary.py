"""Metadata of a GGUF file -> Tokenizer: the vocabulary of tokenizer.json, built from the lists of the file."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Vocabulary

from redraft.checkpoint.gguf.vocabulary_kinds import (
    CUTTINGS,
    Lists,
    build_byte_level,
    build_gemma,
    build_sentencepiece,
)
from redraft.checkpoint.names import CheckpointError
from redraft.config import show_value
from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError

PREFIX = "tokenizer.ggml."
GEMMA, BYTE_LEVEL, SENTENCEPIECE = KINDS = ("gemma4", "gpt2", "llama")
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # token types; 1 is normal and 6 a byte
UNKNOWN_CUTTING = "default"  # what llama.cpp takes, with a warning, where a file has no tokenizer.ggml.pre
MOST_CHARACTERS = 2**23  # of a SentencePiece vocabulary: all ways to split each token are tried; those of Gemma have 2**21
# Special tokens of the release. llama.cpp's converter marks some of them as text, so that its chat parser sees them.
RELEASED_SPECIAL_TOKENS = frozenset(
    '<pad> <eos> <bos> <unk> <mask> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> '
    "<|think|> <|channel> <channel|> <|turn> <turn|> <|image> <|audio> <|image|> <|audio|> <image|> <audio|> "
    "<|video|>".split()
)
NAMED_TOKENS = {  # of tokenizer_config.json -> of the file
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
    "mask_token": "mask_token_id",
}


def read_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Makes the tokenizer of a file, with its chat template."""
    kind = metadata.get(PREFIX + "model")
    if kind not in KINDS:
        raise CheckpointError(
            f"{path} has a tokenizer of the kind {show_value(kind)}; redraft reads {', '.join(map(repr, KINDS))}"
        )
    tokens = _read_list(path, metadata, "tokens", str)
    types = _read_list(path, metadata, "token_type", int)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path} has {len(tokens)} tokens and {len(types)} token types")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        repeated = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise CheckpointError(f"{path} has the token {show_value(repeated)} twice")
    settings: dict[str, Any] = dict(_read_named_tokens(path, metadata, tokens))
    if kind != GEMMA:  # an embedding may have more rows than the vocabulary has tokens; files fill the list up
        ids = {token: number for token, number in ids.items() if types[number] != UNUSED}
    lists = _read_lists(path, metadata, kind, ids, types, settings.get("unk_token"))
    vocabulary, adds_bos = _build(path, metadata, kind, lists)
    if kind != GEMMA:
        settings["add_bos_token"] = _read_flag(path, metadata, "add_bos_token", adds_bos)
    released = RELEASED_SPECIAL_TOKENS if kind == GEMMA else frozenset()
    added = [
        AddedToken(token, special=is_special, normalized=False)
        for token, type_number in zip(tokens, types, strict=True)
        if (is_special := type_number in (UNKNOWN, CONTROL) or token in released) or type_number == USER_DEFINED
    ]
    vocabulary.add_tokens(added)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path} has a chat template that is not a text: {show_value(template)}")
    try:
        return Tokenizer(vocabulary, template=template, settings=settings)
    except TokenizerError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _read_lists(
    path: Path, metadata: Mapping[str, Any], kind: str, ids: dict[str, int], types: list[int], unknown: str | None
) -> Lists:
    has_prefix = _read_flag(path, metadata, "add_space_prefix", kind == SENTENCEPIECE)
    if has_prefix and kind != SENTENCEPIECE:
        raise CheckpointError(f"{path}: add_space_prefix is set; redraft reads tokenizers of {kind} that add no space")
    if kind != SENTENCEPIECE:
        return Lists(ids, types, _read_merges(path, metadata), (), unknown, has_prefix)
    scores = _read_list(path, metadata, "scores", float)
    if len(scores) != len(types):
        raise CheckpointError(f"{path} has {len(types)} tokens and {len(scores)} scores")
    if sum(map(len, ids)) > MOST_CHARACTERS:
        raise CheckpointError(f"{path} has tokens of more than {MOST_CHARACTERS:,} characters together")
    if not all(map(math.isfinite, scores)):
        raise CheckpointError(f"{path} has the score of a token that is not a finite number")
    return Lists(ids, types, [], scores, unknown, has_prefix)


def _build(path: Path, metadata: Mapping[str, Any], kind: str, lists: Lists) -> tuple[Vocabulary, bool]:
    """The vocabulary, and whether a text begins with the BOS token where the file does not say."""
    pre: Any = metadata.get(PREFIX + "pre")
    if kind == BYTE_LEVEL and pre in (None, UNKNOWN_CUTTING):
        raise CheckpointError(
            f"{path} does not say how its tokenizer cuts texts ({PREFIX}pre is {show_value(pre) if pre else 'missing'}): "
            "convert the model again with a newer llama.cpp, or load its folder of safetensors"
        )
    if kind == BYTE_LEVEL and (not isinstance(pre, str) or pre not in CUTTINGS):
        raise CheckpointError(
            f"{path} cuts texts as {show_value(pre)} does ({PREFIX}pre); redraft knows {', '.join(CUTTINGS)}"
        )
    try:
        if kind == GEMMA:
            return build_gemma(lists), True
        if kind == SENTENCEPIECE:
            return build_sentencepiece(lists), True
        return build_byte_level(lists, CUTTINGS[pre]), CUTTINGS[pre].adds_bos
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} has a vocabulary that cannot be used: {show_value(str(error))}") from None


def _read_flag(path: Path, metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    flag = metadata.get(PREFIX + name, default)
    if not isinstance(flag, bool):
        raise CheckpointError(f"{path}: {PREFIX}{name} must be true or false, got {show_value(flag)}")
    return flag


def _read_list(path: Path, metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """A list of the metadata. All items of an array have the type of the first."""
    items = metadata.get(PREFIX + name)
    if not isinstance(items, list) or (items and (not isinstance(items[0], kind) or isinstance(items[0], bool))):
        raise CheckpointError(f"{path}: {PREFIX}{name} must be an array of {kind.__name__}, got {show_value(items)}")
    return items


def _read_merges(path: Path, metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs that BPE joins, in the order of their rank: "left right" in the file."""
    merges = []
    for merge in _read_list(path, metadata, "merges", str):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"{path} has the merge {show_value(merge)}, which is not two tokens with a space between")
        merges.append((left, right))
    return merges


def _read_named_tokens(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """The special tokens that have a name, as tokenizer_config.json lists them."""
    named = {}
    for name, key in NAMED_TOKENS.items():
        number = metadata.get(PREFIX + key)
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
            raise CheckpointError(f"{path}: {PREFIX}{key} must be one of the {len(tokens)} tokens, got {show_value(number)}")
        named[name] = tokens[number]
    return named
