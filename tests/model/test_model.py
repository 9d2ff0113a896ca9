"""Cached = uncached, batched = alone, rewound = fresh, in chunks = at once; and the cache is only read by `denoise`."""

import pytest
import tiny
import torch

from redraft.config import FULL, SLIDING

IDS = torch.randint(0, tiny.VOCAB, (3, 60), generator=torch.Generator().manual_seed(5))
CANVAS = torch.randint(0, tiny.VOCAB, (3, 16), generator=torch.Generator().manual_seed(6))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.fixture(params=tiny.CONFIGS, name="model")
def _model(request):
    return tiny.build(tiny.CONFIGS[request.param])


@pytest.mark.parametrize("rewind", [None, 0])
@pytest.mark.parametrize("sizes", [[1] * 60, [7, 13, 40], [59, 1], [17, 43]])
def test_prefill_in_chunks_equals_prefill_at_once(model, sizes, rewind):
    whole = model.new_cache(3, 60, rewind=rewind)
    chunked = model.new_cache(3, 60, rewind=rewind)
    hidden = model.encode(IDS, whole)
    parts = [model.encode(part, chunked) for part in IDS.split(sizes, dim=1)]
    close(torch.cat(parts, dim=1), hidden)
    close(model.denoise(CANVAS, None, chunked), model.denoise(CANVAS, None, whole))


def test_cached_equals_uncached(model):
    """Tokens encoded after a cached context have the hidden states that one forward over the whole text gives them."""
    cache = model.new_cache(3, 60)
    model.encode(IDS[:, :41], cache)
    close(model.encode(IDS[:, 41:], cache), model.encode(IDS, model.new_cache(3, 60))[:, 41:])


@pytest.mark.parametrize("rewind", [None, 0])
def test_batched_equals_alone(model, rewind):
    lengths = [60, 1, 23]
    together = model.new_cache(3, 76, rewind=rewind)
    padded = IDS.clone()
    model.encode(padded, together, lengths)
    soft = torch.randn(3, 16, model.config.hidden_size)
    logits = model.denoise(CANVAS, soft, together)
    model.encode(CANVAS, together)
    after = model.denoise(CANVAS.flip(0), None, together)
    for row, length in enumerate(lengths):
        cache = model.new_cache(1, 76, rewind=rewind)
        model.encode(IDS[row : row + 1, :length], cache)
        close(logits[row : row + 1], model.denoise(CANVAS[row : row + 1], soft[row : row + 1], cache))
        model.encode(CANVAS[row : row + 1], cache)
        close(after[row : row + 1], model.denoise(CANVAS.flip(0)[row : row + 1], None, cache))


def test_rewound_equals_fresh(model):
    cache = model.new_cache(3, 90)
    fresh = model.new_cache(3, 90)
    model.encode(IDS, cache)
    cache.rewind([30, 30, 30])
    model.encode(CANVAS, cache)
    model.encode(torch.cat([IDS[:, :30], CANVAS], dim=1), fresh)
    close(model.denoise(CANVAS, None, cache), model.denoise(CANVAS, None, fresh))
    cache.rewind([30, 4, 0])
    ragged = model.new_cache(3, 90)
    model.encode(IDS[:, :30], ragged, [30, 4, 0])
    close(model.denoise(CANVAS, None, cache), model.denoise(CANVAS, None, ragged))


def test_denoising_only_reads_the_cache(model):
    cache = model.new_cache(3, 60)
    model.encode(IDS, cache)
    before = [tensor.clone() for layer in range(len(model.layers)) for tensor in cache.view(layer)]
    first = model.denoise(CANVAS, None, cache)
    assert torch.equal(model.denoise(CANVAS, None, cache), first)
    after = [tensor for layer in range(len(model.layers)) for tensor in cache.view(layer)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert cache.lengths == [60, 60, 60]


def test_denoise_is_bidirectional_and_encode_is_causal(model):
    cache = model.new_cache(3, 60)
    hidden = model.encode(IDS, cache)
    changed = IDS.clone()
    changed[:, 40] = (changed[:, 40] + 1) % tiny.VOCAB
    other = model.encode(changed, model.new_cache(3, 60))
    close(other[:, :40], hidden[:, :40])
    assert ((hidden - other)[:, 40].abs().amax(dim=-1) > 1e-2).all()
    canvas = CANVAS.clone()
    canvas[:, -1] = (canvas[:, -1] + 1) % tiny.VOCAB
    change = (model.denoise(CANVAS, None, cache) - model.denoise(canvas, None, cache)).abs().amax(dim=(0, 2))
    assert (change > 0).all()


def test_sliding_layers_attend_only_within_their_window():
    """Each sliding layer carries a token's influence window - 1 positions further; a full layer carries it anywhere.

    Three sliding layers of window 5 carry it 3 * 4 positions, once the output of the full layer's attention is zeroed.
    """
    model = tiny.build(tiny.CONFIGS["short window"])
    assert model.config.layer_types == (SLIDING, SLIDING, SLIDING, FULL)
    changed = IDS[:1].clone()
    changed[0, 20] = (changed[0, 20] + 1) % tiny.VOCAB

    def reached() -> list[int]:
        a, b = (model.encode(ids, model.new_cache(1, 60)) for ids in (IDS[:1], changed))
        return (a - b).abs().amax(dim=-1)[0].gt(1e-6).nonzero().flatten().tolist()

    assert reached()[-1] == 59
    model.layers[3].post_attention_layernorm.weight.zero_()
    assert reached() == list(range(20, 33))


def test_the_soft_embedding_of_a_certain_token_is_its_embedding(model):
    logits = torch.full((1, 3, tiny.VOCAB), -1e9)
    ids = torch.tensor([[5, 7, 9]])
    logits.scatter_(-1, ids[..., None], 0.0)
    close(model.soft_embed(logits), model.embed(ids))


def test_encode_and_denoise_have_layer_scalars_of_their_own(model):
    canvas = CANVAS[:1]
    ids = IDS[:1]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        cache = model.new_cache(1, 60)
        return model.encode(ids, cache), model.denoise(canvas, None, cache)

    hidden, logits = run()
    model.layers[0].layer_scalar.mul_(1.5)
    assert torch.equal(run()[0], hidden)
    assert not torch.equal(run()[1], logits)


def test_gradients_reach_every_weight():
    model = tiny.build(tiny.CONFIGS["every expert"]).requires_grad_(True)
    cache = model.new_cache(2, 30)
    hidden = model.encode(IDS[:2, :30], cache)
    logits = model.denoise(CANVAS[:2], model.soft_embed(torch.randn(2, 16, tiny.VOCAB)), cache)
    (logits.logsumexp(-1).mean() + model.head(hidden).logsumexp(-1).mean()).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert not without
