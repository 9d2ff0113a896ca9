"""`python -m redraft.cli` is `redraft`."""

from redraft.cli.start import start

start()
