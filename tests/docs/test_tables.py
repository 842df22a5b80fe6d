"""The numbers in tables of the README and of docs/ are from their files."""

import re

import pytest
from tables import PAGES, made, marked


@pytest.mark.parametrize(
    "function, arguments, rows",
    [pytest.param(*x, id=f"{page.stem}-{x[0]}") for page, *x in marked()],
)
def test_table_is_of_its_files(function, arguments, rows):
    assert rows and rows == made(function, arguments)


def test_a_wrong_cell_is_found():
    [[function, arguments, rows]] = [x for _, *x in marked() if x[0] == "training_steps"]
    test_table_is_of_its_files(function, arguments, rows)
    rows[0][1] = "5.48 (4.66)"
    with pytest.raises(AssertionError):
        test_table_is_of_its_files(function, arguments, rows)


def test_tables_of_numbers_name_their_source():
    """A table of fractions or per cent stands below a comment: its function, or its command."""
    bare = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        parts = re.split(r"\n\s*\n *", text)
        for before, part in zip(parts, parts[1:]):
            has_numbers = re.search(r"\| *\**-?\d+(\.\d| %)", part)
            if part.startswith("|") and has_numbers and not before.startswith("<!-- "):
                bare.append(f"{page.name}: {part.splitlines()[0]}")
    told = "write <!-- no file: COMMAND --> above a table of numbers that no file holds"
    assert not bare, "\n".join([told, *bare])
