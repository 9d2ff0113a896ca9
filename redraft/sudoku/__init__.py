"""Sudoku: boards as people write them, an exact solver, a generator of puzzles. Knows nothing of models."""
