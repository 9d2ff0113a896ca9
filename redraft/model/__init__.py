"""The network: one stack with two forwards, `encode` (causal, writes the KV cache) and `denoise` (bidirectional).

DiffusionGemma has both. A causal-only model, such as a standard Gemma 4 checkpoint or a Llama, has `encode` only, unless it
is given a page adapter.

Files in reading order:
backbone.py         Backbone: encode, denoise, joint, soft_embed, forward_train, for every architecture
layers.py           parts that the layers of the architectures share
diffusion_gemma.py  DiffusionGemma: attention, dense MLP and experts, self-conditioning, soft-capped head
llama.py            Llama: the standard decoder; also SmolLM2, Mistral, Qwen2 and Qwen3
architectures.py    builds the model of a configuration
vision.py           Vision: the vision tower and its projection, for images in prompts
embedding.py        token embedding, logits and soft embeddings, in full precision or in 8 bits
moe.py              router and experts
masks.py            attention masks, for generation and for training
drafter.py          what lets a left-to-right model draft, and the draft head
page.py             what lets a left-to-right model denoise canvases, to infill and edit
lora.py             adapters: low-rank additions to the matrices, by row and by half
kv_cache.py         keys and values of the context: append, advance, view, rewind
quant/              the same layers with weights in fewer bits
"""
