"""What only a model that redrafts a whole canvas can do.

infill.py   fills holes of known or unknown length between given text
edit.py     redrafts a text in place where the model doubts it
augment.py  variants of many texts
sudoku/     puzzles: boards, an exact solver, a generator, and solving by diffusion
"""
