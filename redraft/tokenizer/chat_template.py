"""Where chat templates are rendered: jinja2's sandbox, with what templates written for transformers expect to find.

A module of its own, because jinja2 takes long to import and most texts are no conversations.
"""

import json
from datetime import datetime

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, with which templates mark answers for training; here what it encloses is just text."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """A fresh one."""
    extensions = [_Generation, jinja2.ext.loopcontrols]
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    found.globals["raise_exception"] = _raise
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    found.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    return found


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
