"""Work on many requests, on one machine or on a Ray cluster. Only the files that need Ray or FastAPI import them.

Files in reading order:
jobs.py         a job: the items of an input, a processor, an output file to which results are appended, resuming
batch_file.py   OpenAI's batch format: lines of requests in, lines of answers out
batch_app.py    answers the requests of a batch with the server's own routes, in this process
ray_data.py     runs the processor of a job on the workers of a Ray cluster, with Ray Data
"""
