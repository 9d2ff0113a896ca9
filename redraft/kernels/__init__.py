"""The operations a faster version may replace, one file each. What stands here is their definition in plain PyTorch."""

from redraft.kernels.attention import attend
from redraft.kernels.experts import gated_experts
from redraft.kernels.norm import rms_norm
from redraft.kernels.rope import rope_frequencies, rope_table, rotate
from redraft.kernels.vocabulary import Prediction, TopProbs, argmax_entropy_sample, compute_top_probs, soft_embed, softcap_

__all__ = [
    "Prediction",
    "TopProbs",
    "argmax_entropy_sample",
    "attend",
    "compute_top_probs",
    "gated_experts",
    "rms_norm",
    "rope_frequencies",
    "rope_table",
    "rotate",
    "soft_embed",
    "softcap_",
]
