"""TreeBucket: one round of exact mode as a CUDA graph, in which a tree of drafts is verified instead of a row of them.

    nodes, a canvas behind each -> layers -> head -> picks -> the path whose tokens are all picked, and the next token
                                        hidden states of the canvas behind it -> draft head -> the tokens of the next tree

The tokens are those of any other exact round: a draft is accepted if it is the causal half's pick. A tree has more drafts
for a position, which a GPU verifies in about the same time while it has few requests. Nodes that are not on the accepted
path leave the KV cache again (`attention.keep_path`).
Shapes: B rows, N nodes, D depth of the tree, C positions of a canvas, V vocabulary, K model size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.diffusion import pick
from redraft.diffusion.draft_tree import DraftTree
from redraft.diffusion.verified import Round, Verdict, Verification
from redraft.engine.cache_table import CacheTable, TreeTensors
from redraft.engine.fused_llama import FusedLlama
from redraft.engine.round_graph import LoadedRows, pick_rows
from redraft.kernels.triton import attention
from redraft.kernels.triton.draft_tree import AcceptedPath, accept_path
from redraft.kernels.triton.pick import rank_gumbel
from redraft.model.kv_cache import KVCache

# Columns behind the nodes in the table that the host fills: whether the row has a request, its cached tokens, how many
# tokens the answer may still get, cursor, seed.
FIELDS = 5


class TreeBucket:
    """Static buffers and the body of a round for a batch of at most B rows."""

    def __init__(self, fused: FusedLlama, tree: DraftTree, rows: int, context: int) -> None:
        model = fused.model
        device = model.device
        self.fused = fused
        self.tree = tree
        self.tensors = TreeTensors.of(tree, device)
        self.canvas_length = tree.depth + 1  # the first position is no draft
        self.context = context
        self.table = CacheTable.empty(model, rows)
        self.canvas_table = CacheTable.empty(model, rows * len(tree), self.table.base)
        on_gpu = device.type == "cuda"
        columns = len(tree) + FIELDS
        self.inputs_host = torch.zeros(rows, columns, dtype=torch.int64, pin_memory=on_gpu)
        self.inputs_BI = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self.rows_B = torch.arange(rows, device=device)
        self.temperature_B = torch.zeros(rows, dtype=torch.float64, device=device)
        self.results_host = torch.zeros(rows, 1 + len(tree), dtype=torch.int64, pin_memory=on_gpu)
        self.logprobs_host = torch.zeros(rows, tree.depth + 1, dtype=torch.float32, pin_memory=on_gpu)
        self.loaded = LoadedRows()

    # 1. The host's part

    def load(self, states: Sequence[Verification], caches: Sequence[KVCache]) -> None:
        """Fills the buffers. Each cache counts the nodes already."""
        rows = list(zip(states, caches, strict=True))
        nodes = len(self.tree)
        if self.loaded.replace(rows):
            self.table.fill(caches, [nodes] * len(rows))
            temperatures = [pick.gumbel_temperature(state.cfg) for state in states]
            self.temperature_B[: len(states)] = torch.tensor(temperatures, dtype=torch.float64)
        inputs = []
        for state, cache in rows:
            room = state.cfg.max_new_tokens - len(state.tokens)
            inputs.append([*self._ids(state), 1, cache.lengths[0] - nodes, room, len(state.tokens), state.seed])
        self.inputs_host.zero_()
        self.inputs_host[: len(inputs)] = torch.tensor(inputs)
        self.inputs_BI.copy_(self.inputs_host, non_blocking=True)

    def _ids(self, state: Verification) -> list[int]:
        """The tokens of the nodes. A request whose last round had no tree has its drafts in the likeliest line."""
        if state.tree:
            return [state.last, *state.tree]
        ids = [state.last, *[0] * (len(self.tree) - 1)]  # any token may be a draft
        for node, draft in zip(self.tree.lines[0][1:], state.drafts, strict=False):
            ids[node] = draft
        return ids

    def read(self, states: Sequence[Verification]) -> list[tuple[Round, Verdict, list[int]]]:
        """For each row: the accepted path as a row of drafts, the verdict, and the tokens of the next tree.

        The row goes on behind the accepted path with the likeliest drafts there, so that rejected drafts are counted. Waits
        for the GPU.
        """
        if self.inputs_BI.is_cuda:
            torch.cuda.current_stream().synchronize()
        found = []
        for state, row, logprobs in zip(states, self.results_host.tolist(), self.logprobs_host.tolist(), strict=False):
            last, token, *tree = row
            ids = self._ids(state)
            accepted = self.tree.depths[last]
            room = state.cfg.max_new_tokens - len(state.tokens)
            drafts = [ids[node] for node in self.tree.lines[last][1:]][: room - 1]
            if not state.tree:  # the nodes beyond its drafts are padding
                drafts = drafts[: max(accepted, len(state.drafts))]
            stops = [step for step, draft in enumerate(drafts[:accepted]) if draft in state.cfg.eos_token_ids]
            if stops:  # nothing follows a stop token
                accepted = stops[0] + 1
                drafts = drafts[:accepted]
            verdict = Verdict(accepted, None if stops else token, tuple(logprobs[: accepted + (not stops)]))
            work = Round((state.last, *drafts), tuple(drafts), tuple(range(len(drafts) + 1)), self.canvas_length)
            found.append((work, verdict, tree))
        return found

    def likeliest(self, tree: Sequence[int]) -> list[int]:
        """The likeliest draft of each position, as a round without a tree would verify them."""
        return [tree[node - 1] for node in self.tree.lines[0][1:]]

    # 2. The device's part

    def body(self) -> None:
        """The round that is captured."""
        model = self.fused.model
        shape = self.tensors
        nodes = len(self.tree)
        ids_BN = self.inputs_BI[:, :nodes]
        is_real_B, cached_B, room_B, cursor_B, seed_B = self.inputs_BI[:, nodes:].unbind(1)
        self.table.lengths_B.copy_(cached_B)
        self.table.counts_B.copy_(is_real_B * nodes)
        self.canvas_table.behind_tree_(self.table)
        blank = model.config.vocab_size
        canvas_BNC = torch.full((*ids_BN.shape, self.canvas_length), blank, device=model.device)
        hidden_ND, canvas_ND = self.fused.joint(ids_BN, self.table, canvas_BNC, self.canvas_table, self.context, shape)
        assert canvas_ND is not None
        logits_NV = model.logits(hidden_ND)
        logits_BNV = logits_NV.unflatten(0, ids_BN.shape)
        picks_BN = pick_rows(logits_NV, self.temperature_B, seed_B, cursor_B[:, None] + shape.depths_N)
        accepted = accept_path(ids_BN, picks_BN, room_B, shape.visible_N, shape.depths_N, shape.parents_N, shape.paths_ND)
        with self.fused.side_stream:  # the next drafts need neither
            attention.keep_path(
                self.table.base, self.table.keys_LB, self.table.values_LB, self.table.sizes_LB, self.table.lengths_B,
                accepted.path_BD, self.table.base.numel(),
            )  # fmt: skip
            self.logprobs_host.copy_(self._logprobs(logits_BNV, accepted), non_blocking=True)
        canvas_BCK = canvas_ND.unflatten(0, canvas_BNC.shape)[self.rows_B, accepted.last_B]
        tree_BN = self._draft(canvas_BCK, accepted.token_B, seed_B, cursor_B + accepted.count_B)
        results = torch.cat([accepted.last_B[:, None], accepted.token_B[:, None], tree_BN], dim=1)
        self.results_host.copy_(results, non_blocking=True)
        self.fused.side_stream.wait()

    def _logprobs(self, logits_BNV: Tensor, accepted: AcceptedPath) -> Tensor:
        """Log probabilities of the accepted drafts and of the token behind them, [B, D + 1]."""
        before_BD = F.pad(accepted.path_BD, (1, 0))  # the node before each token
        step_D = torch.arange(before_BD.shape[1], device=before_BD.device)
        path_ids_BD = F.pad(accepted.ids_BD, (0, 1))
        emitted_BD = torch.where(step_D < accepted.count_B[:, None], path_ids_BD, accepted.token_B[:, None])
        rows_BDV = logits_BNV[self.rows_B[:, None], before_BD].float()
        return rows_BDV.gather(2, emitted_BD[..., None])[..., 0] - rows_BDV.logsumexp(dim=-1)

    def _draft(self, hidden_BCK: Tensor, token_B: Tensor, seed_B: Tensor, position_B: Tensor) -> Tensor:
        """The tokens of the tree behind each row's token, which stands at `position_B`, without its root: ids_BN."""
        model = self.fused.model
        tree = self.tree
        drafter = model.drafter
        assert drafter is not None
        begun_BCI = drafter.head.begin(hidden_BCK.flatten(0, 1)).unflatten(0, hidden_BCK.shape[:2])
        position_DB = position_B + torch.arange(tree.depth + 1, device=position_B.device)[:, None]
        ids: dict[int, Tensor] = {0: token_B}
        for depth in range(1, tree.depth + 1):
            level = tree.level(depth)
            parents = sorted({tree.parents[node] for node in level})
            previous_BP = torch.stack([ids[parent] for parent in parents], dim=1)
            hidden_NK, begun_NI = (
                tensor[:, depth, None].expand(-1, len(parents), -1).flatten(0, 1) for tensor in (hidden_BCK, begun_BCI)
            )
            drafted_NK = drafter.head.add_previous(hidden_NK, begun_NI, model.embed(previous_BP.flatten()))
            count = 1 + max(tree.ranks[node] for node in level)
            ranked_NR = rank_gumbel(model.logits(drafted_NK), self.temperature_B, seed_B, position_DB[depth], count)
            ranked_BPR = ranked_NR.unflatten(0, previous_BP.shape)
            for node in level:
                ids[node] = ranked_BPR[:, parents.index(tree.parents[node]), tree.ranks[node]]
        return torch.stack([ids[node] for node in range(1, len(tree))], dim=1)
