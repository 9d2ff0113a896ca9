"""Train a byte-level model from scratch, load it, and write with it: about half a minute on two CPU cores.

The first argument is a folder for the run; the second is a number of steps, if not the recipe's.
"""

# %% The recipe of `redraft train toy`: every setting is a field that `--set NAME=VALUE` changes too
import sys
from pathlib import Path

import redraft
from redraft.train.loop import Report, Trainer
from redraft.train.recipe import load_recipe

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/toy_example")
changes = [f"steps={steps}" for steps in sys.argv[2:]]
config = load_recipe("toy", folder, changes)

# %% Train: the loop yields reports
trainer = Trainer(config, folder)
for event in trainer.run():
    if isinstance(event, Report):
        print(f"step {event.step}: loss {event.loss:.3f}, {event.tokens_per_second:,.0f} tokens/s")

# %% The run's last checkpoint is an ordinary one
writer = redraft.load(folder / "model")
answer = writer.write("the ", seed=1, max_tokens=32)
print(repr(answer))
