"""Wire formats. Each has routes, turns request bodies into CompletionParams, and turns chunks into responses.

openai.py     chat completions, completions, FIM, edits, models
openai_requests.py  their request bodies
responses.py  OpenAI's newer route: input items in, output items or events out
anthropic.py  messages
ollama.py     generate, chat, model listing
llamacpp.py   /completion, /infill, /tokenize, /detokenize, /props, /slots, /health
canvas/       our own: every step of a canvas, one file per endpoint
"""
