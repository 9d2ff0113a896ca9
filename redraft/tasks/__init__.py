"""Tasks on top of the engine: text generation, infilling, editing, augmentation, Sudoku.

generation.py   GenerationOptions: the options of one answer, shared by Python, command line and server
best_of.py      several answers to one prompt, of which the causal half's likeliest is returned
keywords.py     the options as typed keywords, for editors and notebooks
canvas_html.py  results as HTML, for notebooks
answer.py       Answer: the result of one generation
text_events.py  adds decoded text to the engine's events
feature_cache.py the features of the images that were used last
images.py       conversations with images
streamer.py     feeds streamers of transformers
async_stream.py the same events for asyncio
decide.py       the probability of each of some choices
infill.py       infills gaps of known or unknown length between given text (FIM)
edit.py         edits a text in place where the model finds it unlikely
mend.py         finds what is wrong in a text with the causal half, and repairs it
augment.py      variants of many texts, for training sets
sudoku/         puzzles: boards, an exact solver, a generator, and solving by diffusion
"""
