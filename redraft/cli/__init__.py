"""The command line.

start.py      the entry point
main.py       write, chat; user errors become one sentence
chat.py       the conversation of chat: lines, commands, pictures
attachments.py paths of pictures in a line
options.py    options that several commands share
generation.py options of the commands that generate an answer
edit.py       fill, edit
augment.py    augment
batch.py      batch: answers files of requests
serve.py      serve
replicas.py   serve --replicas
cluster.py    cluster deploy, status, down
models.py     pull, models, rm
info.py       info
quantize.py   quantize
merge.py      merge: an adapter into its base
warm.py       warm: builds GPU kernels ahead
sudoku.py     sudoku
demo.py       demo: a Sudoku and a story
train.py      train, eval
tune.py       tune: trains an adapter
adapt.py      adapt: teaches a left-to-right model to draft
data.py       data: makes training data
terminal.py   draws events on a terminal
recording.py  records events as an animated picture
"""
