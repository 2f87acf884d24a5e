"""Block-sparse attention beside dense attention and the peers found there.

Peers work on the same lists of blocks: FlexAttention and, given its
blocksparse_attention_kernel.py, the kernel that vLLM had, without what its wrapper does on the
host. Every result is compared with a float32 formula before it is timed. Medians of CUDA-graph
replays that take turns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from attention import DEVICE, Prefill, check, relative_error, take_turns
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import torch_paged_attn
from torch_paged_attn.layouts import BlockSparseLayout, local_strided


@dataclasses.dataclass(frozen=True)
class BlockSparse:
    """One sequence under a local band and every `stride`-th block column, another for each head."""

    length: int
    block_size: int
    local: int
    stride: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return (
            f"1x{self.length} {self.num_heads}/{self.num_kv_heads}"
            f" block {self.block_size} {self.local}+1/{self.stride}"
        )


BLOCKSPARSE = (
    BlockSparse(16384, 64, 16, 16),
    BlockSparse(16384, 64, 16, 8, num_kv_heads=32),
    BlockSparse(32768, 64, 16, 32),
    BlockSparse(16384, 128, 8, 16),
    BlockSparse(32768, 128, 8, 32),
)


def flex(p: BlockSparse, layout: BlockSparseLayout, q, k, v) -> Callable:
    """FlexAttention over the same blocks, those on the diagonal under the causal mask."""
    listed = layout.dense()
    diagonal = torch.eye(*listed.shape[1:], dtype=torch.bool, device=DEVICE)

    def lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
        return blocks.sum(-1).int()[None], order.int()[None]

    mask = BlockMask.from_kv_blocks(
        *lists(listed & diagonal),
        *lists(listed & ~diagonal),
        BLOCK_SIZE=p.block_size,
        mask_mod=lambda b, h, row, key: row >= key,
    )
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    heads_first = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    # its own tiles do not fit into blocks of 64
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64} if p.block_size == 64 else None
    options = {"enable_gqa": p.num_heads != p.num_kv_heads, "kernel_options": tiles}
    return lambda: compiled(*heads_first, block_mask=mask, **options)[0].transpose(0, 1)


def vllm(module: Any, p: BlockSparse, layout: BlockSparseLayout, q, k, v, cu) -> Callable:
    """vLLM's kernel, launched as its wrapper launches it."""
    tiles = p.length // p.block_size
    sequence = torch.zeros(tiles, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(tiles, dtype=torch.int32, device=DEVICE) * p.block_size
    out = torch.empty_like(q)
    strides = [stride for x in (q, k, v, out) for stride in (0, *x.stride())]
    crow, col = layout.crow_indices, layout.col_indices

    def run() -> torch.Tensor:
        module._fwd_kernel_batch_inference[(tiles, p.num_heads, 1)](
            q, k, v, out, p.head_dim**-0.5, cu[:-1], cu[1:], cu[:-1], cu[1:], sequence, starts,
            *strides, crow, col, *crow.stride(), *col.stride(), p.num_heads // p.num_kv_heads,
            HAS_BATCH_DIM=False, D_HEAD=p.head_dim, BLOCK_M=p.block_size, BLOCK_N=p.block_size,
            BLOCK_D=p.head_dim, BLOCK_M_LOADING=p.block_size, EVEN_D=True, num_warps=4,
            num_stages=3,
        )  # fmt: skip
        return out

    return run


@torch.inference_mode()
def measure(p: BlockSparse, vllm_kernel: Any) -> dict[str, Any]:
    """TFLOP/s of the blocks that are listed, beside those of dense causal attention."""
    layout = local_strided(p.num_heads, p.length, p.block_size, p.local, p.stride, device=DEVICE)
    shape = (p.length, p.num_heads, p.head_dim)
    q = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, p.length, p.num_kv_heads, p.head_dim, device=DEVICE, dtype=q.dtype)
    cu = torch.tensor([0, p.length], device=DEVICE, dtype=torch.int32)
    listed = layout.arguments()
    calls: dict[str, Callable] = {
        "ours": lambda: torch_paged_attn.blocksparse(q, k, v, cu_seqlens_q=cu, **listed)[0],
        "flex": flex(p, layout, q, k, v),
    }
    if vllm_kernel:
        calls["vLLM"] = vllm(vllm_kernel, p, layout, q, k, v, cu)

    some = torch.randint(0, p.length, (64,), device=DEVICE)
    columns = torch.arange(p.length, device=DEVICE)
    # (heads, some, length): blocks listed for the row, and keys up to its own
    seen = layout.dense()[:, some // p.block_size].repeat_interleave(p.block_size, 2)
    seen = seen[..., : p.length] & (columns <= some[:, None])
    group = p.num_heads // p.num_kv_heads
    keys, values = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q[some].float().transpose(0, 1) @ keys.transpose(1, 2) * p.head_dim**-0.5
    want = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values
    errors = {n: relative_error(call()[some].transpose(0, 1), want) for n, call in calls.items()}
    check(errors)

    calls["dense"] = lambda: torch_paged_attn.flash_varlen(q, k, v, cu_seqlens_q=cu, causal=True)[0]
    flops = Prefill((p.length,), p.num_heads, p.num_kv_heads, p.head_dim).flops
    density = layout.density()
    rates = {
        name: (1.0 if name == "dense" else density) * flops / ms * 1e-9
        for name, ms in take_turns(calls).items()
    }
    return {"unit": "TFLOP/s", "figures": rates, "error": errors["ours"], "of causal": density}


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    return {str(p): functools.partial(measure, p, peers.get("vLLM")) for p in BLOCKSPARSE}
