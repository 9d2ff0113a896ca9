"""Write a story, watch its canvas settle, and read the answer with asyncio.

Run it as a script, or cell by cell in an editor or a notebook: there the last line of a cell shows the canvas in colours.
"""

# %% Load the model that ships with redraft: 16 million parameters, on a CPU, without network
import asyncio

import redraft

writer = redraft.load()
print(writer)

# %% Write: the seed reproduces the answer
answer = writer.write("Once upon a time", seed=7, canvas_length=32, max_tokens=32)
print(answer)
print(repr(answer))

# %% Several prompts run in one batch, and each gets the text that it gets alone
answers = writer.write(["The dog", "The cat"], seed=1, canvas_length=32, max_tokens=32)
for batched in answers:
    print(batched)

# %% Watch: a draft after every step, then the committed canvas
for event in writer.stream("Once upon a time", seed=7, canvas_length=32, max_tokens=32):
    print(event if isinstance(event, redraft.Draft | redraft.Committed) else event.stats[0].tokens_per_second)


# %% The same for asyncio: the event loop stays free between two events
async def read_story() -> str:
    """The text of the committed canvases."""
    stream = await writer.astream("Once upon a time", seed=7, canvas_length=32, max_tokens=32)
    return "".join([event.text async for event in stream if isinstance(event, redraft.Committed)])


print(asyncio.run(read_story()))  # in a notebook: await read_story()

# %% In a notebook an answer shows its text and what it cost
answer  # noqa: B018
