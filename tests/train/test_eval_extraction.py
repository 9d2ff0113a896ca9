"""JSON extraction: records satisfy their schemas, schemas grow, answers under a schema are valid, scores count right."""

import json

import jsonschema
import tiny

from redraft.train.evals import extraction


def test_records_satisfy_their_schemas_which_grow():
    records = extraction.make_records(40)
    assert [len(record.values) for record in records] == sorted(len(record.values) for record in records)
    assert {len(record.values) for record in records} == set(range(1, 9))
    for record in records:
        jsonschema.validate(record.values, record.schema)
        assert all(name in record.prompt for name in record.values)
    assert extraction.make_records(40) == records != extraction.make_records(40, seed=1)


def test_fields_are_counted_one_by_one():
    records = [record for record in extraction.make_records(24) if len(record.values) == 2][:2]
    first = {**records[0].values, next(iter(records[0].values)): "something else"}
    found = extraction.score_answers(records, [json.dumps(first), "no json"])
    assert found == {"valid": 0.0, "fields_right": 0.25, "valid_of_2": 0.0}
    assert extraction.score_answers(records, [json.dumps(record.values) for record in records])["valid"] == 1.0


def test_answers_under_a_schema_are_valid():
    records = extraction.make_records(8)[:3]
    messages = []
    sampler = tiny.sampler(canvas_length=96, max_new_tokens=96, max_steps=2)
    found = extraction.score(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), sampler, records, messages.append)
    assert found["schema"]["valid"] == 1.0
    assert found["free"]["valid"] == 0.0
    assert found["schemas"] == 3
    assert messages[-1] == "free: 3 of 3"
