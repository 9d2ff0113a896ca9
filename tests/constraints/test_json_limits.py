"""Values without a limit in their schema have a sensible one; a limit of the schema holds exactly."""

import re

import pytest

from redraft.constraints.json_schema import build_regex


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "integer"}, ["0", "-12", "999999999"], ["999220221501850", "1000000000", "-1000000000"]),
        ({"type": "integer", "minimum": 0}, ["0", "999999999"], ["-1", "1000000000"]),
        ({"type": "integer", "maximum": 5}, ["5", "-999999999"], ["6", "-1000000000"]),
        ({"type": "integer", "minimum": 2_000_000_000}, ["2000000000", "999999999999999"], ["1999999999"]),
        ({"type": "integer", "maximum": 10**12}, ["1000000000000", "0"], ["1000000000001"]),
        ({"type": "integer", "minimum": 0, "maximum": 10**12}, ["1000000000000"], ["1000000000001"]),
        ({"type": "number"}, ["3.5", "-0.000001"], ["3.1415926", "1000000000.5"]),
        (
            {"type": "string", "format": "email"},
            ['"lily@home.org"', '"tom.smith@my-school.co.uk"', '"john.h.smith@mail.company.co.uk"'],
            [f'"{"a" * 280}@b.com"', '"a.b.c.d@e.com"', '"lily@home"'],
        ),
        ({"type": "string"}, ['""', f'"{"long " * 100}"'], ['"']),
    ],
)
def test_limits_of_values(schema, allowed, refused):
    regex = build_regex(schema)
    assert [text for text in allowed + refused if re.fullmatch(regex, text)] == allowed
