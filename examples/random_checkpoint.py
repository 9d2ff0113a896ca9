"""Writes a small checkpoint with random weights, in the published layout: something to load, time and look at.

    python examples/random_checkpoint.py FOLDER

It has never been trained, so its pages are noise and say that they did not settle; everything else is real.
"""

import sys

import torch

import redraft
from redraft.model import DiffusionGemma


def main(folder: str) -> None:
    """About 2 million parameters, a canvas of 64 bytes."""
    config = redraft.ModelConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        top_k_experts=2,
        layer_types=("sliding_attention",) * 3 + ("full_attention",),
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=128,
        max_position_embeddings=4096,
        canvas_length=64,
        eos_token_ids=(1,),
        image_token_ids=(257, 258, 259),
    )
    torch.manual_seed(0)
    model = DiffusionGemma(config)
    with torch.no_grad():
        for layer in model.layers:
            layer.experts.gate_up_proj.normal_(0, 0.05)
            layer.experts.down_proj.normal_(0, 0.05)
    sampler = redraft.SamplerConfig.from_published({}, config).changed(max_steps=24, quota=True)
    redraft.save(model, folder, sampler=sampler)
    redraft.Tokenizer.of_bytes(["<pad>", "<eos>", "<bos>", "<unk>"]).save(folder)
    print(f"{folder}: {config.parameter_counts()['total'] / 1e6:.1f}M parameters, untrained")


if __name__ == "__main__":
    main(*sys.argv[1:])
