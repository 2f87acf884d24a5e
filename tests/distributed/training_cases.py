"""Layers and steps as engines run them: FSDP2, torch.compile, and the example."""

import contextlib
import re
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from packs import Pack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from worlds import World, only_of

import torch_paged_attn as tpa
from torch_paged_attn import reference
from torch_paged_attn.distributed import ulysses
from torch_paged_attn.distributed.context_parallel import (
    Shards,
    all_gather_attention,
    ulysses_attention,
)
from torch_paged_attn.testing import Truth, assert_accurate

HEADS, DIM = 8, 16


class Layer(nn.Module):
    """Attention with sinks, between two projections."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.qkv = nn.Parameter(torch.randn(3 * HEADS * DIM, 32, generator=g) / 8)
        self.out = nn.Parameter(torch.randn(32, HEADS * DIM, generator=g) / 8)
        self.sinks = nn.Parameter(torch.randn(HEADS, generator=g))

    def forward(self, x, cu_seqlens):
        q, k, v = (x @ self.qkv.mT).unflatten(1, (3, HEADS, DIM)).unbind(1)
        out, _ = tpa.flash_varlen(q, k, v, cu_seqlens, causal=True, sinks=self.sinks)
        return out.flatten(1) @ self.out.mT


def case_fsdp_step(world: World) -> None:
    """Parameters that are sharded between calls: where all processes have the same batch, the same
    steps as on one process, bit for bit.
    """
    cu_seqlens = torch.tensor([0, 5, 5, 45], dtype=torch.int32)
    x = world.randn(45, 32, seed=1)
    found = []
    for shard in (False, True):
        layer = Layer()
        if shard:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world.size,)))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        losses = []
        for _ in range(2):
            loss = layer(x, cu_seqlens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        whole = [p.full_tensor() if shard else p for p in layer.parameters()]
        found.append([*losses, *whole])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


class Twice(nn.Module):
    """Two layers, the second computed again in the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList((Layer(), Layer()))
        self.use_reentrant = use_reentrant

    def forward(self, x, cu_seqlens):
        x = self.layers[0](x, cu_seqlens)
        return checkpoint(self.layers[1], x, cu_seqlens, use_reentrant=self.use_reentrant)


@only_of(2)
def case_ddp_steps(world: World) -> None:
    """Parameters that are copied: where both processes have the same batches, the same steps as on
    one process, bit for bit. With a static graph, or gradients added up before they are exchanged.
    """
    cu_seqlens = torch.tensor([0, 5, 5, 45], dtype=torch.int32)
    batches = world.randn(2, 45, 32, seed=1)
    for is_static in (True, False):
        found = []
        for is_copied in (False, True):
            # PyTorch lets a reentrant checkpoint into static graphs alone, and these not add up
            model = Twice(use_reentrant=is_static)
            run = DistributedDataParallel(model, static_graph=is_static) if is_copied else model
            waits = run.no_sync if is_copied and not is_static else contextlib.nullcontext
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for _ in range(2):
                with waits():
                    run(batches[0], cu_seqlens).square().mean().backward()
                if not is_static:
                    run(batches[1], cu_seqlens).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(model.parameters())
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b), is_static


@only_of(2)
def case_compiled_context_parallel_layer(world: World) -> None:
    """One graph, collectives and all, with the bits of the same layer without a compiler."""
    pack = Pack((33, 0, 70), options=(("causal", True),))
    for scheme in (all_gather_attention, ulysses_attention):
        shards = Shards(pack.cu_seqlens)

        def layer(q, k, v, scheme=scheme, shards=shards):
            out, lse = scheme(q.sin(), k.sin(), v.sin(), shards, causal=True)
            return out.square(), lse

        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        if scheme is ulysses_attention and ulysses.TORCH < (2, 12):
            own = [shards.shard(x) for x in pack.inputs()]
            world.refuses(partial(compiled, *own), Exception, "2.12 or later")
            continue
        results = []
        for run in (layer, compiled):
            own = [shards.shard(x).requires_grad_() for x in pack.inputs()]
            out, lse = run(*own)
            out.sum().backward()
            results.append([out, lse, *(x.grad for x in own)])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), (scheme.__name__, a.shape, (a - b).abs().max())


@only_of(2)
def case_example(world: World) -> None:
    folder = Path(tpa.__file__).parents[1] / "examples"
    sys.path.insert(0, str(folder))
    import long_context

    assert long_context.run(Namespace(tokens=256, steps=2), torch.device("cpu")) == 0


def case_prefix_and_rest(world: World) -> None:
    """Parts of different ranks by hand: each its own keys, one all-gather, one merge."""
    q, k, v = world.randn(7, 8, 16), world.randn(40, 4, 16, seed=1), world.randn(40, 4, 16, seed=2)
    bounds = torch.tensor([0, 7], dtype=torch.int32)
    keys = torch.tensor([0, 40], dtype=torch.int32)
    mine = slice(world.rank * 10, 40 if world.rank == world.size - 1 else world.rank * 10 + 10)
    own = torch.tensor([0, len(range(40)[mine])], dtype=torch.int32)
    out, lse = tpa.flash_varlen(q, k[mine], v[mine], bounds, own)
    outs = [torch.empty_like(out) for _ in range(world.size)]
    lses = [torch.empty_like(lse) for _ in range(world.size)]
    dist.all_gather(outs, out)
    dist.all_gather(lses, lse)
    out, lse = outs[0], lses[0]
    for part in zip(outs[1:], lses[1:], strict=True):
        out, lse = tpa.merge_states(out, lse, *part)
    hints = {"max_seqlen_q": 7, "max_seqlen_k": 40}
    truth = Truth.of(reference.flash_varlen, q, k, v, bounds, keys, **hints)
    assert_accurate(out, lse, truth)


def case_documentation(world: World) -> None:
    """What docs/distributed.md shows runs on several processes as well."""
    page = Path(tpa.__file__).parents[1] / "docs" / "distributed.md"
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(snippets) == 3
    begins = mock.patch.object(dist, "init_process_group", lambda *args, **options: None)
    ends = mock.patch.object(dist, "destroy_process_group", lambda: None)
    with begins, ends:
        for snippet in snippets:
            exec(compile(snippet, str(page), "exec"), {})
