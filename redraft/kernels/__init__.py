"""The model's operations in plain PyTorch, one file each. These are the reference; a GPU runs the versions in `triton/`.

norm          RMS norm
rope          rotary position embedding
attention     grouped-query attention, through SDPA or FlexAttention
fp8           8-bit tensors: quantize, dequantize, matrix product
scaled_mm     the choice between torch._scaled_mm and our fp8 product
linear_fp8    a linear layer with an fp8 weight; quantizes its activations
nibbles       4-bit codes, four to a unit of 16 bits
nvfp4         4-bit floats: the tensor, dequantize
int4          4-bit integers: the tensor, dequantize
packed        a tensor in any of these formats: dequantize
linear_packed a linear layer with a packed weight, with its gradient
experts       the experts of a mixture-of-experts layer
vocabulary    softcap, argmax, entropy and sample of the logits; the soft embedding
splitmix      the counter-based random number generator of the sampler
backend       chooses Triton or PyTorch kernels, and the dtype, for a device
builds        reports the kernels that Triton compiles
threads       sets the number of CPU threads from the load of the cores
triton/       the same operations as Triton kernels
"""

from redraft.kernels.attention import attend
from redraft.kernels.experts import NO_ADAPTER, ExpertAdapter, LowRank, gated_experts
from redraft.kernels.norm import rms_norm
from redraft.kernels.rope import apply_rope, rope_frequencies, rope_table, tabulate_rope
from redraft.kernels.vocabulary import Prediction, TopProbs, argmax_entropy_sample, compute_top_probs, soft_embed, softcap_

__all__ = [
    "NO_ADAPTER",
    "ExpertAdapter",
    "LowRank",
    "Prediction",
    "TopProbs",
    "apply_rope",
    "argmax_entropy_sample",
    "attend",
    "compute_top_probs",
    "gated_experts",
    "rms_norm",
    "rope_frequencies",
    "rope_table",
    "soft_embed",
    "softcap_",
    "tabulate_rope",
]
