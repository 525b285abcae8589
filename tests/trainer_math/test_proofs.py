"""The page that says which test proves what names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_proof_on_the_page_is_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 18))
    for number, row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, number
        for path, name in named:
            functions = {
                node.name
                for node in ast.walk(ast.parse((ROOT / path).read_text()))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in functions, (number, path, name)
