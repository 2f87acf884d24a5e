"""What the backend that answers for CPU tensors has of the arguments that a backend may lack: the
CPU's, or under PAGED_ATTN_NEURON_EMULATE=1 Neuron's.
"""

import torch

from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.lacking import OPTIONAL

BACKEND, _ = serving_device(torch.device("cpu"))
HAS = frozenset(OPTIONAL) - frozenset(BACKEND.lacks)
