"""How a prompt becomes tokens.

Files in reading order:
events.py          what a generation yields: drafts, committed canvases, the end with its statistics
generate.py        the whole loop in one plain function; every faster version must give the same tokens
sampler.py         logits to the next canvas: accept, renoise, settle, commit
rng.py             random numbers as a pure function of (seed, block, step, position)
verified.py        the second story, checked and exact mode: the denoiser drafts, the causal half verifies
pick.py            how the causal half chooses a token
draft_policy.py    how many tokens exact mode drafts at once
draft_tree.py      several drafts for a position, which a GPU verifies at once
autoregressive.py  the same weights, one token after another; exact mode must equal it
"""
