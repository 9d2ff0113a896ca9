"""Tasks on top of the engine: text generation, infilling, editing, augmentation, Sudoku.

generation.py   GenerationOptions: the options of one answer, shared by Python, command line and server
best_of.py      several answers to one prompt, of which the causal half's likeliest is returned
text_events.py  adds decoded text to the engine's events
infill.py       infills gaps of known or unknown length between given text (FIM)
best_of.py      several answers, of which the likeliest is returned
edit.py         edits a text in place where the model finds it unlikely
augment.py      variants of many texts, for training sets
sudoku/         puzzles: boards, an exact solver, a generator, and solving by diffusion
"""
