"""The rate at which GPUs' memory travels by MPI: each rank sends to the next, GB/s a rank.

    mpiexec -n 4 python tests/gpu/gpu_transfers.py          # as MPI says, or A2D_MPI_TRANSFERS
    mpiexec -n 4 python tests/gpu/gpu_transfers.py host     # through the host; or device

Medians of ten trials, by the slowest rank.  Exit code 1 if something else arrives than was sent.
"""

import sys

import numpy as np
from mpi4py import MPI

from a2d_mpi.checks.timing import in_turn
from a2d_mpi.comm.device_transport import DeviceTransport
from a2d_mpi.comm.gpus import bind_gpu, gpu_aware

MEBI = 1 << 20


def main(comm: MPI.Intracomm, way: str = "auto") -> int:
    """Print a line for each size, and return the exit code."""
    device, sharing = bind_gpu(comm)
    aware, why = gpu_aware(way)
    if comm.rank == 0:
        how = f"{'device' if aware else 'host'} transfers ({why})"
        print(f"{device.description}, {comm.size} ranks, {sharing} on a GPU, {how}", flush=True)
    transport = DeviceTransport(device, staged=not aware)
    before, after = ((comm.rank + i) % comm.size for i in (-1, 1))
    right = True
    for size in (MEBI, 16 * MEBI, 128 * MEBI):
        sent = device.upload(np.full(size, comm.rank + 1, np.uint8))
        received = device.empty((size,), np.uint8)

        def shift(sent=sent, received=received):
            messages = transport.receive(comm, received, before, 0)
            messages += transport.send(comm, sent, after, 0)
            transport.wait(messages)

        seconds = np.median(in_turn({"": shift}, 10, comm, warmup=2, device=device)[""])
        right &= bool((device.download(received) == before + 1).all())
        if comm.rank == 0:
            print(f"{size // MEBI:4} MiB   {size / seconds / 1e9:6.1f} GB/s per rank", flush=True)
    staged = comm.allreduce(transport.staged_bytes)
    if comm.rank == 0:
        print(f"copied through the host: {staged} bytes")
    return 0 if comm.allreduce(right, MPI.LAND) else 1


if __name__ == "__main__":
    sys.exit(main(MPI.COMM_WORLD, *sys.argv[1:]))
