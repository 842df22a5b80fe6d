"""What tests/cluster/emulate.sh runs on ranks: where they are, then transfers between nodes.

    links.py MIB

Rank 0 prints, for every rank, a line "RANK HOST IPC-NAMESPACE FOREIGN", FOREIGN being the other
hosts' files that it sees in /dev/shm.  Then come three transfers: "ring", MIB from every rank to
the next one; "into", MIB in all from the others to rank 0; "from", the other way round; each with
the rate, in Mbit/s, of the busiest direction of a link.  Last, "payload": the bytes sent to other
nodes by the one that sent most.
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


def busiest(messages):
    """Most bytes that one node sends to others, and most that one receives from others."""
    sent, received = Counter(), Counter()
    for a, b, size in messages:
        if hosts[a] != hosts[b]:
            sent[hosts[a]] += size
            received[hosts[b]] += size
    return max(sent.values(), default=0), max(received.values(), default=0)


def transfer(messages):
    """Seconds from the first rank's start until the last one has sent and received all."""
    comm.Barrier()
    start = time.perf_counter()
    requests = [comm.Irecv(arrived[a][:n], a) for a, b, n in messages if b == comm.rank]
    requests += [comm.Isend(mine[:n], b) for a, b, n in messages if a == comm.rank]
    MPI.Request.Waitall(requests)
    end = time.perf_counter()  # one clock, for it is one machine
    return comm.allreduce(end, MPI.MAX) - comm.allreduce(start, MPI.MIN)


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
share = nbytes // len(others)
patterns = {
    "ring": [(rank, (rank + 1) % comm.size, nbytes) for rank in range(comm.size)],
    "into": [(rank, 0, share) for rank in others],
    "from": [(0, rank, share) for rank in others],
}
for name, messages in patterns.items():
    transfer(messages)  # connects
    seconds = min(transfer(messages) for _ in range(REPEATS))  # others may use the machine
    report(name, f"{8e-6 * max(busiest(messages)) / seconds:.2f}")
everything = [message for messages in patterns.values() for message in messages]
report("payload", busiest(everything)[0] * (REPEATS + 1))
