"""Training text-diffusion models: data and objective. Knows nothing of scheduling, HTTP or the command line."""
