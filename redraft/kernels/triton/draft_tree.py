"""The accepted path of a tree of drafts: its last node, the token behind it, and its nodes and tokens.

Reference: `diffusion/draft_tree.py` and `diffusion/verified.py`. A draft is accepted if it is the pick behind its parent and
all drafts before it are accepted.
Shapes: B requests, N nodes of the tree, D its depth.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class AcceptedPath(NamedTuple):
    """What a request accepts. All int64."""

    last_B: Tensor  # the last node
    token_B: Tensor  # the pick behind it
    count_B: Tensor  # the drafts on the path
    path_BD: Tensor  # their nodes; behind the end of the path, the number of the step from 1 on
    ids_BD: Tensor  # the tokens of these nodes


def accept_path(
    ids_BN: Tensor,
    picks_BN: Tensor,
    room_B: Tensor,
    visible_N: Tensor,
    depths_N: Tensor,
    parents_N: Tensor,
    paths_ND: Tensor,
) -> AcceptedPath:
    """Finds the longest path whose tokens are all picked. Drafts at a depth of `room_B` or more do not count.

    Bit m of `visible_N[n]` says that node m is on the path to node n. Of paths of one length, the lowest node counts.
    """
    rows, nodes = picks_BN.shape
    depth = paths_ND.shape[1]
    last_B, token_B, count_B = torch.empty(3, rows, dtype=torch.int64, device=picks_BN.device).unbind()
    path_BD, path_ids_BD = torch.empty(2, rows, depth, dtype=torch.int64, device=picks_BN.device).unbind()
    _accept_path[(rows,)](
        ids_BN, picks_BN.contiguous(), room_B, visible_N, depths_N, parents_N, paths_ND,
        last_B, token_B, count_B, path_BD, path_ids_BD,
        ids_BN.stride(0), room_B.stride(0), nodes, depth,
        triton.next_power_of_2(nodes), triton.next_power_of_2(depth), num_warps=1,
    )  # fmt: skip
    return AcceptedPath(last_B, token_B, count_B, path_BD, path_ids_BD)


@triton.jit
def _accept_path(
    ids, picks, room, visible, depths, parents, paths, last_out, token_out, count_out, path_out, path_ids_out,
    ids_row, room_row, N, D, N_PADDED: tl.constexpr, D_PADDED: tl.constexpr,
):  # fmt: skip
    """One request."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, N_PADDED).to(tl.int64)
    mask = node < N
    depth = tl.load(depths + node, mask=mask, other=1)
    parent = tl.load(parents + node, mask=mask, other=0)
    token = tl.load(ids + row * ids_row + node, mask=mask, other=0)
    is_picked = (token == tl.load(picks + row * N + parent, mask=mask, other=0)) & (depth < tl.load(room + row * room_row))
    is_picked = (is_picked | (depth == 0)) & mask
    picked = tl.sum(is_picked.to(tl.int64) << node, axis=0)
    bits = tl.load(visible + node, mask=mask, other=0)
    reached = tl.where(mask & ((bits & picked) == bits), depth, -1)
    count = tl.max(reached, axis=0)
    last = tl.min(tl.where(reached == count, node, N), axis=0)
    tl.store(last_out + row, last)
    tl.store(token_out + row, tl.load(picks + row * N + last))
    tl.store(count_out + row, count)
    step = tl.arange(0, D_PADDED)
    path = tl.load(paths + last * D + step, mask=step < D, other=0)
    tl.store(path_out + row * D + step, path, mask=step < D)
    tl.store(path_ids_out + row * D + step, tl.load(ids + row * ids_row + path, mask=step < D, other=0), mask=step < D)
