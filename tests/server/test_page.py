"""The page in a real Chromium, all that can be done on it. Pictures go to build/page."""

import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
from PIL import Image
from serving import served

import redraft
from redraft.server.middleware import Limits

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here; .ci/run installs it"),
]
PICTURES = Path(__file__).parents[2] / "build" / "page"
STORY = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 64, "max_steps": 10}
CALM = 60_000  # milliseconds that a run may take where many tests share two cores


@pytest.fixture(scope="module")
def url():
    with served(small(), name="tiny") as address:
        yield address


def small():
    """The shipped model on short pages: two cores are soon done with them."""
    writer = redraft.load()
    writer.sampler = writer.sampler.changed(canvas_length=64)
    return writer


@pytest.fixture(scope="module")
def chromium():
    PICTURES.mkdir(parents=True, exist_ok=True)
    sync_api.expect.set_options(timeout=CALM)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Makes pages; at the end nothing may have been complained of on any console."""
    said, contexts = [], []

    def open_(address, width=1440, height=900, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(CALM)
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)
        return page

    open_.said = said
    yield open_
    for context in contexts:
        context.close()
    assert said == []


def write(page, **changes):
    asked = {**STORY, **changes}
    page.click("#tab-write")
    for name, value in asked.items():
        page.fill(f"#form-write [name={name}]", str(value))
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".badge")


def scrub(page, index):
    page.locator(".scrub").evaluate("(e, to) => { e.value = to; e.dispatchEvent(new Event('input')); }", index)


def tokens(page):
    return page.locator(".page .t").all_inner_texts()


def said_by_server(url, **body):
    answer = httpx.post(f"{url}/v1/canvas", json={"stream": False, **body}, timeout=60)
    return answer.json()["events"]


def picture(page, name):
    page.evaluate("document.activeElement?.blur()")
    page.wait_for_timeout(600)  # what flashes has calmed down
    page.screenshot(path=PICTURES / f"{name}.png")


@pytest.mark.timed
def test_it_is_painted_at_once(opened, url):
    page = opened(url)
    page.wait_for_timeout(300)
    assert page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 1000


def test_it_writes_what_the_server_says(opened, url):
    page = opened(url)
    sync_api.expect(page.locator("#model")).to_have_text("tiny")
    write(page)
    text = said_by_server(url, **STORY)[-1]["text"]
    assert page.inner_text(".page") == STORY["prompt"] + text
    assert "tokens/s" in page.inner_text(".meters")
    assert "10 steps" in page.inner_text(".meters")
    assert re.search(r"\d\.\d\d GiB", page.inner_text(".meters"))
    picture(page, "write_end")


def test_scrubbing_shows_every_step_as_it_was(opened, url):
    page = opened(url)
    write(page)
    frames = [event for event in said_by_server(url, **STORY) if event["type"] == "frame"]
    scrub(page, 0)
    assert page.inner_text(".where") == "page 1, step 1 of 10"
    first = [token["t"].replace("\n", "⏎\n") for token in frames[0]["tokens"]]
    shown = page.locator(".page .t:not(.end)").all_text_contents()
    assert shown == first[: len(shown)]
    noise = sum(token["s"] == "n" for token in frames[0]["tokens"][: len(shown)])
    assert page.locator(".page .noise").count() == noise > 0
    page.locator("h1").click()
    for _ in range(3):
        page.keyboard.press("j")
    assert page.inner_text(".where") == "page 1, step 4 of 10"
    page.keyboard.press("k")
    assert page.inner_text(".where") == "page 1, step 3 of 10"
    for kind in ("noise", "changed", "draft"):
        assert page.locator(f".page .{kind}").count() > 0, kind
    picture(page, "scrub")
    page.keyboard.press(" ")
    sync_api.expect(page.locator(".where")).to_have_text("the end")
    page.keyboard.press("o")
    assert page.locator(".page.mapped .t[style]").count() > 20
    picture(page, "order_map")
    with page.expect_download() as kept:
        page.click("#save-picture")
    kept.value.save_as(PICTURES / "order_map_saved.png")
    saved = Image.open(PICTURES / "order_map_saved.png").convert("RGB")
    box = page.locator(".page").bounding_box()
    assert saved.size == (int(2 * box["width"]), int(2 * box["height"]))
    assert len(saved.getcolors(2**24)) > 30  # ink on many grounds


def test_a_token_shows_what_else_it_could_be_and_what_stood_there(opened, url):
    page = opened(url)
    write(page)
    scrub(page, 5)
    token = page.locator(".page .changed").first
    word = token.inner_text().strip()
    token.hover()
    assert word.replace("\n", "⏎") in page.inner_text(".closer h2")
    assert 1 <= page.locator(".candidates li").count() <= 5
    shares = [float(share.rstrip("%")) for share in page.locator(".candidates b").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 100.5
    assert page.locator(".past .bars i").count() == 10
    picture(page, "closely")


def test_a_token_is_replaced_and_the_run_goes_on_from_that_step(opened, url):
    page = opened(url)
    write(page)
    scrub(page, 3)
    before = tokens(page)
    page.locator(".page .t").nth(5).click()
    page.fill(".instead", " dragon")
    page.keyboard.press("Enter")
    assert page.inner_text(".going .go") == "Go on from page 1, step 4"
    picture(page, "steer")
    page.click(".going .go")
    page.wait_for_selector(".badge")
    turns = [{"block": 0, "step": 4, "pins": [{"at": 5, "text": " dragon"}], "bans": []}]
    expected = said_by_server(url, **STORY, turns=turns)[-1]["text"]
    assert page.inner_text(".page") == STORY["prompt"] + expected
    assert page.locator(".page .t").nth(5).inner_text().strip() == "dragon"
    assert "pinned" in page.locator(".page .t").nth(5).get_attribute("class")
    scrub(page, 3)
    assert tokens(page) == before
    picture(page, "steered")
    # And once more, by keys alone: the token at place 9 is banned where it stands at the end.
    scrub(page, 99)
    old = page.locator(".page .t").nth(9).text_content()
    page.focus(".page")
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("b")
    page.keyboard.press("g")
    page.wait_for_selector(".badge")
    assert page.locator(".page .t").nth(9).text_content() != old
    assert page.locator(".page .t").nth(5).inner_text().strip() == "dragon"


def test_at_the_end_a_token_is_the_one_that_was_committed(opened, url):
    page = opened(url)
    write(page)
    committed = said_by_server(url, **STORY)[-2]
    for at in range(0, 64, 7):
        page.locator(".page .t").nth(at).click()
        page.keyboard.press("p")
        assert f"id {committed['ids'][at]} " in page.inner_text(".closer .facts >> nth=0")
    page.click(".going .go")
    page.wait_for_selector(".badge")
    again = page.locator(".page .t").all_text_contents()
    assert [again[at] for at in range(0, 64, 7)] == [committed["texts"][at] for at in range(0, 64, 7)]


def test_holes_are_filled_and_show_as_a_page(opened, url):
    page = opened(url)
    page.click("#tab-fill")
    text = "The [[ ]] sat on the [[ ]]."
    for name, value in {"text": text, "length": 2, "seed": 3}.items():
        page.fill(f"#form-fill [name={name}]", str(value))
    page.click("#form-fill [type=submit]")
    page.wait_for_selector(".result:visible")
    known = said_by_server(url, text=text.replace("[[ ]]", "[[ 2 ]]"), seed=3)[-1]["text"]
    assert page.inner_text(".result pre") == known
    assert page.locator(".page .pinned").count() > 3
    scrub(page, 0)
    picture(page, "fill")
    page.fill("#form-fill [name=text]", "<h1>The dog was very [[ ]].</h1>")
    page.fill("#form-fill [name=length]", "")
    page.click("#form-fill [type=submit]")
    page.wait_for_selector(".result ins")
    assert page.locator(".result ins").count() == 1
    page.click(".again")  # with the length that was found, it can be steered
    page.wait_for_selector(".badge")
    sync_api.expect(page.locator(".where")).to_have_text("the end")
    page.locator(".page .t:not(.pinned)").first.click()
    assert page.locator(".actions .ban").count() == 1
    shown = page.frame_locator("#preview iframe")
    assert shown.locator("h1").inner_text().startswith("The")
    picture(page, "fill_preview")


def test_an_edit_shows_what_has_changed(opened, url):
    page = opened(url)
    page.click("#tab-edit")
    page.fill("#form-edit [name=seed]", "4")
    page.click("#form-edit [type=submit]")
    page.wait_for_selector(".result ins")
    assert page.locator(".result ins").count() == page.locator(".result del").count() > 0
    page.click(".order")
    picture(page, "edit")
    text, changed = page.inner_text(".result"), page.locator(".page .t:not(.pinned)").first
    old = changed.text_content()
    changed.click()
    page.keyboard.press("b")  # not that one: another
    page.click(".going .go")
    page.wait_for_selector(".badge")
    assert page.inner_text(".result") != text
    assert page.locator(".page .t:not(.pinned)").first.text_content() != old


def test_a_decision_is_shown_as_bars(opened, url):
    page = opened(url)
    page.keyboard.press("Alt+6")
    page.click("#form-decide [type=submit]")
    page.wait_for_selector(".result .candidates li")
    words = page.locator(".result .candidates span").all_text_contents()
    shares = [float(share.rstrip("%")) for share in page.locator(".result .candidates b").all_inner_texts()]
    assert words[0] == " sad"
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert page.locator(".page").is_hidden()
    picture(page, "decide")
    page.fill("#form-decide [name=choices]", " sad\n sad")
    page.click("#form-decide [type=submit]")
    sync_api.expect(page.locator("#status")).to_have_text(re.compile("choices must differ"))
    page.click("#tab-write")
    page.click("#form-write [type=submit]")
    page.wait_for_selector(".page .t")  # it is shown again, and can be stopped
    page.click("#stop")
    sync_api.expect(page.locator("#status")).to_have_text("stopped")
    opened.said.clear()  # the browser notes the 400 itself


def test_a_board_races_cell_after_cell(opened, url):
    page = opened(url)
    page.click("#tab-sudoku")
    page.fill("#form-sudoku [name=seed]", "1")
    page.click("#race-boards")
    page.wait_for_selector(".race .arrived >> nth=1")
    facts = page.locator(".race .facts").all_inner_texts()
    assert facts[0].startswith("solved")
    assert "51 passes, 0 digits" in facts[1]
    assert page.locator(".race .board").count() == 2
    picture(page, "race_boards")


def test_a_sudoku_is_solved_before_ones_eyes(opened, url):
    page = opened(url, color_scheme="dark")
    page.keyboard.press("Alt+5")
    page.click("text=Puzzle 2")
    page.fill("#form-sudoku [name=seed]", "1")
    page.click("#form-sudoku [type=submit]")
    page.wait_for_selector(".badge")
    assert page.inner_text(".badge") == "solved"
    digits = "".join(page.locator(".board td").all_inner_texts())
    assert len(digits) == 81
    assert all(set(digits[9 * row : 9 * row + 9]) == set("123456789") for row in range(9))
    scrub(page, 1)
    assert page.locator(".board .given").count() == 21
    picture(page, "sudoku")


def test_a_conversation_goes_on(opened, url):
    page = opened(url)
    page.click("#tab-chat")
    page.fill("#form-chat [name=max_steps]", "8")
    for count in (2, 4):
        page.fill("#form-chat [name=message]", "Tell me about a cat.")
        page.click("#form-chat [type=submit]")
        sync_api.expect(page.locator("#talk li")).to_have_count(count)
    assert page.locator("#talk li.assistant").count() == 2
    picture(page, "chat")
    # What is stopped was not said, and what is typed meanwhile stays.
    for name, value in {"max_steps": 96, "temperature": 2, "max_tokens": 600}.items():  # it cannot settle meanwhile
        page.fill(f"#form-chat [name={name}]", str(value))
    page.fill("#form-chat [name=message]", "Never mind.")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".page .noise")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#form-chat [name=message]")).to_have_value("Never mind.")
    assert page.locator("#talk li").count() == 4
    # A story that is told while one looks at the conversation is no part of it.
    page.click("#tab-write")
    page.fill("#form-write [name=max_steps]", "10")
    page.click("#form-write [type=submit]")
    page.click("#tab-chat")
    page.wait_for_selector(".badge")
    assert page.locator("#talk li").count() == 4


def test_a_race_is_measured_and_shown(opened, url):
    page = opened(url)
    for name, value in STORY.items():
        page.fill(f"#form-write [name={name}]", str(value))
    page.click("#start-race")
    page.wait_for_selector(".race .arrived >> nth=1")
    assert "times as fast" in page.inner_text(".race > .hint")
    facts = page.locator(".race .facts").all_inner_texts()
    assert "10 passes" in facts[0]
    assert int(facts[1].split(" tokens")[0]) == int(facts[1].split(", ")[1].split()[0])  # a pass for every token
    picture(page, "race")
    page.click("#start-race")
    page.wait_for_selector(".race .clock")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#status")).to_have_text("stopped")


def test_a_replay_is_one_file_that_plays_without_a_server(opened, url, tmp_path):
    page = opened(url)
    write(page)
    ended = page.inner_text(".page")
    with page.expect_download() as kept:
        page.click("#save-replay")
    saved = tmp_path / kept.value.suggested_filename
    kept.value.save_as(saved)
    with page.expect_download() as kept:
        page.click("#save-trace")
    trace = [json.loads(line) for line in Path(kept.value.path()).read_text(encoding="utf-8").splitlines()]
    assert [trace[0]["type"], trace[1]["type"], trace[-1]["type"]] == ["asked", "begin", "end"]
    again = opened("about:blank")
    asked = []
    again.on("request", lambda request: asked.append(request.url))
    again.goto(saved.as_uri())
    sync_api.expect(again.locator(".where")).to_have_text("the end")
    assert again.inner_text(".page") == ended
    assert [address for address in asked if not address.startswith("file:")] == []
    scrub(again, 4)
    assert again.inner_text(".where") == "page 1, step 5 of 10"
    again.locator(".page .t").nth(3).hover()
    assert again.locator(".candidates li").count() >= 1
    assert again.locator(".actions").count() == 0
    picture(again, "replay")


@pytest.mark.parametrize(("width", "height", "scheme"), [(360, 780, "dark"), (3840, 2160, "light")])
def test_it_is_readable_on_a_phone_and_on_a_wall(opened, url, width, height, scheme):
    page = opened(url, width, height, color_scheme=scheme)
    write(page)
    scrub(page, 6)
    for mode in ("write", "chat", "fill", "edit", "sudoku", "decide"):
        page.click(f"#tab-{mode}")
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    size = page.evaluate("parseFloat(getComputedStyle(document.querySelector('.page')).fontSize)")
    assert 14 <= size <= 32
    assert width < 1000 or size > 20
    page.click("#tab-write")
    page.locator(".page .t").nth(5).click()
    picture(page, f"{width}_{scheme}")


def test_what_is_written_is_never_run(opened, url):
    page = opened(url)
    evil = "<p>Look</p><img src=x onerror=\"top.document.title='run'\"><script>top.document.title='run'</script> and"
    write(page, prompt=evil, max_tokens=8)
    assert page.inner_text(".before") == evil
    assert page.frame_locator("#preview iframe").locator("p").inner_text() == "Look"  # it is shown, and does nothing
    page.wait_for_timeout(300)
    assert page.title() == "redraft"
    opened.said[:] = [line for line in opened.said if "sandbox" not in line and "Content Security" not in line]


def test_mistakes_are_told_and_what_runs_can_be_stopped(opened, url):
    page = opened(url)
    page.fill("#form-write [name=regex]", "(")
    page.click("#form-write [type=submit]")
    sync_api.expect(page.locator("#status")).to_have_text(re.compile(".{10}"))
    assert "(" in page.inner_text("#status")
    opened.said.clear()  # the browser notes the 400 itself
    page.fill("#form-write [name=regex]", "")
    page.click("#form-write [type=submit]")
    page.wait_for_selector(".page .t")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#status")).to_have_text("stopped")
    page.fill("#form-write [name=max_steps]", "")
    page.click("#form-write [type=submit]")
    page.wait_for_selector(".page .noise")
    page.locator(".page .t").nth(4).click()
    page.type(".instead", " gogo", delay=150)  # while steps come in: letters are letters
    assert page.input_value(".instead") == " gogo"
    page.locator("h1").click()
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector(".badge")  # it closed the keys, and stopped nothing
    assert page.inner_text("#status") == ""


def test_a_key_is_asked_for(opened):
    with served(small(), limits=Limits(key="secret")) as address:
        page = opened(address)
        page.click("#form-write [type=submit]")
        page.wait_for_selector("#key[open]")
        page.fill("#key input", "secret")
        page.click("#key [value=ok]")
        page.wait_for_selector(".badge")
        opened.said.clear()  # the browser notes the 401s itself
