"""Records told in words: they satisfy their schemas, schemas grow, answers under one are valid, all is counted."""

import json

import jsonschema
import tiny

from redraft.train.evals import extraction


def test_records_satisfy_their_schemas_which_grow():
    records = extraction.told(40)
    assert [len(one.values) for one in records] == sorted(len(one.values) for one in records)
    assert {len(one.values) for one in records} == set(range(1, 9))
    for one in records:
        jsonschema.validate(one.values, one.schema)
        assert all(name in one.prompt for name in one.values)
    assert extraction.told(40) == records != extraction.told(40, seed=1)


def test_fields_are_counted_one_by_one():
    records = [one for one in extraction.told(24) if len(one.values) == 2][:2]
    first = {**records[0].values, next(iter(records[0].values)): "something else"}
    found = extraction._counted(records, [json.dumps(first), "no json"])
    assert found == {"valid": 0.0, "fields_right": 0.25, "valid_of_2": 0.0}
    assert extraction._counted(records, [json.dumps(one.values) for one in records])["valid"] == 1.0


def test_answers_under_a_schema_are_valid():
    records, told = extraction.told(8)[:3], []
    sampler = tiny.sampler(canvas_length=96, max_new_tokens=96, max_steps=2)
    found = extraction.score(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), sampler, records, told.append)
    assert found["schema"]["valid"] == 1.0
    assert found["free"]["valid"] == 0.0
    assert found["schemas"] == 3
    assert told[-1] == "free: 3 of 3"
