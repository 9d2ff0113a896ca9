"""Acceptance: offline counts equal those of a real loop of exact mode, and Gumbel noise given a token belongs to it."""

from dataclasses import replace

import pytest
import tiny
import torch

from redraft.diffusion.draft_tree import DraftTree
from redraft.train.evals import acceptance

CONFIG = replace(tiny.BASE, draft_head_size=12, eos_token_ids=(1,))
CANVAS = 4


def causal_logits(model, ids: list[int]) -> torch.Tensor:
    """Logits of the token behind these."""
    return model.head(model.encode(torch.tensor([ids]), model.new_cache(1, len(ids)))[0, -1])


def draft_greedily(model, ids: list[int], answer: int, tree: DraftTree) -> list[int]:
    """The tokens of a tree, from a canvas of blanks behind `ids`, whose first slot the causal half has answered."""
    cache = model.new_cache(1, len(ids))
    model.encode(torch.tensor([ids]), cache)
    kept = []
    hook = model.norm.register_forward_hook(lambda module, inputs, output: kept.append(output))
    model.denoise(torch.zeros(1, CANVAS, dtype=torch.long), None, cache)
    hook.remove()
    drafts = [answer]
    for parent, rank, depth in list(zip(tree.parents, tree.ranks, tree.depths, strict=True))[1:]:
        logits_1V = model.draft_logits(kept[0][0, depth : depth + 1], torch.tensor([drafts[parent]]))
        drafts.append(int(logits_1V[0].topk(rank + 1).indices[rank]))
    return drafts


def write_greedily(model, prompt: list[int], length: int) -> list[int]:
    """The text at temperature 0, token for token."""
    ids = list(prompt)
    while len(ids) < length and ids[-1] != 1:
        ids.append(int(causal_logits(model, ids).argmax()))
    return ids


def count_greedy_rounds(model, text: list[int], first: int, tree: DraftTree) -> int:
    """Rounds of exact mode at temperature 0, in the plainest way. Tokens from `first` on are generated."""
    known = first + 1  # the first round gives a token, and has no drafts
    rounds = 1
    while known < len(text):
        drafts = draft_greedily(model, text[: known - 1], text[known - 1], tree)
        rounds += 1
        node = 0
        while node is not None and known < len(text):
            known += 1  # the causal half's token behind the node
            children = [child for child, parent in enumerate(tree.parents) if parent == node]
            node = next((child for child in children if drafts[child] == text[known - 1]), None)
    return rounds


ROW = DraftTree(parents=(-1, 0, 1, 2), ranks=(0, 0, 0, 0))
TREE = DraftTree(parents=(-1, 0, 1, 2, 0, 4, 5, 1, 0), ranks=(0, 0, 0, 0, 1, 0, 0, 1, 2))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_offline_rounds_equal_those_of_a_real_loop(seed):
    model = tiny.decided(CONFIG, seed)
    prompts = [[2, 40, 50], [2, 60]]
    texts = acceptance.sample_texts(model, prompts, 0.0, 24)
    tokens = row_rounds = tree_rounds = 0
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == write_greedily(model, prompt, 24)
        row_rounds += count_greedy_rounds(model, text, len(prompt), ROW)
        tree_rounds += count_greedy_rounds(model, text, len(prompt), TREE)
        tokens += len(text) - len(prompt)
    found = acceptance.measure(model, texts, [3, 2], 0.0, canvas_length=CANVAS, tree=TREE)
    assert (found.tokens, found.exact, found.tree) == (tokens, tokens / row_rounds, tokens / tree_rounds)
    assert found.checked >= found.exact
    assert found.tree > found.exact or seed == 1  # all of its drafts are wrong
    assert len(found.slots) == CANVAS - 1
    assert replace(found, tree=None) == acceptance.measure(model, texts, [3, 2], 0.0, canvas_length=CANVAS)


def test_a_tree_accepts_the_longest_path_of_right_ranks():
    tree = DraftTree(parents=(-1, 0, 1, 0, 3), ranks=(0, 0, 0, 1, 0))
    ranks_1NC = torch.tensor([[[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [2, 0, 0]]])
    assert acceptance.count_in_tree(tree, ranks_1NC).tolist() == [[2, 1, 2, 1, 0]]


def test_the_noise_of_a_token_makes_it_the_largest():
    generator = torch.Generator().manual_seed(0)
    log_p_NV = torch.log_softmax(torch.randn(200, 30, generator=generator) * 3, dim=-1)
    token_N = torch.randint(30, (200,), generator=generator)
    noise_NV = acceptance.posterior_gumbel(log_p_NV, token_N, generator)
    assert torch.equal((log_p_NV + noise_NV).argmax(dim=-1), token_N)


def test_noise_given_sampled_tokens_is_gumbel_noise():
    generator = torch.Generator().manual_seed(1)
    p_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
    token_N = torch.multinomial(p_V, 20_000, replacement=True, generator=generator)
    noise_NV = acceptance.posterior_gumbel(p_V.log().expand(20_000, -1), token_N, generator)
    assert (noise_NV.mean(dim=0) - 0.5772).abs().max() < 0.05  # the mean of a Gumbel number
    assert (noise_NV.std(dim=0) - 1.2825).abs().max() < 0.05


def test_a_drafter_that_is_the_causal_half_is_always_right():
    """All drafts are accepted where the draft distribution equals the causal one: rounds give a whole canvas."""
    assert acceptance.count_rounds([3] * 40, 5, 25) == 1 + 5  # the first round gives 1 token, the others 4
    assert acceptance.count_rounds([0] * 40, 5, 25) == 20


def test_at_a_temperature_more_drafts_are_right_than_by_chance():
    model = tiny.decided(CONFIG)
    prompts = [[2, 40, 50], [2, 60, 70]]
    texts = acceptance.sample_texts(model, prompts, 1.0, 20)
    found = acceptance.measure(model, texts, [3, 3], 1.0, canvas_length=CANVAS, tolerance=1e4)
    assert found.checked == pytest.approx(found.tokens / sum(-(-(len(text) - 4) // CANVAS) + 1 for text in texts))
    assert 1 <= found.exact <= found.checked
    noise = acceptance.measure(model, texts, [3, 3], 1.0, canvas_length=CANVAS, draft_token=None)
    assert noise.tokens == found.tokens
