"""The example of PyTorch runs, and trains."""

import re

from helpers import ROOT, launch


def test_runs():
    path = ROOT / "examples" / "pytorch.py"
    assert len(path.read_text().splitlines()) <= 25
    printed = launch(4, path, timeout=200).stdout
    losses = [float(x) for x in re.findall(r"loss (\d\.\d+)", printed)]
    assert len(losses) == 20 and max(losses[-4:]) < min(losses[:4]), printed
