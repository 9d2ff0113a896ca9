"""Compiles every kernel for an H100 or H200 at the released shape, which needs no GPU. Prints name and shared memory.

Run by `test_gpu_kernels.py` in a process of its own: where kernels are interpreted they cannot be compiled.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from redraft.kernels.triton import (
    attention,
    experts,
    fp8,
    mlp,
    norm,
    qkv_rope,
    routing,
    sampler_step,
    token_automaton,
    vocabulary,
)

HALF, FULL, EIGHT, WHOLE, LONG, DOUBLE, FLAG = "*bf16", "*fp32", "*fp8e4nv", "*i32", "*i64", "*fp64", "*i1"
KINDS = {  # of arguments that are not bf16 tensors, by name
    **dict.fromkeys(("order", "ends", "experts", "experts_out", "args", "sizes", "lengths", "counts"), WHOLE),
    **dict.fromkeys(("blocks", "steps", "unchanged", "limits", "stabilities"), WHOLE),
    **dict.fromkeys(("positions", "keys_at", "values_at", "seeds", "noise", "best", "sampled", "ids_out", "best_out"), LONG),
    **dict.fromkeys(("sampled_out",), LONG),
    **dict.fromkeys(("weights_out", "shares", "scale_out", "frequencies", "temperatures", "temperature", "figures"), FULL),
    **dict.fromkeys(
        ("sums", "tops", "masses", "top_out", "mass_out", "entropy", "entropy_out", "bounds", "confidences"), FULL
    ),
    **dict.fromkeys(("accepted_out", "settled"), FLAG),
    "uniform": DOUBLE,
    "eight": EIGHT,
    "cap": "fp32",
    "SHRINK": "fp32",
}


def compiled(kernel, fixed: dict, warps: int = 4, stages: int = 3, **kinds: str):
    """The kernel with these constants. Numbers are named in capitals, or by row and token; all are multiples of 16."""
    signature, constants, known, fixed = {}, {}, {}, {"PDL": True, "PACKS": False, **fixed}
    for at, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name], constants[(at,)] = "constexpr", fixed[name]
            continue
        number = name.isupper() or name.endswith(("_row", "_token"))
        signature[name] = kinds.get(name) or KINDS.get(name) or ("i32" if number else HALF)
        if signature[name] != "fp32":
            known[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, known)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def expert_kernels():
    for eight in (False, True):
        kinds = {"weight": EIGHT, "scale": FULL} if eight else {}
        for pairs in (2048, 4096, 8192, 16384):
            wide, narrow = experts.select_tiles(1 if eight else 2, pairs, 128)
            for kernel, tile, first in ((experts._gate_up, wide, "x"), (experts._down, narrow, "h")):
                fixed = {"K": 8, "FP8": eight, "BT": tile.tokens, "BF": tile.features, "BK": tile.inner}
                own = {first: EIGHT, f"{first}_scale": FULL} if eight else {}
                yield compiled(kernel, fixed, tile.warps, tile.stages, **kinds, **own)


def attention_kernels():
    all_full = dict.fromkeys(("q", "k", "v", "base", "out", "part", "mass"), FULL)  # the most memory that float32 takes
    for (large, _), tiles in attention.TILES.items():
        size, window = (512, 0) if large else (256, 1024)
        shape = {"WINDOW": window, "K": size, "WIDE": size, "BM": tiles.rows, "BN": tiles.keys}
        for causal in (False, True):
            for whole in {True, tiles.splits == 1}:
                part, own = HALF if whole else FULL, {"CAUSAL": causal, "WHOLE": whole}
                yield compiled(attention._attend, shape | own, tiles.warps, tiles.stages, part=part, mass=part)
    yield compiled(attention._attend, {"WINDOW": 0, "K": 512, "WIDE": 512, "BM": 32, "BN": 16, **own}, stages=2, **all_full)
    for size in (256, 512):
        yield compiled(attention._combine_splits, {"J": 4, "WIDE": size, "ROWS": 4}, part=FULL, mass=FULL)
        yield compiled(attention._write_kv, {"WIDE": size}, 1)


def other_kernels():
    eps = {"EPS": 1e-6, "WIDE": 4096}
    yield compiled(routing._score, {"WIDE": 128, "BT": 16, "SLICE": 512, "BK": 128}, scores=FULL)
    yield compiled(routing._route, {"J": 6, "K": 8, "WIDE": 128, "FEW": 8}, 1, scores=FULL)
    yield compiled(routing._sort_by_expert, {"AT_ONCE": 2048})
    yield compiled(fp8._quantize_rows, {"WIDE": 4096})
    yield compiled(qkv_rope._split_qkv_rope, {"OWN_VALUES": True, "EPS": 1e-6, "HALF": 128, "AT_ONCE": 8})
    yield compiled(qkv_rope._split_qkv_rope, {"OWN_VALUES": False, "EPS": 1e-6, "HALF": 256, "AT_ONCE": 8})
    yield compiled(norm._rms_norm, {"WEIGHTED": True, **eps}, 8)
    eight = {"dense_out": EIGHT, "sparse_out": EIGHT, "dense_scale": FULL, "sparse_scale": FULL}
    for packs in (False, True):
        yield compiled(norm._add_attention_and_norm, {"PACKS": packs, **eps}, 8, **(eight if packs else {}))
        next_out = {"next_out": EIGHT, "next_scale": FULL} if packs else {}
        yield compiled(norm._add_mlp_and_norm, {"K": 8, "PACKS": packs, **eps}, 8, **next_out)
    yield compiled(mlp._gelu_and_mul, {"WIDE": 1024})
    chunk = {"CHUNK": 4096, "INSIDE": 32, "BLOCK": 128}
    yield compiled(vocabulary._reduce_chunks, chunk)
    yield compiled(vocabulary._combine_chunks, {"WIDE": 64, "INSIDE": 32, "BLOCK": 128})
    yield compiled(vocabulary._compute_probs, {"CHUNK": 4096})
    yield compiled(sampler_step._draw_step_inputs, {"WIDE": 256, "SAMPLE": 1, "NOISE": 2})
    yield compiled(sampler_step._step_canvases, {"WIDE": 256}, 8)


def pattern_kernels():
    numbers = {"steps": DOUBLE, "best": FULL, "which": WHOLE, "from_": WHOLE, "to": WHOLE, "live": "*i8", "ids": LONG}
    sums = dict.fromkeys(("before", "behind", "totals", "scores", "through"), DOUBLE)
    found = {"entries": WHOLE, "begins": WHOLE, "tops": FULL, "sums_out": DOUBLE, "best_out": FULL, "which_out": WHOLE}
    shape = {"ROWS": token_automaton.ROWS, "WIDE": token_automaton.WIDE}
    yield compiled(token_automaton._segment_reduce, {"RAW": True, "KNOWN": False, **shape}, best=HALF, which=HALF, **found)
    known = {"values": DOUBLE, "best": FULL, "which": WHOLE}
    yield compiled(token_automaton._segment_reduce, {"RAW": False, "KNOWN": True, **shape}, **known, **found)
    yield compiled(token_automaton._mark_live_states, {"PAIRS": token_automaton.PAIRS}, 8, **numbers)
    yield compiled(
        token_automaton._forward_backward_viterbi,
        {"PAIRS": token_automaton.PAIRS, "STATES": token_automaton.STATES},
        8,
        **numbers,
        **sums,
    )


if __name__ == "__main__":
    for kernel in (*expert_kernels(), *attention_kernels(), *other_kernels(), *pattern_kernels()):
        print(json.dumps({"name": kernel.metadata.name, "shared": kernel.metadata.shared}))
