"""Two threads are what the tests' machine has; more would only make timings noisy."""

import torch

torch.set_num_threads(2)
