"""How good a model is.

tasks.py       one function for each task of `redraft eval`
measures.py    likelihood, repair, samples, holes
infill.py      missing lines and words
extraction.py  JSON extraction by schema
sudoku_lists.pylists of puzzles
judge.py       a Llama that judges stories
masked.py      masked diffusion, for comparison
"""
