"""GPU = CPU: draws to the bit, logits to rounding, tokens exactly (float32, models that do not amplify rounding)."""

from dataclasses import replace

import pytest
import tiny
import torch

from redraft.diffusion import rng
from redraft.diffusion.generate import generate
from redraft.kernels import gated_experts
from redraft.model.masks import Layout
from redraft.train import loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_draws_are_the_same_numbers():
    for block, step in ((0, 0), (3, 7)):
        there, here = (rng.draws([5, -1, 2**40], block, device) for device in ("cuda", "cpu"))
        assert torch.equal(there.noise(step, 256, 262_144).cpu(), here.noise(step, 256, 262_144))
        assert torch.equal(there.uniform(step, 256).cpu(), here.uniform(step, 256))


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_agree(name):
    here = tiny.build(tiny.CONFIGS[name])
    there = tiny.build(tiny.CONFIGS[name]).cuda()
    ids, canvas = torch.arange(180).view(3, 60), torch.arange(48).view(3, 16)
    results = []
    for model in (here, there):
        cache = model.new_cache(3, 60, rewind=0)
        model.encode(ids.to(model.device), cache, [60, 1, 23])
        first = model.denoise(canvas.to(model.device), None, cache)
        results.append((first, model.denoise(canvas.to(model.device), model.soft_embed(first), cache)))
    for mine, other in zip(*results, strict=True):
        assert (mine - other.cpu()).abs().max() <= 1e-3 * mine.abs().max()


@pytest.mark.parametrize("seed", range(8))
def test_tokens_agree(seed):
    prompts = [[2, 30, 40], [2, *range(60, 100)], [2]]
    config = list(tiny.CONFIGS.values())[seed % len(tiny.CONFIGS)]
    lasts = []
    for device in ("cpu", "cuda"):
        model = tiny.decided(config, seed).to(device)
        *_, last = generate(model, prompts, tiny.sampler(max_new_tokens=48), seeds=[seed, 1, 2])
        lasts.append(last)
    assert torch.equal(lasts[0].ids_BT, lasts[1].ids_BT.cpu())
    assert lasts[0].reasons == lasts[1].reasons


@pytest.mark.parametrize(("tokens", "experts", "top"), [(1, 8, 2), (7, 40, 3), (256, 128, 8)])
def test_the_grouped_product_equals_the_loop_over_experts(tokens, experts, top):
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(tokens, 64), torch.randn(experts, 96, 64) / 8, torch.randn(experts, 64, 48) / 7
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)])
    args = [t.bfloat16() for t in (x, torch.rand(tokens, top), gate_up, down)]
    slow = gated_experts(args[0], chosen, *args[1:])
    truth = gated_experts(args[0].float(), chosen, *(t.float() for t in args[1:]))
    fast = gated_experts(args[0].cuda(), chosen.cuda(), *(t.cuda() for t in args[1:])).cpu()
    assert (fast - truth).abs().max() <= 2 * (slow - truth).abs().max() + 1e-3


@pytest.mark.filterwarnings("ignore")  # torch's own compiler has some
def test_the_loss_and_its_gradients_agree_with_the_dense_mask_on_the_cpu():
    """FlexAttention compiled for the GPU against the dense mask, the same draws on both sides."""
    config = replace(tiny.BASE, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, sliding_window=40)
    positions = torch.arange(160).repeat(2, 1)
    layout = Layout(
        positions, torch.where(positions < 30, -1, 30 + (positions - 30) // 26 * 26), torch.zeros_like(positions)
    )
    ids = torch.randint(0, tiny.VOCAB, (2, 160), generator=torch.Generator().manual_seed(0))
    results = []
    for device in ("cpu", "cuda"):
        model = tiny.build(config).to(device).requires_grad_(True)
        cfg = loss.LossConfig(self_condition=0.5, on_policy=1.0, span_noise=0.5)
        noise = loss.draw_noise(loss.Batch(ids, layout), cfg, tiny.VOCAB, torch.Generator().manual_seed(1)).to(device)
        batch = loss.Batch(ids.to(device), layout.to(device))
        sparse = loss.SparseMasks(config, 2, 160, device) if device == "cuda" else None
        mask_of = sparse(batch.layout) if sparse else loss.dense_masks(config, batch.layout)
        result = loss.Objective(model, cfg)(batch, noise, mask_of, loss.slice_masks(mask_of, 1))
        result.total.backward()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        results.append((result.denoiser.item(), result.ar.item(), gradients))
    (denoiser, ar, here), (denoiser_there, ar_there, other) = results
    assert denoiser == pytest.approx(denoiser_there, rel=1e-3)
    assert ar == pytest.approx(ar_there, rel=1e-3)
    for name, gradient in here.items():
        assert (gradient - other[name]).abs().max() <= 2e-2 * gradient.abs().max(), name


RELEASED_HEADS = replace(
    tiny.BASE,
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_experts=16,
    top_k_experts=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    global_head_dim=512,
    sliding_window=100,
    max_position_embeddings=2048,
)


@pytest.mark.parametrize("rows", [1, 3])
def test_fused_layers_in_bf16_are_as_close_to_the_truth_as_plain_ones(rows):
    from redraft.engine.batched_cache import BatchedCache
    from redraft.engine.cache_table import CacheTable
    from redraft.engine.fused_layers import FusedLayers

    truth = tiny.build(RELEASED_HEADS).cuda()
    plain, fast = (tiny.build(RELEASED_HEADS).cuda().bfloat16() for _ in range(2))
    fused, generator = FusedLayers(fast), torch.Generator().manual_seed(0)
    prompts = [torch.randint(1024, (1, 60 + 97 * row), generator=generator).cuda() for row in range(rows)]
    canvas = torch.randint(1024, (rows, 256), generator=generator).cuda()
    soft = torch.randn(rows, 256, 256, generator=generator).cuda()
    with torch.inference_mode():
        found = []
        for model in (truth, plain):
            caches = [model.new_cache(1, 900, rewind=300) for _ in prompts]
            for prompt, cache in zip(prompts, caches, strict=True):
                model.encode(prompt, cache)
            found.append(model.denoise(canvas, soft.to(model.dtype), BatchedCache(caches)).float())
        caches, table = [fast.new_cache(1, 900, rewind=300) for _ in prompts], CacheTable.empty(fast, 1)
        for prompt, cache in zip(prompts, caches, strict=True):
            table.fill([cache])
            fused.encode(prompt, table, 900)
            cache.advance([prompt.shape[1]])
        table = CacheTable.empty(fast, rows)
        table.fill(caches)
        mine = fast.head(fused.denoise(canvas, soft.bfloat16(), table, 900)).view_as(found[0])
    assert (mine - found[0]).abs().max() <= 2 * (found[1] - found[0]).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vocabulary_kernel_finds_the_same_tokens(dtype):
    from redraft.kernels import vocabulary as reference
    from redraft.kernels.triton import vocabulary

    torch.manual_seed(0)
    for sharpness in (1.0, 8.0, 40.0):
        raw = (torch.randn(256, 262_144, device="cuda") * sharpness).to(dtype)
        heat = torch.linspace(0.4, 0.8, 256, device="cuda")
        uniform = torch.rand(256, dtype=torch.float64, device="cuda")
        shaped = reference.softcap_(raw.clone(), 30.0) / heat[:, None]
        theirs = reference.argmax_entropy_sample(shaped[:, None], uniform[:, None])
        mine = vocabulary.argmax_entropy_sample(raw, 30.0, heat, uniform)
        assert torch.equal(mine.best_N, theirs.best_BC[:, 0])
        # A draw on the border of two tokens may find either: sums of 262,144 numbers are not alike to the last bit.
        upto = shaped.double().softmax(dim=-1).cumsum(dim=-1)
        gaps = (torch.searchsorted(upto, uniform[:, None], right=True) + torch.tensor([-1, 0], device="cuda")).clamp(0)
        clear = (upto.gather(1, gaps) - uniform[:, None]).abs().amin(dim=1) > 1e-6
        assert torch.equal(mine.sampled_N[clear], theirs.sampled_BC[clear, 0])
        assert clear.float().mean() > 0.25
        assert torch.allclose(mine.entropy_N, theirs.entropy_BC[:, 0], atol=1e-4, rtol=1e-4)
        table = torch.randn(262_144, 64, device="cuda", dtype=dtype)
        soft = vocabulary.compute_probs_(raw, 30.0, heat, mine) @ table
        other = reference.soft_embed(shaped.to(dtype), table)
        assert (soft - other).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 1e-3) * other.abs().max()


def test_the_fast_engine_gives_the_tokens_of_generate():
    """Through CUDA graphs, in float32: requests of different lengths at once, pages committed, graphs used again."""
    from redraft.config import SamplerConfig
    from redraft.engine.cuda_graph_runner import CudaGraphRunner
    from redraft.engine.engine import Engine

    config = replace(tiny.BASE, head_dim=16, global_head_dim=32)
    model = tiny.decided(config).cuda()
    engine = Engine(model)
    assert isinstance(engine.runner, CudaGraphRunner)
    cfg = SamplerConfig(
        canvas_length=16, max_new_tokens=48, max_steps=6, entropy_bound=2.0, confidence_threshold=0.3, eos_token_ids=(1,)
    )
    for round_ in range(2):
        prompts = [[2, *range(20, 20 + 9 * row + round_)] for row in range(5)]
        requests = [engine.add(prompt, cfg, seed=row) for row, prompt in enumerate(prompts)]
        found = engine.run(requests)
        for row, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            *_, expected = generate(model, [prompt], cfg, seeds=[row])
            assert torch.equal(found[request].ids_BT, expected.ids_BT)
