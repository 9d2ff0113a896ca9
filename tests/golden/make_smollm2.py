"""Makes smollm2_greedy.json: what transformers writes greedily in float32 for 200 chat prompts with SmolLM2-135M-Instruct.

    OMP_NUM_THREADS=1 python tests/golden/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

transformers reads tokenizer, chat template and weights from that file. `smallest_gap` is the smallest difference between the
two highest logits of any step. Other machines round differently; they give the same tokens if they differ by less.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
NEW_TOKENS = 12
QUESTIONS = (
    "What is {}?",
    "Write one sentence about {}.",
    "Give me three words that go well with {}.",
    "Why do some people not like {}?",
)
SUBJECTS = (
    *("rain", "chess", "a violin", "the moon", "bread", "a volcano", "democracy", "winter", "a bicycle", "coffee"),
    *("the ocean", "gravity", "a library", "jazz", "a passport", "cheese", "photography", "a spider", "football", "honey"),
    *("the stock market", "a lighthouse", "yoga", "thunder", "a birthday", "mathematics", "the desert", "a cactus", "tea"),
    *("opera", "a computer", "the Roman Empire", "swimming", "a bridge", "silence", "a penguin", "poetry", "electricity"),
    *("a garden", "the alphabet", "a hospital", "dancing", "an earthquake", "chocolate", "a telescope", "friendship"),
    *("a submarine", "the news", "glass", "a dictionary"),
)


def main(file: str) -> None:
    """Answers all prompts, one at a time."""
    names = {"pretrained_model_name_or_path": str(Path(file).parent), "gguf_file": Path(file).name}
    model = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(**names)
    prompts = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS]
    answers = {}
    gaps = []
    for number, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}]
        batch = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "output_logits": True, "return_dict_in_generate": True}
        found = model.generate(**batch, **settings, pad_token_id=0, eos_token_id=tokenizer.eos_token_id)
        ids = found.sequences[0, batch["input_ids"].shape[1] :].tolist()
        answers[prompt] = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
        highest = torch.cat(found.logits).topk(2).values
        gaps.append(float((highest[:, 0] - highest[:, 1]).min()))
        print(number + 1, prompt, repr(tokenizer.decode(ids)), f"{gaps[-1]:.4f}", flush=True)
    made = {"transformers": transformers.__version__, "smallest_gap": round(min(gaps), 6), "answers": answers}
    text = json.dumps(made, indent=0).replace(",\n", ", ").replace("[\n", "[").replace("\n]", "]")
    (HERE / "smollm2_greedy.json").write_text(text.replace('], "', '],\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
