"""Prose that is hard to read: chains of pronouns, long sentences, first lines without a verb.

``python tests/test_prose.py`` prints the counts of each file, ``-v`` also the sentences.
"""

import ast
import re
import sys
import textwrap
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHAINS = re.compile(r"\b(those of|that of|so many|such that)\b", re.IGNORECASE)
MOST_WORDS = 30

# The docstring of a function begins with one of these verbs, which "of" does not follow: "Return
# the bytes of one token." Add a verb when you need it. Properties are nouns: "Number of ranks."
VERBS = """
    accept add adjust advance allocate answer append apply ask assert assign begin bind block
    bound build call cast check choose clear close collect combine compare compile complete
    compute convert copy count create cut deal declare decode decompress define delete deliver
    derive describe detect divide do draw drop encode end enter estimate evaluate exchange
    execute exit fill find finish fit flush forget format free gather generate get give go
    group handle hash hide hold implement import improve increase insert iterate join keep
    launch leave let limit list load lock log lower make map mark mask match measure meet merge
    move name normalize note number open order overwrite pack parse pass place plan plot poll
    post predict prepare print prove put queue raise read receive record reduce refine refuse
    register release remove repeat replace report request rescale reserve resize restore
    restrict resume return reverse revoke rotate round run sample save say scale scatter search
    select send serve set settle share shift show shrink simulate skip solve sort split start
    stop store strip subtract sum summarise swap switch take tell test time tokenise
    train transpose try turn update use wait walk warn write yield
"""
QUESTIONS = "how what when where whether which who whose why"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Most chains, long sentences and first lines of docstrings without a verb, for each group. Lower a
# number when you have removed some; a rise is a sentence to rewrite.
MOST = {
    "pages": (0, 0, 0),
    "src": (0, 0, 0),
    "drivers": (0, 5, 0),
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
    for _, doc in documented(text):
        # What follows "::" and is indented is code.
        doc = re.sub(r"::\n\n(?:(?: +.*)?\n)*(?: +.*)?", ".\n\n", doc + "\n")
        yield re.sub(r"^ *(>>>|\.\.\. |-{3,}|={3,}).*$", "", doc, flags=re.MULTILINE)


def comments(text):
    """The comments of a module that have lines of their own."""
    for block in re.findall(r"^ *# .*(?:\n *# .*)*", text, re.MULTILINE):
        yield re.sub(r"^ *# ", "", block, flags=re.MULTILINE)


def documented(text):
    """Yield the module, its classes and its functions that have a docstring, and the docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            yield node, ast.get_docstring(node)


def verbless(text):
    """First lines of docstrings of functions that do not begin with a verb, and all questions."""
    lines = []
    for node, doc in documented(text):
        line = doc.partition("\n")[0]
        word, following = [*re.findall(r"\w+", line.lower()), "", ""][:2]
        decorators = " ".join(map(ast.unparse, getattr(node, "decorator_list", [])))
        needs_verb = isinstance(node, FUNCTIONS) and "property" not in decorators
        is_verb = word in VERBS.split() and following != "of"
        if word in QUESTIONS.split() or (needs_verb and not is_verb):
            lines.append(line)
    return lines


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
    """Yield for each file its path, its group, and its chains, long sentences and first lines."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        yield path, "pages", (*marks(page_text(path.read_text())), [])
    for group in ("src", "drivers"):
        for path in sorted((ROOT / group).rglob("*.py")):
            text = path.read_text()
            prose = "\n\n".join([*docstrings(text), *comments(text)])
            yield path, group, (*marks(prose), verbless(text))


def marks(text):
    """Return the chains and the long sentences of a text."""
    chains, long = [], []
    for sentence in sentences(text):
        chains += [sentence] * len(CHAINS.findall(sentence))
        long += [sentence] * is_long(sentence)
    return chains, long


@pytest.mark.parametrize("group", MOST)
def test_prose_gets_no_worse(group):
    totals = [], [], []
    for _, its_group, found in files():
        if its_group == group:
            for total, lines in zip(totals, found):
                total += lines
    for total, most in zip(totals, MOST[group]):
        assert len(total) <= most, "\n".join(total)


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
    code = f"x = 1\n    # {words}\n    # those of {words}.\n    # Short.\n"
    assert [len(x) for x in marks(*comments(code))] == [1, 1]


def test_first_lines_without_a_verb_are_found():
    code = '''
        """Sums of rows."""
        def f():
            """Sum of rows."""
        def g():
            """Sum the rows."""
        class A:
            """What is summed."""
            @cached_property
            def rows(self):
                """Number of rows."""
            @property
            def even(self):
                """Whether all rows are equal."""
    '''
    expected = {"Sum of rows.", "What is summed.", "Whether all rows are equal."}
    assert set(verbless(textwrap.dedent(code))) == expected


def main():
    """Print the counts of each file and of each group."""
    totals = {group: [0, 0, 0] for group in MOST}
    print("chains  long verbless")
    for path, group, found in files():
        counts = [len(lines) for lines in found]
        totals[group] = [a + b for a, b in zip(totals[group], counts)]
        if any(counts):
            print("{:6} {:5} {:8}".format(*counts), f" {path.relative_to(ROOT)}")
            if "-v" in sys.argv:
                print(*(f"    {x}" for x in dict.fromkeys(chain(*found))), sep="\n")
    for group, counts in totals.items():
        print("{:6} {:5} {:8}".format(*counts), f" {group}, at most {MOST[group]}")


if __name__ == "__main__":
    main()
