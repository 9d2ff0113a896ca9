"""Training of text-diffusion models.

loss.py         the objective: noise, self-conditioning, cross-entropies of both halves
data.py         files to packed rows and batches
optim.py        Muon and AdamW, learning-rate schedule, moving average
checkpoints.py  the state of a run on disk
sudoku_data.py  puzzles to train on
config.py       TrainConfig: everything that describes a run
text_task.py    training on text
sudoku_task.py  training on puzzles
loop.py         Trainer: the run, its reports, resuming
recipe.py       finds a recipe by name and changes its settings
recipes/        the recipes that ship: toy, tiny, sudoku, tiny_sudoku
plot.py         the picture of a run's metrics
evals/          scores of a model
"""
