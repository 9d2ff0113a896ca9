"""A full-size rehearsal: a random checkpoint of the released 26B-A4B shape goes through the front door.

    python benchmarks/rehearse.py make FOLDER --vocabulary gemma4_vocab.jsonl.xz [--shape small] [--device cuda]
    python benchmarks/rehearse.py run FOLDER [--steps 16] [--tokens 1024]

`make` writes the published layout: shards of at most 5e9 bytes with the vision tensors, index, configurations, tokenizer
(51.6e9 bytes; a memory-backed folder is best). `run` starts `redraft "..." -m FOLDER`, `redraft chat` and `redraft serve`
as a user would, and reports seconds to load, seconds to the first canvas, peak memory of host and GPU, and tokens/s as the
user receives them. The last line is JSON.
"""

import argparse
import json
import lzma
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Vocabulary
from torch import Tensor

from redraft import checkpoint
from redraft.config import FULL, SLIDING, ModelConfig
from redraft.model.diffusion_gemma import DiffusionGemma

SMALL = ModelConfig(
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_experts=8,
    top_k_experts=2,
    layer_types=(SLIDING, FULL),
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    sliding_window=64,
    canvas_length=32,
)
SHAPES = {"released": ModelConfig(), "small": SMALL}
VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
VISION |= {"num_key_value_heads": 16, "head_dim": 72, "patch_size": 16, "pooling_kernel_size": 3, "standardize": True}
VISION |= {"position_embedding_size": 10240, "model_type": "gemma4_vision", "use_clipped_linears": False}
SMALL_VISION = VISION | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "position_embedding_size": 840}
SMALL_VISION |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
SPECIAL = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>"}
SPECIAL |= {48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>'}
SPECIAL |= {98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>"}
QUESTION = "Why is the sky blue?"


# make: the checkpoint


def vision_shapes(vision: dict[str, Any], hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of the vision tower and its projection."""
    width = vision["hidden_size"]
    inner = vision["intermediate_size"]
    tower = "model.encoder.vision_tower."
    shapes: dict[str, tuple[int, ...]] = {
        "model.encoder.embed_vision.embedding_projection.weight": (hidden_size, width),
        tower + "patch_embedder.input_proj.weight": (width, 768),
        tower + "patch_embedder.position_embedding_table": (2, vision["position_embedding_size"], width),
        tower + "std_bias": (width,),
        tower + "std_scale": (width,),
    }
    for layer in range(vision["num_hidden_layers"]):
        stem = f"{tower}encoder.layers.{layer}."
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{stem}{norm}_layernorm.weight"] = (width,)
        for part in "qkvo":
            shapes[f"{stem}self_attn.{part}_proj.linear.weight"] = (width, width)
        for part in "qk":
            shapes[f"{stem}self_attn.{part}_norm.weight"] = (vision["head_dim"],)
        shapes[stem + "mlp.gate_proj.linear.weight"] = (inner, width)
        shapes[stem + "mlp.up_proj.linear.weight"] = (inner, width)
        shapes[stem + "mlp.down_proj.linear.weight"] = (width, inner)
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], device: str) -> Tensor:
    """Norms and scales are one; the router is spread out, so that tokens go to different experts."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    deviation = 1.0 if "router.proj" in name else 0.02
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, deviation).cpu()


def write_weights(folder: Path, shapes: dict[str, tuple[int, ...]], device: str, shard_bytes: int) -> int:
    """Shards and their index; returns the bytes of all tensors."""
    shards: list[list[str]] = [[]]
    filled = 0
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in shapes.items()}
    for name in sorted(shapes):
        if shards[-1] and filled + sizes[name] > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += sizes[name]
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: random_tensor(name, shapes[name], device) for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        print(f"{file}: {sum(sizes[name] for name in names) / 1e9:.1f} GB", flush=True)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return sum(sizes.values())


def write_tokenizer(folder: Path, vocabulary: Path) -> None:
    """The Gemma 4 vocabulary as a tokenizer.json. A merge joins the adjacent pair whose token has the lowest id."""
    with lzma.open(vocabulary, "rt", encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    byte_ids = range(238, 494)  # listed as the characters they are, not as <0x0A>
    vocab = {token: i for i, token in enumerate(entries) if i not in byte_ids and isinstance(token, str)}
    vocab |= {f"<0x{i - 238:02X}>": i for i in byte_ids} | {token: i for i, token in SPECIAL.items()}
    merges = []
    for token, _ in sorted(vocab.items(), key=lambda item: item[1]):
        merges += [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
    tokenizer = Vocabulary(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")


def make(folder: Path, shape: str, vocabulary: Path, device: str) -> None:
    """Writes the whole checkpoint, in place of an earlier one."""
    vision = VISION if shape == "released" else SMALL_VISION
    config = replace(SHAPES[shape], vision=vision)
    with torch.device("meta"):
        model = DiffusionGemma(config)
    shapes = {checkpoint.published_name(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes |= vision_shapes(vision, config.hidden_size)
    began = time.perf_counter()
    with checkpoint.replace_folder(folder, force=True) as part:
        total = write_weights(part, shapes, device, 5 * 10**9 if shape == "released" else 10**7)
        published = publish(config, vision)
        (part / "config.json").write_text(json.dumps(published, indent=2) + "\n", encoding="utf-8")
        write_tokenizer(part, vocabulary)
    print(f"{len(shapes)} tensors, {total:,} bytes in {time.perf_counter() - began:.0f} s")


def publish(config: ModelConfig, vision: dict[str, Any]) -> dict[str, Any]:
    """config.json of the checkpoint."""
    from redraft.checkpoint.published_config import publish_model_config

    return publish_model_config(config, "bfloat16") | {"vision_config": vision}


# run: as a user would


class Watch:
    """Samples a process tree's anonymous host memory and the GPU's used memory ten times a second; keeps the peaks."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.host = 0
        self.gpu = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.1):
            try:
                status = Path(f"/proc/{self.process}/status").read_text(encoding="ascii")
                kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
                self.host = max(self.host, kib * 1024)
            except (OSError, StopIteration):
                pass
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                self.gpu = max(self.gpu, total - free)


def environment() -> dict[str, str]:
    """Ours, with output unbuffered."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def write_once(folder: str, prompt: str, tokens: int, steps: int) -> dict[str, Any]:
    """`redraft PROMPT -m FOLDER --json`: seconds of the process, and the statistics that it prints."""
    command = [sys.executable, "-m", "redraft", "-", "-m", folder, "--json"]
    command += ["--seed", "1", "-n", str(tokens), "--steps", str(steps), "--raw"]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    with Watch(process.pid) as watch:
        out, error = process.communicate(prompt)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {error}")
    stats = json.loads(out)["stats"]
    return {
        "process seconds": time.perf_counter() - began,
        "seconds": stats["seconds"],
        "tokens": stats["new_tokens"],
        "tokens/s": stats["new_tokens"] / stats["seconds"],
        "steps": stats["steps"],
        "host GiB": watch.host / 2**30,
        "gpu GiB": watch.gpu / 2**30,
    }


def first_text(folder: str, steps: int) -> dict[str, Any]:
    """`redraft QUESTION -m FOLDER` as in the README: seconds from the start to the first character of the answer."""
    command = [
        sys.executable,
        "-m",
        "redraft",
        QUESTION,
        "-m",
        folder,
        "-n",
        "512",
        "--steps",
        str(steps),
        "--seed",
        "1",
    ]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    with Watch(process.pid) as watch:
        first = process.stdout.read(1)
        first_seconds = time.perf_counter() - began
        process.stdout.read()
        error = process.stderr.read().decode()
        process.wait()
    if process.returncode or not first:
        raise SystemExit(f"{' '.join(command)}: {error}")
    return {
        "first canvas seconds": first_seconds,
        "process seconds": time.perf_counter() - began,
        "host GiB": watch.host / 2**30,
        "gpu GiB": watch.gpu / 2**30,
        "says": error.strip().splitlines()[-1],
    }


def chat_twice(folder: str, steps: int) -> dict[str, Any]:
    """`redraft chat`, two messages through a pipe."""
    command = [sys.executable, "-m", "redraft", "chat", "-m", folder, "-n", "256", "--steps", str(steps), "--seed", "1"]
    began = time.perf_counter()
    run = subprocess.run(command, input=f"{QUESTION}\nAnd at night?\n", capture_output=True, text=True, env=environment())
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}: {run.stderr}")
    return {"process seconds": time.perf_counter() - began, "characters": len(run.stdout)}


def serve_openai(folder: str, prompt: str, tokens: int, steps: int) -> dict[str, Any]:
    """`redraft serve` and the openai client: seconds until ready, tokens/s whole and streamed."""
    import httpx
    import openai

    port = 18012
    command = [sys.executable, "-m", "redraft", "serve", "-m", folder, "--port", str(port)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        with Watch(process.pid) as watch:
            for _ in wait_for(process):
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
            ready = time.perf_counter() - began
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)
            more = {"diffusion_max_steps": steps}
            speeds = []
            for seed in (1, 2):  # the second finds everything built
                at = time.perf_counter()
                answer = client.completions.create(model="", prompt=prompt, max_tokens=tokens, seed=seed, extra_body=more)
                speeds.append(answer.usage.completion_tokens / (time.perf_counter() - at))
            at = time.perf_counter()
            pieces = [
                time.perf_counter() - at
                for _ in client.chat.completions.create(
                    model="",
                    messages=[{"role": "user", "content": QUESTION}],
                    max_tokens=512,
                    seed=3,
                    stream=True,
                    extra_body=more,
                )
            ]
    finally:
        process.terminate()
        process.wait(60)
    return {
        "ready seconds": ready,
        "first tokens/s": speeds[0],
        "tokens/s": speeds[1],
        "chat stream seconds": pieces[-1],
        "host GiB": watch.host / 2**30,
        "gpu GiB": watch.gpu / 2**30,
    }


def wait_for(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ticks while a server starts; ends the benchmark where it does not."""
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended: {process.stderr.read() if process.stderr else ''}")
        time.sleep(0.1)
        yield


def run(folder: str, tokens: int, steps: int) -> None:
    """All of it, with a table."""
    prompt = " ".join(
        ["The sky over the harbour was grey, and the boats came home early that day."] * 32
    )  # about 512 tokens
    results = {
        "first answer": first_text(folder, steps),
        "write": write_once(folder, prompt, tokens, steps),
        "chat": chat_twice(folder, steps),
        "serve": serve_openai(folder, prompt, tokens, steps),
    }
    for name, values in results.items():
        print(name)
        for what, value in values.items():
            print(f"  {what:<24}{value:>10.2f}" if isinstance(value, float) else f"  {what:<24}{value:>10}")
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    print(json.dumps({"bench": "rehearse", "folder": folder, "steps": steps, "versions": versions, **results}))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("folder", type=Path)
    maker.add_argument("--vocabulary", type=Path, required=True)
    maker.add_argument("--shape", choices=SHAPES, default="released")
    maker.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    runner = commands.add_parser("run")
    runner.add_argument("folder")
    runner.add_argument("--tokens", type=int, default=1024)
    runner.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    if options.command == "make":
        make(options.folder, options.shape, options.vocabulary, options.device)
    else:
        run(options.folder, options.tokens, options.steps)


if __name__ == "__main__":
    main()
