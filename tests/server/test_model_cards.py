"""What lists and timings say about diffusion models, causal-only models, drafters and page adapters."""

import asyncio
from dataclasses import replace

import httpx
import llama_models
import pytest
import tiny

import redraft
from redraft.server.app import ServerConfig, make_app
from redraft.server.model_card import ModelCard
from redraft.server.models import ModelSource


@pytest.fixture(name="replies", scope="module")
def _replies(tmp_path_factory):
    """The replies of a server: first a Llama; on demand one with a drafter, one with a page adapter, a diffusion model."""
    llama = llama_models.save_with_drafter(tmp_path_factory.mktemp("llama"))
    page = llama_models.save_with_page(tmp_path_factory.mktemp("page")) / "page"
    loads = {
        "drafting": lambda: redraft.load(llama.parent / "drafter"),
        "page": lambda: redraft.load(page),
        "diffusion": tiny.writer,
    }
    diffusion = tiny.save_folder(tmp_path_factory.mktemp("tiny") / "x")
    paths = {"drafting": llama.parent / "drafter", "page": page, "diffusion": diffusion}
    sources = {name: ModelSource(load, ModelCard.from_checkpoint(paths[name])) for name, load in loads.items()}
    app = make_app(redraft.load(llama), ServerConfig(name="llama", max_models=4), sources)

    async def ask_all():
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), http as client:
            replies = {"/v1/models": (await client.get("/v1/models")).json()}  # before they are loaded
            for name in ("llama", *sources):
                for path, body in REQUESTS.items():
                    reply = await client.post(path, json={**body, "model": name})
                    assert reply.status_code == 200, reply.text
                    replies[path, name] = reply.json()
            body = {"prompt": "Once ", "suffix": " time", "max_tokens": 4, "seed": 1}
            for name in ("llama", "page"):
                replies["infill", name] = await client.post("/v1/completions", json={**body, "model": name})
            for path in ("/api/tags", "/api/ps"):
                replies[path] = (await client.get(path)).json()
            return replies

    return asyncio.run(ask_all())


REQUESTS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4, "seed": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 4, "seed": 1},
    "/v1/canvas/autoregressive": {"prompt": "a", "max_tokens": 4, "seed": 1, "stream": False},
    "/api/show": {},
}
KINDS = {  # what a card says about each model
    "llama": {"diffusion": False},
    "drafting": {"diffusion": False, "drafter": {"longest_draft": 4}},
    "page": {"diffusion": True},
    "diffusion": {"diffusion": True},
}


def kinds_of(entry):
    return {name: value for name, value in entry.items() if name in ("diffusion", "drafter")}


def test_lists_say_which_models_are_diffusion_models_and_which_have_a_drafter(replies):
    listed = {entry["id"]: kinds_of(entry) for entry in replies["/v1/models"]["data"]}
    assert listed == KINDS  # without the name for edits, which a causal-only model cannot make
    for path in ("/api/tags", "/api/ps"):
        assert {entry["name"]: kinds_of(entry["details"]) for entry in replies[path]["models"]} == KINDS
    for name, kind in KINDS.items():
        assert kinds_of(replies["/api/show", name]["details"]) == kind
        assert ("insert" in replies["/api/show", name]["capabilities"]) == kind["diffusion"]


def test_a_llama_with_a_page_adapter_infills_and_a_llama_alone_does_not(replies):
    assert replies["infill", "page"].status_code == 200
    assert replies["infill", "page"].json()["timings"]["diffusion_steps"] > 0
    assert replies["infill", "llama"].status_code == 400
    assert "infill needs a diffusion model" in replies["infill", "llama"].text


@pytest.mark.parametrize("name", KINDS)
def test_timings_say_whether_a_diffusion_model_has_answered(replies, name):
    events = replies["/v1/canvas/autoregressive", name]["events"]
    for reply in (replies["/v1/completions", name], replies["/v1/responses", name], events[-1]):
        assert reply["timings"]["diffusion"] is KINDS[name]["diffusion"]


def test_a_card_names_the_family_and_what_loading_takes():
    card = ModelCard.from_writer(tiny.writer())
    assert (card.family, card.loaded_bytes) == ("diffusion_gemma", card.nbytes)
    causal = tiny.writer()
    causal.model.config = replace(causal.model.config, is_causal_only=True)
    assert ModelCard.from_writer(causal).family == "gemma4"
    llama = replace(card, family="llama", nbytes=10, parameters=40)  # of a GGUF file: 2 bits a weight
    assert llama.loaded_bytes == 80
