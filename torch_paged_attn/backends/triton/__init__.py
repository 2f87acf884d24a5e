"""The Triton backend: kernels for NVIDIA and AMD GPUs, without C++."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.ops.backend import Backend
from torch_paged_attn.ops.lacking import COLUMN_SCALES, INT4, TOKEN_SCALES
from torch_paged_attn.ops.paths import Path
from torch_paged_attn.ops.repeated import Recent


class Triton(Backend):
    """The backend of GPUs. It needs only Triton, which is part of torch for CUDA and ROCm."""

    name = "triton"
    dispatch_keys = ("CUDA",)
    files: ClassVar[Mapping[str, str]] = {
        op: f"merges.{op}" for op in ("merge_states", "merge_states_backward")
    }
    supports = (
        *("q_latent", "tail_mask", "k_start", "q_position", "rng_state[2:]", "batch_invariant"),
        *("key_ranks", "key_rank", "key_interleave"),
        *(f"{x} but of selected" for x in (*TOKEN_SCALES, *INT4)),
        *COLUMN_SCALES,
    )
    supports_in_backward = (
        *("tail_mask", "k_start", "q_position", "rng_state[2:]"),
        *("key_ranks", "key_rank", "key_interleave"),
    )
    lacks_ops = ()
    # the functions check a call when they plan it; a call like an earlier one needs no new plan
    checks_metadata = True
    announces = (
        *("flash_varlen", "flash_varlen_out", "blocksparse"),
        *("flash_varlen_backward", "blocksparse_backward"),
    )

    def unsupported(self) -> str | None:
        """Why it cannot run here, or None."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; a torch for CUDA or ROCm brings it"
        return None

    def untested(self, target: str | None = None) -> str | None:
        """None on Hopper, and where there is no GPU."""
        if target is None:
            if not torch.cuda.is_available():
                return None
            from torch_paged_attn.backends.triton.runtime.target import target_of

            target = target_of(torch.device("cuda")).arch
        arch = target.partition(":")[0]
        if arch == "sm90":
            return None
        return f"its kernels were compiled for {arch}, and no such GPU has run its tests"

    def recent(self, op: str) -> Recent | None:
        """Plans were made for the last calls of most ops."""
        find = getattr(self.function(op), "recent", None)
        return find and find()

    def path(self, op: str, call: Any, target: str | None = None) -> Path:
        """Whether portable kernels run the call, Hopper's, or both, with which tiles and splits."""
        if (reason := self.unsupported()) is not None:
            return Path(self.name, None, reason)
        from torch_paged_attn.backends.triton.dispatch import path

        return path.path(op, call, target)

    def attend_heads(self, given: dict[str, Any], out: Tensor, lse: Tensor) -> bool:
        """By Hopper's kernel, if it runs the call."""
        from torch_paged_attn.backends.triton.dispatch import some_heads

        return self.unsupported() is None and some_heads.attend(given, out, lse)

    def compiler(self) -> Any:
        """Needs Triton, which must not be imported where there is no GPU."""
        from torch_paged_attn.backends.triton import compile_ahead

        return compile_ahead

    def remote_merge(self) -> Any:
        """A kernel on Triton."""
        from torch_paged_attn.backends.triton.merges import merge_remote

        return merge_remote

    def notes(self) -> list[str]:
        """Which kernels are used on this machine."""
        from torch_paged_attn.backends.triton.hopper import support
        from torch_paged_attn.backends.triton.runtime.launcher import starter_type, unknown_triton

        if (reason := support.unsupported_device()) is not None:
            attention = f"flash_varlen and blocksparse take the portable kernel: {reason}"
        else:
            attention = (
                "flash_varlen and blocksparse take Hopper's own kernel for prefill in 16 bits, and"
                " flash_varlen its own for decode of latent attention and its own backward, else"
                " the portable one, and both for chunks among decodes; the DEBUG log of"
                " torch_paged_attn.backends.triton says which, and why"
            )
        launches = [unknown] if (unknown := unknown_triton()) else []
        if starter_type() is None:
            launches.append(
                "Triton's launcher starts kernels, which takes longer than from C:"
                " torch_paged_attn/_launch.abi3.so is not built, or there is no CUDA driver"
            )
        others = "reshape_and_cache and merge_states have one kernel for all GPUs"
        return [attention, others, *launches]

    def unsupported_backward(self, call: AttentionCall) -> str | None:
        """Why a call has no gradient here, or None. The portable kernels support all gradients of
        the contract except that of a bias with key_ranks and a layout, where a tile of keys may be
        in several blocks; and float32 heads that do not fit into shared memory.
        """
        if call.selection is not None:
            return None
        if max(call.head_dim, call.head_dim_v) > 256:
            from torch_paged_attn.backends.triton.portable.backward.plan import lacks_room

            if (reason := lacks_room(call)) is not None:
                return f"{reason}, for whose gradient this GPU's shared memory has no room"
        bias = call.attn_bias
        if call.layout is None or call.key_ranks == 1 or bias is None:
            return None
        if not bias.is_floating_point():
            return None
        return "the triton backend has no gradient of attn_bias beside key_ranks and a layout"

    def traceable(self, op: str) -> Callable[..., Any] | None:
        """Cache writes stay opaque, because a graph would copy a tensor that a kernel writes
        through two views. Backwards stay opaque, because checkpointing and the partitioner look for
        them, and so do the ops of selected keys. Attention returns NotImplemented for the calls of
        `flash_varlen.why_opaque`, and stays opaque where it writes into a tensor of the caller's.
        """
        from torch_paged_attn.backends.triton.runtime.launch import traced

        is_opaque = op.startswith(("reshape_and_cache", "select"))
        if is_opaque or op.endswith(("_backward", "_out")):
            return None
        function = self.function(op)

        def trace(*args: Any, **kwargs: Any) -> Any:
            with traced():
                return function(*args, **kwargs)

        return trace


BACKEND = Triton()
