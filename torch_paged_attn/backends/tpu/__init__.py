"""The TPU backend: the ops in Pallas, as pure JAX functions, and their way to torch.

`functions.py` and `cache_write` hold functions that are named like ops and take their arguments as
JAX arrays. `torch_side/binding.py` puts the ops on torch tensors, `front_ends.py` beside it finds
the way to the device; `kernels` are Pallas'. Compiled by the TPU compiler and run by
Pallas' interpreter; not tested on a TPU.
"""

from collections.abc import Callable
from typing import Any

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.ops.backend import Backend
from torch_paged_attn.ops.lacking import TOKEN_SCALES


class Tpu(Backend):
    """Google's TPUs, by torch_tpu or torch_xla."""

    name = "tpu"
    supports = TOKEN_SCALES
    selects_pages = True
    dispatch_keys = ("XLA", "PrivateUse1")

    def unsupported(self) -> str | None:
        """Why it cannot run here, or None."""
        from torch_paged_attn.backends.tpu.torch_side import front_ends

        return front_ends.unsupported()

    def has(self, op: str) -> bool:
        """Whether `torch_side/binding.py` has the op."""
        from torch_paged_attn.backends.tpu.torch_side import binding

        return hasattr(binding, op.replace(".", "_"))

    def unsupported_backward(self, call: AttentionCall) -> str | None:
        """Why a call has no gradients: those of `flash_varlen` alone have."""
        if call.op == "flash_varlen":
            return None
        return f"the {self.name} backend has no {call.op}_backward"

    def function(self, op: str) -> Callable[..., Any]:
        """An op on torch tensors."""
        from torch_paged_attn.backends.tpu.torch_side import binding

        return getattr(binding, op.replace(".", "_"))


BACKEND = Tpu()
