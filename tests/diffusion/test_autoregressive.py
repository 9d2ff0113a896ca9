"""Autoregressive generation: equals re-encoding the whole text for every token, and never slices the prompt wrongly."""

import pytest
import tiny
import torch

from redraft.diffusion.autoregressive import generate_autoregressive

MODEL = tiny.build(tiny.BASE, 4)
CONTEXT = tiny.BASE.max_position_embeddings


def greedy_without_cache(ids: list[int], max_tokens: int) -> list[int]:
    """The definition: encode everything again for each token, take the argmax."""
    tokens = []
    for _ in range(max_tokens):
        whole = [*ids, *tokens]
        with torch.inference_mode():
            hidden = MODEL.encode(torch.tensor([whole]), MODEL.new_cache(1, len(whole)))
            tokens.append(int(MODEL.head(hidden[:, -1:]).argmax()))
        if tokens[-1] in MODEL.config.eos_token_ids:
            break
    return tokens


def test_cached_equals_uncached():
    for prompt in ([2, 30, 40], [2, 99], [2, *range(60, 90)]):
        assert list(generate_autoregressive(MODEL, prompt, 6)) == greedy_without_cache(prompt, 6)


def test_a_prompt_that_does_not_fit_loses_its_beginning():
    prompt = [2, *(token % 100 + 20 for token in range(CONTEXT))]
    room = 12
    short = prompt[-room:]
    expected = list(generate_autoregressive(MODEL, short, 3))
    found = []
    for token in generate_autoregressive(MODEL, prompt, CONTEXT - room):
        found.append(token)
        if len(found) == len(expected):
            break
    assert found == expected


def test_max_tokens_may_leave_room_for_a_single_prompt_token():
    expected = next(generate_autoregressive(MODEL, [50], 1))
    assert next(generate_autoregressive(MODEL, [2, 30, 40, 50], CONTEXT - 1)) == expected


@pytest.mark.parametrize("max_tokens", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_max_tokens_that_leave_no_room_for_the_prompt_are_refused(max_tokens):
    with pytest.raises(ValueError, match=f"max_tokens is {max_tokens}.*context of {CONTEXT}.*at most {CONTEXT - 1}"):
        next(generate_autoregressive(MODEL, [2, 30, 40], max_tokens))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        next(generate_autoregressive(MODEL, [], 4))


def test_the_same_seed_samples_the_same_tokens_and_another_seed_does_not():
    first, again, other = (
        list(generate_autoregressive(MODEL, [2, 30], 12, tiny.sampler(temperature=1.0), seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
