"""The conversation of `redraft chat`: lines that the user types, commands among them, and pictures for the next message.

On a terminal a mistake is one sentence, after which the conversation goes on: the refused message is not part of it, its
pictures stay attached, and the arrow up brings its text back. In a pipe a mistake ends the command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from redraft.cli.attachments import Attachment, find_pictures, parse_paths, read_attachment, remove_paths
from redraft.cli.terminal import QUIET, strip_control_characters
from redraft.cli.warm import show_builds

if TYPE_CHECKING:
    from redraft.writer import Writer

PROMPT = "> "
BOLD_PROMPT = "\x01\x1b[1m\x02> \x01\x1b[22m\x02"  # \x01 and \x02 tell readline which characters have no width
HELP = """\
/image PATH  attach a PNG, JPEG, WebP, GIF or BMP file to the next message; a path in a message does the same
/image       list the attached pictures
/drop        detach the pictures; /drop 2 detaches the second one
/reset       start over
/exit        leave, as Ctrl-D does
/help        list the commands"""

Messages = list[dict[str, Any]]


class Conversation:
    """A conversation with a model. `answer` generates and shows the answer to messages, and returns its text."""

    def __init__(self, writer: Writer, system_messages: Messages, answer: Callable[[Messages], str]) -> None:
        self.writer = writer
        self.system_messages = system_messages
        self.answer = answer
        self.messages = list(system_messages)
        self.attached: list[Attachment] = []
        self.console = Console(highlight=False)
        # In a pipe stdout has the answers and nothing else.
        self.notes = self.console if self.console.is_terminal else Console(stderr=True, highlight=False)

    def run(self) -> None:
        """Takes one line after another, until the user leaves."""
        from redraft.engine import EngineError

        for line in read_lines(self.console):
            if line == "/exit":
                return
            try:
                self.take(line)
            except KeyboardInterrupt:
                if not self.console.is_terminal:
                    raise
                self.show_stopped()
            except (ValueError, EngineError) as error:
                if not self.console.is_terminal:
                    raise
                # The conversation continues without this line.
                self.console.print(strip_control_characters(str(error)), style="red", markup=False)
                self.list_attached()

    def take(self, line: str) -> None:
        """Runs a command, or sends a message."""
        command, argument = (*line.split(maxsplit=1), "")[:2]
        if line == "/reset":
            self.messages = list(self.system_messages)
            self.attached = []
        elif line == "/help":
            self.note(HELP)
        elif command == "/image" and argument:
            self.attached += self.read(parse_paths(argument))
            self.list_attached()
        elif command == "/image":
            self.list_attached(if_none="no image is attached: /image PATH attaches one")
        elif command == "/drop":
            self.drop(argument)
        else:
            self.take_message(line)

    def take_message(self, line: str) -> None:
        """Sends a message with the pictures that were attached, and those whose paths are in it.

        A message of nothing but paths attaches them to the next one.
        """
        from redraft.checkpoint import CheckpointError

        paths = find_pictures(line)
        text = remove_paths(line, paths)
        try:
            pictures = self.read([typed.path for typed in paths])
        except CheckpointError as error:
            if not text:
                raise
            self.note(f"{error}. The message is sent as text.")
            pictures = []
            text = line
        for picture in pictures:
            self.note(str(picture))
        if text:
            self.send(text, [*self.attached, *pictures])
        else:
            self.attached += pictures

    def send(self, text: str, pictures: list[Attachment]) -> None:
        """Sends a message and keeps it with its answer, also with one that Ctrl-C ended."""
        parts = [{"type": "image", "image": picture.data} for picture in pictures]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        request = [*self.messages, {"role": "user", "content": content}]
        try:
            answer = self.answer(request)
        except KeyboardInterrupt as interrupt:
            if not self.console.is_terminal:
                raise
            answer = getattr(interrupt, "committed", "")
            self.show_stopped()
        self.messages = [*request, {"role": "assistant", "content": answer}]
        self.attached = []

    def read(self, paths: list[Path]) -> list[Attachment]:
        """Reads pictures. The first one loads the vision tower."""
        if not paths:
            return []
        with show_builds(Console(stderr=True, highlight=False), message="reading images"):
            return [read_attachment(self.writer, path) for path in paths]

    def drop(self, number: str) -> None:
        """Detaches a picture by its number, or all of them."""
        count = len(self.attached)
        if not number:
            self.attached = []
            self.note(f"{count} images detached" if count != 1 else "1 image detached")
            return
        if not number.isdecimal() or not 1 <= int(number) <= count:
            known = f"an attached image, 1 to {count}" if count else "an attached image, and none is attached"
            raise ValueError(f"/drop takes the number of {known}, got {number[:100]!r}: see /image")
        self.note(f"{self.attached.pop(int(number) - 1)} is detached")

    def list_attached(self, if_none: str = "") -> None:
        """Shows the attached pictures, above the prompt."""
        for attachment in self.attached:
            self.note(str(attachment))
        if not self.attached and if_none:
            self.note(if_none)

    def show_stopped(self) -> None:
        """Says that Ctrl-C ended something and not the chat."""
        self.console.print("(stopped)", style=QUIET)

    def note(self, text: str) -> None:
        """Shows lines that are no part of an answer. File names may hold escape codes."""
        self.notes.print(strip_control_characters(text), style=QUIET, markup=False, soft_wrap=True)


def read_lines(console: Console) -> Iterator[str]:
    """Yields the lines that the user types or pipes in, without empty ones. A terminal has line editing and a history."""
    is_typed = console.is_terminal and sys.stdin is not None and sys.stdin.isatty()
    has_history = False
    if is_typed:
        with suppress(ImportError):  # Windows has its own
            import readline  # noqa: F401  `input` uses it

            has_history = True
    while sys.stdin is not None:
        try:
            line = input((BOLD_PROMPT if has_history else PROMPT) if is_typed else "")
        except EOFError:
            return
        if line.strip():
            yield line.strip()
