"""`python -m redraft` is `redraft`."""

from redraft.cli.start import start

start()
