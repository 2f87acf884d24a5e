"""Backward, and forward with backward, beside cuDNN, FlashAttention-2, 4 and FlexAttention.

`ours` are the kernels that this GPU takes, `fast` the same with deterministic=False, `portable` the
kernels that every other GPU takes. cuDNN, FA2 and FA4 are not deterministic; FA4 comes as its
backward alone (`--fa4`), compiled beforehand, and is given our forward's results. TFLOP/s counts
2.5 times the forward's operations for a backward, whatever a kernel really multiplies, and of a
window or of causality the pairs that are seen.

The gradients of the first KV head are compared with those of a float32 formula before anything is
timed. Medians of bursts that take turns, so that everyone meets the chip equally hot.
"""

import dataclasses
import functools
import inspect
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from attention import DEVICE, cumulative, ragged, relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.flash_varlen import flash_varlen
from torch_paged_attn.backends.triton.flash_varlen_backward import flash_varlen_backward
from torch_paged_attn.backends.triton.portable.backward.plan import plan_backward
from torch_paged_attn.backends.triton.portable.forward.plan import plan_attention
from torch_paged_attn.backward_call import BackwardCall

TOKENS = 16384

# a float32 formula's gradients and those of 16 bits are this far apart at most
MOST_ERROR = 0.02


@dataclasses.dataclass(frozen=True)
class Case:
    """Packed sequences of these lengths; `left` keys seen before a query's own."""

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool = True
    left: int = -1

    def __str__(self) -> str:
        same = len(set(self.lengths)) == 1
        size = f"{len(self.lengths)}x{self.lengths[0]}" if same else f"ragged{len(self.lengths)}"
        mask = "causal" if self.causal else "full"
        window = f" window{self.left}" if self.left >= 0 else ""
        dims = f"d{self.head_dim}" + (f"/{self.head_dim_v}" * (self.head_dim_v != self.head_dim))
        return f"{size} {self.num_heads}/{self.num_kv_heads} {dims} {mask}{window}"

    @property
    def pairs(self) -> float:
        """Pairs of query and key that see each other, of one head."""
        if self.left < 0:
            return sum(n * n for n in self.lengths) * (0.5 if self.causal else 1.0)
        width = self.left + 1
        return sum(n * min(n, width) - min(n, width) ** 2 / 2 for n in self.lengths)

    @property
    def forward_flops(self) -> float:
        """Two products."""
        return 2 * self.num_heads * (self.head_dim + self.head_dim_v) * self.pairs


def case(length: int, heads: int, kv_heads: int, dim: int, causal: bool = True) -> Case:
    """Sequences of one length, TOKENS in all."""
    return Case((length,) * (TOKENS // length), heads, kv_heads, dim, dim, causal)


CASES = (
    *(
        case(n, 2048 // d, 2048 // d, d, causal)
        for d in (128, 64)
        for causal in (False, True)
        for n in (1024, 4096, 16384)
    ),
    case(8192, 32, 32, 128),
    case(8192, 32, 8, 128),
    case(4096, 32, 8, 128),
    case(4096, 32, 8, 128, causal=False),
    case(4096, 32, 8, 64),
    case(4096, 32, 8, 64, causal=False),
    case(16384, 32, 8, 64),
    Case(ragged(24, 3, 4000, 16), 32, 8, 128, 128),
    Case((8192,) * 2, 32, 8, 128, 128, left=1023),
    case(8192, 8, 8, 256),
    Case((4096,) * 4, 16, 16, 192, 128),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a case is called with, packed and as (batch, heads, length, dim) if that is possible."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu: Tensor
    dense: tuple[Tensor, ...] | None

    @classmethod
    def of(cls, c: Case) -> "Inputs":
        def draw(heads: int, dim: int) -> Tensor:
            return torch.randn(sum(c.lengths), heads, dim, device=DEVICE, dtype=torch.bfloat16)

        q, k = draw(c.num_heads, c.head_dim), draw(c.num_kv_heads, c.head_dim)
        v, dout = draw(c.num_kv_heads, c.head_dim_v), draw(c.num_heads, c.head_dim_v)
        dense = None
        if len(set(c.lengths)) == 1:
            shape = len(c.lengths), c.lengths[0]
            dense = tuple(
                x.unflatten(0, shape).transpose(1, 2).contiguous() for x in (q, k, v, dout)
            )
        return cls(q, k, v, dout, cumulative(c.lengths), dense)


# a forward that keeps what its backward needs, and that backward: dq, dk, dv, packed or dense
Contender = tuple[Callable[[], Any], Callable[[Any], tuple[Tensor, ...]]]


def by_autograd(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Contender:
    """A function of q, k and v that PyTorch differentiates; the last input is dout."""
    *given, dout = inputs
    leaves = [x.detach().requires_grad_() for x in given]

    def run() -> Tensor:
        with torch.enable_grad():
            return forward(*leaves)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return run, backward


def ours(c: Case, x: Inputs) -> dict[str, Contender]:
    """The operators' kernels, called as the dispatcher does."""
    longest = max(c.lengths)
    lengths = x.cu, None, longest, longest
    options = {"causal": c.causal, "window_size_left": c.left}
    qkv = x.q, x.k, x.v

    def backward(deterministic: bool, saved: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        more = {**options, "deterministic": deterministic}
        return flash_varlen_backward(x.dout, None, *qkv, *saved, *lengths, **more)[:3]

    call = AttentionCall.flash_varlen(*qkv, *lengths, **options)
    plan = plan_attention(call)
    plan_of_backward = plan_backward(BackwardCall(call, x.dout, None, *call.new_results()))

    def run(plan: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return plan(tensors, [tensor.data_ptr() for tensor in tensors])

    def portable() -> tuple[Tensor, ...]:
        return run(plan, *qkv, x.cu)

    def portable_backward(saved: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return run(plan_of_backward, x.dout, *qkv, *saved, x.cu)[:3]

    def forward() -> tuple[Tensor, Tensor]:
        return flash_varlen(*qkv, *lengths, **options)

    return {
        "ours": (forward, functools.partial(backward, True)),
        "fast": (forward, functools.partial(backward, False)),
        "portable": (portable, portable_backward),
    }


def flash_attention_2(c: Case, x: Inputs) -> Contender:
    """Through torch's varlen_attn."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(c.lengths)
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (c.left, 0 if c.causal else -1)
    elif c.left >= 0:
        raise NotImplementedError("varlen_attn of this torch has no windows")
    else:
        options["is_causal"] = c.causal
    if c.num_heads != c.num_kv_heads:
        if "enable_gqa" not in known:
            raise NotImplementedError("varlen_attn of this torch has no groups of heads")
        options["enable_gqa"] = True

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q, k, v, x.cu, x.cu, longest, longest, **options)

    return by_autograd(run, (x.q, x.k, x.v, x.dout))


def cudnn(c: Case, x: Inputs) -> Contender:
    if x.dense is None or c.left >= 0:
        raise NotImplementedError("SDPA has neither packed sequences nor windows for cuDNN")
    grouped = c.num_heads != c.num_kv_heads

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=c.causal, enable_gqa=grouped)

    return by_autograd(run, x.dense)


def flex(c: Case, x: Inputs) -> Contender:
    """Compiled for the case; sequences of different lengths are documents of one."""
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = {"enable_gqa": c.num_heads != c.num_kv_heads}
    if x.dense is not None:
        inputs, length = x.dense, c.lengths[0]
        document = None
    else:
        inputs = tuple(t.transpose(0, 1)[None].contiguous() for t in (x.q, x.k, x.v, x.dout))
        length = sum(c.lengths)
        counts = torch.tensor(c.lengths, device=DEVICE)
        document = torch.arange(len(c.lengths), device=DEVICE).repeat_interleave(counts)

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = row >= key if c.causal else row == row
        if c.left >= 0:
            seen = seen & (row - key <= c.left)
        return seen if document is None else seen & (document[row] == document[key])

    mask = None
    if c.causal or document is not None:
        mask = create_block_mask(sees, None, None, length, length, device=DEVICE)
    return by_autograd(lambda q, k, v: compiled(q, k, v, block_mask=mask, **grouped), inputs)


def flash_attention_4(peer: Any, c: Case, x: Inputs) -> Contender:
    """`peer.backward` takes (batch, length, heads, dim), and lse as (batch, heads, length)."""
    if x.dense is None or c.left >= 0:
        raise NotImplementedError("it was compiled for sequences of one length, without windows")
    shape, longest = (len(c.lengths), c.lengths[0]), max(c.lengths)
    q, k, v, dout = (t.unflatten(0, shape) for t in (x.q, x.k, x.v, x.dout))

    def run() -> tuple[Tensor, Tensor]:
        out, lse = flash_varlen(x.q, x.k, x.v, x.cu, None, longest, longest, causal=c.causal)
        return out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1).contiguous()

    def backward(saved: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        gradients = peer.backward(q, k, v, saved[0], dout, saved[1], c.causal)
        return tuple(t.flatten(0, 1) for t in gradients)

    return run, backward


PEERS: dict[str, Callable[[Case, Inputs], Contender]] = {
    "cuDNN": cudnn, "FA2": flash_attention_2, "flex": flex
}  # fmt: skip


def want_of_first_head(c: Case, x: Inputs) -> tuple[Tensor, ...]:
    """dq of the first KV head's group, dk and dv of that head, by PyTorch in float32."""
    group = c.num_heads // c.num_kv_heads
    found = []
    parts = (t[:, :n].float().split(c.lengths) for t, n in zip(
        (x.q, x.k, x.v, x.dout), (group, 1, 1, group), strict=True))  # fmt: skip
    for q, k, v, dout in zip(*parts, strict=True):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        heads = [t.transpose(0, 1)[None] for t in leaves]
        heads[1:] = [t.expand(-1, group, -1, -1) for t in heads[1:]]
        options: dict[str, Any] = {"is_causal": c.causal}
        if c.left >= 0:
            at = torch.arange(len(q), device=DEVICE)
            seen = (at[:, None] >= at) & (at[:, None] - at <= c.left)
            options = {"attn_mask": seen}
        out = scaled_dot_product_attention(*heads, **options)
        found.append(torch.autograd.grad(out, leaves, dout.transpose(0, 1)[None]))
    return tuple(torch.cat(t) for t in zip(*found, strict=True))


def error_of(c: Case, gradients: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """The largest relative error of three gradients."""
    packed = [g.transpose(1, 2).flatten(0, 1) if g.dim() == 4 else g for g in gradients]
    return max(relative_error(g[:, : w.shape[1]], w) for g, w in zip(packed, want, strict=True))


def in_turns(
    calls: dict[str, Callable[[], Any]], rounds: int = 7, each_ms: float = 30
) -> dict[str, float]:
    """Median milliseconds of a call, from bursts that take turns, each round in another order: a
    chip that has just worked hard runs slower, so that it matters who comes before."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def elapsed(call: Callable[[], Any], count: int) -> float:
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / count

    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(2, int(each_ms / elapsed(call, 2)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = [*calls], random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(elapsed(calls[name], counts[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def contenders(c: Case, x: Inputs, wanted: tuple[str, ...] = ()) -> dict[str, Contender]:
    """All that can be had here, or those `wanted`."""
    found = {name: pair for name, pair in ours(c, x).items() if not wanted or name in wanted}
    for name, make in PEERS.items():
        if wanted and name not in wanted:
            continue
        try:
            run, backward = make(c, x)
            backward(run())
        except Exception as error:  # a peer that has not this case
            print(f"# {c}: no {name}: {str(error).splitlines()[0][:100]}", flush=True)
        else:
            found[name] = run, backward
    return found


@functools.lru_cache(1)
def checked(c: Case, wanted: tuple[str, ...] = ()) -> tuple[dict[str, Contender], float]:
    """The contenders of a case, whose gradients are right, and the largest error among them."""
    x = Inputs.of(c)
    want = want_of_first_head(c, x)
    found = contenders(c, x, wanted)
    errors = {name: error_of(c, backward(run()), want) for name, (run, backward) in found.items()}
    wrong = {name: error for name, error in errors.items() if not error < MOST_ERROR}
    assert not wrong, f"relative errors {wrong}"
    return found, max(errors.values())


def measure(c: Case, with_forward: bool, wanted: tuple[str, ...] = ()) -> dict[str, Any]:
    """TFLOP/s of everyone."""
    found, error = checked(c, wanted)
    if with_forward:  # whose forward is ours
        found = {name: pair for name, pair in found.items() if name != "FA4"}
    calls: dict[str, Callable[[], Any]] = {}
    for name, (run, backward) in found.items():
        if with_forward:
            calls[name] = lambda run=run, backward=backward: backward(run())
        else:
            calls[name] = functools.partial(backward, run())
    flops = c.forward_flops * (3.5 if with_forward else 2.5)
    rates = {name: flops / ms * 1e-9 for name, ms in in_turns(calls).items()}
    return {"unit": "TFLOP/s", "figures": rates, "error": error}


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    if "FA4" in peers:
        PEERS["FA4"] = functools.partial(flash_attention_4, peers["FA4"])
    return {
        f"{kind} {c}": functools.partial(measure, c, kind != "backward")
        for c in CASES
        for kind in ("backward", "forward+backward")
    }
