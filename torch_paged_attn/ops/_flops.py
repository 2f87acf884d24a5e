"""The number of floating-point operations of a call, for `torch.utils.flop_counter`.

A multiply-add counts as two. Only useful work counts: pairs of a query and a key that the causal
mask and the window leave, or, for `blocksparse`, the pairs of all listed blocks if these are fewer.
For `selected_attention` all keys of the listed units count, if these are fewer.
Sequence lengths are read if they are on the CPU. Otherwise (on another device, or while a graph is
traced) every query is assumed to see as many keys as shapes and hints allow, or half of them under
a causal mask.
"""

import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torch_paged_attn.attention_call import AttentionCall, key_lengths
from torch_paged_attn.backward_call import BackwardCall

COUNTER = "torch.utils.flop_counter"
OPS = "flash_varlen", "flash_varlen_out", "blocksparse", "selected_attention"


def flops(call: AttentionCall) -> int:
    """Operations of a forward: q times k, q_latent times v if given, and probabilities times v."""
    dims = call.head_dim + call.head_dim_v * (1 if call.q_latent is None else 2)
    return 2 * call.num_heads * _pairs(call) * dims


def backward_flops(call: BackwardCall) -> int:
    """Operations of a backward: q times k again, dout times v, and one product each for dq, dk
    and dv, as far as they are wanted.
    """
    forward, (dq, dk, dv, *_) = call.forward, call.output_mask
    products = (1 + dq + dk) * forward.head_dim + (1 + dv) * forward.head_dim_v
    return 2 * forward.num_heads * _pairs(forward) * products


def _pairs(call: AttentionCall) -> int:
    """Number of pairs of a query and a key that one head computes, over all sequences."""
    if (selection := call.selection) is not None:
        _, groups, entries = selection.key_indices.shape
        listed = call.total_q * entries
        if _is_on_host(selection.key_indices):
            listed = int((selection.key_indices >= 0).sum()) // groups
        listed *= selection.select_size
        if call.is_slots:
            return listed
        return min(listed, _visible_pairs(call))
    visible = _visible_pairs(call)
    if (layout := call.layout) is None:
        return visible
    sequences = 1 if layout.col_indices.dim() == 3 else call.batch
    blocks = layout.col_indices.numel() // layout.col_indices.shape[-2] * sequences
    return min(visible, blocks * layout.q_block_size * layout.k_block_size)


def _visible_pairs(call: AttentionCall) -> int:
    """The pairs that causal mask and window leave."""
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k
    if all(x is None or _is_on_host(x) for x in (*lengths, call.q_position)):
        key_lens = key_lengths(*lengths).tolist()
        query_lens = call.cu_seqlens_q.diff().tolist()
        firsts = call.first_positions().tolist()
        return sum(_visible(call, *n) for n in zip(firsts, query_lens, key_lens, strict=True))
    return _visible_by_shapes(call)


def _is_on_host(x: Tensor) -> bool:
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def _visible(call: AttentionCall, first: int, query_len: int, key_len: int) -> int:
    """Pairs of one sequence that causal mask and window leave. `first` is the position of its
    first query.
    """
    left, right = call.window_size_left, call.window_right
    positions = first + torch.arange(query_len, device="cpu")
    keys = call.key_positions(torch.arange(key_len, device="cpu"))
    start = torch.searchsorted(keys, positions - left) if left >= 0 else 0
    stop = torch.searchsorted(keys, positions + right + 1) if right >= 0 else key_len
    return int((positions * 0 + stop - start).clamp(min=0).sum())


def _visible_by_shapes(call: AttentionCall) -> int:
    """The largest number of pairs that shapes and hints allow, halved under a causal mask."""
    table = call.block_table
    longest = call.k.shape[0] if table is None else table.shape[1] * call.page_size
    if call.max_seqlen_k:
        longest = min(longest, call.max_seqlen_k)
    left, right = call.window_size_left, call.window_right
    if left >= 0 and right >= 0:
        return call.total_q * min(longest, left + right + 1)
    pairs = call.total_q * longest
    return pairs if right < 0 and left < 0 else pairs // 2


def _register() -> None:
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    def formula(count: Any, call_of: Any) -> Any:
        return lambda *args, out_val=None, **kwargs: count(call_of(*args, **kwargs))

    for op in OPS:
        for name, count, call in (
            (op, flops, AttentionCall),
            (f"{op}_backward", backward_flops, BackwardCall),
        ):
            packet = getattr(torch.ops.paged_attn, name, None)
            if packet is not None and packet not in flop_registry:
                register = register_flop_formula(packet, get_raw=True)
                register(formula(count, getattr(call, op)))


class _WhenImported:
    """An import hook that registers the formulas when `torch.utils.flop_counter` is imported.

    That module imports Triton, which takes half a second, so this package does not import it.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_flops() -> None:
    """Register the formulas with torch's counter: now, or when it is imported."""
    if COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenImported())
