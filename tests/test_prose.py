"""Prose that is hard to read: chains of pronouns and long sentences, counted and held.

``python tests/test_prose.py`` prints the counts of each file, ``-v`` also the sentences.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHAINS = re.compile(r"\b(those of|that of|so many|such that)\b", re.IGNORECASE)
MOST_WORDS = 30

# Most chains and long sentences of each group. Lower a number when you have removed some; a rise
# is a sentence to rewrite.
MOST = {
    "pages": (0, 0),
    "src": (103, 82),
    "drivers": (6, 13),
}


def page_text(text):
    """A page without code, tables, pictures and headings; the words of its links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\s*\|.*$|^#.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n)+", "", text)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)


def docstrings(text):
    """The docstrings of a module, of its classes and of its functions, without examples."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        doc = ast.get_docstring(node) if isinstance(node, kinds) else None
        if doc:
            # What follows "::" and is indented is code.
            doc = re.sub(r"::\n\n(?:(?: +.*)?\n)*(?: +.*)?", ".\n\n", doc + "\n")
            yield re.sub(r"^ *(>>>|\.\.\. |-{3,}|={3,}).*$", "", doc, flags=re.MULTILINE)


def paragraphs(text):
    """Lines that belong together. An item of a list or another indentation begins a new one."""
    lines, indent = [], 0
    for line in [*text.splitlines(), ""]:
        item = re.match(r"( *)([*-] |\d+\. )?", line)
        if lines and (not line.strip() or item[2] or len(item[1]) != indent):
            yield " ".join(lines)
            lines = []
        if line.strip():
            indent = len(item[0])  # the next lines of an item stand under its first word
            lines.append(line[indent:].strip())


def sentences(text):
    """The sentences of a text. Inline code is one word, and so is a formula in it."""
    for paragraph in paragraphs(text):
        plain = re.sub(r"(`+).+?\1", "code", paragraph)
        plain = re.sub(r"\b(e\.g|i\.e|cf|al|vs)\.", r"\1", plain)
        yield from re.split(r"(?<=[.!?])[*)\"']*\s+", plain)


def is_long(sentence):
    """Whether a sentence has more words than a reader can keep in mind."""
    return sum(any(c.isalnum() for c in word) for word in sentence.split()) > MOST_WORDS


def files():
    """Yield of each file: its path, its group and its text for people."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        yield path, "pages", page_text(path.read_text())
    for group in ("src", "drivers"):
        for path in sorted((ROOT / group).rglob("*.py")):
            yield path, group, "\n\n".join(docstrings(path.read_text()))


def marks(text):
    """Chains and long sentences of a text."""
    chains, long = [], []
    for sentence in sentences(text):
        chains += [sentence] * len(CHAINS.findall(sentence))
        long += [sentence] * is_long(sentence)
    return chains, long


@pytest.mark.parametrize("group", MOST)
def test_prose_gets_no_worse(group):
    chains, long = [], []
    for _, its_group, text in files():
        if its_group == group:
            more_chains, more_long = marks(text)
            chains += more_chains
            long += more_long
    most_chains, most_long = MOST[group]
    assert len(chains) <= most_chains, "\n".join(chains)
    assert len(long) <= most_long, "\n".join(long)


def test_hard_sentences_are_found():
    chains, long = marks("A is the sum, that\nof B too. So many are here. That is fine.")
    assert (len(chains), len(long)) == (2, 0)
    words = " ".join(["word"] * MOST_WORDS)
    assert len(marks(f"{words} `a b c`.\n\n{words}. {words}.")[1]) == 1
    assert marks(f"* {words}.\n* {words}.\n  {words}.") == ([], [])
    page = f"```\n{words} {words}\n```\n| {words} | {words} |\n\n[{words}](a b c).\n"
    assert marks(page_text(page)) == ([], [])
    code = f'"""One.\n\nAs in::\n\n    {words} {words}\n\nTwo {words}.\n"""'
    assert len(marks(*docstrings(code))[1]) == 1


def main():
    """Print chains and long sentences of each file, and of each group."""
    totals = dict.fromkeys(MOST, (0, 0))
    print("chains  long")
    for path, group, text in files():
        chains, long = marks(text)
        totals[group] = totals[group][0] + len(chains), totals[group][1] + len(long)
        if chains or long:
            print(f"{len(chains):6} {len(long):5}  {path.relative_to(ROOT)}")
            if "-v" in sys.argv:
                print(*(f"    {x}" for x in dict.fromkeys(chains + long)), sep="\n")
    for group, (chains, long) in totals.items():
        print(f"{chains:6} {long:5}  {group}, at most {MOST[group][0]} and {MOST[group][1]}")


if __name__ == "__main__":
    main()
