"""How a prompt becomes text.

generate.py        the story in one plain function; everything faster must give the same tokens
sampler.py         logits to the next canvas: accept, renoise, settle, commit
rng.py             random numbers as a pure function of (seed, block, step, position)
autoregressive.py  the same weights, one token after another
"""
