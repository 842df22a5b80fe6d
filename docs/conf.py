"""Settings of Sphinx for `python jobs/run.py docs`; the pages are those of this folder."""

import os
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

import a2d_mpi
from a2d_mpi.__main__ import build_parser

COMMANDS = Path(a2d_mpi.__file__).parent / "commands"
os.environ["COLUMNS"] = "90"  # the width of help texts

project = "a2d_mpi"
author = "the authors of a2d_mpi"
project_copyright = author
release = a2d_mpi.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "numpydoc", "myst_parser"]
exclude_patterns = ["README.md"]  # index.rst includes it
default_role = "py:obj"
myst_heading_anchors = 3
autodoc_typehints = "none"  # numpydoc's sections say more
autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch", "transformers"]  # large, and not needed to read docstrings
numpydoc_show_class_members = False  # autodoc shows them
html_theme = "furo"
html_title = f"a2d_mpi {release}"


class DriverHelp(Directive):
    """Help of a command and of its subcommands: ``.. driver-help:: plan``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Make the nodes of the page."""
        name = self.arguments[0]
        self.state.document.settings.record_dependencies.add(f"{COMMANDS}/{name}.py")
        parser = build_parser(name, f"python -m a2d_mpi {name}")
        texts = [x.format_help().strip() for x in (parser, *parser.commands.values())]
        return [nodes.literal_block(text, text, language="none") for text in texts]


def without_folders(app, page: str, source: list[str]) -> None:
    """Keep only the text of links to folders, and to pages that are not in this folder."""
    link = r"(?<!!)\[([^\]]*)\]\(\.\./(?![^)#]*\.(?!md)\w+\))[^)]*\)"
    source[0] = re.sub(link, r"\1", source[0])


def setup(app) -> None:
    """Register the above."""
    app.add_directive("driver-help", DriverHelp)
    app.connect("source-read", without_folders)
