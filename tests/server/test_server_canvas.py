"""Our own wire format: frames add up to the canvas, a resumed run equals the unbroken one, constraints hold."""

import json
import re

import httpx
import pytest
from serving import make, served

from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Draft

WRITER = make()
EOS = [1, 5]
STORY = {"prompt": "Hello", "seed": 7, "max_tokens": 32, "forbidden": EOS, "max_steps": 6}
PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"


@pytest.fixture(scope="module")
def url():
    with served(WRITER) as address:
        yield address


def events(url, path="", **body):
    answer = httpx.post(f"{url}/v1/canvas{path}", json={"stream": False, **body}, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()["events"]


def refusal(url, path="", **body):
    answer = httpx.post(f"{url}/v1/canvas{path}", json=body, timeout=600)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def of(kind, found):
    return [event for event in found if event["type"] == kind]


def canvases_of(frames):
    """The whole canvas after each frame, put together from the changed tokens."""
    canvases = []
    tokens = {}
    block = 0
    for frame in frames:
        tokens = tokens if frame["block"] == block else {}
        block = frame["block"]
        tokens = {**tokens, **{token["i"]: token for token in frame["tokens"]}}
        canvases.append([tokens[position] for position in sorted(tokens)])
    return canvases


def test_frames_add_up_to_the_drafts_of_the_engine(url):
    found = events(url, **STORY, candidates=3)
    constraints, options = Constraints(forbidden=(1, 5)), {"max_tokens": 32, "max_steps": 6}
    drafts = [
        event
        for event in WRITER.stream("Hello", seed=7, constraints=constraints, candidates=3, **options)
        if isinstance(event, Draft)
    ]
    frames = of("frame", found)
    assert len(frames) == len(drafts) > 4
    for event, tokens in zip(drafts, canvases_of(frames), strict=True):
        assert [token["id"] for token in tokens] == event.canvas_BC[0].tolist()
        assert [token["s"] == "d" for token in tokens] == event.accepted_BC[0].tolist()
        assert [token["c"][0][0] for token in tokens] == event.ids_BC[0].tolist()
        assert [token["p"] for token in tokens] == [round(share, 4) for share in event.top_probs.own_BC[0].tolist()]
        assert all(token["t"] == WRITER.tokenizer.decode_fragment([token["id"]]) for token in tokens)
    assert any(len(frame["tokens"]) < 16 for frame in frames)
    assert found[-1]["text"] == WRITER.write("Hello", seed=7, constraints=constraints, **options).text
    assert "".join(canvas["text"] for canvas in of("canvas", found)) == found[-1]["text"]


def test_a_stream_is_the_same_events(url):
    with httpx.stream("POST", f"{url}/v1/canvas", json=STORY, timeout=600) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    told, expected = [json.loads(line) for line in lines], events(url, **STORY)
    assert [one for one in told if one["type"] != "end"] == [one for one in expected if one["type"] != "end"]
    assert told[-1]["text"] == expected[-1]["text"]


def test_a_resumed_run_without_a_change_equals_the_unbroken_run(url):
    before = events(url, **STORY)
    first = of("canvas", before)[0]["ids"]
    again = events(
        url, **STORY, canvases=[first], interventions=[{"block": 1, "step": 2}], resume_at={"block": 1, "step": 2}
    )
    expected = [frame for frame in of("frame", before) if (frame["block"], frame["step"]) > (1, 2)]
    assert [frame["step"] for frame in of("frame", again)] == [frame["step"] for frame in expected]
    shown = [[frame for frame in of("frame", found) if frame["block"] == 1] for found in (before, again)]
    assert canvases_of(shown[0])[2:] == canvases_of(shown[1])
    assert of("canvas", again) == of("canvas", before)[1:]
    assert again[-1]["text"] == before[-1]["text"]


def test_pins_and_bans_of_an_intervention_hold(url):
    before = events(url, **STORY)
    old = of("canvas", before)[0]["ids"]
    interventions = [
        {"block": 0, "step": 2, "pins": [{"position": 3, "text": "xy"}], "bans": [{"position": 8, "id": old[8]}]}
    ]
    canvas = of("canvas", events(url, **STORY, interventions=interventions))[0]
    assert canvas["texts"][3:5] == ["x", "y"]
    assert canvas["ids"][8] != old[8]
    freed = [*interventions, {"block": 0, "step": 3, "free": [3, 4, 8], "bans": [{"position": 3, "text": "x"}]}]
    assert of("canvas", events(url, **STORY, interventions=freed))[0]["texts"][3] != "x"
    frames = of("frame", events(url, **STORY, pins=[{"position": 0, "text": "A"}]))
    assert (frames[0]["tokens"][0]["t"], frames[0]["tokens"][0]["s"]) == ("A", "k")


def test_gaps_of_given_lengths_share_a_canvas_and_can_be_steered(url):
    found = events(url, text="ab.[[ 3 ]], cd [[ 2 ]]!", seed=3)
    assert (found[0]["prefix"], found[-1]["text"][:3]) == ("ab.", "ab.")
    canvas = of("canvas", found)[0]
    assert "".join(canvas["texts"])[3:8] == ", cd "
    assert found[-1]["text"] == "ab." + canvas["text"]
    pinned = [{"block": 0, "step": 1, "pins": [{"position": 1, "text": "Q"}]}]
    assert events(url, text="ab.[[ 3 ]], cd [[ 2 ]]!", seed=3, interventions=pinned)[-1]["text"][4] == "Q"


@pytest.mark.soak
def test_gaps_without_lengths_are_filled_as_the_writer_does(url):
    text = "ab [[ ]] cd[[ ]]."
    found = events(url, text=text, seed=3)
    expected = WRITER.fill(text, seed=3)
    assert (found[-1]["text"], tuple(found[-1]["gaps"])) == (expected.text, expected.gaps)
    assert {frame["block"] for frame in of("frame", found)} == {0, 1}
    assert any(token["s"] == "k" for token in of("frame", found)[0]["tokens"])
    assert "only gaps of a given length" in refusal(url, text=text, pins=[{"position": 1, "id": 3}])


def test_an_edit_equals_the_writers(url):
    found = events(url, "/edit", text="some text that stays", strength=0.5, seed=4, keep=[[0, 4]])
    expected = WRITER.edit("some text that stays", strength=0.5, seed=4, keep=[(0, 4)])
    assert found[-1]["text"] == expected.text
    assert [change["new"] for change in found[-1]["changes"]] == [change.new for change in expected.changes]
    assert len(of("frame", found)) > 0


def test_patterns_and_a_draft_are_honoured(url):
    found = events(url, prompt="Hello", regex="[0-9]{4}", seed=1)[-1]["text"]
    assert len(found) == 4
    assert found.isdigit()
    assert events(url, prompt="Hello", choices=["yes", "no"], seed=1)[-1]["text"] in ("yes", "no")
    first = events(url, **STORY, draft="0123456789abcdef")[1]["tokens"]
    assert first != events(url, **STORY)[1]["tokens"]


def test_autoregressive_makes_one_token_per_forward(url):
    found = events(url, "/autoregressive", prompt="Hello", max_tokens=12, seed=1)
    assert 0 < len(of("token", found)) <= 12
    assert found[-1]["timings"]["diffusion_forwards"] == len(of("token", found))
    cold = [events(url, "/autoregressive", prompt="Hello", max_tokens=12, seed=seed, temperature=0) for seed in (1, 2)]
    assert of("token", cold[0]) == of("token", cold[1])


def test_a_puzzle_is_solved_by_the_model_in_the_package(url):
    found = events(url, "/sudoku", puzzle=PUZZLE, seed=1)
    assert found[-1]["solved"]
    assert all(str(digit) == given for digit, given in zip(found[-1]["board"], PUZZLE, strict=True) if given != ".")
    assert len(of("board", found)) >= 1
    assert "81" in refusal(url, "/sudoku", puzzle="123")


def test_an_autoregressive_board_never_changes_a_cell(url):
    found = events(url, "/sudoku", puzzle=PUZZLE, seed=1, autoregressive=True)
    boards, open_ = [event["board"] for event in of("board", found)], [at for at, cell in enumerate(PUZZLE) if cell == "."]
    assert len(boards) == len(open_) == found[-1]["forwards"]
    for step, board in enumerate(boards):
        assert [at for at in open_ if board[at]] == open_[: step + 1]
        assert all(board[at] == boards[-1][at] for at in open_[: step + 1])
    assert (found[-1]["canvases"], found[-1]["revisions"], found[-1]["board"]) == (1, 0, boards[-1])


def test_several_bans_at_a_position_hold_together(url):
    seen = set()
    for _ in range(3):
        bans = [{"position": 8, "id": token} for token in seen]
        token = of("canvas", events(url, **STORY, bans=bans))[0]["ids"][8]
        assert token not in seen
        seen.add(token)


def test_small_requests_cannot_take_the_server_down(url):
    assert "belongs to no gap" in refusal(url, text="[[" + " " * 200_000)
    assert "does not fit" in refusal(url, text="a [[ 1 ]] b [[ 1000000000 ]]")
    assert "interventions" in refusal(url, prompt="a", interventions=[{"block": 0, "step": 1}] * 65)
    assert "beyond the answer" in refusal(url, prompt="a", pins=[{"position": 900_000, "text": "x" * 200}] * 10)
    assert "more than 4,096 tokens" in refusal(url, prompt="a", pins=[{"position": 900_000, "text": "x" * 200}] * 500)
    assert httpx.get(f"{url}/page/{'a' * 3000}.js").status_code == 404
    assert httpx.get(f"{url}/page/..%2Fpage.py").status_code == 404


def test_unknown_fields_inside_lists_are_named_too(url):
    answer = httpx.post(f"{url}/v1/canvas", json={**STORY, "interventions": [{"block": 0, "step": 1, "pin": []}] * 1})
    assert answer.headers["x-redraft-unknown-fields"] == "interventions.pin"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "exactly one of"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "exactly one of"),
        ({"prompt": "a", "text": "b [[ 2 ]]"}, "exactly one of"),
        ({"prompt": "a", "text": "b [[ ]]"}, "exactly one of"),
        ({"text": "b [[ ]]", "max_tokens": 3}, "leave max_tokens out"),
        ({"prompt": "a", "think": True}, "leave think out"),
        ({"prompt": "a", "regex": "[0-9]*", "canvases": [[70] * 16], "max_tokens": 32}, "does not fit the pattern"),
        ({"text": "a [[ 600 ]] [[ ]]"}, "does not fit the model's context"),
        ({"text": "nothing to fill"}, "there is nothing to fill"),
        ({"prompt": "a", "pins": [{"position": 1}]}, "has either an id or a text, at position 1"),
        ({"prompt": "a", "pins": [{"position": 1, "text": ""}]}, "the text at position 1 is empty"),
        ({"prompt": "a", "pins": [{"position": 1, "id": 99999}]}, "outside the vocabulary"),
        ({"prompt": "a", "interventions": [{"block": 0, "step": 99}]}, "the last possible is canvas"),
        ({"prompt": "a", "canvases": [[1, 2]]}, "canvas 0 has 2 tokens, canvas_length is 16"),
        ({"prompt": "a", "candidates": 0}, "candidates"),
        ({"prompt": "a", "regex": "("}, "\\("),
    ],
)
def test_bad_requests_raise_before_anything_is_streamed(url, body, sentence):
    assert re.search(sentence, refusal(url, **body))


def test_an_edit_is_steered_and_resumed(url):
    text = "some text that stays or does not"
    asked = {"text": text, "strength": 0.5, "seed": 4}
    first = events(url, "/edit", **asked)
    (zero, one), frames = of("canvas", first), of("frame", first)
    assert len(zero["ids"]) + len(one["ids"]) == len(WRITER.tokenizer.encode(text))
    intervention = {"block": 1, "step": 1, "pins": [{"position": 20, "text": "Z"}]}
    again = events(
        url, "/edit", **asked, interventions=[intervention], canvases=[zero["ids"]], resume_at={"block": 1, "step": 1}
    )
    (canvas,) = of("canvas", again)
    assert canvas["texts"][4] == "Z"
    assert canvas["ids"] != one["ids"]
    assert of("frame", again)[0]["step"] == 2
    unbroken = events(url, "/edit", **asked, interventions=[{**intervention, "pins": []}], canvases=[zero["ids"]])
    assert of("frame", unbroken) == [frame for frame in frames if frame["block"] == 1]


def test_a_decision_equals_the_writers_and_is_ranked(url):
    begin, end = events(url, "/decide", messages=[{"role": "user", "content": "x"}], choices=["ab", "c", "d"])
    expected = WRITER.decide([{"role": "user", "content": "x"}], ["ab", "c", "d"])
    assert begin["type"] == "begin"
    assert {one["text"]: one["probability"] for one in end["choices"]} == pytest.approx(expected)
    shares = [one["probability"] for one in end["choices"]]
    assert shares == sorted(shares, reverse=True)
    assert end["timings"]["diffusion_forwards"] == 1
    assert "choices must differ" in refusal(url, "/decide", prompt="x", choices=["a", "a"])
    assert "exactly one of" in refusal(url, "/decide", choices=["a", "b"])


def test_the_prompt_of_a_decision_is_tokenized_once(url, monkeypatch):
    prompts = []
    encode = WRITER.tokenizer.encode_prompt
    monkeypatch.setattr(WRITER.tokenizer, "encode_prompt", lambda text, *rest: prompts.append(text) or encode(text, *rest))
    events(url, "/decide", prompt="x", choices=["a", "b"])
    assert prompts == ["x"]


def test_the_end_event_has_the_memory_in_use(url):
    memory = events(url, prompt="a", seed=1)[-1]["memory"]
    assert 2**26 < memory["process"] < 2**40
    assert memory["device"] is None


def test_a_pattern_is_steered(url):
    asked = {"prompt": "a", "seed": 4, "regex": "[a-z]{20}"}
    old = events(url, **asked)[-1]["text"]
    intervention = {"block": 0, "step": 1, "pins": [{"position": 2, "text": "q"}], "bans": [{"position": 5, "text": old[5]}]}
    new = events(url, **asked, interventions=[intervention])[-1]["text"]
    assert re.fullmatch("[a-z]{20}", new)
    assert new[2] == "q"
    assert new[5] != old[5]


def test_an_intervention_on_a_later_canvas_with_nothing_to_redraft_is_a_bad_request(url):
    """The first canvas is redrafted; all tokens of the second one are kept, which only its turn shows."""
    body = {"text": "a" * 32, "strength": 0.5, "seed": 4, "keep": [[16, 32]], "stream": False}
    body["interventions"] = [{"block": 1, "step": 1, "pins": [{"position": 20, "text": "Z"}]}]
    assert "nothing to redraft" in refusal(url, "/edit", **body)


def test_bad_edits_raise_before_anything_is_streamed(url):
    assert "outside of the text" in refusal(url, "/edit", text="abc", keep=[[0, 99]])
    assert "take it in parts" in refusal(url, "/edit", text="abc " * 200)
    assert "exactly one of" in refusal(url, "/autoregressive")
    assert "do not fit the context" in refusal(url, "/autoregressive", prompt="a", max_tokens=5000)


def test_frames_of_chats_have_probabilities_too(url):
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "diffusing": True, "max_tokens": 16, "seed": 1}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    frames = [json.loads(line) for line in lines if "diffusion_frame" in line]
    assert set(frames[0]["tokens"][0]) == {"i", "t", "s", "p", "e"}
    assert all(0 <= token["p"] <= 1 for frame in frames for token in frame["tokens"])


def test_watching_does_not_change_the_text(url):
    seen = events(url, **STORY)[-1]["text"]
    plain = {"prompt": "Hello", "seed": 7, "max_tokens": 32, "diffusion_max_steps": 6, "logit_bias": {"1": -100, "5": -100}}
    assert httpx.post(f"{url}/v1/completions", json=plain, timeout=600).json()["choices"][0]["text"] == seen
