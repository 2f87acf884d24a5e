"""Tokens a second of a whole training step: a Llama of a billion parameters, 16,384 tokens packed.

    python benchmarks/gpu/run.py --only train_step

Random weights of Llama-3.2-1B's shape with a vocabulary of 32,000, bfloat16 weights, fused AdamW:
forward, loss, backward and update. The same model trains with its attention by

    ours               `flash_varlen`, deterministic
    ours, any order    the same with deterministic=False
    FA2                `torch.nn.attention.varlen.varlen_attn`, with keys' heads repeated: torch
                       2.11's has no groups of heads
    cuDNN              `scaled_dot_product_attention`, where all documents are of one length

which take turns; each figure is the median of a way's steps. Every way's first loss must be that of
float32 math to three digits.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attention import DEVICE
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from torch_paged_attn import flash_varlen

TOKENS = 16384
PACKS = {
    "4 x 4096": [4096] * 4,
    "16 x 1024": [1024] * 16,
    # lengths of web documents: most are short
    "24 ragged": [max(32, round(4096 * 0.72**i)) for i in range(23)],
}
CONFIG = dict(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=TOKENS,
)
ROUNDS = 7


class Pack:
    """Documents laid end to end, of random tokens."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = [*lengths, TOKENS - sum(lengths)] if sum(lengths) < TOKENS else lengths
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        self.cu_seqlens = ends.int().to(DEVICE)
        self.longest = max(self.lengths)
        self.tokens = torch.randint(CONFIG["vocab_size"], (1, TOKENS), device=DEVICE)
        self.positions = torch.cat([torch.arange(n) for n in self.lengths])[None].to(DEVICE)
        self.targets = self.tokens[0].roll(-1)
        self.targets[(ends[1:] - 1).to(DEVICE)] = -100

    @property
    def is_even(self) -> bool:
        return len(set(self.lengths)) == 1


pack: Pack  # the one that is trained on


def rows(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def ours(deterministic: bool):
    def attend(module, query, key, value, mask, scaling=None, **_):
        bounds, longest = pack.cu_seqlens, pack.longest
        out, _ = flash_varlen(
            *(rows(x) for x in (query, key, value)),
            *(bounds, None, longest, longest),
            causal=True,
            softmax_scale=scaling,
            deterministic=deterministic,
        )
        return out[None], None

    return attend


def fa2(module, query, key, value, mask, scaling=None, **_):
    group = query.shape[1] // key.shape[1]  # torch 2.11's takes equal heads
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    bounds, longest = pack.cu_seqlens, pack.longest
    out = varlen.varlen_attn(
        *(rows(x).contiguous() for x in (query, key, value)),
        *(bounds, bounds, longest, longest),
        scale=scaling,
        window_size=(-1, 0),
    )
    return out[None], None


def dense(backend):
    def attend(module, query, key, value, mask, scaling=None, **_):
        def documents(x):  # (1, heads, tokens, d) -> (documents, heads, length, d)
            return rows(x).unflatten(0, (-1, pack.longest)).transpose(1, 2)

        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                *(documents(x) for x in (query, key, value)),
                is_causal=True,
                scale=scaling,
                enable_gqa=True,
            )
        return out.transpose(1, 2).flatten(0, 1)[None], None

    return attend


WAYS = {
    "ours": ours(True),
    "ours, any order": ours(False),
    "FA2": fa2,
    "cuDNN": dense(SDPBackend.CUDNN_ATTENTION),
}


def loss_of(model: nn.Module, way: str) -> Tensor:
    model.config._attn_implementation = f"bench_{way}"
    hidden = model.model(pack.tokens, position_ids=pack.positions, use_cache=False)
    logits = model.lm_head(hidden.last_hidden_state[0])
    return cross_entropy(logits.float(), pack.targets)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    loss_of(model, way).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def expected_loss(model: nn.Module) -> float:
    """The loss with attention by the formula in float32, a document at a time."""

    def attend(module, query, key, value, mask, scaling=None, **_):
        outs = []
        for q, k, v in zip(
            *(x[0].split(pack.lengths, 1) for x in (query, key, value)), strict=True
        ):
            q, k, v = (x.float()[None] for x in (q, k, v))
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
                out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
            outs.append(out[0].transpose(0, 1).to(query.dtype))
        return torch.cat(outs)[None], None

    from transformers import AttentionInterface

    AttentionInterface.register("bench_formula", attend)
    with torch.no_grad():
        return loss_of(model, "formula").item()


@functools.cache
def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model that all ways train, and its optimizer."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    for name, attend in WAYS.items():
        AttentionInterface.register(f"bench_{name}", attend)
    with torch.device(DEVICE):
        model = LlamaForCausalLM._from_config(
            LlamaConfig(**CONFIG), dtype=torch.bfloat16, attn_implementation="bench_ours"
        ).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def measure(name: str) -> dict[str, Any]:
    """Tokens a second of every way that can."""
    global pack
    model, optimizer = made()
    pack = Pack(PACKS[name])
    ways = [way for way in WAYS if way != "cuDNN" or pack.is_even]
    expected = expected_loss(model)
    for way in ways:
        with torch.no_grad():
            loss = loss_of(model, way).item()
        assert abs(loss - expected) < 1e-3 * expected, (way, loss, expected)
    for way in ways:
        step(model, optimizer, way)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            seconds[way].append(step(model, optimizer, way))
    rates = {way: TOKENS / statistics.median(times) for way, times in seconds.items()}
    return {"unit": "tokens/s", "figures": rates}


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    return {name: functools.partial(measure, name) for name in PACKS}
