"""Some heads of a call, written where those of all heads lie: by Hopper's kernel alone."""

import torch

from torch_paged_attn.backends.triton.dispatch.some_heads import attend
from torch_paged_attn.ops import flash_varlen

LENGTHS = (700, 0, 4300)


def test_writes_what_all_heads_have(device):
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    g = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS) + 8  # padding
    q, k, v = (torch.randn(tokens, n, 128, generator=g).bfloat16().to(device) for n in (16, 4, 4))
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    given = {"cu_seqlens_q": bounds, "max_seqlen_q": 4300, "max_seqlen_k": 4300, "causal": True}
    out = torch.full_like(q, 7.0)
    lse = torch.full((16, tokens), 7.0, device=device)
    for heads in (slice(0, 1), slice(1, 4)):
        own = slice(4 * heads.start, 4 * heads.stop)
        of_heads = {"q": q[:, own], "k": k[:, heads], "v": v[:, heads]}
        assert attend(given | of_heads, out[:, own], lse[own]) == is_hopper
    if is_hopper:
        wanted = flash_varlen(q, k, v, **given)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    else:
        assert (out == 7).all() and (lse == 7).all()
