"""Read the pages of the documentation."""

import re
import shlex

from helpers import ROOT, launch


def read(page):
    return (ROOT / page).read_text()


def found(page, language):
    """Return the matches of the blocks of a language in a page."""
    return re.finditer(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """Return the blocks of a language in a page."""
    return [x[1] for x in found(page, language)]


def run(command, folder=ROOT):
    """Return what a command of a page prints."""
    words = shlex.split(command.replace("$A2D", str(ROOT)).replace("\\\n", " "))
    ranks, words = (int(words[2]), words[4:]) if words[0] == "mpiexec" else (0, words[1:])
    return launch(ranks, *words, cwd=folder).stdout


def run_code(code, folder=ROOT):
    """Return what the Python of a page prints."""
    return launch(0, "-c", code, cwd=folder).stdout
