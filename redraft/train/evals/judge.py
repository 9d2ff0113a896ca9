"""A Llama checkpoint with a list of its tokens, loaded by transformers: the judge of samples, and a teacher of stories.

The tokenizer is byte-pair encoding: it merges the adjacent pair whose joined token has the lowest id. That gives the tokens
the checkpoint was trained on.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer as Vocabulary
from tokenizers import models

START, FIRST_BYTE, FIRST_TOKEN = 1, 3, 259  # the same ids in every Llama vocabulary


class LlamaCheckpoint:
    """The model in `folder` (config.json, model.safetensors) with its tokens (tokens.jsonl)."""

    def __init__(self, folder: str | Path, device: torch.device | str = "cpu") -> None:
        try:
            from transformers import LlamaForCausalLM
        except ImportError:
            raise ValueError("a Llama checkpoint needs transformers: pip install transformers") from None
        folder = Path(folder)
        if not (folder / "tokens.jsonl").exists():
            raise ValueError(f"{folder} has no tokens.jsonl: a list of the tokens must lie beside the Llama checkpoint")
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        with (folder / "tokens.jsonl").open(encoding="utf-8") as lines:  # not splitlines(): tokens may be line separators
            self.tokens: list[str | dict[str, list[int]]] = [json.loads(line) for line in lines]
        self.vocabulary = build_vocabulary(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Tokenizes a text; the start token comes first."""
        return [START, *self.vocabulary.encode(" " + text).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without the space that precedes every text."""
        pieces = []
        for number in ids:
            token = self.tokens[number]
            if isinstance(token, dict):
                pieces.append(bytes(token["bytes"]))
            elif FIRST_BYTE <= number < FIRST_TOKEN:
                pieces.append(bytes([number - FIRST_BYTE]))
            else:
                pieces.append(token.encode())
        return b"".join(pieces).decode("utf-8", "replace").removeprefix(" ")


class LlamaJudge(LlamaCheckpoint):
    """Computes perplexity under a Llama checkpoint."""

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> float:
        """Returns the perplexity per token over all texts, each cut to the judge's context."""
        nats = 0.0
        tokens = 0
        for text in texts:
            ids = self.encode(text)[: self.model.config.max_position_embeddings]
            row = torch.tensor([ids], device=self.model.device)
            nats += float(self.model(row, labels=row).loss) * (len(ids) - 1) if len(ids) > 1 else 0.0
            tokens += len(ids) - 1
        return math.exp(nats / max(1, tokens))


def build_vocabulary(tokens: Sequence[str | dict[str, list[int]]]) -> Vocabulary:
    """Builds the byte-pair vocabulary from a list of tokens in id order."""
    ids: dict[str, int] = {}
    for number, token in enumerate(tokens[FIRST_TOKEN:], FIRST_TOKEN):
        if isinstance(token, str):
            ids.setdefault(token, number)
    merges = [
        (token[:split], token[split:])
        for token in sorted(ids, key=ids.__getitem__)
        for split in range(1, len(token))
        if token[:split] in ids and token[split:] in ids
    ]
    all_ids = ids | {f"<0x{byte:02X}>": FIRST_BYTE + byte for byte in range(256)}
    return Vocabulary(models.BPE(vocab=all_ids, merges=merges, byte_fallback=True))
