"""The tool programs of client libraries' documentation against SmolLM2 itself. REDRAFT_SMOLLM2 names its GGUF file.

SmolLM2's template knows no tools. Every call is well-formed and every program runs to its end; whether a call is wise is the
model's affair.
"""

import asyncio
import json
import os
from pathlib import Path

import pytest
from pydantic import BaseModel, Field
from serving import served

import redraft

REAL = Path(os.environ.get("REDRAFT_SMOLLM2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not REAL.is_file(), reason="REDRAFT_SMOLLM2 names no file"),
    pytest.mark.filterwarnings("ignore"),  # from the clients' own libraries
]
TOKENS = 60
CITY = {"type": "string", "description": "The city", "maxLength": 20}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": PARAMETERS},
}
QUESTION = "What is the weather in Paris?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: The city.
    """
    return f"18 degrees in {city}"


@pytest.fixture(scope="module", name="url")
def _url():
    with served(redraft.load(REAL, drafter=False), name="smollm2", compile_seconds=600) as address:
        yield address


def openai_client(url):
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_openai_chat_loop(url):
    with openai_client(url) as client:
        messages = [{"role": "user", "content": QUESTION}]
        asked = {"model": "smollm2", "tools": [TOOL], "max_tokens": TOKENS, "seed": 1}
        answer = client.chat.completions.create(**asked, messages=messages, tool_choice="required").choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls"
        result = get_weather(**json.loads(call.function.arguments))
        messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        last = client.chat.completions.create(**asked, messages=messages).choices[0]
        assert bool(last.message.content) != bool(last.message.tool_calls)
        pieces = [
            part.function.arguments
            for chunk in client.chat.completions.create(**asked, messages=messages[:1], tool_choice="required", stream=True)
            for part in chunk.choices[0].delta.tool_calls or ()
        ]
        assert "".join(pieces) == call.function.arguments
        assert len(pieces) > 2  # they come as they are written


def test_openai_responses_loop(url):
    with openai_client(url) as client:
        tool = {"type": "function", **TOOL["function"]}
        asked = {"model": "smollm2", "tools": [tool], "max_output_tokens": TOKENS}
        items = [{"role": "user", "content": QUESTION}]
        response = client.responses.create(**asked, input=items, tool_choice="required")
        (call,) = response.output
        items += [call, {"type": "function_call_output", "call_id": call.call_id,
                         "output": get_weather(**json.loads(call.arguments))}]  # fmt: skip
        assert client.responses.create(**asked, input=items).output
        with client.responses.stream(**asked, input=items[:1], tool_choice="required") as stream:
            (streamed,) = stream.get_final_response().output
        assert json.loads(streamed.arguments).keys() == {"city"}


def test_anthropic_loop(url):
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        tool = {"name": "get_weather", "description": "The weather of a city", "input_schema": PARAMETERS}
        asked = {"model": "smollm2", "max_tokens": TOKENS, "tools": [tool]}
        messages = [{"role": "user", "content": QUESTION}]
        with client.messages.stream(**asked, messages=messages, tool_choice={"type": "any"}) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            message = stream.get_final_message()
        (use,) = message.content
        assert message.stop_reason == "tool_use"
        assert json.loads("".join(pieces)) == use.input
        result = {"type": "tool_result", "tool_use_id": use.id, "content": get_weather(**use.input)}
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**asked, messages=messages).content


def test_ollama_loop(url):
    import ollama

    client = ollama.Client(host=url)
    asked = {"model": "smollm2", "tools": [get_weather], "options": {"num_predict": TOKENS, "seed": 1}}
    messages = [{"role": "user", "content": QUESTION}]
    message = client.chat(**asked, messages=messages).message  # its API cannot force a call
    assert bool(message.content) != bool(message.tool_calls)
    arguments = {"city": "Paris"}
    call = {"function": {"name": "get_weather", "arguments": arguments}}
    messages += [{"role": "assistant", "tool_calls": [call]},
                 {"role": "tool", "tool_name": "get_weather", "content": get_weather(**arguments)}]  # fmt: skip
    lines = list(client.chat(**asked, messages=messages, stream=True))
    assert lines[-1].done
    client._client.close()


def test_pydantic_ai_agent(url):
    pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    import openai
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            model = OpenAIChatModel("smollm2", provider=OpenAIProvider(openai_client=client))
            settings = {"max_tokens": TOKENS, "seed": 1}
            agent = Agent(model, tools=[get_weather], model_settings=settings)
            assert isinstance((await agent.run(QUESTION)).output, str)
            extract = Agent(model, output_type=ToolOutput(Person), model_settings=settings)
            assert isinstance((await extract.run("Jason is 25 years old.")).output, Person)
            async with agent.run_stream(QUESTION) as result:
                assert "".join([text async for text in result.stream_text(delta=True)])

    asyncio.run(run())


def test_instructor_extracts_a_record(url):
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    with openai_client(url) as plain:
        client = instructor.from_openai(plain)
        asked = {"model": "smollm2", "max_tokens": TOKENS, "response_model": Person}
        messages = [{"role": "user", "content": "Extract: Jason is 25 years old."}]
        assert isinstance(client.chat.completions.create(**asked, messages=messages), Person)
        people = list(client.create_partial(**asked, messages=messages))
        assert people[-1].age in range(121)


@pytest.mark.soak_long
def test_langchain_agent_loop(url):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    model = langchain.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="smollm2", max_tokens=TOKENS)
    messages = [HumanMessage(QUESTION)]
    bound = model.bind_tools([tool(get_weather)], tool_choice="any")
    message = bound.invoke(messages)
    (call,) = message.tool_calls
    messages += [message, ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])]
    assert model.bind_tools([tool(get_weather)]).invoke(messages)
    assert isinstance(model.with_structured_output(Person, method="function_calling").invoke("Jason is 25."), Person)
    chunks = list(bound.stream(messages[:1]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.tool_calls[0]["name"] == "get_weather"


@pytest.mark.soak_long
def test_litellm_completion(url):
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    asked = {"model": "openai/smollm2", "api_base": f"{url}/v1", "api_key": "none", "tools": [TOOL], "max_tokens": TOKENS}
    messages = [{"role": "user", "content": QUESTION}]
    message = litellm.completion(**asked, messages=messages, tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": result}]
    assert litellm.completion(**asked, messages=messages).choices[0].message


@pytest.mark.soak_long
def test_llama_index_agent(url):
    pytest.importorskip("llama_index.llms.openai_like", reason="llama-index-llms-openai-like is not installed")
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="smollm2", api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        max_tokens=TOKENS, context_window=2048,
    )  # fmt: skip
    tool = FunctionTool.from_defaults(get_weather)
    answer = model.predict_and_call([tool], user_msg=QUESTION, tool_required=True)
    assert "18 degrees" in str(answer)
    assert model.chat_with_tools([tool], user_msg=QUESTION)


@pytest.mark.soak_long
def test_openai_agents_run(url):
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    import openai

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            agents.set_tracing_disabled(True)
            model = agents.OpenAIChatCompletionsModel(model="smollm2", openai_client=client)
            settings = agents.ModelSettings(max_tokens=TOKENS, tool_choice="required")
            agent = agents.Agent("Weather", instructions="Be brief.", model=model, model_settings=settings,
                                 tools=[agents.function_tool(get_weather)])  # fmt: skip
            return str((await agents.Runner.run(agent, QUESTION, max_turns=4)).final_output)

    assert asyncio.run(run())
