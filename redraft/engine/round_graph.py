"""RoundBucket: one round of checked or exact mode as a CUDA graph, for a batch of requests.

    clean tokens, canvases -> layers -> head -> picks -> accepted drafts and the next token of each row
                                     hidden states of the canvas behind it -> draft head -> the next drafts

`diffusion/verified.py` is the definition. The graph covers requests whose tokens are picked by temperature alone; filters,
penalties, constraints and top probabilities go through the same layers and then through the reference. Without drafts a
round is one step of autoregressive generation.
Shapes: B rows, S clean tokens of each, C positions of the canvas behind each clean token, V vocabulary, D model size.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from redraft.diffusion import pick, rng
from redraft.diffusion.verified import Round, Verdict, Verification
from redraft.engine.cache_table import CacheTable
from redraft.engine.fused_layers import FusedLayers
from redraft.engine.fused_llama import FusedLlama
from redraft.kernels.triton.pick import pick_gumbel
from redraft.model.kv_cache import KVCache

RoundKey = tuple[int, int, int]  # rows, draft length, context length
# Columns behind the clean tokens in the table that the host fills: clean tokens, cached tokens, drafts, the last draft
# (which is compared but needs no row of its own), cursor, seed, token that fills canvases (-1: noise).
FIELDS = 7
ACCEPT_EQUAL_ONLY = -1.0  # as a tolerance: no token is less than 0 nats below the likeliest


def uses_round_graph(state: Verification) -> bool:
    """Whether the graph implements this request's picks."""
    return state.next_token.is_empty and not pick.needs_shaping(state.cfg) and not state.candidates


def pick_rows(logits_NV: Tensor, temperature_B: Tensor, seed_B: Tensor, positions_BS: Tensor) -> Tensor:
    """The causal half's tokens, ids_BS: those of a row have one temperature and one seed."""
    temperature_N = temperature_B[:, None].expand_as(positions_BS).flatten()
    seeds_N = seed_B[:, None].expand_as(positions_BS).flatten()
    return pick_gumbel(logits_NV, temperature_N, seeds_N, positions_BS.flatten()).view_as(positions_BS)


class LoadedRows:
    """The requests whose addresses and settings a bucket's buffers hold. Weak, so that their caches are freed with them."""

    def __init__(self) -> None:
        self._rows: list[tuple[weakref.ref[Verification], weakref.ref[KVCache]]] = []

    def replace(self, rows: Sequence[tuple[Verification, KVCache]]) -> bool:
        """Notes the requests of a round. Returns whether they are others than before."""
        held = [(state(), cache()) for state, cache in self._rows]
        self._rows = [(weakref.ref(state), weakref.ref(cache)) for state, cache in rows]
        pairs = zip(rows, held, strict=False)
        return len(rows) != len(held) or any(new[0] is not old[0] or new[1] is not old[1] for new, old in pairs)


class RoundBucket:
    """Static buffers and the body of a round for a batch of at most B rows."""

    def __init__(self, fused: FusedLayers | FusedLlama, key: RoundKey) -> None:
        rows, draft_length, self.context = key
        model = fused.model
        device = model.device
        self.fused = fused
        self.clean_count = draft_length + 1
        self.canvas_length = draft_length + 1 if draft_length else 0
        self.table = CacheTable.empty(model, rows)
        self.canvas_table = CacheTable.empty(model, rows * self.clean_count, self.table.base)
        on_gpu = device.type == "cuda"
        columns = self.clean_count + FIELDS
        self.inputs_host = torch.zeros(rows, columns, dtype=torch.int64, pin_memory=on_gpu)
        self.inputs_BI = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self.settings_B2 = torch.zeros(rows, 2, dtype=torch.float64, device=device)  # temperature, tolerance
        self.results_host = torch.zeros(rows, 2 + draft_length, dtype=torch.int64, pin_memory=on_gpu)
        self.logprobs_host = torch.zeros(rows, self.clean_count, dtype=torch.float32, pin_memory=on_gpu)
        self.loaded = LoadedRows()

    def load(self, states: Sequence[Verification], works: Sequence[Round], caches: Sequence[KVCache]) -> None:
        """Fills the buffers. Each cache counts its clean tokens already."""
        rows = list(zip(states, caches, strict=True))
        if self.loaded.replace(rows):
            self.table.fill(caches, [len(work.clean) for work in works])
            settings = [
                (
                    pick.gumbel_temperature(state.cfg),
                    state.cfg.tolerance if state.cfg.check == "checked" else ACCEPT_EQUAL_ONLY,
                )
                for state in states
            ]
            self.settings_B2[: len(states)] = torch.tensor(settings, dtype=torch.float64)
        inputs = []
        for state, work, cache in zip(states, works, caches, strict=True):
            count = len(work.clean)
            last_draft = work.drafts[count - 1] if len(work.drafts) >= count else 0
            blank = state.cfg.draft_token if state.cfg.draft_token is not None else -1
            ids = [*work.clean, *[0] * (self.clean_count - count)]
            fields = [count, cache.lengths[0] - count, len(work.drafts), last_draft, len(state.tokens), state.seed, blank]
            inputs.append([*ids, *fields])
        self.inputs_host.zero_()
        self.inputs_host[: len(inputs)] = torch.tensor(inputs)
        self.inputs_BI.copy_(self.inputs_host, non_blocking=True)

    def body(self) -> None:
        """The round that is captured."""
        model = self.fused.model
        clean_count = self.clean_count
        ids_BS = self.inputs_BI[:, :clean_count]
        count_B, cached_B, drafts_B, last_draft_B, cursor_B, seed_B, blank_B = self.inputs_BI[:, clean_count:].unbind(1)
        self.table.lengths_B.copy_(cached_B)
        self.table.counts_B.copy_(count_B)
        canvas_BSC = None
        offset_S = torch.arange(clean_count, device=model.device)
        if self.canvas_length:
            self.canvas_table.behind_each_(self.table)
            canvas_BSC = self._canvases(cursor_B, seed_B, blank_B)
        hidden_ND, canvas_ND = self.fused.joint(ids_BS, self.table, canvas_BSC, self.canvas_table, self.context)
        logits_NV = model.head(hidden_ND)
        temperature_B, tolerance_B = self.settings_B2.unbind(1)
        positions_BS = cursor_B[:, None] + offset_S
        picks_BS = pick_rows(logits_NV, temperature_B, seed_B, positions_BS)
        index_B1 = (count_B - 1).clamp(min=0)[:, None]
        compared_BS = ids_BS.roll(-1, dims=1).scatter(1, index_B1, last_draft_B[:, None])
        logits_BSV = logits_NV.view(*picks_BS.shape, -1)
        compared_logits_BS = logits_BSV.gather(2, compared_BS[..., None])[..., 0]
        gap_BS = logits_BSV.amax(dim=-1) - compared_logits_BS
        fits_BS = (compared_BS == picks_BS) | (gap_BS <= tolerance_B[:, None])
        fits_BS &= offset_S < drafts_B[:, None]
        accepted_B = fits_BS.long().cumprod(dim=1).sum(dim=1)
        row_B1 = torch.minimum(accepted_B, count_B - 1).clamp(min=0)[:, None]
        token_B = picks_BS.gather(1, row_B1)[:, 0]
        emitted_BS = torch.where(offset_S < accepted_B[:, None], compared_BS, token_B[:, None])
        logprobs_BS = logits_BSV.gather(2, emitted_BS[..., None])[..., 0] - logits_BSV.logsumexp(dim=-1)
        results = [accepted_B, token_B]
        if canvas_ND is not None:
            canvas_BSCD = canvas_ND.view(*picks_BS.shape, self.canvas_length, -1)
            index_B1CD = row_B1[..., None, None].expand(-1, 1, *canvas_BSCD.shape[2:])
            results += self._draft(canvas_BSCD.gather(1, index_B1CD)[:, 0], token_B, seed_B, cursor_B + accepted_B)
        self.results_host.copy_(torch.stack(results, dim=1), non_blocking=True)
        self.logprobs_host.copy_(logprobs_BS, non_blocking=True)

    def _canvases(self, cursor_B: Tensor, seed_B: Tensor, blank_B: Tensor) -> Tensor:
        """The canvases before they are denoised, ids_BSC. A drafter's are empty."""
        model = self.fused.model
        if model.drafter is not None:
            return torch.full(
                (len(cursor_B), self.clean_count, self.canvas_length), model.config.vocab_size, device=model.device
            )
        offsets = torch.arange(self.clean_count, device=model.device)
        positions_BSC = cursor_B[:, None, None] + offsets[:, None] + torch.arange(self.canvas_length, device=model.device)
        seeds_BSC = seed_B[:, None, None].expand_as(positions_BSC)
        noise_N = rng.draft_noise(seeds_BSC.flatten(), positions_BSC.flatten(), model.config.vocab_size)
        return torch.where(blank_B[:, None, None] >= 0, blank_B[:, None, None], noise_N.view_as(positions_BSC))

    def _draft(self, hidden_BCD: Tensor, token_B: Tensor, seed_B: Tensor, position_B: Tensor) -> list[Tensor]:
        """Drafts from left to right behind each row's token, which stands at `position_B`."""
        model = self.fused.model
        temperature_B, _ = self.settings_B2.unbind(1)
        drafts = []
        previous_B = token_B
        for index in range(1, self.canvas_length):
            logits_BV = model.draft_logits(hidden_BCD[:, index], previous_B)
            previous_B = pick_rows(logits_BV, temperature_B, seed_B, (position_B + index)[:, None])[:, 0]
            drafts.append(previous_B)
        return drafts

    def read(self, states: Sequence[Verification], works: Sequence[Round]) -> list[tuple[Verdict, list[int]]]:
        """The verdicts and the next drafts. Waits for the GPU."""
        if self.inputs_BI.is_cuda:
            torch.cuda.current_stream().synchronize()
        results = []
        rows = zip(states, works, self.results_host.tolist(), self.logprobs_host.tolist(), strict=False)
        for state, work, (accepted, token, *drafts), logprobs in rows:
            has_token = accepted < len(work.clean)
            emitted = accepted + int(has_token)
            verdict = Verdict(accepted, token if has_token else None, tuple(logprobs[:emitted]))
            results.append((verdict, self._cut_drafts(state, verdict, drafts)))
        return results

    def _cut_drafts(self, state: Verification, verdict: Verdict, drafts: list[int]) -> list[int]:
        """The drafts that count: none behind a stop token or beyond the answer."""
        stops = state.cfg.eos_token_ids
        if verdict.token is None or verdict.token in stops:
            return []
        end = next((index + 1 for index, token in enumerate(drafts) if token in stops), len(drafts))
        room = state.cfg.max_new_tokens - len(state.tokens) - verdict.accepted - 1
        return drafts[: max(0, min(end, room))]
