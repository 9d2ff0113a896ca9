"""Makes a Llama folder with a tokenizer from a checkpoint that has a list of its tokens only, such as stories15M (llama2.c).

python benchmarks/make_stories_folder.py TEACHER OUT

TEACHER holds config.json, model.safetensors and tokens.jsonl: a token a line, in the order of their ids. Afterwards:

redraft "Once upon a time" -m OUT
redraft adapt OUT --out runs/stories --tokens 200k
"""

import argparse
import json
import shutil
from pathlib import Path

from redraft.checkpoint.gguf.vocabulary import read_tokenizer
from redraft.tokenizer.tokenizer import Tokenizer

SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
TOKENS = "tokens.jsonl"
STOPS = [2, 1]  # a story ends with </s>, or with the <s> of the next one
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # types of tokens in llama.cpp


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", metavar="TEACHER", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    options = parser.parse_args()
    make_folder(options.teacher, options.out)
    print(f"{options.out} is a Llama folder with a tokenizer")


def make_folder(teacher: Path, out: Path) -> None:
    """Copies the weights, and adds the tokenizer and the tokens that end a story."""
    missing = [name for name in (CONFIG, WEIGHTS, TOKENS) if not (teacher / name).exists()]
    if missing:
        raise SystemExit(f"{teacher} has no {missing[0]}: give a Llama checkpoint with a list of its tokens")
    if out.resolve() == teacher.resolve():
        raise SystemExit(f"{out} is the teacher itself: give another folder to write to")
    tokenizer = make_tokenizer(teacher / TOKENS)
    config = json.loads((teacher / CONFIG).read_text(encoding="utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(teacher / WEIGHTS, out / WEIGHTS)
    (out / CONFIG).write_text(json.dumps({**config, "eos_token_id": STOPS}, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(out)


def make_tokenizer(path: Path) -> Tokenizer:
    """SentencePiece BPE of a list of tokens: of two adjacent pairs, that whose joined token has the lower id is merged."""
    with path.open(encoding="utf-8") as lines:  # not splitlines(): tokens may be line separators
        texts = [json.loads(line) for line in lines][len(SPECIAL_TOKENS) + len(BYTES) :]
    if not all(isinstance(text, str) for text in texts):
        raise SystemExit(f"{path} has a token that is not a text: SentencePiece has single bytes at the ids 3 to 258 only")
    tokens = [*SPECIAL_TOKENS, *BYTES, *(text.replace(" ", "\u2581") for text in texts)]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(BYTES), *[NORMAL] * len(texts)]
    settings = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [-float(number) for number in range(len(tokens))],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return read_tokenizer(path, {f"tokenizer.ggml.{name}": value for name, value in settings.items()})


if __name__ == "__main__":
    main()
