"""Whole training configurations, one file each with a function `recipe(folder)`: toy, tiny, sudoku, tiny_sudoku."""
