"""Our own wire format: a canvas at every denoising step, with the probabilities of its tokens; runs can be changed.

/v1/canvas                 events.py: what all endpoints share; write.py: continues a text, answers messages, fills gaps
/v1/canvas/edit            edit.py: redrafts a text in place
/v1/canvas/sudoku          sudoku.py: solves a puzzle
/v1/canvas/decide          decide.py: the probability of each of several answers, from one forward
/v1/canvas/autoregressive  autoregressive.py: the same weights one token after another, for comparison
routes.py                  the routes

Every endpoint answers with events: begin, then frame, token or board, canvas, at last end. The server keeps no state: to
resume a run at a step, a client sends the same request with an intervention there, and leaves out the frames before it.
"""

from redraft.server.api.canvas.routes import routes

__all__ = ["routes"]
