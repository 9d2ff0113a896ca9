"""A visit to the web page: the greeting, examples, runs of earlier, links, and how it looks and reads at every width.

Pictures of every tab before, during and after a run go to build/page.
"""

import pytest
from browsing import DONE, STORY, answer_from, check_accessibility, go_to, recorded, screenshot, tokens, write

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.soak
TABS = ("write", "chat", "fill", "edit", "sudoku", "decide")
SIZES = {390: 844, 768: 1024, 1440: 900, 2560: 1440}


def posts_of(page):
    """The requests that the page sends to the model from now on."""
    posts = []
    page.on("request", lambda request: posts.append(request.post_data_json) if request.method == "POST" else None)
    return posts


def test_the_page_greets_with_recorded_runs(opened, url):
    page = opened("about:blank", reduced_motion="reduce")
    posts = posts_of(page)
    page.goto(url)
    page.wait_for_selector(".home[data-state=done]")
    diffusion, autoregressive = (run["events"][-1] for run in recorded("sudoku"))
    boards = page.locator(".home .board").all()
    assert ["".join(board.locator("td").all_inner_texts()) for board in boards] == [
        diffusion["text"],
        autoregressive["text"],
    ]
    rows = [diffusion["text"][9 * row : 9 * row + 9] for row in range(9)]
    for group in (rows, ["".join(column) for column in zip(*rows, strict=True)]):
        assert {"".join(sorted(cells)) for cells in group} == {"123456789"}
    assert page.locator(".lane.won h2").inner_text().startswith("Diffusion")
    story = recorded("write")[0]
    assert page.inner_text(".home .canvas") == story["request"]["body"]["prompt"] + story["events"][-1]["text"]
    for tab in TABS:
        page.click(f"#tab-{tab}")
        assert page.locator(f"#form-{tab} .preset").count() >= 3
        for preset in page.locator(f"#form-{tab} .preset").all():
            preset.click()
            assert page.evaluate(f"document.querySelector('#form-{tab}').checkValidity()")
        if tab != "chat":
            page.wait_for_selector(".stage[data-state=recorded]")
            assert len(page.inner_text(".sentence")) > 40
    assert posts == []


def test_a_recorded_run_plays_and_gives_way_to_a_run(opened, url):
    page = opened(f"{url}/#edit")
    sync_api.expect(page.locator(".position")).to_have_text("the end")
    changed = recorded("edit")[0]["events"][-1]
    assert page.locator(".result ins").all_inner_texts() == [change["new"] for change in changed["changes"]]
    page.click("#tab-write")
    write(page)
    assert page.inner_text(".canvas").startswith(STORY["prompt"])
    assert len(tokens(page)) == STORY["max_tokens"]
    page.click("#tab-edit")
    assert page.locator(".stage[data-state=recorded]").count() == 1  # its own stage
    page.click("#tab-write")
    shown = page.inner_text(".canvas")
    page.fill("#form-write [name=regex]", "(")
    page.click("#form-write [type=submit]")
    page.wait_for_selector("#status.bad")
    assert page.inner_text(".canvas") == shown  # bad input erases nothing
    assert "seed 1" in page.inner_text(".meters")
    opened.messages.clear()  # the browser logs the 400


def test_a_run_is_kept_and_a_link_holds_it(opened, url):
    page = opened(f"{url}/#write")
    write(page)
    text = page.inner_text(".canvas")
    page.click("#copy-link")
    link = page.url
    posts = posts_of(page)
    page.reload()  # the browser has kept the run of the link
    sync_api.expect(page.locator(".position")).to_have_text("the end")
    assert page.inner_text(".canvas") == text
    page.click("#history summary")
    page.click("#history li button")
    sync_api.expect(page.locator(".position")).to_have_text("the end")
    assert page.inner_text(".canvas") == text
    page.click("#forget-runs")
    page.wait_for_selector("#history", state="hidden")
    assert posts == []
    other = opened(link)  # another browser sends the request, but only when asked to
    posts = posts_of(other)
    other.wait_for_selector("#linked:visible")
    assert other.input_value("#form-write [name=seed]") == "1"
    assert posts == []
    other.click("#linked button")
    other.wait_for_selector(DONE)
    assert other.inner_text(".canvas") == text


def test_on_a_phone_the_canvas_is_in_sight_and_nothing_covers_it(opened, url):
    page = opened(f"{url}/#write", 390, 844, reduced_motion="reduce")
    assert page.locator("header").bounding_box()["height"] < 64  # one row
    answer_from(page, recorded("write")[0]["events"])
    write(page)
    header = page.locator("header").bounding_box()
    canvas = page.locator(".canvas").bounding_box()
    assert header["y"] + header["height"] <= canvas["y"] < 300
    assert page.locator(".details").is_hidden()
    page.locator(".canvas .t").nth(3).click()
    details = page.locator(".details").bounding_box()
    canvas = page.locator(".canvas").bounding_box()
    assert details["y"] >= canvas["y"] + canvas["height"]
    page.click(".details .close")
    assert page.locator(".details").is_hidden()


MARKDOWN = """# Title

Some *soft* and **loud** words, `code` and [a link](https://example.org).

- one
- two
  1. deep

> said

| a | b |
|---|---|
| 1 | 2 |

```
<b>raw</b>
```
<img src=x onerror=alert(1)>"""
HTML = (
    "<h3>Title</h3><p>Some <em>soft</em> and <strong>loud</strong> words, <code>code</code> and "
    '<a href="https://example.org" target="_blank" rel="noopener noreferrer">a link</a>.</p>'
    '<ul><li>one</li><li>two<ol start="1"><li>deep</li></ol></li></ul><blockquote><p>said</p></blockquote>'
    "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"
    '<pre tabindex="0"><code>&lt;b&gt;raw&lt;/b&gt;</code></pre><p>&lt;img src=x onerror=alert(1)&gt;</p>'
)


def test_markdown_becomes_elements_and_html_stays_text(opened, url):
    page = opened(f"{url}/#chat")
    script = "async (text) => (await import('/page/markdown.js')).markdown(text).map((part) => part.outerHTML).join('')"
    assert page.evaluate(script, MARKDOWN) == HTML


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_greeting_is_accessible(opened, url, scheme):
    page = opened(url, color_scheme=scheme, reduced_motion="reduce")
    page.wait_for_selector(".home[data-state=done]")
    check_accessibility(page)


def look(page, name):
    """Takes pictures of the page in both color schemes, finds no violation in either, and nothing wider than the screen."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        screenshot(page, f"{page.viewport_size['width']}_{scheme}_{name}")
        check_accessibility(page)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= page.viewport_size["width"]


@pytest.mark.parametrize("width", SIZES)
def test_every_tab_before_during_and_after_a_run(opened, url, width):
    page = opened(url, width, SIZES[width], reduced_motion="reduce")
    page.wait_for_selector(".home[data-state=done]")
    look(page, "home")
    for tab in TABS:
        page.click(f"#tab-{tab}")
        look(page, f"{tab}_before")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(DONE, state="attached")
        if tab == "chat":
            page.click("text=Show the canvas")
        if tab != "decide":
            go_to(page, 1)
        look(page, f"{tab}_during")
        if tab != "decide":
            go_to(page, 10_000)
        look(page, f"{tab}_after")
