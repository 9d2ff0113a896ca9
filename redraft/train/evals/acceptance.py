"""Acceptance: how many tokens a round of exact or checked mode gives, computed offline on texts that the model wrote.

A round verifies drafts in one forward that also carries a canvas behind every draft, so the next drafts begin where the
accepted ones end (policy "all canvases"). Canvas s stands behind token s. Its slot 1 is the token that the round itself
answered; slots 2 to C are the next drafts, each sampled by the draft head with the token before it.

In exact mode the text is the same with any drafts. So one teacher-forced forward for each phase of the canvases gives the
accepted drafts of all canvases, and a walk over the text counts rounds. Text and drafts share Gumbel noise, as in exact
mode; the noise of a text that was sampled elsewhere is drawn from its posterior, given the tokens. Checked mode accepts a
draft at most `tolerance` nats less likely than the likeliest token; the text behind it stays the given one, so this is an
estimate.

Shapes: B rows, L tokens of a row, C slots, M modes, V vocabulary, N tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from redraft.diffusion.draft_tree import DraftTree
from redraft.model.backbone import Backbone
from redraft.model.drafter import shift_rows
from redraft.model.masks import Layout
from redraft.train.loss import dense_masks
from redraft.train.own_text import OwnTextConfig, OwnTextSampler

BATCH_ROWS = 32
MAX_LOGITS = 2**27  # of a batch; about seven numbers of 4 to 8 bytes are held for each
TEMPERATURES = (0.0, 0.7, 1.0)
COLDEST = 1e-3  # the temperature that greedy texts are sampled at


@dataclass(frozen=True)
class Acceptance:
    """Tokens per round, and the share of canvases whose slot i is accepted, given that the slots before it are."""

    temperature: float
    tokens: int
    exact: float  # tokens per round: accepted drafts and the one that the check itself gives
    checked: float
    slots: tuple[float, ...]  # of exact mode, from slot 2 on
    tree: float | None = None  # tokens per round of exact mode where a tree of drafts is verified, as on a GPU

    def __str__(self) -> str:
        slots = " ".join(f"{share:.2f}" for share in self.slots)
        in_trees = "" if self.tree is None else f", in trees {self.tree:.2f}"
        rounds = f"exact {self.exact:.2f}{in_trees}, checked {self.checked:.2f} tokens a round"
        return f"T {self.temperature:.1f}  {rounds}  slots {slots}"


@torch.no_grad()
def sample_texts(
    model: Backbone, prompts: Sequence[Sequence[int]], temperature: float, length: int, seed: int = 0
) -> list[list[int]]:
    """Continues each prompt with the causal half, to a stop token or `length` tokens. Returns prompts and answers."""
    torch.manual_seed(seed)
    longest = max(map(len, prompts))
    cfg = OwnTextConfig(
        rows=len(prompts), length=max(length, longest + 2), longest_beginning=longest, most_repeats=length, ended_share=1.0
    )
    rows = OwnTextSampler(model, cfg).sample_rows(prompts, [max(temperature, COLDEST)] * len(prompts))
    return [row if row is not None else list(prompt) for row, prompt in zip(rows, prompts, strict=True)]


@torch.no_grad()
def measure(
    model: Backbone,
    texts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    temperature: float,
    *,
    canvas_length: int = 8,
    draft_token: int | None = 0,
    tolerance: float = 2.0,
    tree: DraftTree | None = None,
    seed: int = 0,
) -> Acceptance:
    """Measures texts that the causal half sampled at this temperature. Without a draft token, canvases are noise.

    With a tree, whose depth is one less than the canvas length, also how many tokens a round gives that verifies it.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    rounds_M = torch.zeros(3 if tree is not None else 2, dtype=torch.long)  # exact mode, checked mode, exact mode in trees
    tokens = 0
    reached_C = torch.zeros(canvas_length)
    canvases = 0
    length = max(map(len, texts)) + canvas_length
    batch_rows = max(1, min(BATCH_ROWS, MAX_LOGITS // (length * model.config.vocab_size)))
    for begin in range(0, len(texts), batch_rows):
        rows = [list(ids) for ids in texts[begin : begin + batch_rows]]
        firsts = prompt_lengths[begin : begin + batch_rows]
        accepted_MBL = accepted_drafts(model, rows, temperature, canvas_length, draft_token, tolerance, tree, generator)
        for row, (ids, first) in enumerate(zip(rows, firsts, strict=True)):
            if len(ids) <= first:
                continue
            tokens += len(ids) - first
            for mode, accepted_BL in enumerate(accepted_MBL):
                rounds_M[mode] += count_rounds(accepted_BL[row].tolist(), first, len(ids))
            last = max(first - 1, len(ids) - canvas_length)
            whole = accepted_MBL[0, row, first - 1 : last]  # canvases that fit into the text
            canvases += len(whole)
            reached_C += torch.bincount(whole, minlength=canvas_length).flip(0).cumsum(0).flip(0)
    reached_C[0] = canvases
    slots = tuple((reached_C[1:] / reached_C[:-1].clamp(min=1)).tolist())
    exact, checked, *in_trees = (tokens / max(1, rounds) for rounds in rounds_M.tolist())
    return Acceptance(temperature, tokens, exact, checked, slots, *in_trees)


def count_rounds(accepted: Sequence[int], first: int, end: int) -> int:
    """Walks over a text whose tokens from `first` on are generated. `accepted[s]` drafts of the canvas behind s are right.

    The first round has no drafts: it gives one token, and the canvas behind the last prompt token.
    """
    rounds = 1
    token = first  # the last token that is known; the canvas before it began at its position
    while token < end - 1:
        token += 1 + accepted[token - 1]
        rounds += 1
    return rounds


def accepted_drafts(
    model: Backbone,
    rows: Sequence[Sequence[int]],
    temperature: float,
    canvas_length: int,
    draft_token: int | None,
    tolerance: float,
    tree: DraftTree | None,
    generator: torch.Generator,
) -> Tensor:
    """Returns for every token how many drafts of the canvas behind it are accepted, [M, B, L].

    The M modes are exact, checked and, if there is a tree, exact in trees.
    """
    device = model.device
    length = max(map(len, rows)) + canvas_length  # room for the canvas behind the last token
    length += -length % 8
    pad = model.config.pad_token_id
    ids_BL = torch.tensor([[*ids, *[pad] * (length - len(ids))] for ids in rows], device=device)
    positions_BL = torch.arange(length, device=device).expand_as(ids_BL)
    accepted_MBL = torch.zeros(3 if tree is not None else 2, *ids_BL.shape, dtype=torch.long)
    gumbel_NV = None
    for phase in range(1, canvas_length + 1):
        starts_BL = positions_BL - (positions_BL - phase) % canvas_length
        is_draft_BL = starts_BL >= 1
        layout = Layout(positions_BL, torch.where(is_draft_BL, starts_BL, -1), torch.zeros_like(ids_BL))
        noise_BL = torch.randint(model.config.vocab_size, ids_BL.shape, generator=generator, device=device)
        blank_BL = noise_BL if draft_token is None else torch.full_like(ids_BL, draft_token)
        noisy_BL = torch.where(is_draft_BL, blank_BL, ids_BL)
        masks = dense_masks(model.config, layout)
        noisy_BLD, clean_BLD, _ = model.forward_train(noisy_BL, ids_BL, None, positions_BL, masks)
        if model.drafter is not None:
            noisy_BLD = shift_rows(noisy_BLD, clean_BLD, positions_BL == starts_BL)
        log_p_NV = torch.log_softmax(model.head(clean_BLD.roll(1, dims=1).flatten(0, 1)), dim=-1)
        log_q_NV = torch.log_softmax(model.draft_logits(noisy_BLD.flatten(0, 1), ids_BL.roll(1, dims=1).flatten()), dim=-1)
        target_N = log_p_NV.argmax(dim=-1)
        scores_NV = log_q_NV
        if temperature > 0:
            target_N = ids_BL.flatten()
            if gumbel_NV is None:
                gumbel_NV = posterior_gumbel(torch.log_softmax(log_p_NV / temperature, dim=-1), target_N, generator)
            scores_NV = torch.log_softmax(log_q_NV / temperature, dim=-1) + gumbel_NV
        draft_N = scores_NV.argmax(dim=-1)
        below_best_N = log_p_NV.amax(dim=-1) - log_p_NV.gather(-1, draft_N[:, None])[:, 0]
        is_right_N = draft_N == target_N
        _write_accepted(accepted_MBL[0], is_right_N.view_as(ids_BL).cpu(), phase, canvas_length, count_prefix)
        is_right_N |= below_best_N <= tolerance
        _write_accepted(accepted_MBL[1], is_right_N.view_as(ids_BL).cpu(), phase, canvas_length, count_prefix)
        if tree is not None:
            rank_N = (scores_NV > scores_NV.gather(-1, target_N[:, None])).sum(dim=-1)
            count = partial(count_in_tree, tree)
            _write_accepted(accepted_MBL[2], rank_N.view_as(ids_BL).cpu(), phase, canvas_length, count)
    return accepted_MBL


def count_prefix(is_right_BNC: Tensor) -> Tensor:
    """How many drafts are right from the left on, [B, N]."""
    return is_right_BNC.long().cumprod(dim=-1).sum(dim=-1)


def count_in_tree(tree: DraftTree, ranks_BNC: Tensor) -> Tensor:
    """How many drafts of a tree are accepted, [B, N], if the right token of each position has this rank among its drafts."""
    accepted_BN = torch.zeros(ranks_BNC.shape[:-1], dtype=torch.long)
    for path, depth in zip(tree.paths, tree.depths, strict=True):
        ranks = torch.tensor([tree.ranks[node] for node in path[1:]], dtype=torch.long)
        is_path_BN = (ranks_BNC[..., :depth] == ranks).all(dim=-1)
        accepted_BN = torch.where(is_path_BN, accepted_BN.clamp(min=depth), accepted_BN)
    return accepted_BN


def _write_accepted(
    accepted_BL: Tensor, of_slots_BL: Tensor, phase: int, canvas_length: int, count: Callable[[Tensor], Tensor]
) -> None:
    """Counts the accepted drafts of every whole canvas of one phase: slot 1 is no draft."""
    canvases = (of_slots_BL.shape[1] - phase) // canvas_length
    of_slots_BNC = of_slots_BL[:, phase : phase + canvases * canvas_length].unflatten(1, (canvases, canvas_length))
    behind_BN = accepted_BL[:, phase - 1 : phase - 1 + canvases * canvas_length : canvas_length]
    behind_BN.copy_(count(of_slots_BNC[..., 1:]))


def posterior_gumbel(log_p_NV: Tensor, token_N: Tensor, generator: torch.Generator) -> Tensor:
    """Draws Gumbel noise given that argmax(log p + noise) is the token: exactly the noise behind a text sampled elsewhere.

    The largest sum is a Gumbel number z, independent of where it is; each other sum is one that is truncated at z.
    """
    uniform_NV = torch.rand(log_p_NV.shape, generator=generator, device=log_p_NV.device, dtype=torch.float64)
    gumbel_NV = -(-(uniform_NV.clamp(1e-300, 1 - 1e-16)).log()).log()
    z_N1 = gumbel_NV.gather(-1, token_N[:, None])
    sums_NV = -torch.logaddexp(-z_N1, -(log_p_NV.double() + gumbel_NV))
    sums_NV.scatter_(-1, token_N[:, None], z_N1)
    return sums_NV - log_p_NV.double()
