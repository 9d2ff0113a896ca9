"""The operations of `redraft.kernels` as Triton kernels. Each file holds the kernels and the functions that launch them.

    pdl               programmatic dependent launch, which most kernels use
    tiles             tile sizes that fit a card's shared memory
    fp8               quantizes rows to fp8; converts bytes to numbers and back
    norm              residual additions and RMS norms between the products of a layer
    qkv_rope          splits the qkv product into heads; norms and RoPE
    attention         attention over [KV cache ; new tokens], and writing the KV cache
    attention_wide    the same for wide heads, as two products with the softmax weights in memory
    routing           the router's top-k, and the sort of tokens by expert
    mlp               the activation of dense MLP and experts
    experts_fourbit   the experts with 4-bit weights, as grouped products
    experts           the experts with weights in any format
    linear_fp8        dense products with fp8 weights, and the soft embedding of an fp8 embedding
    vocabulary        argmax, entropy, sample and probabilities of the logits
    sampler_step      random numbers, acceptance and the next canvas
    pick              Gumbel picks of the causal half
    draft_tree        the accepted path of a tree of drafts
    token_automaton   regular-expression constraints: forward-backward sums and the Viterbi path

Import these modules only where a GPU runs them or Triton's interpreter tests them: importing Triton takes long.
Kernels name the size of a tile in capitals. A tensor argument `x` of a kernel is a pointer; `x_out` is written.
"""
