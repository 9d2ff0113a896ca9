"""HTTP: routes that translate what clients send into requests of a Writer, and its events into what they read.

app.py puts it together, asking.py is what a request asks for, worker.py the threads behind it, desk.py where routes meet
them; holes.py and filling.py are for editors; openai.py, anthropic.py, ollama.py and llama.py are the wire formats.
"""
