"""The Neuron backend: AWS Trainium and Inferentia, in NKI.

Written against the public documentation of NKI 0.6 and run on an emulator of it. It has never run
on hardware: see `docs/neuron.md`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from torch_paged_attn import environment
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.ops.backend import Backend
from torch_paged_attn.ops.lacking import TOKEN_SCALES

__all__ = ["BACKEND", "Neuron", "keep_plans"]


def keep_plans() -> AbstractContextManager[None]:
    """As `plan.keep_plans`: within it, metadata is read once for each version of its tensors."""
    from torch_paged_attn.backends.neuron import plan

    return plan.keep_plans()


FORWARDS = "flash_varlen", "flash_varlen_out", "blocksparse", "selected_attention", "merge_states"


class Neuron(Backend):
    """Trainium and Inferentia, by torch_neuronx or torch_xla; CPU tensors on the emulator."""

    name = "neuron"
    supports = TOKEN_SCALES
    selects_pages = True
    files = MappingProxyType(dict.fromkeys(FORWARDS, "attention"))
    dispatch_keys = ("XLA", "PrivateUse1") + (("CPU",) if environment.NEURON_EMULATE else ())

    def unsupported(self) -> str | None:
        """Why it cannot run here, or None."""
        from torch_paged_attn.backends.neuron import runtime

        return runtime.unsupported()

    def is_asked_for(self, key: str) -> bool:
        """Whether CPU tensors are to be the emulator's."""
        return key == "CPU" and environment.NEURON_EMULATE

    def unsupported_backward(self, call: AttentionCall) -> str | None:
        """Why it has no gradient of a call, or None; it continues "q requires grad, and "."""
        reason = f"the {self.name} backend has no {call.op}_backward"
        return None if call.op == "flash_varlen" else reason

    def traceable(self, op: str) -> Callable[..., Any] | None:
        """Attention stays one opaque node: its work lists are made on the host from what the
        tensors hold. So do writes into caches between whose elements something else lies, such as
        keys beside values.
        """
        from torch_paged_attn.backends.neuron.paged_kv import is_dense
        from torch_paged_attn.backends.neuron.runtime import can_trace, traced

        if op == "merge_states":
            return self.function(op)
        if not op.startswith("reshape_and_cache") or not can_trace():
            return None

        def trace(*args: Any, **kwargs: Any) -> Any:
            caches = args[2] if op == "reshape_and_cache" else args[2:4]
            if not all(is_dense(cache) for cache in caches):
                return NotImplemented
            with traced():
                return self.function(op)(*args, **kwargs)

        return trace


BACKEND = Neuron()
