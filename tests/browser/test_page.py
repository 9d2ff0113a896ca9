"""The web page in a real Chromium: every mode and every control. Screenshots go to build/page."""

import json
import re
from pathlib import Path

import pytest
from browsing import (
    DONE,
    RUNNING,
    SCREENSHOTS,
    STORY,
    answer_from,
    go_to,
    recorded,
    screenshot,
    server_events,
    small,
    tokens,
    write,
)
from PIL import Image
from serving import served

from redraft.config import DEFAULT_EDIT_STRENGTH
from redraft.server.middleware import Limits

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.soak


DRAGON = slice(5, 5 + len(" dragon"))  # where a letter is a token


def count_frames(url) -> int:
    """The denoising steps of the story."""
    return sum(event["type"] == "frame" for event in server_events(url, **STORY))


def test_write_shows_the_text_of_the_server(opened, url):
    page = opened(f"{url}/#write")
    sync_api.expect(page.locator("#model")).to_have_text("tiny")
    write(page)
    end = server_events(url, **STORY)[-1]
    assert page.inner_text(".canvas") == STORY["prompt"] + end["text"]
    assert "tokens/s" in page.inner_text(".meters")
    assert f"{count_frames(url)} steps" in page.inner_text(".meters")
    assert re.search(r"\d\.\d\d GiB", page.inner_text(".meters"))
    screenshot(page, "write_end")


def test_the_slider_shows_every_step(opened, url):
    page = opened(f"{url}/#write")
    write(page)
    frames = [event for event in server_events(url, **STORY) if event["type"] == "frame"]
    go_to(page, 0)
    assert page.inner_text(".position") == "canvas 1, step 1 of 10"
    first = [token["t"].replace("\n", "⏎\n") for token in frames[0]["tokens"]]
    shown = page.locator(".canvas .t:not(.end)").all_text_contents()
    assert shown == first[: len(shown)]
    noise = sum(token["s"] == "n" for token in frames[0]["tokens"][: len(shown)])
    assert page.locator(".canvas .noise").count() == noise > 0
    page.locator("#model").click()
    for _ in range(3):
        page.keyboard.press("j")
    assert page.inner_text(".position") == "canvas 1, step 4 of 10"
    page.keyboard.press("k")
    assert page.inner_text(".position") == "canvas 1, step 3 of 10"
    for kind in ("noise", "changed", "draft"):
        assert page.locator(f".canvas .{kind}").count() > 0, kind
    screenshot(page, "scrub")
    page.keyboard.press(" ")
    sync_api.expect(page.locator(".position")).to_have_text("the end")
    page.keyboard.press("o")
    assert page.locator(".canvas.mapped .t[style]").count() > 20
    screenshot(page, "order_map")
    with page.expect_download() as download:
        page.click("#save-picture")
    download.value.save_as(SCREENSHOTS / "order_map_saved.png")
    saved = Image.open(SCREENSHOTS / "order_map_saved.png").convert("RGB")
    box = page.locator(".canvas").bounding_box()
    assert saved.size == (int(2 * box["width"]), int(2 * box["height"]))
    assert len(saved.getcolors(2**24)) > 30  # text on many background colours


def test_a_token_shows_its_candidates_and_its_history(opened, url):
    page = opened(f"{url}/#write")
    write(page)
    go_to(page, 5)
    token = page.locator(".canvas .changed").first
    word = token.inner_text().strip()
    token.hover()
    assert word.replace("\n", "⏎") in page.inner_text(".details h2")
    assert 1 <= page.locator(".candidates li").count() <= 5
    shares = [float(share.rstrip("%")) for share in page.locator(".candidates b").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 100.5
    assert page.locator(".history .bars i").count() == count_frames(url)
    screenshot(page, "details")


def test_a_token_is_replaced_and_the_run_resumes_from_that_step(opened, url):
    page = opened(f"{url}/#write")
    write(page)
    go_to(page, 3)
    before = tokens(page)
    page.locator(".canvas .t").nth(5).click()
    page.fill(".replacement", " dragon")
    page.keyboard.press("Enter")
    assert page.inner_text(".resume .go") == "Resume from canvas 1, step 4"
    screenshot(page, "steer")
    page.click(".resume .go")
    page.wait_for_selector(DONE)
    interventions = [{"block": 0, "step": 4, "pins": [{"position": 5, "text": " dragon"}], "bans": []}]
    expected = server_events(url, **STORY, interventions=interventions)[-1]["text"]
    assert page.inner_text(".canvas") == STORY["prompt"] + expected
    assert "".join(page.locator(".canvas .t").all_text_contents()[DRAGON]) == " dragon"
    assert page.locator(".canvas .pinned").all_text_contents() == list(" dragon")
    go_to(page, 3)
    assert tokens(page) == before
    screenshot(page, "steered")
    # Once more with the keyboard alone: the token at position 19 is banned at the end.
    go_to(page, 99)
    old = page.locator(".canvas .t").nth(19).text_content()
    page.focus(".canvas")
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("b")
    page.keyboard.press("g")
    page.wait_for_selector(DONE)
    assert page.locator(".canvas .t").nth(19).text_content() != old
    assert "".join(page.locator(".canvas .t").all_text_contents()[DRAGON]) == " dragon"


def test_at_the_end_a_token_is_the_committed_one(opened, url):
    page = opened(f"{url}/#write")
    write(page)
    committed = server_events(url, **STORY)[-2]
    for at in range(0, 32, 4):
        page.locator(".canvas .t").nth(at).click()
        page.keyboard.press("p")
        assert f"id {committed['ids'][at]} " in page.inner_text(".details .facts >> nth=0")
    page.click(".resume .go")
    page.wait_for_selector(DONE)
    again = page.locator(".canvas .t").all_text_contents()
    assert [again[at] for at in range(0, 32, 4)] == [committed["texts"][at] for at in range(0, 32, 4)]


def test_a_check_sweeps_over_the_canvas_and_steering_turns_it_off(opened, url):
    page = opened(f"{url}/#write")
    page.select_option("#form-write [name=check]", "checked")
    write(page, max_steps=4)
    assert page.inner_text(".badge") == "checked"
    body = {**STORY, "max_steps": 4, "check": "checked"}
    begin, *events, end = server_events(url, **body)
    frames = [event for event in events if event["type"] == "frame"]
    assert begin["check"] == "checked"
    assert page.inner_text(".canvas") == STORY["prompt"] + end["text"]
    for name in ("drafted", "accepted", "corrected"):
        assert f"{end['timings'][name]} {name}" in page.inner_text(".meters")
    middle = next(at for at, frame in enumerate(frames) if (frame["verified"] or 0) > 4)
    go_to(page, middle)
    assert page.inner_text(".position") == f"canvas 1, {frames[middle]['verified']} of 32 tokens verified"
    assert page.locator(".canvas .verified").count() == frames[middle]["verified"]
    assert page.locator(".canvas .front").count() == 1
    assert page.locator(".canvas .noise").count() == 0
    screenshot(page, "checked")
    page.locator(".canvas .t").nth(5).click()
    page.fill(".replacement", " dragon")
    page.keyboard.press("Enter")
    assert "turns the check off" in page.inner_text(".resume")
    page.click(".resume .go")
    sync_api.expect(page.locator(".badge")).to_have_text(re.compile("settle"))
    assert "turned the check off" in page.inner_text("#status")
    assert "".join(page.locator(".canvas .t").all_text_contents()[DRAGON]) == " dragon"
    page.reload()
    assert page.input_value("#form-write [name=check]") == page.input_value("#form-chat [name=check]") == "checked"
    page.select_option("#form-write [name=check]", "exact")
    write(page)
    assert page.inner_text(".badge") == "exact"
    assert page.inner_text(".canvas") == STORY["prompt"] + server_events(url, **{**STORY, "check": "exact"})[-1]["text"]
    go_to(page, 2)
    assert page.locator(".canvas .verified").count() == page.locator(".canvas .t").count() > 0
    screenshot(page, "exact")


def test_gaps_are_filled_and_html_is_previewed(opened, url):
    page = opened(f"{url}/#write")
    page.click("#tab-fill")
    text = "The [[ ]] sat on the [[ ]]."
    for name, value in {"text": text, "length": 2, "seed": 3, "max_steps": 6}.items():
        page.fill(f"#form-fill [name={name}]", str(value))
    page.click("#form-fill [type=submit]")
    page.wait_for_selector(DONE)
    known = server_events(url, text=text.replace("[[ ]]", "[[ 2 ]]"), seed=3, max_steps=6)[-1]["text"]
    assert page.inner_text(".result pre") == known
    assert page.locator(".canvas .pinned").count() > 3
    go_to(page, 0)
    screenshot(page, "fill")
    page.fill("#form-fill [name=text]", "<h1>The dog was very [[ ]].</h1>")
    page.fill("#form-fill [name=length]", "")
    page.click("#form-fill [type=submit]")
    page.wait_for_selector(DONE)
    assert page.locator(".result ins").count() == 1
    page.click(".refill")  # with the length that was found, the canvas can be steered
    page.wait_for_selector(DONE)
    sync_api.expect(page.locator(".position")).to_have_text("the end")
    page.locator(".canvas .t:not(.pinned)").first.click()
    assert page.locator(".actions .ban").count() == 1
    shown = page.frame_locator(".preview iframe")
    assert shown.locator("h1").inner_text().startswith("The")
    screenshot(page, "fill_preview")


def test_an_edit_shows_its_changes(opened, url):
    page = opened(f"{url}/#write")
    page.click("#tab-edit")
    assert float(page.input_value("#form-edit [name=strength]")) == DEFAULT_EDIT_STRENGTH
    page.fill("#form-edit [name=seed]", "4")
    page.click("#form-edit [type=submit]")
    page.wait_for_selector(DONE)
    assert page.locator(".result ins").count() == page.locator(".result del").count() > 0
    page.click(".order")
    screenshot(page, "edit")
    text, changed = page.inner_text(".result"), page.locator(".canvas .t:not(.pinned)").first
    old = changed.text_content()
    changed.click()
    page.keyboard.press("b")  # not that one: another
    page.click(".resume .go")
    page.wait_for_selector(DONE)
    assert page.inner_text(".result") != text
    assert page.locator(".canvas .t:not(.pinned)").first.text_content() != old


def test_a_decision_is_shown_as_bars(opened, url, hold):
    page = opened(f"{url}/#write")
    page.keyboard.press("Alt+6")
    page.click("#form-decide [type=submit]")
    page.wait_for_selector(DONE)
    words = page.locator(".result .candidates span").all_text_contents()
    shares = [float(share.rstrip("%")) for share in page.locator(".result .candidates b").all_inner_texts()]
    assert {" happy", " sad"} <= set(words)
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert page.locator(".canvas").is_hidden()
    screenshot(page, "decide")
    page.fill("#form-decide [name=choices]", " sad\n sad")
    page.click("#form-decide [type=submit]")
    sync_api.expect(page.locator("#status")).to_have_text(re.compile("choices must differ"))
    assert page.locator(".result .candidates span").all_text_contents() == words  # the run before it stays
    page.click("#tab-write")
    assert page.locator(".board, .result .candidates").count() == 0  # each tab has its own stage
    assert page.inner_text("#status") == ""
    hold()
    page.click("#form-write [type=submit]")
    page.wait_for_selector(f"{RUNNING} .canvas .t")  # the canvas is shown again, and the run can be stopped
    page.click("#stop")
    sync_api.expect(page.locator("#status")).to_have_text("stopped")
    opened.messages.clear()  # the browser logs the 400


def test_a_puzzle_races_against_autoregressive(opened, url):
    page = opened(f"{url}/#write")
    page.click("#tab-sudoku")
    page.fill("#form-sudoku [name=seed]", "1")
    page.click("#race-boards")
    page.wait_for_selector(DONE)
    facts = page.locator(".race .facts").all_inner_texts()
    assert facts[0].startswith("solved")
    assert "51 forwards, 0 digits" in facts[1]
    assert page.locator(".race .board").count() == 2
    screenshot(page, "race_boards")


def test_a_puzzle_is_solved_and_shown_step_by_step(opened, url):
    page = opened(f"{url}/#write", color_scheme="dark")
    page.keyboard.press("Alt+5")
    page.click("text=Hard")
    page.fill("#form-sudoku [name=seed]", "1")
    page.click("#form-sudoku [type=submit]")
    page.wait_for_selector(DONE)
    assert page.inner_text(".badge") == "solved"
    digits = "".join(page.locator(".board td").all_inner_texts())
    assert len(digits) == 81
    assert all(set(digits[9 * row : 9 * row + 9]) == set("123456789") for row in range(9))
    go_to(page, 1)
    assert page.locator(".board .given").count() == 21
    screenshot(page, "sudoku")


def say_that_it_cannot_chat(route):
    models = route.fetch().json()
    route.fulfill(json={"data": [{**model, "can_chat": False} for model in models["data"]]})


def test_a_conversation_continues_is_kept_and_can_be_edited(opened, url):
    page = opened("about:blank")
    page.route("**/v1/models", say_that_it_cannot_chat)
    page.goto(f"{url}/#chat")
    messages = page.locator("#conversation li")
    sync_api.expect(page.locator("#cannot-chat")).to_have_text(re.compile("tiny was not made to chat"))
    fields = {"max_steps": 8, "seed": 1, "max_tokens": 32, "system": "You like cats."}
    for name, value in fields.items():
        page.fill(f"#form-chat [name={name}]", str(value))
    page.set_input_files("#file", {"name": "cat.txt", "mimeType": "text/plain", "buffer": b"Tom is a cat.\n"})
    sync_api.expect(page.locator("#files li")).to_have_count(1)
    asked = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    for count in (2, 4):
        page.fill("#form-chat [name=message]", "Tell me about a **cat**.")
        page.click("#form-chat [type=submit]")
        page.wait_for_selector(".stage[aria-busy=false]", state="attached")
        sync_api.expect(page.locator("#conversation li.assistant")).to_have_count(count // 2)
    assert [message["role"] for message in asked[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert asked[0]["messages"][1]["content"] == "Tell me about a **cat**.\n\ncat.txt:\n```\nTom is a cat.\n```"
    answer = server_events(url, **asked[1])[-1]["text"]
    kept = json.loads(page.evaluate("localStorage['redraft-conversations']"))
    assert kept[0]["messages"][-1] == {"role": "assistant", "content": answer}
    assert page.locator("#conversation li.assistant .text:visible").count() == 2  # an answer is shown once: as text,
    assert page.locator(".canvas:visible").count() == 0
    assert page.locator("#conversation li.user strong").first.inner_text() == "cat"
    assert page.locator("#conversation li.user pre").first.inner_text() == "Tom is a cat."
    page.click("text=Show the canvas")
    assert page.locator("#conversation li.assistant .text:visible").count() == 1  # or as its canvas
    assert page.inner_text(".canvas").endswith(answer)
    screenshot(page, "chat")
    page.reload()  # the browser has kept it
    page.locator("#conversations button").first.click()
    assert messages.count() == 4
    page.click("#conversation li.user >> nth=1 >> text=Edit")
    page.fill("#form-chat [name=message]", "Tell me about a dog.")
    page.fill("#form-chat [name=max_steps]", "2")
    page.fill("#form-chat [name=max_tokens]", "8")
    page.click("#form-chat [type=submit]")
    sync_api.expect(page.locator("#conversation li.user .text").nth(1)).to_have_text("Tell me about a dog.")
    sync_api.expect(page.locator("#conversation li.assistant")).to_have_count(2)
    page.click("text=Retry")
    page.wait_for_selector(DONE, state="attached")
    assert asked[3]["messages"] == asked[2]["messages"]
    assert asked[3]["seed"] != asked[2]["seed"]


def test_a_conversation_that_is_opened_during_a_run_stays_as_it_is(opened, url, hold):
    page = opened(f"{url}/#chat")
    old = {"id": 1, "system": "", "messages": [{"role": "user", "content": "old"}, {"role": "assistant", "content": "kept"}]}
    page.evaluate("(kept) => localStorage.setItem('redraft-conversations', JSON.stringify([kept]))", old)
    page.reload()
    page.fill("#form-chat [name=max_tokens]", "32")
    page.fill("#form-chat [name=message]", "new")
    steps = hold()
    page.click("#form-chat [type=submit]")
    page.wait_for_selector(f"{RUNNING} .canvas .t")
    page.locator("#conversations button").first.click()
    steps.release(1000)
    sync_api.expect(page.locator("#conversations button")).to_have_count(2)
    kept = json.loads(page.evaluate("localStorage['redraft-conversations']"))
    assert kept[1] == old
    assert kept[0]["messages"][0]["content"] == "new"
    assert page.locator("#conversation li.assistant .text").inner_text() == "kept"


def test_a_message_that_is_stopped_is_not_sent(opened, url, hold):
    page = opened(f"{url}/#chat")
    page.fill("#form-chat [name=seed]", "1")
    page.fill("#form-chat [name=message]", "Never mind.")
    hold()
    page.press("#form-chat [name=message]", "Control+Enter")
    page.wait_for_selector(f"{RUNNING} .canvas .noise")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#form-chat [name=message]")).to_have_value("Never mind.")
    assert page.locator("#conversation li").count() == 0


def test_a_text_races_against_autoregressive(opened, url, hold):
    page = opened(f"{url}/#write")
    for name, value in STORY.items():
        page.fill(f"#form-write [name={name}]", str(value))
    page.click("#start-race")
    page.wait_for_selector(DONE)
    assert "times as fast" in page.inner_text(".race > .hint")
    facts = page.locator(".race .facts").all_inner_texts()
    assert f"{count_frames(url)} forwards" in facts[0]
    assert int(facts[1].split(" tokens")[0]) == int(facts[1].split(", ")[1].split()[0])  # one forward per token
    screenshot(page, "race")
    hold()
    page.click("#start-race")
    page.wait_for_selector(f"{RUNNING} .race .clock")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#status")).to_have_text("stopped")


def test_a_replay_is_one_file_that_plays_without_a_server(opened, url, tmp_path):
    page = opened(f"{url}/#write")
    write(page)
    ended = page.inner_text(".canvas")
    with page.expect_download() as download:
        page.click("#save-replay")
    saved = tmp_path / download.value.suggested_filename
    download.value.save_as(saved)
    with page.expect_download() as download:
        page.click("#save-trace")
    trace = [json.loads(line) for line in Path(download.value.path()).read_text(encoding="utf-8").splitlines()]
    assert [trace[0]["type"], trace[1]["type"], trace[-1]["type"]] == ["request", "begin", "end"]
    again = opened("about:blank")
    requests = []
    again.on("request", lambda request: requests.append(request.url))
    again.goto(saved.as_uri())
    sync_api.expect(again.locator(".position")).to_have_text("the end")
    assert again.inner_text(".canvas") == ended
    assert [address for address in requests if not address.startswith("file:")] == []
    go_to(again, 4)
    assert again.inner_text(".position") == "canvas 1, step 5 of 10"
    again.locator(".canvas .t").nth(3).hover()
    assert again.locator(".candidates li").count() >= 1
    assert again.locator(".actions").count() == 0
    screenshot(again, "replay")


@pytest.mark.parametrize(("width", "height", "scheme"), [(360, 780, "dark"), (3840, 2160, "light")])
def test_the_layout_fits_a_phone_and_a_large_screen(opened, url, width, height, scheme):
    page = opened(url, width, height, color_scheme=scheme)
    answer_from(page, recorded("write")[0]["events"])
    write(page)
    go_to(page, 6)
    for mode in ("write", "chat", "fill", "edit", "sudoku", "decide"):
        page.click(f"#tab-{mode}")
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    size = page.evaluate("parseFloat(getComputedStyle(document.querySelector('.canvas')).fontSize)")
    assert 14 <= size <= 32
    assert width < 1000 or size > 20
    page.click("#tab-write")
    page.locator(".canvas .t").nth(5).click()
    screenshot(page, f"{width}_{scheme}")


def test_generated_scripts_never_run(opened, url):
    page = opened(f"{url}/#write")
    evil = "<p>Look</p><img src=x onerror=\"top.document.title='run'\"><script>top.document.title='run'</script> and"
    write(page, prompt=evil, max_tokens=8)
    assert page.inner_text(".prefix") == evil
    assert page.frame_locator(".preview iframe").locator("p").first.inner_text() == "Look"  # shown, without its scripts
    page.locator(".preview iframe").element_handle().content_frame().wait_for_load_state()  # its image has failed by then
    assert page.title() == "redraft"
    opened.messages[:] = [line for line in opened.messages if "sandbox" not in line and "Content Security" not in line]


def test_errors_are_shown_and_runs_can_be_stopped(opened, url, hold):
    page = opened(f"{url}/#write")
    page.fill("#form-write [name=regex]", "(")
    page.click("#form-write [type=submit]")
    sync_api.expect(page.locator("#status")).to_have_text(re.compile(".{10}"))
    assert "(" in page.inner_text("#status")
    opened.messages.clear()  # the browser logs the 400
    page.fill("#form-write [name=regex]", "")
    hold()
    page.click("#form-write [type=submit]")
    page.wait_for_selector(f"{RUNNING} .canvas .t")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#status")).to_have_text("stopped")
    steps = hold()
    page.fill("#form-write [name=max_steps]", "")
    page.click("#form-write [type=submit]")
    page.wait_for_selector(f"{RUNNING} .canvas .noise")
    page.locator(".canvas .t").nth(4).click()
    page.focus(".replacement")
    for count, letter in enumerate(" gogo", 2):  # while steps arrive: the keys type, they are no shortcuts
        steps.release()
        sync_api.expect(page.locator(".position")).to_have_text(f"canvas 1, step {count} of 10")
        page.keyboard.type(letter)
    assert page.input_value(".replacement") == " gogo"
    page.locator("#model").click()
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")
    page.keyboard.press("Escape")
    steps.release(1000)
    page.wait_for_selector(DONE)  # Escape closed the dialog and did not stop the run
    assert page.inner_text("#status") == ""


def test_the_page_asks_for_the_api_key(opened):
    with served(small(), limits=Limits(key="secret")) as address:
        page = opened(f"{address}/#write")
        page.fill("#form-write [name=max_tokens]", "16")
        page.fill("#form-write [name=max_steps]", "2")
        page.click("#form-write [type=submit]")
        page.wait_for_selector("#key[open]")
        page.fill("#key input", "secret")
        page.click("#key [value=ok]")
        page.wait_for_selector(DONE)
        opened.messages.clear()  # the browser logs the 401s
