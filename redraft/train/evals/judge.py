"""A judge of samples that is not the model: a Llama checkpoint with a list of its tokens, read by transformers.

Merging the adjacent pair whose joined token comes first in the vocabulary gives the tokens the checkpoint was trained on.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer as Vocabulary
from tokenizers import models

START, FIRST_BYTE, FIRST_TOKEN = 1, 3, 259  # ids in every Llama vocabulary


class LlamaJudge:
    """Perplexity under a checkpoint in `folder` (config.json, model.safetensors, tokens.jsonl)."""

    def __init__(self, folder: str | Path, device: torch.device | str = "cpu") -> None:
        try:
            from transformers import LlamaForCausalLM
        except ImportError:
            raise ValueError("the judge is read by transformers: pip install transformers") from None
        folder = Path(folder)
        if not (folder / "tokens.jsonl").exists():
            raise ValueError(f"{folder} has no tokens.jsonl; a judge is a Llama checkpoint with a list of its tokens")
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        with (folder / "tokens.jsonl").open(encoding="utf-8") as lines:  # not splitlines(): tokens may be line separators
            self.vocabulary = vocabulary([json.loads(line) for line in lines])

    def encode(self, text: str) -> list[int]:
        """Ids of a text, the start token first."""
        return [START, *self.vocabulary.encode(" " + text).ids]

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> float:
        """Perplexity a token over all texts, each cut to what the judge can read."""
        nats = tokens = 0
        for text in texts:
            ids = self.encode(text)[: self.model.config.max_position_embeddings]
            row = torch.tensor([ids], device=self.model.device)
            nats += float(self.model(row, labels=row).loss) * (len(ids) - 1) if len(ids) > 1 else 0.0
            tokens += len(ids) - 1
        return math.exp(nats / max(1, tokens))


def vocabulary(tokens: Sequence[str | dict[str, list[int]]]) -> Vocabulary:
    """The byte-pair vocabulary behind a list of tokens in id order."""
    ids: dict[str, int] = {}
    for number, token in enumerate(tokens[FIRST_TOKEN:], FIRST_TOKEN):
        if isinstance(token, str):
            ids.setdefault(token, number)
    merges = [
        (token[:at], token[at:])
        for token in sorted(ids, key=ids.__getitem__)
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    everything = ids | {f"<0x{byte:02X}>": FIRST_BYTE + byte for byte in range(256)}
    return Vocabulary(models.BPE(vocab=everything, merges=merges, byte_fallback=True))
