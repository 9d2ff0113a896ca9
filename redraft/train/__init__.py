"""Training of text-diffusion models.

draft_loss.py   the objective of draft rows: canvases behind any token, acceptance by the causal half
noise.py        noise levels of canvases, and the tokens that noise replaces
loss.py         the objective: noise, self-conditioning, cross-entropies of both halves, the loss of drafts
records.py      files to records: JSON lines and texts, shuffled, in bounded memory
documents.py    records to documents: prompt ids and answer ids, one pair for each turn of a conversation
data.py         documents to packed rows and batches
data_check.py   checks all records before a run, and estimates their tokens
own_text.py     samples texts of a model in large batches, as data for draft rows
own_answers.py  samples answers of a model to prompts, given or its own, as data for its drafter
stories.py      samples stories from a teacher, as training data
optim.py        Muon and AdamW, learning-rate schedule, moving average
checkpoints.py  the state of a run on disk
sudoku_data.py  puzzles to train on
config.py       TrainConfig: everything that describes a run
text_task.py    training on text
sudoku_task.py  training on puzzles
draft_task.py   training of a drafter for a left-to-right model
page_task.py    training of a page adapter for a left-to-right model
held_out.py     evaluation on records that are not learned
export.py       the model, the adapter or the drafter that a run leaves behind
meter.py        averages losses between two reports
loop.py         Trainer: the run, its reports, resuming
tuning.py       fine-tuning: a base model and files of records -> the configuration of a run
adapting.py     a left-to-right model learns to draft, or to fill gaps: own answers -> the configuration of a run -> measured
recipe.py       finds a recipe by name and changes its settings
recipes/        the recipes that ship: toy, tiny, tiny_draft, sudoku, tiny_sudoku, tune_sudoku, tune_style
plot.py         the picture of a run's metrics
evals/          scores of a model
"""
