"""Build cuDNN's graphs for a GPU that is not there: python deviceless.py 90 < blocks.

LD_LIBRARY_PATH has the libcuda of tests/gpu/libcuda.c.  A line of the input is a pass and the
fields of a block, in JSON.  A line of the output: the seconds that its graph took, and why there
is none, or null.
"""

import json
import sys
import time
import warnings

from a2d_mpi.kernels import graphs

# What cuDNN asks about a GPU.
A100 = {
    "deviceVer": 800, "driverVer": 13000, "cudaDeviceId": 0, "totalGlobalMem": 85 * 10**9,
    "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 1 << 16, "multiProcessorCount": 108, "warpSize": 32,
    "maxSharedMemoryPerBlock": 48 << 10, "maxSharedMemoryPerBlockOptin": 163 << 10,
    "reservedSharedMemoryPerBlock": 1 << 10, "maxRegistersPerSM": 1 << 16, "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
    "supportCoopLaunch": 1, "smClockRateKHz": 1410000, "memClockRateKHz": 1593000,
    "l2CacheSize": 40 << 20, "deviceName": "NVIDIA A100-SXM4-80GB",
    "smCountOrigin": 0, "oversizedSharedMemoryPerBlock": 0, "memoryBusWidth": 5120,
}  # fmt: skip
H100 = A100 | {
    "deviceVer": 900, "multiProcessorCount": 132, "maxSharedMemoryPerBlockOptin": 227 << 10,
    "smClockRateKHz": 1980000, "memClockRateKHz": 2619000, "l2CacheSize": 50 << 20,
    "deviceName": "NVIDIA H100 80GB HBM3",
}  # fmt: skip
B200 = H100 | {
    "deviceVer": 1000, "multiProcessorCount": 148, "totalGlobalMem": 190 * 10**9,
    "smClockRateKHz": 1965000, "memClockRateKHz": 3996000, "l2CacheSize": 126 << 20,
    "memoryBusWidth": 8192, "deviceName": "NVIDIA B200",
}  # fmt: skip
RTX = A100 | {
    "deviceVer": 1200, "multiProcessorCount": 188, "maxSharedMemoryPerBlockOptin": 99 << 10,
    "maxCtasPerSM": 24, "maxThreadsPerSM": 1536, "smClockRateKHz": 2430000,
    "memClockRateKHz": 14001000, "l2CacheSize": 128 << 20, "memoryBusWidth": 512,
    "deviceName": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}  # fmt: skip
GPUS = {80: A100, 90: H100, 100: B200, 120: RTX}


class Deviceless:
    """cuDNN's frontend, whose graphs are for a described GPU."""

    def __init__(self, cudnn, sm):
        self._cudnn, self._sm = cudnn, sm
        self._gpu = GPUS[sm]
        self._properties = cudnn.create_device_properties(json.dumps(self._gpu))

    def __getattr__(self, name):
        return getattr(self._cudnn, name)

    def create_handle(self):
        return 0

    def destroy_handle(self, handle):
        pass

    def pygraph(self, handle, **options):
        options |= {"sm_version": self._sm, "sm_count": self._gpu["multiProcessorCount"]}
        return self._cudnn.pygraph(device_property=self._properties, **options)


def main(sm):
    imported = Deviceless(graphs._import_cudnn(), sm)
    graphs._import_cudnn = lambda: imported
    launcher = graphs.Graphs()
    warnings.simplefilter("ignore")  # the refusals are printed
    for line in sys.stdin:
        backward, fields = json.loads(line)
        start, reason = time.perf_counter(), None
        try:
            launcher.get(graphs.Block(**fields), backward)
        except graphs.NotSupported as error:
            reason = str(error)
        print(json.dumps([round(time.perf_counter() - start, 2), reason]), flush=True)


if __name__ == "__main__":
    if "without-nvrtc" in sys.argv:
        sys.modules["cuda.pathfinder"] = None
    main(int(sys.argv[1]))
