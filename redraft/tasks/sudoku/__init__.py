"""Sudoku puzzles, and a diffusion model that solves them.

board.py      parse, check and print puzzles
solver.py     exact solver for one puzzle
generator.py  exact solver and puzzle generator for thousands of boards at once; symmetries of boards
encoding.py   boards as token ids of the `sudoku` model, and as text for general models
symmetry.py   one random symmetry per board, applied to boards, ids, logits and probabilities
solve.py      solving by diffusion: batches of canvases, rule check, restarts
"""
