"""Requests with images: the engine gives the tokens of `generate`, and the prefix cache knows images by their content."""

from dataclasses import replace

import pytest
import tiny
import torch
import vision_models

from redraft.config import EngineConfig, SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Draft, Finished, generate
from redraft.diffusion.verified import generate_verified
from redraft.engine import AdaptedEngine, Engine, Replay, RequestError
from redraft.engine.prefix_cache import make_prefix_key
from redraft.model.vision import ImageSpan
from redraft.tasks import best_of
from redraft.tasks.infill import sequence_logprobs
from redraft.tasks.text_events import EncodedPrompt

BEGIN, IMAGE, END = vision_models.IMAGE_IDS
CFG = tiny.sampler(max_new_tokens=32, draft_length=2)
CONFIG = EngineConfig(prefill_chunk=16, prefix_cache_entries=4)


def picture(count: int, seed: int, digest: bytes = b"") -> ImageSpan:
    """Features as of an image of so many tokens."""
    features = torch.randn(count, tiny.BASE.hidden_size, generator=torch.Generator().manual_seed(seed))
    return ImageSpan(0, features, digest)


def make_prompt(*parts: int | ImageSpan, seed: int = 0) -> tuple[list[int], list[ImageSpan]]:
    """A prompt of as many random tokens as each number says, and of images between marks."""
    generator = torch.Generator().manual_seed(seed)
    ids = [2]
    spans = []
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(40, tiny.VOCAB, (part,), generator=generator).tolist()
        else:
            spans.append(part._replace(start=len(ids) + 1))
            ids += [BEGIN, *[IMAGE] * len(part.features_ME), END]
    return ids, spans


PROMPTS = {
    "image first": make_prompt(picture(9, 1), 6),
    "longer than a chunk": make_prompt(5, picture(40, 2), 3),
    "two of them": make_prompt(20, picture(12, 3), 4, picture(7, 4), 9),
    "side by side": make_prompt(picture(14, 5), picture(5, 6), 25),
}
TEXT = make_prompt(21, seed=8)


@pytest.fixture(scope="module")
def model():
    return tiny.decided(vision_models.text_config())


def answer(end: Finished) -> list[int]:
    return end.ids_BT[0].tolist()


def expect(model, prompt, cfg: SamplerConfig, seed: int = 3, **options) -> list[int]:
    """The tokens of `generate` or of `generate_verified`."""
    ids, spans = prompt
    if cfg.check == "off":
        options = {name: [value] if name == "constraints" else value for name, value in options.items()}
        events = generate(model, [ids], cfg, seeds=[seed], images=[spans], **options)
    else:
        events = generate_verified(model, ids, cfg, seed=seed, images=spans, policy=tiny.engine_policy(cfg), **options)
    *_, end = events
    return answer(end)


def run(engine: Engine, prompt, cfg: SamplerConfig, seed: int = 3, **options) -> list[int]:
    ids, spans = prompt
    request = engine.add(ids, cfg, seed=seed, images=spans, **options)
    return answer(engine.run([request])[request])


@pytest.mark.parametrize("check", ["off", "checked", "exact"])
def test_answers_equal_generate_alone_and_beside_text(model, check):
    cfg = CFG.changed(check=check, max_new_tokens=32 if check == "off" else 20)
    names = PROMPTS if check == "off" else ("longer than a chunk", "side by side")
    chosen = {name: PROMPTS[name] for name in names}
    alone = {name: expect(model, prompt, cfg) for name, prompt in chosen.items()}
    for name, prompt in chosen.items():
        assert run(Engine(model, CONFIG), prompt, cfg) == alone[name]
    engine = Engine(model, CONFIG)
    prompts = [TEXT, *chosen.values(), TEXT]
    requests = [engine.add(ids, cfg, seed=3, images=spans) for ids, spans in prompts]
    ends = engine.run(requests)
    text = expect(model, TEXT, cfg)
    assert [answer(ends[request]) for request in requests] == [text, *alone.values(), text]
    name, (ids, _) = next(iter(chosen.items()))
    assert alone[name] != expect(model, (ids, []), cfg)  # images matter


def test_chunks_divide_no_image(model, monkeypatch):
    engine = Engine(model, replace(CONFIG, prefill_chunk=10))
    chunks = []
    encode = model.encode

    def note(ids_BS, cache, counts=None, images=None):
        chunks.append((ids_BS.shape[1], sum(len(span.features_ME) for span in images[0]) if images else 0))
        return encode(ids_BS, cache, counts, images)

    monkeypatch.setattr(model, "encode", note)
    ids, spans = PROMPTS["two of them"]
    engine.add(ids, CFG, seed=1, images=spans)
    for _ in range(8):
        engine.step()
    # 1 + 20 tokens and a mark; 12 image tokens; a mark, 4 tokens, a mark; 7 and 3 more; the rest.
    assert chunks[:6] == [(10, 0), (10, 0), (2, 0), (12, 12), (6, 0), (10, 7)]


def test_drafts_candidates_constraints_replays_and_adapters(model):
    prompt = PROMPTS["two of them"]
    ids, spans = prompt
    constraints = Constraints(pins={2: 77})
    assert run(Engine(model, CONFIG), prompt, CFG, constraints=constraints) == expect(
        model, prompt, CFG, constraints=constraints
    )
    first_1C = torch.full((1, CFG.canvas_length), 60)
    assert run(Engine(model, CONFIG), prompt, CFG, first_canvas_1C=first_1C) == expect(
        model, prompt, CFG, first_canvas_BC=first_1C
    )
    engine = Engine(model, CONFIG)
    request = engine.add(ids, CFG, seed=3, images=spans, candidates=2, seconds=1e6)
    events = list(engine.stream(request))
    assert all(event.top_probs is not None for event in events if isinstance(event, Draft))
    whole = answer(events[-1])
    assert whole == expect(model, prompt, CFG)
    assert len(whole) > CFG.canvas_length
    replay = Replay(canvases=(tuple(whole[: CFG.canvas_length]),))
    assert run(Engine(model, CONFIG), prompt, CFG, replay=replay) == whole
    adapter = tiny.trained(model.config)
    adapted = AdaptedEngine(engine, adapter)
    assert run(adapted, prompt, CFG) == expect(model, prompt, CFG, adapter=adapter) != whole
    exact = CFG.changed(check="exact")
    assert run(adapted, prompt, exact) == expect(model, prompt, exact, adapter=adapter)


def test_images_that_cannot_be_are_refused(model):
    engine = Engine(model, CONFIG)
    ids, spans = make_prompt(3, picture(5, 1))
    with pytest.raises(RequestError, match="overlap or are outside"):
        engine.add(ids[:-2], CFG, seed=1, images=spans)
    with pytest.raises(RequestError, match="need a token behind the last image"):
        engine.add(ids[:-1], CFG.changed(check="exact"), seed=1, images=spans)
    other = Engine(model, CONFIG, verifier=tiny.decided(model.config, 1))
    with pytest.raises(RequestError, match="cannot read this model's images: choose check 'off'"):
        other.add(ids, CFG.changed(check="exact"), seed=1, images=spans)
    assert run(other, (ids, spans), CFG) == expect(model, (ids, spans), CFG)
    assert engine.is_idle


def test_image_tokens_count_for_admission(model):
    """A prompt of many images is refused by the context and by the memory budget, with one sentence."""
    many = make_prompt(*(picture(300, seed) for seed in range(14)), 2)
    with pytest.raises(RequestError, match=r"the prompt has 4231 tokens .* context is 4096: shorten"):
        Engine(model, CONFIG).add(many[0], CFG, seed=1, images=many[1])
    engine = Engine(model, replace(CONFIG, cache_bytes=2**16))
    ids, spans = make_prompt(picture(300, 1), 2)
    with pytest.raises(RequestError, match=r"needs .* MiB of KV cache for 321 tokens, and the budget is 0.1 MiB"):
        engine.add(ids, CFG, seed=1, images=spans)


def test_the_prefix_cache_knows_images_by_content(model):
    engine = Engine(model, CONFIG)
    first = make_prompt(18, picture(30, 1), 4)
    second = make_prompt(18, picture(30, 2), 4)
    for prompt, reused in ((first, 0), (second, 20), (first, len(first[0]))):  # 20: the text before, and the begin mark
        request = engine.add(prompt[0], CFG, seed=3, images=prompt[1])
        end = engine.run([request])[request]
        assert end.stats[0].reused == reused
        assert answer(end) == expect(model, prompt, CFG)
    assert expect(model, first, CFG) != expect(model, second, CFG)


def test_eviction_spares_the_conversation_that_goes_on(model):
    """Without room for a second turn beside both contexts, the older one is kept: it is the one with the same image."""
    first = make_prompt(18, picture(30, 1), 4)
    second = make_prompt(18, picture(30, 2), 4)
    probe = Engine(model, CONFIG)
    turn = [*first[0], *run(probe, first, CFG), 50, 51, 52, 53]
    nbytes = probe.add(turn, CFG, seed=1, images=first[1]).nbytes
    engine = Engine(model, replace(CONFIG, cache_bytes=int(2.2 * nbytes)))
    run(engine, first, CFG)
    run(engine, second, CFG)
    assert len(engine.scheduler.prefix_cache) == 2
    request = engine.add(turn, CFG, seed=4, images=first[1])
    end = engine.run([request])[request]
    assert len(engine.scheduler.prefix_cache) == 1
    assert end.stats[0].reused >= len(first[0])
    assert answer(end) == expect(model, (turn, first[1]), CFG, seed=4)


@pytest.mark.parametrize("check", ["off", "exact"])
def test_a_second_turn_reuses_the_image(model, check):
    cfg = CFG.changed(check=check)
    engine = Engine(model, replace(CONFIG, rewind=64))
    ids, spans = make_prompt(5, picture(30, 1), 4)
    reply = run(engine, (ids, spans), cfg)
    turn = [*ids, *reply, 50, 51, 52, 53]
    request = engine.add(turn, cfg, seed=4, images=spans)
    end = engine.run([request])[request]
    assert end.stats[0].reused >= len(ids)
    assert answer(end) == expect(model, (turn, spans), cfg, seed=4)


def test_a_cancelled_prefill_leaves_whole_images(model):
    engine = Engine(model, CONFIG)
    prompt = PROMPTS["two of them"]
    for steps in range(1, 5):
        request = engine.add(prompt[0], CFG, seed=1, images=prompt[1])
        for _ in range(steps):
            engine.step()
        engine.cancel(request)
        assert run(engine, prompt, CFG) == expect(model, prompt, CFG)


def test_keys_are_no_tokens_and_depend_on_content_alone():
    ids, spans = make_prompt(2, picture(4, 1), picture(4, 1), picture(4, 2), picture(3, 1, b"a"))
    key = make_prefix_key(tuple(ids), spans)
    numbers = [set(key[span.start : span.end]) for span in spans]
    assert all(len(number) == 1 and max(number) < 0 for number in numbers)
    assert numbers[0] == numbers[1] != numbers[2]
    named = make_prefix_key(tuple(ids), [*spans[:3], picture(3, 7, b"a")._replace(start=spans[3].start)])
    assert named == key  # the digest stands for the features
    assert [token for token in key if token >= 0] == [token for token in ids if token != IMAGE]
    assert make_prefix_key((1, 2), ()) == (1, 2)


def test_the_likeliest_answer_is_chosen_with_the_image(model, monkeypatch):
    engine = Engine(model, CONFIG)
    ids, spans = make_prompt(3, picture(30, 1), 4)
    requests = [engine.add(ids, CFG, seed=seed, images=spans) for seed in range(3)]
    ends = engine.run(requests)
    answers = [answer(ends[request])[: ends[request].stats[0].new_tokens] for request in requests]
    logprobs = sequence_logprobs(engine, ids, answers, images=spans)
    with torch.inference_mode():
        for tokens, logprob in zip(answers, logprobs, strict=True):
            whole_1S = torch.tensor([[*ids, *tokens]])
            hidden_1SD = model.encode(whole_1S, model.new_cache(1, whole_1S.shape[1]), images=[spans])
            expected = model.head(hidden_1SD[0, len(ids) - 1 : -1]).float().log_softmax(dim=-1)
            assert logprob == pytest.approx(float(expected.gather(1, whole_1S[0, len(ids) :, None]).sum()), rel=1e-4)
    means = [logprob / len(tokens) for logprob, tokens in zip(logprobs, answers, strict=True)]
    measured = []
    monkeypatch.setattr(
        best_of, "sequence_logprobs", lambda *given: measured.append(sequence_logprobs(*given)) or measured[-1]
    )
    prompt = EncodedPrompt(ids, is_chat=False, images=spans)
    chosen = best_of.choose_likeliest(engine, prompt, [ends[request] for request in requests])
    assert all(request.images == () for request in requests)  # a request that is over keeps none
    assert measured == [logprobs]
    assert chosen == means.index(max(means))
    without = sequence_logprobs(engine, ids, answers)
    assert without != pytest.approx(logprobs)
    with pytest.raises(RequestError, match="this prompt ends with an image"):
        sequence_logprobs(engine, ids[: spans[0].end], answers, images=spans)
