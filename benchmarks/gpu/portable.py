"""Prefill by the portable kernel, and what options cost.

`portable` is the kernel that every GPU but Hopper takes, `ours` the one that this GPU takes; peers
are FlexAttention, compiled for each option as a function of scores, and FlashAttention-2. Head 0 is
compared with the reference before it is timed. Medians of CUDA-graph replays that take turns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from attention import DEVICE, PREFILL, Prefill, check, cumulative, relative_error, take_turns
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from torch_paged_attn import flash_varlen, reference
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.portable.forward.plan import attend

SOFTCAP = 30.0
LLAMA = Prefill((4096,) * 4, 32, 8, 128)


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of equally long prompts, one option, and the size of values if it is not keys'."""

    prefill: Prefill
    option: str = ""
    head_dim_v: int = 0

    def __str__(self) -> str:
        values = f" v{self.head_dim_v}" if self.head_dim_v else ""
        return f"{self.prefill}{values} {self.option}".rstrip()

    @property
    def flops(self) -> float:
        share = (1 + (self.head_dim_v or self.prefill.head_dim) / self.prefill.head_dim) / 2
        return self.prefill.flops * share

    def options(self) -> dict[str, Any]:
        """What the operator is given."""
        p = self.prefill
        heads = torch.arange(1, p.num_heads + 1, device=DEVICE)
        tokens = sum(p.lengths), p.lengths[0]
        match self.option:
            case "bias":
                return {"attn_bias": torch.randn(1, *tokens, device=DEVICE, dtype=torch.bfloat16)}
            case "bool mask":
                return {"attn_bias": torch.rand(1, *tokens, device=DEVICE) < 0.9}
            case "ALiBi":
                return {"alibi_slopes": 2.0 ** (-8.0 * heads / p.num_heads)}
            case "sinks":
                return {"sinks": torch.randn(p.num_heads, device=DEVICE)}
            case "softcap":
                return {"softcap": SOFTCAP}
            case "dropout":
                return {"dropout_p": 0.1, "rng_state": torch.tensor([1, 2], device=DEVICE)}
        return {}

    def score_mod(self, options: dict[str, Any]) -> Callable | None:
        """The option as FlexAttention wants it; None where it has none."""
        length = self.prefill.lengths[0]
        match self.option:
            case "bias":
                bias = options["attn_bias"][0]
                return lambda s, b, h, row, key: s + bias[b * length + row, key]
            case "bool mask":
                mask = options["attn_bias"][0]
                return lambda s, b, h, row, key: torch.where(
                    mask[b * length + row, key], s, -float("inf")
                )
            case "ALiBi":
                slopes = options["alibi_slopes"]
                return lambda s, b, h, row, key: s - slopes[h] * (row - key)
            case "softcap":
                return lambda s, b, h, row, key: SOFTCAP * torch.tanh(s / SOFTCAP)
        return None


CASES = (
    *(Case(p) for p in PREFILL[:5]),
    *(Case(LLAMA, o) for o in ("sinks", "ALiBi", "softcap", "bias", "bool mask", "dropout")),
    Case(Prefill((4096,) * 4, 16, 16, 192), head_dim_v=128),
)


def first_head(options: dict[str, Any]) -> dict[str, Any]:
    per_head = ("sinks", "alibi_slopes")
    return {name: value[:1] if name in per_head else value for name, value in options.items()}


@torch.inference_mode()
def measure(case: Case) -> dict[str, Any]:
    """TFLOP/s of everyone."""
    p, options = case.prefill, case.options()
    total, batch, length = sum(p.lengths), len(p.lengths), p.lengths[0]
    q = torch.randn(total, p.num_heads, p.head_dim, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(total, p.num_kv_heads, p.head_dim, device=DEVICE, dtype=q.dtype)
    v = torch.randn_like(k)[..., : case.head_dim_v or p.head_dim].contiguous()
    cu = cumulative(p.lengths)
    lengths = None, length, length
    options["causal"] = p.causal
    call = AttentionCall.flash_varlen(q, k, v, cu, *lengths, **options)
    calls: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: flash_varlen(q, k, v, cu, *lengths, **options)[0],
        "portable": lambda: attend(call)[0],
    }
    dense = [x.unflatten(0, (batch, length)).transpose(1, 2).contiguous() for x in (q, k, v)]
    grouped = {"enable_gqa": p.num_heads != p.num_kv_heads}
    score_mod = case.score_mod(options)
    if score_mod is not None or not case.option:
        torch._dynamo.reset()
        mask = None
        if p.causal:
            mask = create_block_mask(
                lambda b, h, row, key: row >= key, None, None, length, length, device=DEVICE
            )
        flex = torch.compile(flex_attention, dynamic=False)
        calls["flex"] = lambda: flex(
            *dense, score_mod=score_mod, block_mask=mask, **grouped
        ).transpose(1, 2)
    if not case.option and not case.head_dim_v:

        def flash_attention_2() -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return scaled_dot_product_attention(*dense, is_causal=p.causal, **grouped)

        calls["FA2"] = lambda: flash_attention_2().transpose(1, 2)

    with torch.device(DEVICE):
        heads = q[:, :1], k[:, :1], v[:, :1]
        want = reference.flash_varlen(*heads, cu, *lengths, **first_head(options))[0]
    errors = {
        name: relative_error(call().flatten(0, -3)[:, :1], want) for name, call in calls.items()
    }
    check(errors)
    rates = {name: case.flops / ms * 1e-9 for name, ms in take_turns(calls).items()}
    error = max(errors["ours"], errors["portable"])
    return {"unit": "TFLOP/s", "figures": rates, "error": error}


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    return {str(case): functools.partial(measure, case) for case in CASES}
