"""A real Chromium on the web page, for tests: what they do on it. Screenshots go to build/page."""

import shutil
from pathlib import Path

import httpx

import redraft

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENSHOTS = Path(__file__).parents[1] / "build" / "page"
STORY = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 32, "max_steps": 10}
TIMEOUT_MS = 60_000  # a run may take long on a busy machine
DONE = ".stage[data-state=done][aria-busy=false]"  # the stage of a run that has ended
RUNNING = ".stage[data-state=running]"


def small():
    """The shipped model with short canvases, which are fast on two cores."""
    writer = redraft.load()
    writer.sampler = writer.sampler.changed(canvas_length=32, check="off")
    return writer


def write(page, **changes):
    fields = {**STORY, **changes}
    page.click("#tab-write")
    for name, value in fields.items():
        page.fill(f"#form-write [name={name}]", str(value))
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(DONE)


def go_to(page, index):
    page.locator(".slider").evaluate("(e, to) => { e.value = to; e.dispatchEvent(new Event('input')); }", index)


def tokens(page):
    return page.locator(".canvas .t").all_inner_texts()


def server_events(url, **body):
    answer = httpx.post(f"{url}/v1/canvas", json={"stream": False, **body}, timeout=60)
    return answer.json()["events"]


def screenshot(page, name):
    page.evaluate("document.activeElement?.blur()")
    page.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")  # at their ends
