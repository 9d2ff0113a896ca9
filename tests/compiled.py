"""Compiles every Triton kernel for an H100 or H200 at the released model's shape. Needs no GPU.

Prints one JSON line per kernel: its name and its shared memory. `test_triton_kernels.py` runs this file in a process of its
own, because a process that interprets kernels cannot compile them.

One variant of each kernel and dtype is compiled to a binary. The variants that differ from it in tile sizes and flags are
compiled up to the stage that allocates shared memory.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from redraft.kernels import splitmix
from redraft.kernels.triton import (
    attention,
    experts,
    fp8,
    mlp,
    norm,
    pick,
    qkv_rope,
    routing,
    sampler_step,
    token_automaton,
    vocabulary,
)

BF16 = "*bf16"
F32 = "*fp32"
F64 = "*fp64"
E4M3 = "*fp8e4nv"
I8 = "*i8"
U8 = "*u8"
I32 = "*i32"
I64 = "*i64"
BOOL = "*i1"

# Types of the kernels' arguments by name. Pointers that are not listed are bf16.
ARGUMENT_TYPES = {
    **dict.fromkeys(("order", "ends", "experts", "experts_out", "argmaxes", "slots", "lengths", "counts"), I32),
    **dict.fromkeys(("blocks", "steps", "unchanged", "limits", "stabilities"), I32),
    **dict.fromkeys(("positions", "key_offsets", "value_offsets", "seeds", "noise"), I64),
    **dict.fromkeys(("best", "sampled", "ids_out", "best_out", "sampled_out"), I64),
    **dict.fromkeys(("weights_out", "router_weights", "scale_out", "frequencies"), F32),
    **dict.fromkeys(("temperatures", "temperature", "stats", "sums", "tops", "masses", "top_out", "mass_out"), F32),
    **dict.fromkeys(("entropy", "entropy_out", "bounds", "confidences"), F32),
    **dict.fromkeys(("accepted_out", "settled"), BOOL),
    "uniform": F64,
    "fp8_out": E4M3,
    "cap": "fp32",
    "ROUTER_SCALE": "fp32",
}

Kernels = Iterator[Any]


def compile_kernel(
    kernel: Any, constants: dict[str, Any], warps: int = 4, stages: int = 3, *, to_binary: bool = True, **types: str
) -> Any:
    """Compiles a kernel with these constants. Integer arguments and addresses count as multiples of 16, as in a real launch.

    Integer arguments have names in capitals, or names that end in _row or _token. Without `to_binary` the compiler stops
    before LLVM's optimiser and ptxas. Types, shapes and shared memory are checked by then; the rest takes most of the time.
    """
    constants = {"PDL": True, **constants}
    signature = {}
    constant_values = {}
    attributes = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            constant_values[(index,)] = constants[name]
            continue
        is_integer = name.isupper() or name.endswith(("_row", "_token"))
        signature[name] = types.get(name) or ARGUMENT_TYPES.get(name) or ("i32" if is_integer else BF16)
        if signature[name] != "fp32":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constant_values, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    with nullcontext() if to_binary else skip_binary_stages(kernel.fn.__name__):
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@contextmanager
def skip_binary_stages(name: str) -> Iterator[None]:
    """Makes triton.compile stop at unoptimised LLVM code. Its results must not go to a cache that a GPU reads."""
    add_stages = CUDABackend.add_stages

    def name_kernel(source: str, metadata: dict[str, Any]) -> str:
        metadata["name"] = name  # the skipped stage does this
        return ""

    def add_stages_without_binary(self: Any, stages: dict[str, Any], *arguments: Any) -> None:
        add_stages(self, stages, *arguments)
        stages["ptx"] = name_kernel
        stages["cubin"] = lambda source, metadata: b""

    CUDABackend.add_stages = add_stages_without_binary
    os.environ["DISABLE_LLVM_OPT"] = "1"
    try:
        yield
    finally:
        CUDABackend.add_stages = add_stages
        del os.environ["DISABLE_LLVM_OPT"]


def expert_kernels() -> Kernels:
    for is_fp8 in (False, True):
        weight_types = {"weight": E4M3, "scale": F32} if is_fp8 else {}
        for pairs in (2048, 4096, 8192, 16384):
            up_tiles, down_tiles = experts.select_tiles(1 if is_fp8 else 2, pairs, 128)
            for kernel, tiles, inputs in ((experts._gate_up, up_tiles, "x"), (experts._down, down_tiles, "h")):
                blocks = {"BLOCK_T": tiles.tokens, "BLOCK_F": tiles.features, "BLOCK_K": tiles.inner}
                input_types = {inputs: E4M3, f"{inputs}_scale": F32} if is_fp8 else {}
                constants = {"K": 8, "FP8": is_fp8, **blocks}
                yield compile_kernel(
                    kernel, constants, tiles.warps, tiles.stages, to_binary=pairs == 2048, **weight_types, **input_types
                )


def attention_kernels() -> Kernels:
    for (is_large, is_many), tiles in attention.TILES.items():
        size, window = (512, 0) if is_large else (256, 1024)
        shape = {"WINDOW": window, "K": size, "K_PADDED": size, "BLOCK_M": tiles.rows, "BLOCK_N": tiles.keys}
        for causal in (False, True):
            for whole in sorted({True, tiles.max_splits == 1}):
                constants = {**shape, "CAUSAL": causal, "WHOLE": whole, "FP8": False, "HAS_FP8_TYPE": True}
                partial = BF16 if whole else F32
                to_binary = not is_large and not is_many and causal
                yield compile_kernel(
                    attention._attend,
                    constants,
                    tiles.warps,
                    tiles.stages,
                    to_binary=to_binary,
                    partial=partial,
                    softmax=partial,
                )
        for has_fp8_type in (False, True):  # an fp8 cache
            constants = {**shape, "CAUSAL": False, "WHOLE": True, "FP8": True, "HAS_FP8_TYPE": has_fp8_type}
            to_binary = not is_large and not is_many
            yield compile_kernel(attention._attend, constants, tiles.warps, tiles.stages, to_binary=to_binary, base=U8)
    # float32 needs the most shared memory
    constants = {"WINDOW": 0, "K": 512, "K_PADDED": 512, "BLOCK_M": 32, "BLOCK_N": 16, "CAUSAL": True, "WHOLE": True}
    constants |= {"FP8": False, "HAS_FP8_TYPE": True}
    float32 = dict.fromkeys(("q", "k", "v", "base", "out", "partial", "softmax"), F32)
    yield compile_kernel(attention._attend, constants, stages=2, to_binary=False, **float32)
    for size in (256, 512):
        yield compile_kernel(attention._combine_splits, {"J": 4, "K_PADDED": size, "ROWS": 4}, partial=F32, softmax=F32)
        yield compile_kernel(attention._write_kv, {"FP8": False, "K_PADDED": size}, 1)
        yield compile_kernel(attention._write_kv, {"FP8": True, "K_PADDED": size}, 1, base=U8)
        yield compile_kernel(attention._round_kv, {"K_PADDED": size}, 1)


def other_kernels() -> Kernels:
    row = {"EPS": 1e-6, "D_PADDED": 4096}
    score = {"E_PADDED": 128, "BLOCK_T": 16, "SLICE": routing.SLICE, "BLOCK_K": 128}
    yield compile_kernel(routing._score, score, scores=F32)
    yield compile_kernel(routing._route, {"J": 2816 // routing.SLICE, "K": 8, "E_PADDED": 128, "K_PADDED": 8}, 1, scores=F32)
    yield compile_kernel(routing._sort_by_expert, {"BLOCK_PAIRS": 2048})
    yield compile_kernel(fp8._quantize_rows, {"D_PADDED": 4096})
    for has_values, pairs in ((True, 128), (False, 256)):
        constants = {"HAS_VALUES": has_values, "EPS": 1e-6, "P_PADDED": pairs, "BLOCK_HEADS": 8}
        yield compile_kernel(qkv_rope._split_qkv_rope, constants)
    yield compile_kernel(norm._rms_norm, {"HAS_WEIGHT": True, **row}, 8)
    for to_fp8 in (False, True):
        out_types = {"mlp_out": E4M3, "moe_out": E4M3, "mlp_scale": F32, "moe_scale": F32} if to_fp8 else {}
        yield compile_kernel(norm._add_attention_and_norm, {"TO_FP8": to_fp8, **row}, 8, **out_types)
        out_types = {"next_out": E4M3, "next_scale": F32} if to_fp8 else {}
        yield compile_kernel(norm._add_mlp_and_norm, {"K": 8, "TO_FP8": to_fp8, **row}, 8, **out_types)
    yield compile_kernel(mlp._gelu_and_mul, {"BLOCK_F": 1024})
    yield compile_kernel(vocabulary._reduce_chunks, {"CHUNK": 4096, "BLOCKS": 32, "BLOCK": 128})
    yield compile_kernel(vocabulary._combine_chunks, {"J_PADDED": 64, "BLOCKS": 32, "BLOCK": 128})
    yield compile_kernel(vocabulary._compute_probs, {"CHUNK": 4096})
    picks = {"logits": F32, "temperatures": F64, "best_out": F64}
    yield compile_kernel(pick._pick_parts, {"VERIFY": splitmix.VERIFY, "BLOCK": pick.BLOCK, "PART": pick.PART}, 8, **picks)
    yield compile_kernel(sampler_step._draw_step_inputs, {"C_PADDED": 256, "SAMPLE": 1, "NOISE": 2})
    yield compile_kernel(sampler_step._step_canvases, {"C_PADDED": 256}, 8)


def automaton_kernels() -> Kernels:
    blocks = {"BLOCK_ROWS": token_automaton.BLOCK_ROWS, "BLOCK_INDICES": token_automaton.BLOCK_INDICES}
    segments = {"indices": I32, "begins": I32, "tops": F32, "sums_out": F64, "best_out": F32, "argmax_out": I32}
    logits = {"best": BF16, "argmax": BF16}
    yield compile_kernel(
        token_automaton._segment_reduce, {"IS_LOGITS": True, "HAS_ARGMAX": False, **blocks}, **logits, **segments
    )
    sums = {"values": F64, "best": F32, "argmax": I32}
    yield compile_kernel(
        token_automaton._segment_reduce, {"IS_LOGITS": False, "HAS_ARGMAX": True, **blocks}, **sums, **segments
    )
    pairs = {"pair_probs": F64, "pair_best": F32, "pair_argmax": I32, "from_": I32, "to": I32, "live": I8, "ids": I64}
    states = dict.fromkeys(("forward", "backward", "totals", "scores", "outside"), F64)
    block_pairs = {"BLOCK_PAIRS": token_automaton.BLOCK_PAIRS}
    block_states = {"BLOCK_STATES": token_automaton.BLOCK_STATES}
    yield compile_kernel(token_automaton._mark_live_states, block_pairs, 8, **pairs)
    yield compile_kernel(token_automaton._forward_backward_viterbi, {**block_pairs, **block_states}, 8, **pairs, **states)


if __name__ == "__main__":
    for kernel in (*expert_kernels(), *attention_kernels(), *other_kernels(), *automaton_kernels()):
        print(json.dumps({"name": kernel.metadata.name, "shared": kernel.metadata.shared}))
