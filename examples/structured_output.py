"""Answers that always match: a regular expression, a JSON schema, a list of choices."""

# %%
import json

import redraft

writer = redraft.load(dtype="float32")

# %% A regular expression: the whole answer matches it
date = writer.write("The boy was born on", regex=" [0-9]{4}-[01][0-9]-[0-3][0-9]", seed=3, max_tokens=32)
print(date)

# %% A JSON schema: every answer is valid, whatever the model thinks of JSON
schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 12},
        "mood": {"enum": ["happy", "sad"]},
    },
    "required": ["name", "age", "mood"],
}
answer = writer.write("Tom is a little boy. He is", schema=schema, seed=1, max_tokens=64)
record = json.loads(answer.text)
print(record)

# %% Choices: one of them is the answer; `decide` gives the probability of each, from one forward
mood = writer.write("Tom lost his ball. Tom was very", choices=[" happy", " sad"], seed=1, max_tokens=8)
shares = writer.decide("Tom lost his ball. Tom was very", [" happy", " sad"])
print(mood, shares)
