"""The recipes that ship: one file each, with a function `recipe(folder)` that returns a TrainConfig.

toy.py          a byte-level model of 14 words, half a minute on a CPU
tiny.py         the model in redraft/weights/tiny
tiny_draft.py   `tiny`, trained on to draft what its causal half would write
sudoku.py       the model in redraft/weights/sudoku
tiny_sudoku.py  `tiny`, fine-tuned on Sudoku puzzles as text
tune_sudoku.py  the same with an adapter alone
tune_style.py   an adapter that makes `tiny` write old fairy tales
"""
