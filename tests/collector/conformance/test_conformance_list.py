"""The list of cases and the tests are one."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_each_case_that_is_listed_is_tested_and_the_reverse() -> None:
    listed = re.findall(r"^\| ([CGHJE]\d\d) \|", (ROOT / "docs" / "conformance.md").read_text(), re.MULTILINE)
    tested = [
        name.upper()
        for path in sorted(Path(__file__).parent.glob("test_otlp_*.py"))
        for name in re.findall(r"^def test_([cghje]\d\d)_", path.read_text(), re.MULTILINE)
    ]
    assert sorted(tested) == sorted(listed)
    assert len(set(listed)) == len(listed) >= 60
