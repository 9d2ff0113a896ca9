"""Text is delivered as soon as it is final: the deltas add up to the answer, and the first comes before the last step."""

import pytest
import tiny
import torch
from serving import EchoWriter

import redraft
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Draft, Finished, generate
from redraft.engine.request import StopEvent
from redraft.server.completion import CompletionParams, Finish, TextDelta, stream_completion
from redraft.server.stop_strings import SettledStop
from redraft.tasks.generation import GenerationOptions
from redraft.tasks.text_events import EncodedPrompt, TextAssembler, TextCommitted, TextDraft
from redraft.tokenizer.chat_parser import Parsed, ToolCall

SAMPLER = tiny.sampler(max_new_tokens=40, draft_length=3, draft_steps=2, max_steps=12)
WRITER = EchoWriter(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), SAMPLER)
MODES = {"checked": {"check": "checked"}, "settled": {"check": "off", "settle_prefix": True}}


def is_text(event) -> bool:
    return isinstance(event, redraft.Draft | redraft.Committed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_deltas_add_up_to_the_answer_and_begin_before_the_last_step(mode, seed):
    """The first word is pinned, so its text is final early; other positions are never confident."""
    word = Constraints(pins=dict(enumerate(WRITER.tokenizer.encode("Lily"))))
    options = {"seed": seed, "constraints": word, "confidence_threshold": 1e-9, **MODES[mode]}
    answer = WRITER.write("Once", **options)
    events = [event for event in WRITER.stream("Once", **options) if is_text(event)]
    assert "".join(event.delta.text for event in events) == answer.text
    first = next(event for event in events if event.delta.text)
    drafts = [event for event in events if isinstance(event, Draft) and event.block == 0]
    assert first.delta.text.startswith("Lily")
    assert (first.block, first.step) < (0, drafts[-1].step)
    assert "".join(event.text for event in events if isinstance(event, redraft.Committed)) == answer.text


@pytest.mark.parametrize("mode", MODES)
def test_final_tokens_are_never_taken_back(mode):
    finals = []
    for event in WRITER.stream("Once", seed=4, **MODES[mode]):
        if isinstance(event, Draft):
            finals.append((event.final, event.ids_BC[0].tolist()))
        elif isinstance(event, redraft.Committed):
            committed = event.ids_BC[0].tolist()
            counts = [count for count, _ in finals]
            assert counts == sorted(counts)
            for count, ids in finals:
                text = [token for token in committed[:count] if token != SAMPLER.pad_token_id]
                assert ids[: len(text)] == text
            finals = []


@pytest.mark.parametrize("mode", MODES)
def test_deltas_of_a_chat_have_no_half_call_and_no_half_character(mode):
    said = "say: <|channel>thought\nhm öö<channel|>Grüße ää <|tool_call>call:find{n:2}<tool_call|>!"
    events = list(WRITER.stream([{"role": "user", "content": said}], max_tokens=96, **MODES[mode]))
    deltas = [event.delta for event in events if is_text(event)]
    assert "".join(delta.reasoning for delta in deltas) == "hm öö"
    assert "".join(delta.text for delta in deltas) == "Grüße ää !"
    assert [call for delta in deltas for call in delta.tool_calls] == [ToolCall("find", {"n": 2})]
    assert not any("�" in delta.text + delta.reasoning for delta in deltas)


@pytest.mark.parametrize(
    "pattern", [{}, {"regex": "[a-z]{3,9}( [a-z]{2,5}){3}"}, {"constraints": Constraints(pins={3: 40})}]
)
def test_a_settled_prefix_gives_the_tokens_of_the_plain_loop_alone_and_in_a_batch(pattern):
    prompts = ["Once", "x" * 30, "upon a time"]
    options = {"check": "off", "settle_prefix": True, **pattern}
    together = WRITER.write(prompts, seed=5, **options)
    (cfg, *_), constraints = WRITER.plan([[20]], GenerationOptions.from_keywords(None, **options))
    ids = [WRITER.encode_prompt(prompt) for prompt in prompts]
    rows = [constraints or Constraints()] * 3
    *_, end = generate(WRITER.model, ids, cfg, seeds=[5, 6, 7], constraints=rows)
    assert isinstance(end, Finished)
    for row, answer in enumerate(together):
        assert list(answer.ids) == end.ids_BT[row, : len(answer.ids)].tolist()
        assert answer.stats.steps == end.stats[row].steps
        assert WRITER.write(prompts[row], seed=5 + row, **options).ids == answer.ids


def test_drafts_of_best_of_deliver_nothing():
    """They are those of one answer among several: another one may be the best."""
    events = [event for event in WRITER.stream("Once", seed=1, check="checked", best_of=2) if is_text(event)]
    drafts = [event for event in events if isinstance(event, Draft)]
    assert drafts
    assert not any(event.delta.text for event in drafts)
    assert "".join(e.delta.text for e in events) == WRITER.write("Once", seed=1, check="checked", best_of=2).text


def test_a_steered_canvas_refuses_a_settled_prefix():
    replay = redraft.engine.Replay(canvases=((20,) * 16,))
    with pytest.raises(ValueError, match="leave settle_prefix out"):
        list(WRITER.stream("Once", replay=replay, settle_prefix=True))


def complete(stop_strings: tuple[str, ...], **changes) -> tuple[list[str], Finish]:
    """The deltas of a completion of 40 tokens that says a text, and its end."""
    said = [{"role": "user", "content": "say: one. two. three. four. five. six."}]
    params = CompletionParams(prompt=said, seed=3, stop_strings=stop_strings, max_tokens=40, **changes)
    *chunks, end = stream_completion(WRITER, params, StopEvent())
    assert isinstance(end, Finish)
    return [chunk.text for chunk in chunks if isinstance(chunk, TextDelta)], end


@pytest.mark.parametrize(("settle_prefix", "steps"), [(False, 12), (True, 2)])
def test_with_check_off_a_stop_string_ends_the_canvas_it_has_settled_on(settle_prefix, steps):
    """The text is pinned, so it settles at the second step; what follows its stop token never does.

    A settled prefix with a stop token ends the canvas too.
    """
    settings = {"canvas_length": 40, "confidence_threshold": 1e-9, "settle_prefix": settle_prefix}
    options = {"check": "off", "sampler_settings": settings}
    whole, unstopped = complete((), **options)
    assert unstopped.stats.steps == steps
    assert "".join(whole) == "one. two. three. four. five. six."
    texts, end = complete(("ee.",), **options)
    assert ("".join(texts), end.finish_reason, end.stop_string) == ("one. two. thr", "stop", "ee.")
    assert end.stats.new_tokens == 13
    assert end.stats.steps == 2


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_step_parses_only_its_own_canvas_and_finds_what_the_whole_answer_has(is_chat, monkeypatch):
    """Characters, channels and stop strings cross the canvases, of which each draft decodes its own tokens only."""
    tokenizer = WRITER.tokenizer
    said = "<|channel>thought\nhm öö<channel|>Grüße ää <|tool_call>call:find{n:2}<tool_call|> and so on, " * 6 + "x END y"
    ids = tokenizer.encode(said if is_chat else said.replace("|", ""))
    prompt = EncodedPrompt((2, 30), is_chat)
    cfg = SAMPLER.changed(stability_threshold=0, max_new_tokens=len(ids), canvas_length=7)
    decoded = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.extend(ids) or decode(ids, **options))
    watch = SettledStop((" on, x END", "unsaid"), tokenizer, cfg, prompt)
    committed = Parsed("")
    for begin in range(0, len(ids), 7):
        canvas_1C = torch.tensor([ids[begin : begin + 7]])
        same = {"ids_BC": canvas_1C, "entropy_BC": torch.zeros(canvas_1C.shape), "settled_B": torch.tensor([True])}
        decoded.clear()
        draft = {**same, "canvas_BC": canvas_1C, "accepted_BC": canvas_1C > 0}
        found = watch.add(TextDraft(block=0, step=1, max_steps=1, **draft))
        assert len(decoded) < 20 * 7
        whole = TextAssembler(tokenizer, prompt).add(ids[: begin + 7], final=True)
        added = Parsed(whole.text[len(committed.text) :], whole.reasoning[len(committed.reasoning) :])
        assert found == (added if " on, x END" in whole.text else None)
        watch.add(TextCommitted(block=0, steps_B=torch.tensor([1]), shown=canvas_1C.shape[1], **same))
        committed = TextAssembler(tokenizer, prompt).add(ids[: begin + 7], final=False)
    assert found is not None


def test_with_a_check_a_stop_string_ends_the_round_that_verifies_it():
    options = {"check": "checked", "sampler_settings": {"canvas_length": 40}}
    _, unstopped = complete((), **options)
    texts, end = complete(("ee.",), **options)
    assert ("".join(texts), end.stop_string) == ("one. two. thr", "ee.")
    assert (end.stats.check, end.stats.steps) == ("checked", 2)
    assert 0 < end.stats.rounds < unstopped.stats.rounds
    assert end.stats.logprob is not None


@pytest.mark.parametrize("changes", [{"include_frames": True}, {"logprobs": 1}])
def test_frames_and_logprobs_come_with_whole_canvases(changes):
    texts, _ = complete((), check="checked", **changes)
    assert "".join(texts) == "one. two. three. four. five. six."
    assert len(texts) == 3  # canvases of 16 tokens
