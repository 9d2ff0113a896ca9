"""A real Chromium on the web page, for tests: what they do on it. Screenshots go to build/page."""

import json
import shutil
import string
import threading
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
import tiny
import torch
from serving import EchoWriter

from redraft.tasks.generation import GenerationOptions

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENSHOTS = Path(__file__).parents[1] / "build" / "page"
STORY = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 32, "max_steps": 10}
TIMEOUT_MS = 600_000  # a busy machine may need minutes
DONE = ".stage[data-state=done][aria-busy=false]"  # the stage of a run that has ended
RUNNING = ".stage[data-state=running]"


class SteppedWriter(EchoWriter):
    """A writer whose runs a test can hold: with `steps`, each event after the first waits for a release of it."""

    steps: threading.Semaphore | None = None

    def stream(self, prompt, options=None, **keywords):
        options = GenerationOptions.from_keywords(options, **keywords)
        return self._wait_between(super().stream(prompt, options), options.stop, self.steps)

    def _wait_between(self, events, stop, steps):
        for event in events:
            yield event
            while steps is not None and not stop.is_set() and not steps.acquire(timeout=0.02):
                pass


def small():
    """A writer with a tiny random model. It writes letters, and no canvas settles: a run has all its steps."""
    tokenizer = tiny.byte_tokenizer()
    model = tiny.decided(replace(tiny.BASE, max_position_embeddings=2048))
    letters = tokenizer.encode(string.ascii_letters)
    with torch.no_grad():
        rows = model.embed_tokens.weight[letters].clone()
        model.embed_tokens.weight.zero_()
        model.embed_tokens.weight[letters] = rows
        model.norm.weight.mul_(0.5)  # noise lasts for several steps
    sampler = tiny.sampler(canvas_length=32, max_steps=10, max_new_tokens=32, entropy_bound=0.1, stability_threshold=99)
    return SteppedWriter(model, tokenizer, sampler)


def recorded(kind):
    """The runs of a tab that ship with the page: those of a model that writes words."""
    path = files("redraft.server") / "static" / f"recorded_{kind}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def answer_from(page, events):
    """Answers the page's runs with these events, instead of the server."""
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    page.route(
        "**/v1/canvas*", lambda route: route.fulfill(content_type="text/event-stream", body=lines + "data: [DONE]\n\n")
    )


def check_accessibility(page):
    """axe-core finds no violation."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe.axe_script)
    assert page.locator("audio, video").count() == 0  # so nothing needs to be preloaded, which takes a quarter of the time
    options = {"resultTypes": ["violations"], "preload": False}
    violations = page.evaluate("(options) => axe.run(options).then((results) => results.violations)", options)
    assert [(violation["id"], [node["target"] for node in violation["nodes"]]) for violation in violations] == []


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
    answer = httpx.post(f"{url}/v1/canvas", json={"stream": False, **body}, timeout=600)
    return answer.json()["events"]


def screenshot(page, name):
    page.evaluate("document.activeElement?.blur()")
    page.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")  # at their ends
