"""One browser and one server for all tests here, and a fresh context for each."""

import threading

import pytest
from browsing import CHROMIUM, SCREENSHOTS, TIMEOUT_MS, small
from serving import served


@pytest.fixture(scope="package")
def writer():
    """The model of the server."""
    return small()


@pytest.fixture(scope="package")
def url(writer):
    """A server of a tiny random model, whose steps take about a millisecond."""
    with served(writer, name="tiny") as address:
        yield address


@pytest.fixture
def hold(writer):
    """Holds runs that begin from now on after their first step: each release of what it returns lets one make another."""

    def hold_steps():
        writer.steps = threading.Semaphore(0)
        return writer.steps

    yield hold_steps
    writer.steps = None


@pytest.fixture(scope="package")
def chromium():
    """A browser. Without one, tests that need it are skipped. It ends with the package: no other loop runs beside it."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; .ci/run installs it")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    sync_api.expect.set_options(timeout=TIMEOUT_MS)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Opens browser pages; at the end of the test their consoles must be empty."""
    messages = []
    contexts = []

    def open_(address, width=1440, height=900, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: messages.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: messages.append(str(error)))
        context.add_init_script("if (location.protocol === 'http:') localStorage.setItem('redraft-settings', 'open')")
        page.goto(address)
        return page

    open_.messages = messages
    yield open_
    for context in contexts:
        context.close()
    assert messages == []
