"""FusedLlama in Triton's interpreter: its layers equal the model's, its rounds give the text of the model alone."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from interpreted import DEVICE

from redraft.config import FULL, SLIDING, EngineConfig, LlamaConfig, SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion import draft_tree
from redraft.diffusion.draft_tree import DraftTree
from redraft.diffusion.generate import Finished, generate
from redraft.diffusion.verified import Round, Verdict, Verification, draft_tokens, generate_verified
from redraft.engine.cache_table import CacheTable, TreeTensors
from redraft.engine.cuda_graph_runner import CudaGraphRunner
from redraft.engine.engine import Engine
from redraft.engine.fused_llama import FusedLlama
from redraft.engine.mixed_runner import MixedRunner
from redraft.engine.tree_graph import TreeBucket
from redraft.kernels import backend
from redraft.kernels.triton import attention
from redraft.kernels.triton.draft_tree import accept_path
from redraft.model.drafter import DrafterConfig, new_drafter
from redraft.model.llama import Llama
from redraft.model.page import PageConfig, new_page_adapter
from redraft.train.own_text import FusedEncoder, OwnTextConfig, OwnTextSampler

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where an exponential overflows

SMALL = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    layer_types=(FULL, FULL),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_ids=(2,),
    has_tied_head=True,
)
CONFIGS = {
    "llama": SMALL,
    "biases": replace(SMALL, has_qkv_bias=True, has_tied_head=False),
    "norms": replace(SMALL, has_qk_norm=True, head_dim=24),
    "windows": replace(SMALL, layer_types=(SLIDING, FULL), sliding_window=4, num_attention_heads=3),
}


def make_model(config: LlamaConfig, drafts: bool = True) -> Llama:
    generator = torch.Generator().manual_seed(0)
    model = Llama(config)
    if drafts:
        cfg = DrafterConfig(rank=2, alpha=4.0, head_size=8, canvas_length=3)
        model.drafter = new_drafter(cfg, config, torch.zeros(config.hidden_size))
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise)
    return model.eval().requires_grad_(False).to(DEVICE)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("drafts", [False, True])
def test_the_layers_are_those_of_the_model(name, drafts):
    """Behind a context: clean tokens, and a canvas behind each of them."""
    model = make_model(CONFIGS[name], drafts)
    context = torch.tensor([[1, 5, 9, 30, 21, 7]], device=DEVICE)
    clean = torch.tensor([[11, 12]], device=DEVICE)
    canvas = torch.full((1, 2, 3), CONFIGS[name].vocab_size if drafts else 8, device=DEVICE)
    expected_cache = model.new_cache(1, 16)
    model.encode(context, expected_cache)
    expected = model.joint(clean, canvas, [0, 1], expected_cache)
    fused = FusedLlama(model)
    cache = model.new_cache(1, 16)
    cache.advance([6])
    table = CacheTable.empty(model, 1)
    table.fill([cache], [6])
    fused.encode(context, table, 6)
    cache.advance([2])
    table.fill([cache], [2])
    canvas_table = CacheTable.empty(model, 2, table.base)
    canvas_table.behind_each_(table)
    found = fused.joint(clean, table, canvas, canvas_table, 6)
    assert torch.allclose(found[0].view_as(expected[0]), expected[0], atol=1e-4)
    assert torch.allclose(found[1].view_as(expected[1]), expected[1], atol=1e-4)
    for layer in range(2):
        for mine, theirs in zip(cache.view(layer), expected_cache.view(layer), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)


TREE = DraftTree(parents=(-1, 0, 1, 0, 3, 1), ranks=(0, 0, 0, 1, 0, 1))


def test_a_tree_is_all_of_its_paths_at_once():
    """Every node and its canvas see the context and their own path, as if the other nodes were not there."""
    model = make_model(CONFIGS["norms"])
    context = torch.tensor([[1, 5, 9, 30, 21, 7]], device=DEVICE)
    nodes = torch.tensor([[11, 12, 13, 14, 15, 16]], device=DEVICE)
    fused = FusedLlama(model)
    cache = model.new_cache(1, 32)
    cache.advance([6])
    table = CacheTable.empty(model, 1)
    table.fill([cache], [6])
    fused.encode(context, table, 6)
    cache.advance([len(TREE)])
    table.fill([cache], [len(TREE)])
    canvas_table = CacheTable.empty(model, len(TREE), table.base)
    canvas_table.behind_tree_(table)
    blank = torch.full((1, len(TREE), 3), model.config.vocab_size, device=DEVICE)
    shape = TreeTensors.of(TREE, model.device)
    hidden_ND, canvas_ND = fused.joint(nodes, table, blank, canvas_table, 6, shape)
    canvas_NCD = canvas_ND.unflatten(0, (len(TREE), 3))
    for node, path in enumerate(TREE.paths):
        alone = model.new_cache(1, 32)
        model.encode(context, alone)
        expected = model.joint(nodes[:, list(path)], blank[:, :1], [len(path) - 1], alone)
        assert torch.allclose(hidden_ND[node], expected[0][0, -1], atol=1e-4)
        assert torch.allclose(canvas_NCD[node], expected[1][0, 0], atol=1e-4)
    path_BD = torch.tensor([[3, 4]], device=DEVICE)
    attention.keep_path(
        table.base, table.keys_LB, table.values_LB, table.sizes_LB, table.lengths_B, path_BD, table.base.numel()
    )
    cache.rewind([9])
    alone = model.new_cache(1, 32)
    model.encode(torch.cat([context, nodes[:, [0, 3, 4]]], dim=1), alone)
    for layer in range(2):
        for mine, theirs in zip(cache.view(layer), alone.view(layer), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("name", CONFIGS)
def test_rounds_write_the_text_of_the_model_alone(name, monkeypatch):
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    monkeypatch.setattr(draft_tree, "NODES", 6)
    config = CONFIGS[name] if name in ("llama", "windows") else replace(CONFIGS[name], layer_types=(FULL,))
    engine = Engine(make_model(config), EngineConfig(max_running=4, prefill_chunk=4))
    assert isinstance(engine.runner, CudaGraphRunner)
    settings = {"check": "exact", "draft_length": 2, "draft_token": config.vocab_size, "canvas_length": 4}
    cfg = SamplerConfig(max_new_tokens=6, eos_token_ids=(2,), temperature=1.0, **settings)
    prompts = [[1, 5, 9, 30, 21, 7], [1, 8]]
    requests = [engine.add(prompt, cfg, seed=seed) for seed, prompt in enumerate(prompts)]
    found = engine.run(requests)
    for seed, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        assert found[request].ids_BT.tolist() == write_alone(config, prompt, cfg, seed).ids_BT.tolist()
        assert found[request].stats[0].drafted > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_a_page_adapter_denoises_beside_the_graphs(monkeypatch, drafts):
    """What is written left to right runs on the graphs, canvases in the reference forwards; both as the model says.

    So do the drafts of a drafter beside it.
    """
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    monkeypatch.setattr(draft_tree, "NODES", 5)
    model = make_model(SMALL, drafts)
    cfg = PageConfig(rank=2, alpha=4.0, canvas_lengths=(4,))
    model.page = new_page_adapter(cfg, SMALL, torch.zeros(SMALL.hidden_size))
    for p in model.page.parameters():
        torch.nn.init.normal_(p, std=0.2)
    model.page.to(DEVICE).requires_grad_(False)
    engine = Engine(model, EngineConfig(max_running=4, prefill_chunk=4))
    assert isinstance(engine.runner, MixedRunner)
    canvases = SamplerConfig(canvas_length=4, max_new_tokens=4, max_steps=2, eos_token_ids=(2,))
    written = replace(canvases, check="exact", draft_length=0, max_new_tokens=2)
    if drafts:
        written = replace(written, draft_length=2, draft_token=SMALL.vocab_size)
    prompt = [1, 5, 9]
    requests = [engine.add(prompt, cfg, seed=3) for cfg in (canvases, written)]
    found = engine.run(requests)
    *_, expected = generate(model, [prompt], canvases, seeds=[3])
    assert found[requests[0]].ids_BT.tolist() == expected.ids_BT.tolist()
    *_, expected = generate_verified(model, prompt, written, seed=3)
    assert found[requests[1]].ids_BT.tolist() == expected.ids_BT.tolist()
    assert engine.runner.tree_buckets if drafts else engine.runner.round_buckets
    assert not engine.runner.step_buckets


def test_own_texts_are_those_of_encode(monkeypatch):
    """The sampler of own texts, whose cache the kernels read and write in place."""
    model = make_model(SMALL, drafts=False)
    settings = OwnTextConfig(rows=3, length=9, longest_beginning=3, most_repeats=9, ended_share=1.0)
    found = []
    for kernels in ("reference", "triton"):
        monkeypatch.setenv(backend.ENV_VARIABLE, kernels)
        sampler = OwnTextSampler(model, settings)
        assert isinstance(sampler.encode, FusedEncoder) == (kernels == "triton")
        torch.manual_seed(0)
        found.append(sampler.sample_rows([[1, 5, 9], [1], [1, 30]], [1.0, 0.5, 1.0]))
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0]}) == 3


def write_alone(config: LlamaConfig, prompt: list[int], cfg: SamplerConfig, seed: int) -> Finished:
    """What the model writes without drafts, in the reference."""
    without = replace(cfg, draft_length=0, draft_token=None)
    *_, end = generate_verified(make_model(config, drafts=False), prompt, without, seed=seed)
    return end


def tree_config(max_new_tokens: int = 7, temperature: float = 4.0) -> SamplerConfig:
    return SamplerConfig(
        check="exact", draft_length=2, draft_token=40, canvas_length=4, eos_token_ids=(2,),
        max_new_tokens=max_new_tokens, temperature=temperature,
    )  # fmt: skip


# Seeds whose accepted paths leave the likeliest line, would go on behind the last token of the answer, or hold a stop token,
# which those of 16 and 23 go on behind.
SEEDS = {"side paths": (29, 30), "no room": (6, 37), "stops": (13, 16, 23)}


@pytest.mark.parametrize("seed", [29, 13, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (30, 6, 37, 16, 23))])
def test_trees_are_accepted_and_change_no_token(seed, monkeypatch):
    """At a high temperature the noise decides, which drafts and picks share."""
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    monkeypatch.setattr(draft_tree, "NODES", 5)
    engine = Engine(make_model(SMALL), EngineConfig(max_running=2, prefill_chunk=8))
    kept = spy_on_paths(monkeypatch)
    request = engine.add([1, 5, 9], tree_config(), seed=seed)
    found = engine.run([request])[request]
    expected = write_alone(SMALL, [1, 5, 9], tree_config(), seed)
    assert found.ids_BT.tolist() == expected.ids_BT.tolist()
    assert found.stats[0].logprob == pytest.approx(expected.stats[0].logprob, abs=1e-3)
    assert found.stats[0].accepted > 0
    assert found.stats[0].drafted >= found.stats[0].accepted
    if seed in SEEDS["side paths"]:
        assert any(path != [1, 2][: len(path)] for path in kept)
    # A round gives its accepted drafts and one token more, but none behind an accepted stop token.
    tokens = found.stats[0].accepted + found.stats[0].rounds - int(seed in SEEDS["stops"])
    assert found.ids_BT.shape[1] == tokens
    if seed in SEEDS["stops"]:
        assert found.ids_BT[0, -1] == 2
    if seed in SEEDS["no room"]:
        assert found.ids_BT.shape[1] == 7


def spy_on_paths(monkeypatch) -> list[list[int]]:
    """The accepted paths of all rounds of the first request, as the host reads them."""
    kept: list[list[int]] = []
    read = TreeBucket.read

    def spy(bucket, states):
        found = read(bucket, states)
        kept.append(list(bucket.tree.paths[int(bucket.results_host[0, 0])][1:]))
        return found

    monkeypatch.setattr(TreeBucket, "read", spy)
    return kept


def test_the_accepted_path_is_the_longest_one_whose_tokens_are_picked():
    """Random tokens of a small vocabulary, so that paths of all lengths are accepted; some answers have little room."""
    tree = draft_tree.grow_tree(13, 4)
    rows = 12
    generator = torch.Generator().manual_seed(0)
    fields_BI = torch.randint(
        2, (rows, len(tree) + 3), generator=generator
    )  # the host's table: ids, and columns behind them
    room_B = fields_BI[:, -1]
    room_B.copy_(torch.tensor([1, 2, 3, *[9] * (rows - 3)]))
    ids_BN, picks_BN = fields_BI[:, : len(tree)], torch.randint(2, (rows, len(tree)), generator=generator)
    shape = TreeTensors.of(tree, torch.device(DEVICE))
    inputs = (tensor.to(DEVICE) for tensor in (ids_BN, picks_BN, room_B))
    found = accept_path(*inputs, shape.visible_N, shape.depths_N, shape.parents_N, shape.paths_ND)
    lengths = set()
    for row, (ids, picks, room) in enumerate(zip(ids_BN.tolist(), picks_BN.tolist(), room_B.tolist(), strict=True)):
        accepted = [
            node
            for node, path in enumerate(tree.paths)
            if len(path) <= room and all(ids[child] == picks[parent] for parent, child in pairwise(path))
        ]
        last = max(accepted, key=lambda node: (tree.depths[node], -node))
        path = tree.paths[last][1:]
        padded = [*path, *range(len(path) + 1, tree.depth + 1)]
        lengths.add(len(path))
        assert (int(found.last_B[row]), int(found.token_B[row]), int(found.count_B[row])) == (last, picks[last], len(path))
        assert found.path_BD[row].tolist() == padded
        assert found.ids_BD[row].tolist() == [ids[node] for node in padded]
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.soak
def test_a_tree_bucket_forgets_the_request_before(monkeypatch):
    """One request after another on one engine, with another temperature and another cache."""
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    monkeypatch.setattr(draft_tree, "NODES", 5)
    engine = Engine(make_model(SMALL), EngineConfig(max_running=2, prefill_chunk=8))
    kept = []  # so that no cache gets the memory of the one before it
    for seed, (prompt, temperature) in enumerate((([1, 5, 9], 4.0), ([1, 30, 21, 7], 0.0))):
        cfg = tree_config(4, temperature)
        request = engine.add(prompt, cfg, seed=seed)
        kept.append(request)
        found = engine.run([request])[request]
        assert found.ids_BT.tolist() == write_alone(SMALL, prompt, cfg, seed).ids_BT.tolist()
    assert len(engine.runner.tree_buckets) == 1


@pytest.mark.soak
def test_a_tree_holds_the_drafts_of_the_reference(monkeypatch):
    """Two requests: the likeliest line of each tree is what `draft_tokens` drafts behind the same tokens."""
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    monkeypatch.setattr(draft_tree, "NODES", 6)
    model = make_model(SMALL)
    engine = Engine(model, EngineConfig(max_running=2, prefill_chunk=8))
    prompts = [[1, 5, 9], [1, 30, 21, 7]]
    requests = [engine.add(prompt, tree_config(12, 0.7), seed=seed) for seed, prompt in enumerate(prompts)]
    while not all(request.verification.rounds >= 2 for request in requests):
        engine.step()
    for seed, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        state = request.verification
        assert len(state.tree) == 5
        context = [*prompt, *state.tokens]
        cache = model.new_cache(1, 32)
        model.encode(torch.tensor([context[:-2]], device=DEVICE), cache)
        blank_11C = torch.full((1, 1, 3), 40, device=DEVICE)
        _, hidden_11CD = model.joint(torch.tensor([[context[-2]]], device=DEVICE), blank_11C, [0], cache)
        before = Verification.start(prompt, tree_config(12, 0.7), seed, Constraints(), 40)
        before.tokens = list(state.tokens[:-1])
        verdict = Verdict(0, state.tokens[-1], ())
        work = Round((context[-2],), (), (0,), 3)
        assert state.drafts == draft_tokens(model, before, work, verdict, hidden_11CD[0, 0, 1:])


@pytest.mark.soak
def test_trees_and_rows_of_drafts_alternate(monkeypatch):
    """Three requests have rows of drafts; as soon as one has ended, the others have trees."""
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    monkeypatch.setattr(draft_tree, "NODES", 5)
    engine = Engine(make_model(SMALL), EngineConfig(max_running=4, prefill_chunk=8))
    lengths = (2, 4, 5)
    requests = [engine.add([1, 5, 9], tree_config(length), seed=29 + length) for length in lengths]
    found = engine.run(requests)
    assert engine.runner.round_buckets
    assert engine.runner.tree_buckets
    for request, length in zip(requests, lengths, strict=True):
        expected = write_alone(SMALL, [1, 5, 9], tree_config(length), 29 + length)
        assert found[request].ids_BT.tolist() == expected.ids_BT.tolist()


def make_bucket() -> TreeBucket:
    """A bucket for one request, with a tree of two lines of two drafts."""
    return TreeBucket(FusedLlama(make_model(SMALL)), DraftTree((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0)), 1, 16)


@pytest.mark.parametrize(
    ("last", "room", "drafts", "accepted", "token"),
    [(0, 5, (2, 9), 0, 7), (1, 5, (2,), 1, None), (2, 5, (8, 3), 1, 7), (2, 2, (8,), 1, 7), (4, 5, (8, 3), 2, 7)],
)
def test_a_tree_is_read_as_a_row_of_drafts(last, room, drafts, accepted, token):
    """Stop tokens count where they are accepted. Behind the accepted path, the row goes on with the likeliest drafts."""
    bucket = make_bucket()
    state = Verification.start([1, 5], tree_config(3 + room), 0, Constraints(), 40)
    state.tokens, state.tree = [4, 5, 6], [2, 8, 9, 3]  # node 1 is a stop token
    bucket.results_host[0, :2] = torch.tensor([last, 7])
    ((work, verdict, _),) = bucket.read([state])
    assert (work.drafts, verdict.accepted, verdict.token) == (drafts, accepted, token)


@pytest.mark.parametrize(
    ("row", "last", "drafts", "accepted"),
    [([], 0, (), 0), ([9], 0, (9,), 0), ([9], 1, (9,), 1), ([9], 3, (9, 0), 2), ([9, 8, 7], 0, (9, 8), 0)],
)
def test_padding_is_no_draft(row, last, drafts, accepted):
    """The request comes from a round without a tree: only its own drafts count, and padding that was accepted."""
    bucket = make_bucket()
    state = Verification.start([1, 5], tree_config(8), 0, Constraints(), 40)
    state.tokens, state.drafts = [4, 5, 6], row
    bucket.results_host[0, :2] = torch.tensor([last, 7])
    ((work, verdict, _),) = bucket.read([state])
    assert (work.drafts, verdict.accepted, verdict.token) == (drafts, accepted, 7)
    state.apply(work, verdict, [])
    assert (state.drafted, state.accepted, state.corrected) == (len(drafts), accepted, int(accepted < len(drafts)))


def test_a_request_with_fewer_drafts_has_no_tree(monkeypatch):
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    runner = Engine(make_model(SMALL), EngineConfig(max_running=2, prefill_chunk=8)).runner
    assert runner.spare_slots(tree_config()) > 0
    assert runner.spare_slots(replace(tree_config(), draft_length=1)) == 0


def test_windows_have_no_trees(monkeypatch):
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    runner = Engine(make_model(CONFIGS["windows"]), EngineConfig(max_running=1, prefill_chunk=4)).runner
    assert runner.tree is None
    assert runner.spare_slots(tree_config()) == 0


def test_two_fused_models_share_their_joined_weights():
    """Own answers have two samplers of one model: its weights are not joined twice."""
    model = make_model(SMALL)
    first, second = FusedLlama(model), FusedLlama(model, canvases=False)
    for mine, theirs in zip(first.products, second.products, strict=True):
        for names, product in mine.items():
            assert product.weight.data_ptr() == theirs[names].weight.data_ptr()
            assert torch.equal(product.weight, theirs[names].weight)
            assert theirs[names].canvas_weight is theirs[names].weight
