"""Several machines or GPUs, through Ray. Ray is imported when a function here is called, never when redraft is.

cluster_config.py  the settings of a served cluster, from YAML
routing.py     which model a request names, and to which conversation it belongs
replica.py     one engine with the app of the single machine, in a replica of Ray Serve
front.py       takes requests, passes them to replicas, gathers metrics and health
deploy.py      builds the application of Ray Serve, starts Ray, deploys, shows the state, takes down
"""
