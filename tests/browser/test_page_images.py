"""Images in the chat of the web page, in a real Chromium: chosen, dropped, pasted, scaled down, sent, kept.

The server of these tests has a text model. The tests tell the browser that the model has vision, and remove the images from
the requests that it sends.
"""

import base64
import io
import json
import re

import numpy as np
import pytest
from browsing import DONE, check_accessibility, screenshot
from PIL import Image
from serving import served

import redraft

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.soak
LARGE = (3000, 1200)
THUMBNAIL = 256


HAND_OVER = """([kind, files, text]) => {
  const data = new DataTransfer();
  for (const [name, type, base64] of files) {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  if (text) data.setData("text/plain", text);
  const options = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
  const event = kind === "drop" ? new DragEvent(kind, options) : new ClipboardEvent(kind, options);
  document.querySelector("#form-chat [name=message]").dispatchEvent(event);
}"""


def picture(size=(60, 40), kind="PNG", mode="RGB", **options) -> bytes:
    """A file with random pixels."""
    channels = len(mode)
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, kind, **options)
    return file.getvalue()


def file_of(name, data, kind="image/png"):
    """A file as Playwright takes it."""
    return {"name": name, "mimeType": kind, "buffer": data}


@pytest.fixture(name="chat")
def _chat(opened, url):
    """Opens the chat with a model of vision; `chat.bodies` has the requests that the page sent."""

    def without_images(messages):
        return [{**message, "content": text_of(message["content"])} for message in messages]

    def open_chat(vision=True, **options):
        page = opened("about:blank", **options)
        bodies = []

        def describe(route):
            models = route.fetch().json()
            for model in models["data"]:
                model["vision"] = vision
            route.fulfill(json=models)

        def answer(route):
            body = route.request.post_data_json
            bodies.append(body)
            changed = {"messages": without_images(body["messages"])}
            route.continue_(post_data=json.dumps(body | changed))

        page.route("**/v1/models", describe)
        page.route("**/v1/canvas", answer)
        page.goto(f"{url}/#chat")
        page.bodies = bodies
        if vision:
            page.wait_for_selector("#attach-image:visible")
        return page

    return open_chat


def text_of(content):
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def images_of(message):
    """The files in a message of a request, with their types."""
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    return [(re.match("data:([^;]*);base64,", each)[1], base64.b64decode(each.partition(",")[2])) for each in urls]


def hand_over(page, event, *files, text=""):
    """Drops files on the conversation, or pastes them into the message."""
    encoded = [[file["name"], file["mimeType"], base64.b64encode(file["buffer"]).decode()] for file in files]
    page.evaluate(
        HAND_OVER,
        [event, encoded, text],
    )


def attached(page):
    return page.locator("#images img")


def send(page, text, answers=1):
    page.fill("#form-chat [name=message]", text)
    page.click("#form-chat [type=submit]")
    sync_api.expect(page.locator("#conversation li.assistant")).to_have_count(answers)
    sync_api.expect(page.locator("#form-chat [type=submit]")).to_be_enabled()


def test_images_are_chosen_dropped_and_pasted_and_go_with_the_message(chat):
    page = chat()
    files = [picture(), picture((40, 60), "JPEG"), picture((30, 30), "WEBP")]
    page.set_input_files("#image", file_of("cat.png", files[0]))
    sync_api.expect(attached(page)).to_have_count(1)
    assert page.inner_text("#status") == "cat.png is attached."
    hand_over(page, "drop", file_of("dog.jpg", files[1], "image/jpeg"))
    sync_api.expect(attached(page)).to_have_count(2)
    hand_over(page, "paste", file_of("image.webp", files[2], "image/webp"))
    sync_api.expect(attached(page)).to_have_count(3)
    hand_over(page, "paste", file_of("cells.png", files[0]), text="cells")  # a spreadsheet: its text is pasted
    assert [image.get_attribute("alt") for image in attached(page).all()] == ["cat.png", "dog.jpg", "image.webp"]
    send(page, "What is this?")
    (message,) = page.bodies[0]["messages"]
    types = ["image/png", "image/jpeg", "image/webp"]
    assert images_of(message) == list(zip(types, files, strict=True))  # the bytes of the files
    assert message["content"][-1] == {"type": "text", "text": "What is this?"}
    assert page.locator("#conversation li.user img").count() == 3
    assert attached(page).count() == 0
    send(page, "And now?", 2)
    assert page.bodies[1]["messages"][0] == message  # the model sees them again
    assert page.bodies[1]["messages"][2] == {"role": "user", "content": "And now?"}


def test_images_are_removed_edited_and_retried_with_the_keyboard_alone(chat):
    page = chat()
    with page.expect_file_chooser() as chosen:
        page.evaluate("0")  # once it is answered, the browser knows that Playwright takes its file choosers
        page.focus("#attach-image")
        page.keyboard.press("Enter")
    assert chosen.value.is_multiple()
    chosen.value.set_files([file_of(f"{i}.png", picture((20 + i, 20))) for i in range(3)])
    sync_api.expect(attached(page)).to_have_count(3)
    page.get_by_role("button", name="Remove 1.png").focus()
    page.keyboard.press("Enter")
    sync_api.expect(attached(page)).to_have_count(2)
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove 2.png"  # the next one has the focus
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    sync_api.expect(attached(page)).to_have_count(0)
    assert page.evaluate("document.activeElement.name") == "message"
    page.set_input_files("#file", [file_of("cat.png", picture()), file_of("a.txt", b"a text", "text/plain")])  # any file
    sync_api.expect(attached(page)).to_have_count(1)
    send(page, "One")
    page.click("#conversation li.user >> text=Edit")
    sync_api.expect(attached(page)).to_have_count(1)  # the message has it again
    send(page, "Two")
    page.click("text=Retry")
    sync_api.expect(page.locator("#form-chat [type=submit]")).to_be_enabled()
    sync_api.expect(page.locator("#conversation li.assistant")).to_have_count(1)
    first, second, third = (body["messages"] for body in page.bodies)
    assert text_of(first[0]["content"]) == "One\n\na.txt:\n```\na text\n```"
    assert text_of(second[0]["content"]) == "Two"
    assert images_of(first[0]) == images_of(second[0]) == [("image/png", picture())]
    assert third == second
    page.click("#conversation li.user >> text=Edit")
    page.click("#editing button")
    assert attached(page).count() == 0
    assert page.locator("#conversation li.user img").count() == 1


def test_large_images_are_scaled_down(chat, tmp_path):
    page = chat()
    paths = [tmp_path / "large.jpg", tmp_path / "heavy.png"]
    paths[0].write_bytes(picture(LARGE, "JPEG", quality=60))
    paths[1].write_bytes(picture((1200, 1200), mode="RGBA"))  # random: PNG cannot compress it
    assert paths[1].stat().st_size > 4_000_000
    page.set_input_files("#image", paths)
    sync_api.expect(attached(page)).to_have_count(2)
    status = page.inner_text("#status")
    assert "large.jpg is attached, scaled down to 2048 x 819 pixels." in status
    assert "heavy.png is attached, scaled down to 1200 x 1200 pixels." in status
    send(page, "What?")
    sent = images_of(page.bodies[0]["messages"][0])
    assert [kind for kind, _ in sent] == ["image/jpeg"] * 2
    assert [Image.open(io.BytesIO(data)).size for _, data in sent] == [(2048, 819), (1200, 1200)]
    assert max(len(data) for _, data in sent) <= 4_000_000
    assert np.asarray(Image.open(io.BytesIO(sent[1][1]))).mean() > 150  # what is transparent becomes white


def test_a_message_waits_for_its_image(chat):
    page = chat()
    page.evaluate("""() => {
      const decode = window.createImageBitmap;
      window.createImageBitmap = (file) => new Promise((resolve) => (window.go = () => resolve(decode(file))));
    }""")
    page.set_input_files("#image", file_of("cat.png", picture()))
    page.fill("#form-chat [name=message]", "What?")
    page.press("#form-chat [name=message]", "Control+Enter")
    page.press("#form-chat [name=message]", "Control+Enter")  # is sent once all the same
    assert page.bodies == []
    page.evaluate("window.go()")
    sync_api.expect(page.locator("#conversation li.assistant")).to_have_count(1)
    assert [images_of(body["messages"][0]) for body in page.bodies] == [[("image/png", picture())]]


def test_a_kept_conversation_has_thumbnails_and_says_that_the_images_are_lost(chat):
    page = chat()
    page.set_input_files("#image", file_of("cat.jpg", picture((1000, 500), "JPEG"), "image/jpeg"))
    sync_api.expect(attached(page)).to_have_count(1)
    send(page, "What?")
    sync_api.expect(page.locator("#lost-images")).to_be_hidden()
    (kept,) = json.loads(page.evaluate("localStorage['redraft-conversations']"))
    (image,) = kept["messages"][0]["images"]
    assert set(image) == {"name", "thumbnail"}
    small = Image.open(io.BytesIO(base64.b64decode(image["thumbnail"].partition(",")[2])))
    assert small.size == (THUMBNAIL, THUMBNAIL // 2)
    page.reload()
    page.locator("#conversations button").first.click()
    sync_api.expect(page.locator("#lost-images")).to_be_visible()
    sync_api.expect(page.locator("#conversation li.user img")).to_have_attribute("alt", "cat.jpg")
    screenshot(page, "chat_images_lost")
    send(page, "More?", 2)
    assert page.bodies[1]["messages"][0] == {"role": "user", "content": "What?"}
    assert page.locator("#conversation li.user img").count() == 1  # still shown
    page.click("#new-conversation")
    sync_api.expect(page.locator("#lost-images")).to_be_hidden()


def test_a_browser_without_room_keeps_the_text(chat):
    page = chat()
    page.evaluate("""() => {
      window.room = 2000;
      const setItem = Storage.prototype.setItem;
      Storage.prototype.setItem = function (key, value) {
        if (value.length > window.room) throw new DOMException("full", "QuotaExceededError");
        return setItem.call(this, key, value);
      };
    }""")
    page.set_input_files("#image", file_of("cat.png", picture((300, 300))))
    sync_api.expect(attached(page)).to_have_count(1)
    send(page, "What?")
    (kept,) = json.loads(page.evaluate("localStorage['redraft-conversations']"))
    assert kept["messages"][0] == {"role": "user", "content": "What?", "images": [{"name": "cat.png"}]}
    page.evaluate("window.room = 10")
    send(page, "More?", 2)
    assert "no room to keep the conversation" in page.inner_text("#status")
    page.reload()
    page.locator("#conversations button").first.click()
    assert page.inner_text("#conversation li.user .images") == "cat.png"


def test_mistakes_are_one_sentence_and_keep_the_message(chat, opened):
    page = chat()
    good = file_of("cat.png", picture())
    page.set_input_files("#image", [file_of("page.png", b"<html>"), good, file_of("x.heic", b"x", "image/heic")])
    sync_api.expect(attached(page)).to_have_count(1)
    words = "is no image that this browser can show: attach a PNG, JPEG, WebP, GIF or BMP file"
    assert page.inner_text("#status") == f"page.png {words}; x.heic {words}"
    assert "bad" in page.get_attribute("#status", "class")
    page.unroute("**/v1/canvas")
    page.route("**/v1/canvas", lambda route: route.fulfill(status=400, json={"error": {"message": "it takes no images"}}))
    page.fill("#form-chat [name=message]", "What?")
    page.click("#form-chat [type=submit]")
    sync_api.expect(page.locator("#status")).to_have_text("it takes no images")
    sync_api.expect(page.locator("#form-chat [name=message]")).to_have_value("What?")
    assert attached(page).count() == 1  # the message and its image are back
    opened.messages.clear()  # the browser logs the 400


def test_a_model_without_vision_takes_no_images(chat):
    page = chat(vision=False)
    sync_api.expect(page.locator("#model")).to_have_text("tiny")
    assert page.locator("#attach-image").is_hidden()
    for event in ("drop", "paste"):
        page.evaluate("document.querySelector('#status').textContent = ''")
        hand_over(page, event, file_of("cat.png", picture()))
        sync_api.expect(page.locator("#status")).to_have_text("tiny takes no images: cat.png is not attached")
    assert attached(page).count() == 0
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    hand_over(page, "drop", file_of("a.svg", svg, "image/svg+xml"))  # SVG is text
    sync_api.expect(page.locator("#files li")).to_have_count(1)


def test_a_steered_answer_belongs_to_its_conversation(chat):
    """Another conversation is opened before the answer comes. The buttons that save a run come and go with its canvas."""
    page = chat(vision=False)
    send(page, "What?")
    sync_api.expect(page.locator(".saves")).to_be_hidden()
    page.click("text=Show the canvas")
    sync_api.expect(page.locator(".saves")).to_be_visible()
    held = []
    page.route("**/v1/canvas", lambda route: held.append(route))
    page.locator(".canvas .t").nth(2).click()
    page.keyboard.press("b")
    with page.expect_request("**/v1/canvas"):
        page.click(".resume .go")
    page.click("#new-conversation")
    sync_api.expect(page.locator(".saves")).to_be_hidden()
    held[0].fallback()
    sync_api.expect(page.locator("#form-chat [type=submit]")).to_be_enabled()
    sync_api.expect(page.locator("#conversation li")).to_have_count(0)
    (kept,) = json.loads(page.evaluate("localStorage['redraft-conversations']"))
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"]
    assert page.bodies[1]["interventions"]


def test_a_run_with_images_is_steered_and_its_replay_has_none(chat, tmp_path):
    page = chat()
    page.set_input_files("#image", file_of("cat.png", picture()))
    sync_api.expect(attached(page)).to_have_count(1)
    send(page, "What?")
    page.click("text=Show the canvas")
    page.locator(".canvas .t").nth(2).click()
    page.keyboard.press("b")
    page.click(".resume .go")
    page.wait_for_selector(DONE, state="attached")
    sync_api.expect(page.locator("#conversation li.assistant .text")).to_be_visible()
    first, steered = page.bodies
    assert steered["messages"] == first["messages"]
    assert steered["interventions"][0]["bans"]
    assert page.locator("#conversation li.user img").get_attribute("alt") == "cat.png"
    page.click("text=Show the canvas")
    with page.expect_download() as download:
        page.keyboard.press("s")  # a file to show to others: it has the text and no image
    download.value.save_as(tmp_path / "replay.html")
    replay = (tmp_path / "replay.html").read_text(encoding="utf-8")
    assert "What?" in replay
    assert "data:image" not in replay


@pytest.mark.parametrize(("width", "height", "scheme"), [(390, 844, "dark"), (1440, 900, "light")])
def test_images_fit_the_screen_and_are_accessible(chat, width, height, scheme):
    page = chat(width=width, height=height, color_scheme=scheme, reduced_motion="reduce")
    files = [file_of(f"{i}.png", picture(size)) for i, size in enumerate([(900, 30), (30, 900), (400, 300), (1, 1)])]
    for state in ("attached", "sent", "lost"):
        if state == "attached":
            page.set_input_files("#image", files)
            sync_api.expect(attached(page)).to_have_count(4)
        elif state == "sent":
            send(page, "What?")
        else:
            page.reload()
            page.locator("#conversations button").first.click()
            sync_api.expect(page.locator("#lost-images")).to_be_visible()
        screenshot(page, f"{width}_{scheme}_images_{state}")
        check_accessibility(page)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width


def test_the_model_sees_the_image(opened, url, tmp_path):
    import vision_models  # transformers takes seconds to import

    writer = redraft.load(vision_models.published(tmp_path), device="cpu")
    file = vision_models.FILES["landscape"]()
    with served(writer, name="eyes") as address:
        page = opened(f"{address}/#chat")
        page.wait_for_selector("#attach-image:visible")  # the server says that the model has vision
        page.set_input_files("#image", file_of("cat.png", file))
        sync_api.expect(attached(page)).to_have_count(1)
        for name, value in {"seed": 3, "max_tokens": 16, "max_steps": 4}.items():
            page.fill(f"#form-chat [name={name}]", str(value))
        send(page, "What is this?")
        (kept,) = json.loads(page.evaluate("localStorage['redraft-conversations']"))
        parts = [{"type": "image", "image": file}, {"type": "text", "text": "What is this?"}]
        settings = {"seed": 3, "max_tokens": 16, "max_steps": 4}
        expected = writer.chat([{"role": "user", "content": parts}], **settings).text
        assert kept["messages"][1]["content"] == expected
        page.set_input_files("#image", file_of("damaged.png", file[:-40]))
        sync_api.expect(page.locator("#status")).to_have_text(re.compile("damaged.png"))
    page = opened(f"{url}/#chat")
    sync_api.expect(page.locator("#model")).to_have_text("tiny")
    hand_over(page, "drop", file_of("cat.png", file))
    sync_api.expect(page.locator("#status")).to_have_text("tiny takes no images: cat.png is not attached")
