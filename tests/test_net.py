"""Bytes and messages of every rank are those of `tests/traffic.json`; see `net.py`."""

import json
from pathlib import Path

from helpers import launch
from net import RANKS

HERE = Path(__file__).parent


def test_traffic(tmp_path):
    """Committed, so that no change of a formula and of the code together goes unseen."""
    done = launch(RANKS, HERE / "net.py", tmp_path / "now.json", timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "now.json").read_text())
    known = json.loads((HERE / "traffic.json").read_text())
    assert found.keys() == known.keys()
    for name, expected in known.items():
        for kind, counts in expected.items():
            assert found[name][kind] == counts, f"{kind} of {name}"
