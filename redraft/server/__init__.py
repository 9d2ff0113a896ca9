"""The HTTP server.

app.py         builds the FastAPI app: routes, middleware, error handlers
server_config.py  settings of a server
addresses.py   the default port, local addresses, the tag of model names
errors.py      errors of a request, and the HTTP status of each
connections.py limits on connections: how many, and how long they may take
bodies.py      limits on request bodies
middleware.py  access: hosts, origins, API key, bodies, metrics, one log line per request
worker.py      a bounded pool of threads that run requests against the engine
compiler_pool.py  compiles patterns in helper processes
streams.py     async streams: merge several, stop when the client disconnects, write server-sent events
service.py     one model as every route uses it: read a body, start a completion, stream it, count it
models.py      the models of a server: loads them on demand, unloads them when idle
model_card.py  what lists of models say about one
keep_alive.py  how long an idle model stays in memory
image_urls.py  fetches images from the hosts that the server may use
images.py      images of requests: content parts of every wire format, limits
completion.py  CompletionParams and the chunks of a completion, independent of the wire format
canvas_params.py  canvas options under vLLM's names, which every wire format may have
stop_strings.py  cuts a completion at a stop string, as early as its text is final or has settled
checks.py      checked and exact mode: which one a request runs in, and its settings
tool_calls.py  tool calls: which may be made, the structure that constrains them, and reading them
frames.py      a canvas after each step, as the tokens that changed
logprobs.py    tokens of a completion with their log probabilities
fim.py         finds the prefix and suffix (FIM) or the region to edit that an editor sent
infill.py      infills a gap and rewrites a region for editors
schema.py      request bodies
api/           wire formats: openai, anthropic, ollama, llamacpp, canvas
first_launch.py  launches the kernels of a model before its first client
page.py        the web page; static/ has its files
docs_page.py   /docs: every route with the fields of its body
"""
