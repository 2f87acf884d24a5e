"""How many floating-point operations a call takes, for `torch.utils.flop_counter`.

A product of two numbers and its addition are two. What is counted is useful work: the pairs of
queries and keys that causality and window let see each other, or for `blocksparse` those of the
listed blocks if they are fewer. Lengths that lie on the host are read; otherwise (on a device, in a
graph) every query is taken to see as many keys as shapes and hints allow, under causality half.
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
OPS = "flash_varlen", "blocksparse"


def flops(call: AttentionCall) -> int:
    """Of a forward: q times k, latents times v, and the probabilities times v."""
    dims = call.head_dim + call.head_dim_v * (1 if call.q_latent is None else 2)
    return 2 * call.num_heads * _pairs(call) * dims


def backward_flops(call: BackwardCall) -> int:
    """Of a backward: q times k again, dout times v, and a product for each of dq, dk and dv."""
    forward, (dq, dk, dv, *_) = call.forward, call.output_mask
    products = (1 + dq + dk) * forward.head_dim + (1 + dv) * forward.head_dim_v
    return 2 * forward.num_heads * _pairs(forward) * products


def _pairs(call: AttentionCall) -> int:
    """Pairs of a query and a key that are looked at, of one head."""
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k
    if all(x is None or _is_on_host(x) for x in (*lengths, call.q_position)):
        key_lens = key_lengths(*lengths).tolist()
        query_lens = call.cu_seqlens_q.diff().tolist()
        firsts = call.first_positions().tolist()
        visible = sum(_visible(call, *n) for n in zip(firsts, query_lens, key_lens, strict=True))
    else:
        visible = _visible_by_shapes(call)
    if (layout := call.layout) is None:
        return visible
    sequences = 1 if layout.col_indices.dim() == 3 else call.batch
    blocks = layout.col_indices.numel() // layout.col_indices.shape[-2] * sequences
    return min(visible, blocks * layout.q_block_size * layout.k_block_size)


def _is_on_host(x: Tensor) -> bool:
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def _visible(call: AttentionCall, first: int, query_len: int, key_len: int) -> int:
    """Pairs of one sequence, whose first query stands at position `first`."""
    left, right = call.window_size_left, call.window_right
    positions = first + torch.arange(query_len, device="cpu")
    keys = call.key_positions(torch.arange(key_len, device="cpu"))
    start = torch.searchsorted(keys, positions - left) if left >= 0 else 0
    stop = torch.searchsorted(keys, positions + right + 1) if right >= 0 else key_len
    return int((positions * 0 + stop - start).clamp(min=0).sum())


def _visible_by_shapes(call: AttentionCall) -> int:
    """The largest number of pairs that the shapes allow."""
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
            packet = getattr(torch.ops.paged_attn, name)
            if packet not in flop_registry:
                register = register_flop_formula(packet, get_raw=True)
                register(formula(count, getattr(call, op)))


class _WhenImported:
    """Registers the formulas as soon as somebody imports torch's counter. It imports Triton, which
    takes half a second: too long for everybody who counts nothing.
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
    """Tell torch's counter, now or when it is imported."""
    if COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenImported())
