"""What tests/cluster/emulate.sh runs on ranks: where they are, then transfers between nodes.

    links.py MIB

Rank 0 prints, for every rank, a line "RANK HOST IPC-NAMESPACE FOREIGN", FOREIGN being the other
hosts' files that it sees in /dev/shm.  Then come transfers of MIB each: "ring", from every rank to
the next one; "into", from all others to rank 0; "from", the other way round; with the rate, in
Mbit/s, of the busiest direction of a link.  Last, "payload": what that node sent that sent most.
"""

import os
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from mpi4py import MPI

REPEATS = 4
comm = MPI.COMM_WORLD
host = socket.gethostname()
hosts = comm.allgather(host)
nbytes = int(float(sys.argv[1]) * 2**20)


def report(*words):
    """Print on rank 0."""
    if comm.rank == 0:
        print(*words, flush=True)


def busiest(pairs):
    """Most bytes that one node sends to others, and most that one receives from others."""
    crossing = [(hosts[a], hosts[b]) for a, b in pairs if hosts[a] != hosts[b]]
    counts = [Counter(ends) for ends in zip(*crossing)] or [Counter()] * 2
    return tuple(nbytes * max(count.values(), default=0) for count in counts)


def transfer(pairs):
    """Seconds until the last rank has sent and received all."""
    comm.Barrier()
    start = time.perf_counter()
    requests = [comm.Irecv(arrived[a], a) for a, b in pairs if b == comm.rank]
    requests += [comm.Isend(mine, b) for a, b in pairs if a == comm.rank]
    MPI.Request.Waitall(requests)
    return comm.allreduce(time.perf_counter() - start, MPI.MAX)


shm = Path("/dev/shm")
(shm / f"seen-{host}").touch()
comm.Barrier()
foreign = sorted(x.name for x in shm.glob("seen-*") if x.name != f"seen-{host}")
places = comm.gather((host, os.readlink("/proc/self/ns/ipc"), ",".join(foreign) or "-"))
for rank, place in enumerate(places or []):
    report(rank, *place)

mine = np.ones(nbytes, np.uint8)
arrived = {rank: np.empty_like(mine) for rank in range(comm.size)}
others = range(1, comm.size)
patterns = {
    "ring": [(rank, (rank + 1) % comm.size) for rank in range(comm.size)],
    "into": [(rank, 0) for rank in others],
    "from": [(0, rank) for rank in others],
}
for name, pairs in patterns.items():
    transfer(pairs)  # connects
    seconds = min(transfer(pairs) for _ in range(REPEATS))  # others may use the machine
    report(name, f"{8e-6 * max(busiest(pairs)) / seconds:.2f}")
everything = [pair for pairs in patterns.values() for pair in pairs]
report("payload", busiest(everything)[0] * (REPEATS + 1))
