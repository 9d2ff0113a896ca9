"""The HTTP server.

app.py         puts routes, middleware and error handlers together
middleware.py  access: hosts, origins, keys, body size, metrics
worker.py      a bounded pool of threads that run requests
service.py     what every route uses: start a request, stream it, count it, notice a client that left
completion.py  CompletionParams, and the pieces of an answer, whatever the wire format
fim.py         finds the prefix and suffix that editors send
infill.py      fills and edits for editors
schema.py      request bodies
api/           wire formats: openai, anthropic, ollama, llamacpp, canvas
page.py        the web page; static/ has its files
"""
