"""Metadata of a GGUF file -> Tokenizer: the vocabulary of tokenizer.json, built from the lists of the file.

Gemma's vocabulary is BPE over a text whose spaces became U+2581; bytes without a token are written as <0x00> to <0xFF>.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary

from redraft.checkpoint.names import CheckpointError
from redraft.config import show_value
from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError

PREFIX = "tokenizer.ggml."
MODEL = "gemma4"
SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types; 5 is unused and 6 a byte
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
    if metadata.get(PREFIX + "model") != MODEL:
        raise CheckpointError(
            f"{path} has a tokenizer of the kind {show_value(metadata.get(PREFIX + 'model'))}; redraft reads {MODEL!r}"
        )
    if metadata.get(PREFIX + "add_space_prefix", False) is not False:
        raise CheckpointError(f"{path}: add_space_prefix is set; redraft reads tokenizers that add no space")
    tokens = _read_list(path, metadata, "tokens", str)
    types = _read_list(path, metadata, "token_type", int)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path} has {len(tokens)} tokens and {len(types)} token types")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        repeated = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise CheckpointError(f"{path} has the token {show_value(repeated)} twice")
    settings = _read_named_tokens(path, metadata, tokens)
    vocabulary = _build(path, ids, _read_merges(path, metadata), settings.get("unk_token"))
    added = [
        AddedToken(token, special=is_special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if (is_special := kind in (UNKNOWN, CONTROL) or token in RELEASED_SPECIAL_TOKENS) or kind == USER_DEFINED
    ]
    vocabulary.add_tokens(added)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path} has a chat template that is not a text: {show_value(template)}")
    try:
        return Tokenizer(vocabulary, template=template, settings=settings)
    except TokenizerError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _build(path: Path, ids: dict[str, int], merges: list[tuple[str, str]], unknown: str | None) -> Vocabulary:
    try:
        model = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} has a vocabulary that cannot be used: {show_value(str(error))}") from None
    vocabulary = Vocabulary(model)
    vocabulary.normalizer = normalizers.Replace(" ", SPACE)
    vocabulary.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    vocabulary.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return vocabulary


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
