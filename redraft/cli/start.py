"""The entry point of the command `redraft`. Ctrl-C is quiet from the first moment: importing everything takes a while."""

import os
import signal

INTERRUPTED = 130  # the exit code of a command that Ctrl-C stopped


def start() -> None:
    """Imports the command line and runs it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else the shell, or the program around this one, ignores Ctrl-C
        # An import may catch an exception, or print it with a trace. Nothing is lost yet: leave at once.
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from redraft.cli.main import main

    signal.signal(signal.SIGINT, handler)
    main()
