"""Text at both ends: streamed = written, batched = alone, streamers of transformers, thoughts and calls taken apart."""

import json
import threading

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, TextDiffusionStreamer

import redraft
from redraft.constraints.constraints import Constraints
from redraft.engine import Stopped
from redraft.tasks.generation import GenerationOptions
from redraft.tokenizer.chat_parser import ToolCall

WRITER = tiny.writer()


def saying(text: str) -> Constraints:
    """Constraints that pin a whole answer, so that a model of gibberish says it."""
    return Constraints(pins=dict(enumerate(WRITER.tokenizer.encode(text))))


def test_several_at_once_equal_one_by_one():
    prompts = ["Once", "upon a time", "x" * 50]
    together = WRITER.write(prompts, seed=5, max_tokens=40)
    alone = [WRITER.write(prompt, seed=5 + i, max_tokens=40) for i, prompt in enumerate(prompts)]
    assert [a.text for a in together] == [a.text for a in alone]
    assert [a.ids for a in together] == [a.ids for a in alone]
    assert [a.seed for a in together] == [5, 6, 7]


@pytest.mark.parametrize("prompt", ["Once upon", [{"role": "user", "content": "Hello"}]])
@pytest.mark.parametrize("seed", range(6))
def test_streamed_pieces_add_up_to_the_answer(prompt, seed):
    events = list(WRITER.stream(prompt, seed=seed, max_tokens=40))
    pieces = [e.text for e in events if isinstance(e, redraft.Committed)]
    ask = WRITER.write if isinstance(prompt, str) else WRITER.chat
    answer = ask(prompt, seed=seed, max_tokens=40)
    assert "".join(pieces) == answer.text
    assert events[-1].stats[0].new_tokens == answer.stats.new_tokens
    drafts = [e for e in events if isinstance(e, redraft.Draft)]
    assert drafts[-1].block == len(pieces) - 1
    if answer.reason == "length":
        assert WRITER.tokenizer.decode(answer.ids[32:]) == drafts[-1].text


@pytest.mark.parametrize("most", [1, 15, 16, 17, 40])
def test_max_tokens_is_kept(most):
    for seed in range(8):
        answer = WRITER.write("Once", seed=seed, max_tokens=most)
        assert len(answer.ids) <= most
        assert answer.stats.new_tokens == len(answer.ids) + (answer.reason == "stop")
        assert (answer.reason == "length") == (len(answer.ids) == most)
        assert not set(answer.ids) & {1, 5}


def test_the_seed_of_an_answer_gives_it_again():
    answer = WRITER.write("Once")
    assert WRITER.write("Once", seed=answer.seed).ids == answer.ids
    assert WRITER.write("Once", seed=answer.seed + 1).ids != answer.ids


def test_thoughts_and_calls_are_taken_out():
    said = "<|channel>thought\nhm<channel|>Hi<turn|>"
    answer = WRITER.chat("Hello", think=True, constraints=saying(said), max_tokens=64)
    assert (answer.text, answer.reasoning, answer.reason) == ("Hi", "hm", "stop")
    said = 'I look. <|tool_call>call:find{what:<|"|>ö<|"|>,n:2}<tool_call|><turn|>'
    answer = WRITER.chat("Hello", constraints=saying(said), max_tokens=80, tools=[{"name": "find", "description": "Finds"}])
    assert answer.text == "I look."
    assert answer.tool_calls == (ToolCall("find", {"what": "ö", "n": 2}),)


def test_a_streamed_chat_never_shows_half_a_call_or_half_a_character():
    """The canvas holds 16 tokens, so both the call and the umlauts lie across pages."""
    said = "<|channel>thought\nhmmmm öööööö<channel|>Grüße ää "
    said += '<|tool_call>call:find{what:<|"|>some thing<|"|>}<tool_call|>!<turn|>'
    events = list(WRITER.stream([{"role": "user", "content": "x"}], think=True, constraints=saying(said), max_tokens=160))
    pages = [e for e in events if isinstance(e, redraft.Committed)]
    assert "".join(p.reasoning for p in pages) == "hmmmm öööööö"
    assert "".join(p.text for p in pages) == "Grüße ää !"
    assert len([p for p in pages if p.text]) > 1
    assert not any("�" in p.text + p.reasoning for p in pages)


def test_a_chat_may_write_the_characters_of_a_special_token():
    """Across canvases of 16 tokens, streamed and whole: the text keeps them, and the stream never shrinks."""
    text = "Use the <eos> token, <|channel> or a half <|tool_c"
    ids = [token for character in text for token in WRITER.tokenizer.encode(character)]
    pinned = Constraints(pins=dict(enumerate([*ids, 1])))
    answer = WRITER.chat("x", constraints=pinned, max_tokens=80, seed=1)
    assert (answer.text, answer.reasoning, answer.tool_calls) == (text, "", ())
    events = list(WRITER.stream([{"role": "user", "content": "x"}], constraints=pinned, max_tokens=80, seed=1))
    assert "".join(e.text for e in events if isinstance(e, redraft.Committed)) == text


class Recorder:
    """A streamer in transformers' sense."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.Tensor | None]] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(("put", value))

    def put_draft(self, value: torch.Tensor) -> None:
        self.calls.append(("put_draft", value))

    def end(self) -> None:
        self.calls.append(("end", None))


def test_a_streamer_hears_what_transformers_would_tell_it():
    recorder = Recorder()
    answer = WRITER.write("Once", seed=1, max_tokens=32, streamer=recorder, eos_token_ids=())
    names = [name for name, _ in recorder.calls]
    assert names[0] == "put"
    assert names[-1] == "end"
    assert names.count("put") == 3
    assert names.count("put_draft") == answer.stats.steps
    assert recorder.calls[0][1].tolist() == [WRITER.tokenizer.encode_prompt("Once")]
    pages = [value for name, value in recorder.calls if name == "put"][1:]
    assert tuple(torch.cat(pages, dim=1)[0].tolist()) == answer.ids


def test_transformers_own_streamer_works(tmp_path, capsys):
    WRITER.tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    answer = WRITER.write("Once", seed=1, streamer=TextDiffusionStreamer(theirs, skip_prompt=True))
    printed = capsys.readouterr().out
    assert answer.text.strip("�")[-5:] in printed
    assert "\x1b[33m" in printed  # drafts, in its yellow
    wants_logits = TextDiffusionStreamer(theirs)
    wants_logits._takes_logits = True
    with pytest.raises(ValueError, match="wants logits"):
        WRITER.write("Once", streamer=wants_logits)


def test_a_folder_becomes_a_writer(tmp_path):
    tiny.save_folder(tmp_path)
    loaded = redraft.load(tmp_path)
    assert loaded.write("Once", seed=3).ids == WRITER.write("Once", seed=3, max_tokens=32).ids
    assert redraft.load(str(tmp_path), dtype="bfloat16").model.dtype == torch.bfloat16


def test_weights_laid_out_for_a_cpu_are_the_same_and_are_saved_as_they_were(tmp_path, monkeypatch):
    tiny.save_folder(tmp_path / "one")
    written = {}
    for has in (True, False):
        monkeypatch.setattr("redraft.checkpoint.parts.has_bf16", lambda device, has=has: has)
        found = redraft.load(tmp_path / "one", dtype="float32")
        assert found.model.layers[0].mlp.gate_proj.weight.is_contiguous() is has
        written[has] = found.write("Once", seed=3).ids
        redraft.save(found.model, tmp_path / f"saved {has}")
    assert written[True] == written[False]
    one, other = (sorted((tmp_path / f"saved {has}").glob("*.safetensors")) for has in (True, False))
    assert len(one) == len(other) == 1
    first, second = load_file(one[0]), load_file(other[0])
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("has", [True, False])
def test_a_cpu_without_bf16_computes_in_float32_unless_told_otherwise(tmp_path, monkeypatch, caplog, has):
    monkeypatch.setattr("redraft.kernels.backend.has_bf16", lambda device: has)
    tiny.save_folder(tmp_path)
    half = redraft.load(tmp_path, dtype="bfloat16")
    redraft.save(half.model, tmp_path, tokenizer=half.tokenizer, force=True)
    caplog.clear()
    assert redraft.load(tmp_path).model.dtype == (torch.bfloat16 if has else torch.float32)
    assert not caplog.messages
    assert redraft.load(tmp_path, dtype="bfloat16").model.dtype == torch.bfloat16
    assert any("float32" in said for said in caplog.messages) is not has


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    tiny.remove_manifest(tiny.save_folder(tmp_path))
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["model"]["vocab"]["ab"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"ids up to 5000.*vocabulary of {tiny.VOCAB}"):
        redraft.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_q": 5}, "unknown sampler setting 'top_q'"),
        ({"max_tokens": 0}, "got 0"),
        ({"max_steps": -1}, "got -1"),
        ({"max_tokens": 10_000}, "context is 512"),
    ],
)
def test_mistakes_are_named(options, words):
    for ask in (WRITER.write, WRITER.chat, lambda *a, **k: list(WRITER.stream(*a, **k))):
        with pytest.raises(ValueError, match=words):
            ask("Once", **options)


def test_a_text_to_continue_has_no_tools():
    for options in ({"think": True}, {"tools": [{"name": "f"}]}):
        with pytest.raises(ValueError, match="need a conversation"):
            WRITER.stream("Once", **options)


def test_a_page_that_ends_inside_the_word_thought_shows_nothing_of_it():
    for lead in range(16):
        said = "x" * lead + "<|channel>thought\nabc def<channel|>Done<turn|>"
        events = WRITER.stream([{"role": "user", "content": "x"}], constraints=saying(said), max_tokens=80)
        assert "".join(e.reasoning for e in events if isinstance(e, redraft.Committed)) == "abc def"


@pytest.mark.parametrize("device", ["mps", "meta", "toaster", "cuda:99"])
def test_other_devices_are_refused(tmp_path, device):
    with pytest.raises(ValueError, match=device):
        redraft.load(tmp_path, device=device)


def test_an_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match="float8"):
        redraft.load(tiny.save_folder(tmp_path), dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="float17"):
        redraft.load(tiny.save_folder(tmp_path), dtype="float17")


def test_temperature_scales_the_checkpoints_schedule():
    cfg = WRITER.sampler.changed(t_min=0.4, t_max=0.8)
    assert cfg.with_temperature(None) == cfg.with_temperature(1) == cfg.with_temperature(1.0) == cfg
    assert cfg.with_temperature(0.5) == cfg.changed(t_min=0.2, t_max=0.4)
    assert cfg.with_temperature(0) == cfg.changed(t_min=0.4 * 0.02, t_max=0.8 * 0.02)
    for scale in (-0.1, float("inf"), float("nan"), True, "hot"):
        with pytest.raises(redraft.ConfigError, match="temperature"):
            cfg.with_temperature(scale)


def test_python_takes_the_same_temperature_as_the_server():
    cold = WRITER.write("Once", seed=3, temperature=0.5)
    assert cold.ids == WRITER.write("Once", seed=3, t_min=0.5 * WRITER.sampler.t_min, t_max=0.5 * WRITER.sampler.t_max).ids
    assert cold.ids != WRITER.write("Once", seed=3).ids
    assert WRITER.write("Once", seed=3, temperature=1.0).ids == WRITER.write("Once", seed=3).ids
    asked = []
    calls = (
        lambda **k: WRITER.fill("a[[ 2 ]]b", seed=1, **k),
        lambda **k: WRITER.edit("some words", seed=1, strength=1, **k),
    )
    for call in calls:
        with pytest.MonkeyPatch.context() as patch:
            add = WRITER.engine.add
            patch.setattr(WRITER.engine, "add", lambda ids, cfg, add=add, **k: asked.append(cfg.t_max) or add(ids, cfg, **k))
            call(temperature=0.5)
        assert set(asked) == {0.5 * WRITER.sampler.t_max}
        asked.clear()


def test_options_as_a_record_equal_options_as_keywords():
    keywords = {"seed": 3, "max_tokens": 20, "regex": "[a-z]+", "max_steps": 4, "temperature": 0.7}
    record = GenerationOptions.from_keywords(**keywords)
    assert (record.seed, record.regex, dict(record.sampler)) == (3, "[a-z]+", {"max_steps": 4})
    expected = WRITER.write("Once", **keywords).ids
    assert WRITER.write("Once", record).ids == expected
    assert WRITER.write("Once", GenerationOptions.from_keywords(record, seed=9), seed=3).ids == expected
    pieces = [e.text for e in WRITER.stream("Once", options=record) if isinstance(e, redraft.Committed)]
    assert "".join(pieces) == WRITER.write("Once", record).text
    assert WRITER.chat("Hi", record).ids == WRITER.chat("Hi", **keywords).ids
    with pytest.raises(ValueError, match="got regex and choices"):
        GenerationOptions(regex="a", choices=["b"])


def test_write_takes_the_options_of_stream():
    draft = WRITER.tokenizer.encode("hello")
    events = list(WRITER.stream("Once", seed=2, draft=draft, max_tokens=16))
    assert WRITER.write("Once", seed=2, draft=draft, max_tokens=16).ids == tuple(events[-1].ids_BT[0].tolist()[:16])
    recorder = Recorder()
    streamed = WRITER.write("Once", seed=2, draft=draft, max_tokens=16, streamer=recorder)
    assert streamed.ids == WRITER.write("Once", seed=2, draft=draft, max_tokens=16).ids
    with pytest.raises(ValueError, match="do not work with a streamer"):
        WRITER.write("Once", seconds=1.0, streamer=Recorder())
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        WRITER.write("Once", stop=stop)


def test_another_checkpoint_verifies(tmp_path):
    """Exact mode gives the verifier's text; another vocabulary is refused with one sentence."""
    drafter = tiny.save_folder(tmp_path / "drafter", seed=1)
    verifier = tiny.save_folder(tmp_path / "verifier", seed=2)
    writer = redraft.load(drafter, verify_with=verifier, dtype="float32")
    assert writer.sampler.check == "exact"
    expected = redraft.load(verifier, dtype="float32").write("Hello", seed=3, check="exact", draft_length=0, max_tokens=12)
    assert writer.write("Hello", seed=3, max_tokens=12).ids == expected.ids
    with pytest.raises(ValueError, match="vocabular"):
        redraft.load(drafter, verify_with="tiny")
