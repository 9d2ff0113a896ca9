"""The web page of a server with several models."""

import json

import pytest
import test_server_models as models
from serving import served

pytestmark = pytest.mark.soak


def test_the_page_has_a_choice_of_models(opened):
    sources = models.sources_of([models.Loader("one"), models.Loader("two")])
    with served(models.new_writer("base"), sources=sources, name="base") as url:
        page = opened(f"{url}/#write")
        page.wait_for_selector("#models:not([hidden])")
        assert page.locator("#models option").all_text_contents() == models.NAMES
        page.select_option("#models", "two")
        page.fill("#form-write [name=prompt]", "Once")
        page.fill("#form-write [name=max_tokens]", "12")
        page.fill("#form-write [name=seed]", "3")
        with page.expect_response("**/v1/canvas") as response:
            page.click("#form-write [type=submit]")
        assert response.value.request.post_data_json["model"] == "two"
        events = [json.loads(line.removeprefix("data: ")) for line in response.value.text().split("\n\n") if "{" in line]
        assert events[-1]["text"] == models.alone("two", "Once")
