"""Values without a limit in their schema have a sensible one; a limit of the schema holds exactly."""

import pytest

from redraft.constraints.budget import Budget
from redraft.constraints.schema_nfa import compile_schema


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (
            {"type": "integer"},
            ["0", "-12", "999999999999999", "-999999999999999"],
            ["1000000000000000", "-1000000000000000", "01", "1.5", "1e3"],
        ),
        ({"type": "integer", "minimum": 0}, ["0", "999999999", "1000000000000"], ["-1", "-1000000000", "01", "1e3"]),
        ({"type": "integer", "maximum": 5}, ["5", "-999999999", "-1000000000000"], ["6", "1000000000", "1e3"]),
        ({"type": "integer", "minimum": 2_000_000_000}, ["2000000000", "999999999999999"], ["1999999999"]),
        ({"type": "integer", "maximum": 10**12}, ["1000000000000", "0"], ["1000000000001"]),
        ({"type": "integer", "minimum": 0, "maximum": 10**12}, ["1000000000000"], ["1000000000001"]),
        (
            {"type": "number"},
            ["3.5", "-0.000001", f"0.{'1' * 15}", f"{'9' * 15}.5", "1e5", "-2.5E-30", "1e299"],
            [f"0.{'1' * 16}", f"{'9' * 16}.5", "1e300", "1e", ".5", "1.", "01"],
        ),
        ({"type": "number", "minimum": 2}, ["2", "2.0", "3.1415926"], ["1.9", "-2", "3e5", "1e-3"]),
        ({"type": "number", "exclusiveMaximum": 0.5}, ["0.49", "-7", "0"], ["0.5", "0.50", "0.51", "1"]),
        (
            {"type": "string", "format": "email"},
            ['"lily@home.org"', '"tom.smith@my-school.co.uk"', '"john.h.smith@mail.company.co.uk"', '"a.b.c.d@e.com"'],
            ['"lily@home"', '"lily"', '"a b@c.com"', '".a@b.com"'],
        ),
        (
            {"type": "string", "format": "email", "maxLength": 20},
            ['"lily@home.org"'],
            [f'"{"a" * 280}@b.com"', '"tom.smith@my-school.co.uk"'],
        ),
        ({"type": "string"}, ['""', f'"{"long " * 100}"'], ['"']),
        ({"type": "string", "maxLength": 3}, ['"abc"', '"\\n\\"\\\\"', '"é😀ü"'], ['"abcd"', '"\n"', '"\\u00e9"']),
    ],
)
def test_limits_of_values(schema, allowed, refused):
    dfa = compile_schema(schema, Budget())
    assert [text for text in allowed + refused if dfa.accepts(text.encode())] == allowed
