"""Two threads are what the tests' machine has; more would only make timings noisy. No example has a deadline."""

import torch
from hypothesis import settings

torch.set_num_threads(2)
settings.register_profile("redraft", deadline=None)
settings.load_profile("redraft")
