"""The command line.

main.py       redraft, chat, info, quantize; errors as one sentence
options.py    flags that several commands share
edit.py       fill, edit
augment.py    augment
serve.py      serve
sudoku.py     sudoku
train.py      train, eval
terminal.py   events drawn on a terminal
recording.py  events as an animated picture
"""
