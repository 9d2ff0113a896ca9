"""Training of text-diffusion models.

draft_loss.py   the objective of draft rows: canvases behind any token, acceptance by the causal half
loss.py         the objective: noise, self-conditioning, cross-entropies of both halves, the loss of drafts
data.py         files to packed rows and batches
own_text.py     samples texts of a model in large batches, as data for draft rows
stories.py      samples stories from a teacher, as training data
optim.py        Muon and AdamW, learning-rate schedule, moving average
checkpoints.py  the state of a run on disk
sudoku_data.py  puzzles to train on
config.py       TrainConfig: everything that describes a run
text_task.py    training on text
sudoku_task.py  training on puzzles
loop.py         Trainer: the run, its reports, resuming
recipe.py       finds a recipe by name and changes its settings
recipes/        the recipes that ship: toy, tiny, tiny_draft, sudoku, tiny_sudoku
plot.py         the picture of a run's metrics
evals/          scores of a model
"""
