"""The network: a Gemma 4 backbone with two methods, `encode` (causal, writes the KV cache) and `denoise` (bidirectional).

diffusion_gemma.py  DiffusionGemma: layers, encode, denoise, soft_embed, forward_train
moe.py              router and experts
masks.py            attention masks
kv_cache.py         keys and values of the context: append, view, rewind
quant/              the same layers with weights in fewer bits
"""
