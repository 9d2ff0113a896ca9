"""Writes tests/durations.json: the seconds of each test that takes half a second or longer, read from reports of pytest.

    make test PYTEST_ADDOPTS=--junitxml=test.xml
    make soak PYTEST_ADDOPTS=--junitxml=soak.xml
    python tests/make_durations.py test.xml soak.xml

tests/conftest.py reads it.
"""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

SHORTEST = 0.5  # seconds; shorter tests count alike


def read_durations(report: str) -> dict[str, float]:
    """The seconds of the tests in a report, by the names that pytest gives them."""
    durations = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/")
        durations[f"{file}.py::{case.attrib['name']}"] = round(float(case.attrib["time"]), 1)
    return durations


if __name__ == "__main__":
    durations = {name: seconds for report in sys.argv[1:] for name, seconds in read_durations(report).items()}
    longest_first = sorted(((seconds, name) for name, seconds in durations.items() if seconds >= SHORTEST), reverse=True)
    text = json.dumps({name: seconds for seconds, name in longest_first}, indent=0)
    (Path(__file__).parent / "durations.json").write_text(text + "\n", encoding="utf-8")
