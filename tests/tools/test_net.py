"""Predicted bytes and messages of every rank are those of support/traffic.json; see `net.py`.

Other tests hold what plans send to the predictions.
"""

import json

import net
import pytest
from helpers import ROOT
from oracles import messages_of

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.planning import cost
from a2d_mpi.schedules.writing import problem_of


@pytest.mark.thorough
def test_traffic():
    """The committed traffic catches a change of formula and code together."""
    known = json.loads((ROOT / "tests/support/traffic.json").read_text())
    names = set()
    for name, method, shape, (mask, dtype, nheads_kv, seqlen, _) in net.configurations():
        nodes = net.NODES[shape] if method == "node aware" else None
        layout = Layout(*shape, nodes=nodes)
        config = AttentionConfig(seqlen, net.NHEADS, net.HEADDIM, nheads_kv, dtype=dtype)
        problem = problem_of(method, layout, config, net.make_mask(mask, seqlen))
        for kind, count in (("bytes", cost.traffic), ("messages", messages_of)):
            ranks = [count(method, layout, problem, rank) for rank in range(layout.size)]
            found = [{"/".join(key): list(both) for key, both in x.items()} for x in ranks]
            assert found == known[name][kind], f"{kind} of {name}"
        names.add(name)
    assert names == known.keys()
