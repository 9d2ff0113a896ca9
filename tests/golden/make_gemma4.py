"""Makes gemma4_part.json and gemma4_vectors.json: the part of the Gemma 4 vocabulary that the tests' texts can touch.

    python tests/golden/make_gemma4.py VOCABULARY.jsonl.xz gemma-4.inp gemma-4.out

The vocabulary is google/gemma-4-E4B's (Apache-2.0), one entry a line in id order; the vectors are llama.cpp's
(MIT). A token can only ever appear in a tokenisation if it is a substring of the text, so keeping those, with their
original ids, gives the very ids that the whole vocabulary gives. Merges follow from it: Gemma merges the adjacent pair
whose joined token has the lowest id.
"""

import json
import lzma
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

HERE = Path(__file__).parent
SPECIAL = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>"}
SPECIAL |= {48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>'}
SPECIAL |= {98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>"}
TEXTS = [
    "Write a long essay about Portugal.",
    "Why is the sky blue?",
    "system\nuser\nmodel\nthought\ndeveloper\ndeclaration:response:call:",
    "0123456789",
    "Grüße aus Köln: 🦙 und 你好, naïve café",
]


def main(vocabulary: str, inputs: str, outputs: str) -> None:
    """Reads the three files, writes the two fixtures."""
    with lzma.open(vocabulary, "rt", encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    cases = Path(inputs).read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    wanted = [[int(i) for i in line.split()] for line in Path(outputs).read_text().split("\n")[: len(cases)]]
    texts = [text.replace(" ", "▁") for text in (*TEXTS, *cases)]
    pieces = {t[i : i + n] for t in texts for n in range(1, 33) for i in range(len(t) - n + 1)}
    byte_ids = range(238, 494)  # listed as the characters they are, not as <0x0A>
    vocab = {t: i for i, t in enumerate(entries) if i not in byte_ids and isinstance(t, str) and t in pieces}
    vocab |= {f"<0x{i - 238:02X}>": i for i in byte_ids} | {token: i for i, token in SPECIAL.items()}
    merges = []
    for token, _ in sorted(vocab.items(), key=lambda item: item[1]):
        merges += [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL.values()])
    for text, ids in zip(cases, wanted, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, (text, ids)
    tokenizer.save(str(HERE / "gemma4_part.json"), pretty=False)
    vectors = json.dumps(list(zip(cases, wanted, strict=True)), ensure_ascii=False)
    (HERE / "gemma4_vectors.json").write_text(vectors + "\n", encoding="utf-8")
    print(f"{len(vocab)} tokens, {len(merges)} merges, {len(cases)} vectors")


if __name__ == "__main__":
    main(*sys.argv[1:])
