"""Compiles every Triton kernel for a GPU architecture at the released model's shape, with the tiles that are picked there.

    python tests/compiled.py 89 [--binaries]

Needs no GPU. Prints one JSON line per kernel: its name, its shared memory, and the bytes of registers that a product spills
to memory. `test_triton_kernels.py` runs this file in a process of its own, because a process that interprets kernels cannot
compile them.

The products of one canvas and the experts of eight are compiled to LLVM code on every card, with `--binaries` to a binary,
from which spills are known. Kernels without products have no tiles to choose: they are compiled to LLVM code for sm_80, the
oldest, and to a binary for sm_90. All other variants are compiled up to the stage that allocates shared memory.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptx_version_from_options
from triton.compiler import ASTSource

from redraft.kernels import splitmix
from redraft.kernels.backend import KIB, Card
from redraft.kernels.triton import (
    attention,
    attention_wide,
    draft_tree,
    experts,
    experts_fourbit,
    fp8,
    linear_fp8,
    mlp,
    norm,
    pick,
    qkv_rope,
    routing,
    sampler_step,
    token_automaton,
    vocabulary,
)
from redraft.kernels.triton.tiles import LARGE_LIMIT

BF16 = "*bf16"
F32 = "*fp32"
F64 = "*fp64"
E4M3 = "*fp8e4nv"
I8 = "*i8"
I16 = "*i16"
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
    **dict.fromkeys(("accepted_out", "settled", "quotas", "at_ends", "lasts"), BOOL),
    "spreads": I32,
    "stops": I64,
    "uniform": F64,
    "fp8_out": E4M3,
    "cap": "fp32",
    "ROUTER_SCALE": "fp32",
}

TOP_PROBS = ("own_out", "draft_out", "probs_out")
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # per block, by architecture
BINARY_PAIRS = (2048, 16384)  # of tokens and experts: one canvas and eight
FORMULA_SLACK = 1024  # bytes: reductions and barriers, which the formulas leave out
MEMORY, LLVM, BINARY = range(3)  # how far a kernel is compiled
CARD = Card(90, 227 * KIB)  # the command line changes both
FARTHEST = BINARY

Kernels = Iterator[Any]


def compile_kernel(
    kernel: Any, constants: dict[str, Any], warps: int = 4, stages: int = 3, *, to_binary: bool = True, **types: str
) -> Any:
    """Compiles a kernel with these constants. Integer arguments and addresses count as multiples of 16, as in a real launch.

    Integer arguments have names in capitals, or names that end in _row or _token. Without `to_binary` the compiler stops
    where shared memory is allocated. Types and shapes are checked by then; the rest takes most of the time.
    """
    constants = {"PDL": CARD.architecture >= 90, **constants}
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
    with stop_after(FARTHEST if to_binary else MEMORY, kernel.fn.__name__):
        return triton.compile(source, target=GPUTarget("cuda", CARD.architecture, 32), options=options)


def within(kernel: Any, formula: int) -> Any:
    """The kernel, if the compiler allocates no more than the formula of its tiles says."""
    assert kernel.metadata.shared <= formula + FORMULA_SLACK, (kernel.metadata.name, kernel.metadata.shared, formula)
    return kernel


def spilled_bytes(kernel: Any) -> int:
    """Bytes of registers that a thread keeps in memory; 0 without a binary."""
    if not kernel.asm["cubin"]:
        return 0
    program = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None, usage
    return int(stack[1])


@contextmanager
def stop_after(stage: int, name: str) -> Iterator[None]:
    """Makes triton.compile stop at a stage. Unless that is BINARY, its results must not go to a cache that a GPU reads."""
    add_stages = CUDABackend.add_stages

    def name_kernel(source: str, metadata: dict[str, Any]) -> str:
        metadata["name"] = name  # the skipped stage does this
        return ""

    def allocate_memory(module: Any, metadata: dict[str, Any], options: Any) -> str:
        """The first passes of Triton's stage "llir", up to the one that allocates shared memory."""
        manager = ir.pass_manager(module.context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        ptx_version = get_ptx_version_from_options(options, CARD.architecture)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, CARD.architecture, ptx_version)
        manager.run(module, "allocate_memory")
        metadata["shared"] = module.get_int_attr("ttg.shared")
        return ""

    def add_stages_to_stop(self: Any, stages: dict[str, Any], options: Any, *arguments: Any) -> None:
        add_stages(self, stages, options, *arguments)
        if stage == MEMORY:
            stages["llir"] = lambda module, metadata: allocate_memory(module, metadata, options)
        stages["ptx"] = name_kernel
        stages["cubin"] = lambda source, metadata: b""

    if stage == BINARY:
        yield
        return
    CUDABackend.add_stages = add_stages_to_stop
    os.environ["DISABLE_LLVM_OPT"] = "1"
    try:
        yield
    finally:
        CUDABackend.add_stages = add_stages
        del os.environ["DISABLE_LLVM_OPT"]


def expert_kernels() -> Kernels:
    for is_fp8 in (False, True):
        widens = is_fp8 and not CARD.has_fp8
        token_bytes = 1 if is_fp8 and not widens else 2
        weight_types = {"weight": U8 if widens else E4M3, "scale": F32} if is_fp8 else {}
        for pairs in (2048, 4096, 8192, 16384, 65536):
            weight_bytes = 1 if is_fp8 else 2
            up_tiles, down_tiles = experts.select_tiles(weight_bytes, pairs, 128, CARD, token_bytes)
            for kernel, tiles, inputs in ((experts._gate_up, up_tiles, "x"), (experts._down, down_tiles, "h")):
                blocks = {"BLOCK_T": tiles.tokens, "BLOCK_F": tiles.features, "BLOCK_K": tiles.inner, "REST": tiles.rest}
                blocks |= {"BY_EXPERT": tiles.by_expert}
                input_types = {inputs: E4M3, f"{inputs}_scale": F32} if token_bytes == 1 else {}
                constants = {"K": 8, "FP8": is_fp8, "WIDEN": widens, **blocks}
                compiled = compile_kernel(
                    kernel,
                    constants,
                    tiles.warps,
                    tiles.stages,
                    to_binary=pairs in BINARY_PAIRS,
                    **weight_types,
                    **input_types,
                )
                yield within(compiled, tiles.shared_memory(CARD, weight_bytes, token_bytes))


def linear_fp8_kernels() -> Kernels:
    """Dense products and the soft embedding; on a card without fp8 the weights are bytes."""
    widens = not CARD.has_fp8
    types = {"x": BF16, "weight": U8} if widens else {"x": E4M3, "weight": E4M3, "x_scale": F32}
    token_bytes = 2 if widens else 1
    for by_input in (False, True):
        flags = {"WIDEN": widens, "BY_INPUT": by_input}
        for tokens, splits in ((1, 1), (64, 1), (256, 1), (256, 3)):
            tiles = linear_fp8.select_tiles(tokens, CARD, token_bytes)
            blocks = {"BLOCK_T": tiles.tokens, "BLOCK_F": tiles.features, "BLOCK_K": tiles.inner}
            out = {"out": BF16 if splits == 1 else F32}
            compiled = compile_kernel(
                linear_fp8._multiply_fp8, {"SPLITS": splits, **flags, **blocks}, tiles.warps, tiles.stages,
                to_binary=tokens == 256, scale=F32, **types, **out,
            )  # fmt: skip
            yield within(compiled, tiles.shared_memory(CARD, 1, token_bytes))
        constants = {"SPLITS": 3, **flags, "BLOCK": linear_fp8.SUM_BLOCK}
        yield compile_kernel(linear_fp8._sum_splits, constants, scale=F32, x_scale=F32)


def fourbit_kernels() -> Kernels:
    """The 4-bit experts: both products, every format; the plain conversion of each too."""
    types = {"codes": I16, "scale": I32, "minimum": I32, "global_scale": F32}
    products = ((experts_fourbit._gate_up_fourbit, 2816, 2), (experts_fourbit._down_fourbit, 704, 1))
    formats = (experts_fourbit._NVFP4.value, experts_fourbit._INT4.value, experts_fourbit._INT4_MINIMUM.value)
    for pairs, quant in itertools.product((2048, 4096, 16384), formats):
        pair_of_tiles = experts_fourbit.select_tiles(quant, pairs, 128, CARD)
        for (kernel, size, parts), tiles in zip(products, pair_of_tiles, strict=True):
            blocks = {"BLOCK_T": tiles.tokens, "BLOCK_F": tiles.features, "BLOCK_J": tiles.inner // 64}
            flags = {"JOINED": CARD.has_shared_products, "EVEN": size % tiles.inner == 0}
            constants = {"K": 8, "FORMAT": quant, "PARTS": parts, "PTX": True, **flags, **blocks}
            options = (tiles.warps, tiles.stages)
            formula = tiles.shared_memory(CARD, experts_fourbit.WEIGHT_BYTES[quant], 2)
            yield within(compile_kernel(kernel, constants, *options, to_binary=pairs == 2048, **types), formula)
            if pairs == 2048:
                plain = compile_kernel(kernel, {**constants, "PTX": False}, *options, to_binary=False, **types)
                yield within(plain, formula)


def wide_attention_kernels() -> Kernels:
    tiles = attention_wide.TILES
    shape = {"K": 512, "BLOCK_M": tiles.rows, "BLOCK_N": tiles.keys, "BLOCK_K": tiles.inner}
    stats = {"tile_max": F32, "tile_sum": F32}
    for causal in (False, True):
        constants = {**shape, "CAUSAL": causal}
        yield compile_kernel(attention_wide._score_tiles, constants, tiles.warps, tiles.stages, **stats)
        partial = {} if causal else {"partial": F32, "softmax": F32}
        for columns in (tiles.columns, tiles.columns // 2):
            more = {"BLOCK_D": columns, "BLOCK_I": attention_wide.STATS_BLOCK, "WHOLE": causal}
            yield compile_kernel(
                attention_wide._sum_values, {**constants, **more}, tiles.warps, tiles.stages, **stats, **partial
            )


def attention_kernels() -> Kernels:
    fp8_type = {"HAS_FP8_TYPE": CARD.has_fp8}
    for size, window in ((256, 1024), (512, 0)):
        for has_many_tokens in (False, True):
            tiles = attention.select_tiles(size, 2048 if has_many_tokens else 256, CARD, 2)
            shape = {"TREE": 0, "WINDOW": window, "K": size, "K_PADDED": size}
            shape |= {"BLOCK_M": tiles.tokens, "BLOCK_N": tiles.inner}
            for causal in (False, True):
                for whole in sorted({True, tiles.concurrent == 1}):
                    partial = BF16 if whole else F32
                    constants = {**shape, **fp8_type, "CAUSAL": causal, "WHOLE": whole, "FP8": False}
                    compiled = compile_kernel(
                        attention._attend, constants, tiles.warps, tiles.stages,
                        to_binary=not has_many_tokens and causal == whole, partial=partial, softmax=partial,
                    )  # fmt: skip
                    yield within(compiled, attention.shared_memory(tiles, CARD, 2))
            constants = {**shape, **fp8_type, "CAUSAL": False, "WHOLE": True, "FP8": True}  # an fp8 cache
            binary = {"to_binary": not has_many_tokens}
            # The formula leaves out the decoded keys of a tile; the test compares with the card's limit.
            yield compile_kernel(attention._attend, constants, tiles.warps, tiles.stages, **binary, base=U8)
            constants = {**constants, "CAUSAL": True, "WHOLE": False}
            partial = {"partial": F32, "softmax": F32}
            yield compile_kernel(
                attention._attend, constants, tiles.warps, tiles.stages, to_binary=False, base=U8, **partial
            )
    tiles = attention.select_tiles(64, 288, CARD, 2)  # a tree of drafts of a small model
    shape = {"TREE": 32, "WINDOW": 0, "K": 64, "K_PADDED": 64, "BLOCK_M": tiles.tokens, "BLOCK_N": tiles.inner}
    for causal in (False, True):
        constants = {**shape, **fp8_type, "CAUSAL": causal, "WHOLE": False, "FP8": False}
        types = {"tree": I64, "partial": F32, "softmax": F32}
        yield compile_kernel(attention._attend, constants, tiles.warps, tiles.stages, **types)
    yield compile_kernel(attention._keep_path, {"D_PADDED": 8, "WIDTH_PADDED": 256}, path=I64)
    # float32 needs the most shared memory
    tiles = attention.select_tiles(512, 256, CARD, 4)
    shape = {"TREE": 0, "WINDOW": 0, "K": 512, "K_PADDED": 512, "BLOCK_M": tiles.tokens, "BLOCK_N": tiles.inner}
    constants = {**shape, **fp8_type, "CAUSAL": True, "WHOLE": True, "FP8": False}
    float32 = dict.fromkeys(("q", "k", "v", "base", "out", "partial", "softmax"), F32)
    compiled = compile_kernel(attention._attend, constants, tiles.warps, tiles.stages, to_binary=False, **float32)
    yield within(compiled, attention.shared_memory(tiles, CARD, 4))
    if CARD.shared_memory >= LARGE_LIMIT:
        yield from wide_attention_kernels()
    for size in (256, 512):
        yield compile_kernel(attention._combine_splits, {"J": 4, "K_PADDED": size, "ROWS": 4}, partial=F32, softmax=F32)
        yield compile_kernel(attention._write_kv, {"FP8": False, "WIDTH_PADDED": 8 * size})
        yield compile_kernel(attention._write_kv, {"FP8": True, "WIDTH_PADDED": 8 * size}, base=U8)
        yield compile_kernel(attention._round_kv, {"K_PADDED": size}, 1)


def other_kernels() -> Kernels:
    row = {"EPS": 1e-6, "D_PADDED": 4096}
    score = {"E_PADDED": 128, "BLOCK_T": 16, "SLICE": routing.SLICE, "BLOCK_K": 128}
    yield compile_kernel(routing._score, score, scores=F32)
    yield compile_kernel(routing._route, {"J": 2816 // routing.SLICE, "K": 8, "E_PADDED": 128, "K_PADDED": 8}, 1, scores=F32)
    yield compile_kernel(routing._sort_by_expert, {"BLOCK_PAIRS": routing.BLOCK_PAIRS}, 8)
    if CARD.has_fp8:
        yield compile_kernel(fp8._quantize_rows, {"D_PADDED": 4096})
    for has_values, pairs in ((True, 128), (False, 256)):
        constants = {"HAS_VALUES": has_values, "EPS": 1e-6, "P_PADDED": pairs, "BLOCK_HEADS": 8}
        yield compile_kernel(qkv_rope._split_qkv_rope, constants)
    for has_norms in (False, True):
        constants = {"HAS_NORMS": has_norms, "Q_SCALE": 0.125, "EPS": 1e-6, "P_PADDED": 32, "BLOCK_HEADS": 8}
        yield compile_kernel(qkv_rope._split_llama_rope, constants)
    yield compile_kernel(norm._rms_norm, {"HAS_WEIGHT": True, **row}, 8)
    yield compile_kernel(norm._add_and_norm, {"EPS": 1e-6, "D_PADDED": 1024}, 4)
    for to_fp8 in (False, True)[: 1 + CARD.has_fp8]:
        out_types = {"mlp_out": E4M3, "moe_out": E4M3, "mlp_scale": F32, "moe_scale": F32} if to_fp8 else {}
        flags = {"MLP_TO_FP8": to_fp8, "MOE_TO_FP8": to_fp8}
        yield compile_kernel(norm._add_attention_and_norm, {**flags, **row}, 8, **out_types)
        if to_fp8:  # 4-bit experts beside a dense MLP in fp8
            mixed = {"mlp_out": E4M3, "mlp_scale": F32}
            yield compile_kernel(
                norm._add_attention_and_norm, {**flags, "MOE_TO_FP8": False, **row}, 8, to_binary=False, **mixed
            )
        out_types = {"next_out": E4M3, "next_scale": F32} if to_fp8 else {}
        yield compile_kernel(norm._add_mlp_and_norm, {"K": 8, "TO_FP8": to_fp8, **row}, 8, **out_types)
    yield from (compile_kernel(mlp._activate_and_mul, {"IS_SILU": silu, "BLOCK_F": 1024}) for silu in (False, True))
    chunk = {"BLOCKS": 32, "BLOCK": 128}
    yield compile_kernel(vocabulary._reduce_chunks, {"CHUNK": 4096, **chunk})
    yield compile_kernel(vocabulary._combine_chunks, {"J_PADDED": 64, **chunk})
    top = {"K": 5, "K_PADDED": 8, "J_PADDED": 64, "CHUNK": 4096}
    yield compile_kernel(vocabulary._find_top_probs, top, ids=I64, ids_out=I64, **dict.fromkeys(TOP_PROBS, F32))
    for has_scales in (False, True):
        yield compile_kernel(vocabulary._compute_probs, {"CHUNK": 4096, "HAS_SCALES": has_scales}, scale=F32)
    picks = {"logits": F32, "temperatures": F64, "best_out": F64}
    yield compile_kernel(pick._pick_parts, {"VERIFY": splitmix.VERIFY, "BLOCK": pick.BLOCK, "PART": pick.PART}, 8, **picks)
    ranks = {"VERIFY": splitmix.VERIFY, "BLOCK": pick.BLOCK, "COUNT": 8}
    for logits in (BF16, F32):
        yield compile_kernel(pick._rank_parts, ranks, logits=logits, temperatures=F64, sums_out=F64)
    yield compile_kernel(pick._merge_parts, {"COUNT": 6, "P_PADDED": 512}, sums=F64, ids=I64, out=I64)
    numbers = dict.fromkeys(("ids", "picks", "room", "visible", "depths", "parents", "paths"), I64)
    outputs = dict.fromkeys(("last_out", "token_out", "count_out", "path_out", "path_ids_out"), I64)
    yield compile_kernel(draft_tree._accept_path, {"N_PADDED": 32, "D_PADDED": 8}, 1, **numbers, **outputs)
    yield compile_kernel(sampler_step._draw_step_inputs, {"C_PADDED": 256, "SAMPLE": 1, "NOISE": 2})
    yield compile_kernel(sampler_step._step_canvases, {"C_PADDED": 256, "E": sampler_step.MAX_STOPS}, 8)


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
    architecture = int(sys.argv[1])
    CARD = Card(architecture, SHARED_KIB[architecture] * KIB)
    FARTHEST = BINARY if "--binaries" in sys.argv else LLVM
    for compiled_kernel in (*expert_kernels(), *fourbit_kernels(), *linear_fp8_kernels(), *attention_kernels()):
        metadata = compiled_kernel.metadata
        print(json.dumps({"name": metadata.name, "shared": metadata.shared, "spilled": spilled_bytes(compiled_kernel)}))
    FARTHEST = {80: LLVM, 90: BINARY}.get(architecture, MEMORY)  # of kernels without tiles to choose
    for compiled_kernel in (*other_kernels(), *automaton_kernels()):
        print(json.dumps({"name": compiled_kernel.metadata.name, "shared": compiled_kernel.metadata.shared, "spilled": 0}))
