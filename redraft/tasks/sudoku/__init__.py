"""Sudoku.

board.py          puzzles as people write them
solver.py         exact search
generator.py      thousands of puzzles at once
encoding.py       a board as tokens of the small vocabulary of the `sudoku` model
text_encoding.py  a board as text, for models that read anything
views.py          a board under symmetries
solve.py          solving by diffusion: batches of canvases, check, restarts
"""
