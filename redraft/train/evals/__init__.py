"""Scores of a model.

likelihood.py    next-token loss, the denoiser's bound, repair of noised tokens
acceptance.py    tokens a round of exact and checked mode, computed offline
samples.py       texts of any mode against autoregressive texts, under a judge
words.py         doubled words, and words that no training story has
judge.py         the judge, and teacher of stories: a Llama checkpoint
code_lines.py    removed lines of Python functions
infill.py        removed lines, words and sentences; HumanEval infilling
gaps.py          removed spans of tokens, filled by canvases and left to right
sandbox.py       runs code that a model wrote, isolated from the machine
edit_repair.py   random errors in a text, repaired by an edit
extraction.py    JSON extraction under a schema
sudoku_lists.py  lists of puzzles
masked.py        masked diffusion, for comparison
tasks.py         the tasks of `redraft eval`, one function each
"""
