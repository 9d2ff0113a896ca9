"""Fill gaps between given text, find what is wrong in a text, and mend it."""

# %%
import redraft

writer = redraft.load(dtype="float32")

# %% Infill: a gap is [[ ]], or [[ 8 ]] for 8 tokens; the text around it does not change
filled = writer.fill("Once upon a time there was a little [[ ]] named Lily.", seed=1, longest=4)
print(filled.gaps)
print(filled)

# %% Several infills, the most likely first
for candidate in writer.fill("Tom was very [[ 1 ]] because he lost his ball.", count=3, seed=1):
    print(f"{candidate.score:6.1f} {candidate.gaps[0]}")

# %% Suggest: where another text is much more likely
text = "Once upon a time there was a little girl. She found a big the ball in the park."
suggestions = writer.suggest(text)
for suggestion in suggestions:
    print(suggestion.text, "->", [alternative for alternative, _ in suggestion.alternatives])

# %% Edit: the likeliest repair is made, all other text stays
edited = writer.edit(text)
print(edited)
print(edited.diff())
