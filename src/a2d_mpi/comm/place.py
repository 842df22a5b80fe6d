"""Which ranks share a node, its cores and its memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from mpi4py import MPI


class Place:
    """Who is where.  Collective over `comm`.

    Attributes
    ----------
    hosts : list of str
        Of the nodes.
    even : bool
        Whether all nodes have as many ranks; else `partners` is empty.
    ranks_per_node, cores_per_node : int, float
        Namespaces of one host share its cores.
    share : float
        Of a core, for each rank.
    memory : int
        Bytes of a rank.
    first_of_node : bool
        Whether I am.
    partners : dict of str to list of int
        Ranks with which I exchange messages "inside" my node and "between" nodes, if there are:
        one of each other node.  In the order of a ring that I am part of, the next one first.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        boot = Path("/proc/sys/kernel/random/boot_id")
        mine = (
            socket.gethostname(),
            boot.read_text() if boot.exists() else socket.gethostname(),
            tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (0,),
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        )
        everyone = comm.allgather(mine)
        self.hosts = list(dict.fromkeys(host for host, *_ in everyone))
        nodes = [[r for r, x in enumerate(everyone) if x[0] == host] for host in self.hosts]
        self.even = len({len(ranks) for ranks in nodes}) == 1
        self.ranks_per_node = len(nodes[0])
        cores = {(boot, core) for _, boot, found, _ in everyone for core in found}
        self.cores_per_node = len(cores) / len(nodes)
        self.memory = mine[3] // sum(x[1] == mine[1] for x in everyone)
        self.share = min(1.0, self.cores_per_node / self.ranks_per_node)
        node = self.hosts.index(mine[0])
        local = nodes[node].index(comm.rank)
        self.partners, self.first_of_node = {}, local == 0
        if self.even and self.ranks_per_node > 1:
            self.partners["inside"] = nodes[node][local + 1 :] + nodes[node][:local]
        if self.even and len(nodes) > 1:
            self.partners["between"] = [x[local] for x in nodes[node + 1 :] + nodes[:node]]
