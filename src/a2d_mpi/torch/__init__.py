"""Plans in PyTorch: differentiable calls, models of Hugging Face transformers, their gradients.

PyTorch holds tensors and their graph; MPI sends the messages.  Only this folder imports PyTorch.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("PyTorch is not installed: pip install a2d_mpi[torch]") from error

from a2d_mpi.torch.attention import attend, keep_attention, shard, unshard
from a2d_mpi.torch.context import ContextParallel
from a2d_mpi.torch.distributed import init_process_group
from a2d_mpi.torch.gradients import sum_gradients

__all__ = [
    "ContextParallel",
    "attend",
    "init_process_group",
    "keep_attention",
    "shard",
    "sum_gradients",
    "unshard",
]
