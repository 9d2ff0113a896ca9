"""How a prompt becomes tokens.

Files in reading order:
generate.py        the whole loop in one plain function; every faster version must give the same tokens
sampler.py         logits to the next canvas: accept, renoise, settle, commit
rng.py             random numbers as a pure function of (seed, block, step, position)
autoregressive.py  the same weights, one token after another
"""
