"""`python -m redraft.cli` is `redraft`."""

from redraft.cli.main import main

main()
