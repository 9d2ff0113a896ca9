"""The command line.

main.py       write, chat, info, quantize; user errors become one sentence
options.py    options that several commands share
edit.py       fill, edit
augment.py    augment
serve.py      serve
warm.py       warm: builds GPU kernels ahead
sudoku.py     sudoku
train.py      train, eval
terminal.py   draws events on a terminal
recording.py  records events as an animated picture
"""
