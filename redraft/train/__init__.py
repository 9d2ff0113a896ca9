"""Training text-diffusion models: the objective. Knows nothing of scheduling, HTTP or the command line."""
