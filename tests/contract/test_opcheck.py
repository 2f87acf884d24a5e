"""`torch.library.opcheck`: schema, fake, autograd registration and AOT dispatch of every op."""

import pytest
import torch

from torch_paged_attn.testing import PROBLEMS, build

CALLS = [
    "llama3_8b/prefill_ragged/bf16",
    "llama3_8b/mixed/kv_int8",
    "mpt/alibi_batch/f32",
    "training/dropout/f32",
    "llama3_8b/prefill/out_e4m3",
    "phi3_small/local_strided/bf16",
]


def positional(call):
    """The call's arguments as `opcheck` wants them: tensors in order, options by name."""
    op = getattr(torch.ops.paged_attn, call.op).default
    hints = {"cu_seqlens_k": None, "max_seqlen_q": 7, "max_seqlen_k": 300}
    args = hints | call.args
    order = [a.name for a in op._schema.arguments if not a.kwarg_only]
    return op, tuple(args.pop(name, None) for name in order), args


@pytest.mark.parametrize("name", CALLS)
def test_attention(name):
    op, args, kwargs = positional(build(PROBLEMS[name]))
    torch.library.opcheck(op, args, kwargs)


def test_reshape_and_cache():
    key, slots = torch.randn(4, 2, 8), torch.tensor([3, -1, 0, 19])
    k_cache, v_cache = (torch.randn(5, 4, 2, 8).transpose(1, 2) for _ in range(2))
    ops = torch.ops.paged_attn.reshape_and_cache
    torch.library.opcheck(ops.default, (key, key, torch.randn(2, 5, 2, 4, 8), slots))
    torch.library.opcheck(ops.split, (key, key, k_cache, v_cache, slots))
    k_cache, v_cache = (x.to(torch.int8) for x in (k_cache, v_cache))
    scales = torch.ones(5, 2, 4), torch.ones(5, 2, 4)
    torch.library.opcheck(ops.quantize, (key, key, k_cache, v_cache, *scales, slots))


def test_merge_states():
    out, lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    torch.library.opcheck(torch.ops.paged_attn.merge_states.default, (out, lse, out + 1, lse - 1))
    parts = [out, out + 1, out - 1], [lse, lse - 1, lse + 1]
    options = {"out_dtype": torch.bfloat16}
    torch.library.opcheck(torch.ops.paged_attn.merge_states.list, parts, options)
