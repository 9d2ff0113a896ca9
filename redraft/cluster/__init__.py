"""Many machines, GPUs or requests. Only the files that need Ray or FastAPI import them.

ray_connection.py  a Ray cluster of this machine alone, or a connection to a running one

Serving, with Ray Serve:
cluster_config.py  the settings of a served cluster, from YAML
routing.py      which model a request names, and to which conversation it belongs
replica.py      one engine with the app of the single machine, in a replica of Ray Serve
front.py        takes requests, passes them to replicas, gathers metrics and health
deploy.py       builds the application of Ray Serve, deploys it, shows its state, takes it down

Jobs, on this machine or with Ray Data:
jobs.py         a job: the items of an input, a processor, an output file to which results are appended, resuming
batch_file.py   OpenAI's batch format: lines of requests in, lines of answers out
batch_app.py    answers the requests of a batch with the server's own routes, in this process
ray_data.py     runs the processor of a job on the workers of a Ray cluster, with Ray Data
"""
