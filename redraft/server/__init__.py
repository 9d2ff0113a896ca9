"""HTTP: routes that translate what clients send into requests of a Writer, and its events into what they read.

app.py has the routes, asking.py what a request asks for, worker.py the threads behind them; holes.py reads editors' prompts;
openai.py, anthropic.py, ollama.py and llama.py are the wire formats.
"""
