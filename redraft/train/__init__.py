"""Training text-diffusion models.

loop.py         Trainer: the run, its reports, resuming
loss.py         the objective: noise, self-conditioning, cross entropy of both halves
data.py         files to packed rows
text_task.py    learning from text
sudoku_task.py  learning from puzzles
optim.py        Muon and AdamW, schedules, averages
checkpoints.py  state of a run on disk
recipe.py       finds a recipe and changes it; recipes/ has ours
plot.py         the picture of a run
evals/          how good a model is
"""
