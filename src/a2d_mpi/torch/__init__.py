"""Plans in PyTorch: differentiable calls, models of Hugging Face transformers, sums of gradients.

PyTorch holds tensors and their graph; MPI sends the messages.  Only this folder imports PyTorch.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("PyTorch is not installed: pip install a2d_mpi[torch]") from error

from a2d_mpi.torch.attention import attend, keep_attention, shard, shift_labels, unshard
from a2d_mpi.torch.context import Batch, ContextParallel
from a2d_mpi.torch.distributed import init_process_group
from a2d_mpi.torch.gradients import GradientHooks, sum_gradients

__all__ = [
    "Batch",
    "ContextParallel",
    "GradientHooks",
    "attend",
    "init_process_group",
    "keep_attention",
    "shard",
    "shift_labels",
    "sum_gradients",
    "unshard",
]
