"""DTensors through the operators: the bits of one process, and no write that is lost."""

from functools import partial

import torch
import torch.distributed as dist
from packs import Pack
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from worlds import World, only_of

import torch_paged_attn as tpa
from torch_paged_attn import reference
from torch_paged_attn.distributed import sharding
from torch_paged_attn.layouts import local_strided
from torch_paged_attn.testing import Truth, assert_accurate, assert_accurate_gradients

CAUSAL = (("causal", True),)


def placed(mesh, placement, *tensors):
    return [distribute_tensor(x, mesh, [placement] * mesh.ndim) for x in tensors]


def goes_back(world, results, gradients):
    """Whether there are gradients; where torch has none of DTensors, all ranks say so."""
    back = partial(torch.autograd.backward, results, gradients)
    if sharding.HAS_LISTS:
        back()
    else:
        world.refuses(back, NotImplementedError, "backward", "sharding strategy")
    return sharding.HAS_LISTS


def case_heads(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    for kv_heads in (4, 1):
        pack = Pack((5, 0, 40, 1), num_kv_heads=kv_heads, options=CAUSAL, sinks=True, alibi="heads")
        (q, k, v), call = pack.inputs(), pack.call()
        leaves = [x.clone().requires_grad_() for x in (q, k, v, call["sinks"])]
        options = call | {"sinks": leaves[3]}
        out, lse = tpa.flash_varlen(*leaves[:3], pack.cu_seqlens, **options)
        dout, dlse = pack.gradients_in()
        torch.autograd.backward([out, lse], [dout, dlse])

        # one head of keys for all stays whole
        keys = Shard(1) if kv_heads > 1 else Replicate()
        at = [Shard(1), keys, keys, Shard(0)]
        own = [
            distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
            for x, p in zip(leaves, at, strict=True)
        ]
        options["sinks"] = own[3]
        found, found_lse = sharding.flash_varlen(*own[:3], pack.cu_seqlens, **options)
        assert found.placements == (Shard(1),) and found_lse.placements == (Shard(0),)
        assert_accurate(found.full_tensor(), found_lse.full_tensor(), pack.truth())
        with torch.no_grad():  # past DTensor's dispatcher
            again = sharding.flash_varlen(*own[:3], pack.cu_seqlens, **options)
        for x, y in zip(again, (found, found_lse), strict=True):
            assert torch.equal(x.to_local(), y.to_local())
            assert x._spec == y._spec and not x.requires_grad
        given = [*placed(mesh, Shard(1), dout), *placed(mesh, Shard(0), dlse)]
        if not goes_back(world, [found, found_lse], given):
            continue
        grads = [x.grad.full_tensor() for x in own]
        if kv_heads > 1:
            assert torch.equal(found.full_tensor(), out)
            assert torch.equal(found_lse.full_tensor(), lse)
            assert all(torch.equal(x, y.grad) for x, y in zip(grads, leaves, strict=True))
        else:  # dk and dv add up over the ranks; fewer heads share keys, which other kernels take
            assert own[1].grad.placements == (Partial(),)
        empty = out.new_empty(0)
        assert_accurate_gradients((*grads[:3], empty, grads[3]), pack.gradients())


def case_any_placement(world: World) -> None:
    """Tokens that are sharded are brought together; sums that are not done are done."""
    mesh = init_device_mesh("cpu", (world.size,))
    pack = Pack((5, 0, 40, 3), options=CAUSAL)
    out, lse = tpa.flash_varlen(*pack.inputs(), pack.cu_seqlens, causal=True)
    for at in (Shard(0), Shard(2), Replicate()):
        own = placed(mesh, at, *pack.inputs())
        found, found_lse = sharding.flash_varlen(*own, pack.cu_seqlens, causal=True)
        assert torch.equal(found.full_tensor(), out) and torch.equal(found_lse.full_tensor(), lse)


def case_dropout_of_one_process(world: World) -> None:
    """Wherever heads lie, they know which they are."""
    mesh = init_device_mesh("cpu", (world.size,))
    whole = Replicate()
    for kv_heads, at in ((4, Shard(1)), (4, Shard(0)), (1, Shard(1))):
        pack = Pack((5, 0, 40, 3), num_kv_heads=kv_heads, options=CAUSAL)
        options = {"causal": True, "dropout_p": 0.3, "rng_state": torch.tensor([5, 7])}
        leaves = [x.requires_grad_() for x in pack.inputs()]
        out, lse = tpa.flash_varlen(*leaves, pack.cu_seqlens, **options)
        args = dict(zip("qkv", pack.inputs(), strict=True), cu_seqlens_q=pack.cu_seqlens)
        args |= {"max_seqlen_q": 0, "max_seqlen_k": 0} | options
        truth = Truth.of(reference.flash_varlen, **args)
        dout, _ = pack.gradients_in()
        out.backward(dout)
        for is_whole in (False, True):  # q, k and v do not have to lie alike
            places = [whole if is_whole else at, *[at if kv_heads > 1 else whole] * 2]
            own = [
                distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
                for x, p in zip(leaves, places, strict=True)
            ]
            found, found_lse = sharding.flash_varlen(*own, pack.cu_seqlens, **options)
            assert_accurate(found.full_tensor(), found_lse.full_tensor(), truth)
            with torch.no_grad():
                again, _ = sharding.flash_varlen(*own, pack.cu_seqlens, **options)
            assert torch.equal(again.full_tensor(), found.full_tensor())
            given = distribute_tensor(dout, mesh, list(found.placements))
            if (
                goes_back(world, [found], [given]) and kv_heads > 1
            ):  # fewer heads share keys, which other kernels take
                assert torch.equal(found.full_tensor(), out), (at, is_whole)
                assert torch.equal(found_lse.full_tensor(), lse), (at, is_whole)
                assert torch.equal(own[1].grad.full_tensor(), leaves[1].grad), (at, is_whole)


def case_paged_and_block_sparse(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    lengths, table = torch.tensor([9, 30], dtype=torch.int32), torch.randperm(16).view(2, 8).int()
    dist.broadcast(table, 0)
    cache, q = world.randn(2, 16, 4, 4, 16, seed=1), world.randn(2, 8, 16, seed=2)
    bounds = torch.arange(3, dtype=torch.int32)
    arguments = bounds, None, 1, 32, lengths, table
    out, _ = tpa.flash_varlen(q, *cache, *arguments)
    (own,) = placed(mesh, Shard(1), q)
    (caches,) = placed(mesh, Shard(2), cache)
    found, _ = sharding.flash_varlen(own, caches[0], caches[1], *arguments)
    assert torch.equal(found.full_tensor(), out)
    for heads in (1, 4, 8):
        layout = local_strided(heads, 32, 16, 1, 2)
        crow, col = layout.crow_indices, layout.col_indices
        given = (bounds, None, 1, 32, lengths, table)
        out, _ = tpa.blocksparse(q, *cache, crow, col, *given, q_block_size=16, k_block_size=16)
        found, _ = sharding.blocksparse(
            *(own, caches[0], caches[1], crow, col, *given), q_block_size=16, k_block_size=16
        )
        assert torch.equal(found.full_tensor(), out), heads


def case_merges(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    outs = [world.randn(6, 8, 16, seed=i) for i in range(2)]
    lses = [world.randn(8, 6, seed=i + 2) for i in range(2)]
    wanted = tpa.merge_states(outs[0], lses[0], outs[1], lses[1])
    for at, lse_at in ((Shard(1), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate())):
        a, b = placed(mesh, at, *outs)
        c, d = placed(mesh, lse_at, *lses)
        for found in (tpa.merge_states(a, c, b, d), tpa.merge_states([a, b], [c, d])):
            assert found[0].placements == (at,) and found[1].placements == (lse_at,)
            for x, y in zip(found, wanted, strict=True):
                assert torch.equal(x.full_tensor(), y)


def writes(world, mesh, pairs):
    """Each (placements of the cache, of keys): written as on one process, or refused by all."""
    cache, slots = torch.zeros(2, 6, 4, 4, 16), torch.tensor([3, -1, 7, 20, 9])
    key, value = world.randn(5, 4, 16, seed=1), world.randn(5, 4, 16, seed=2)
    wanted = cache.clone()
    tpa.reshape_and_cache(key, value, wanted, slots)
    (there,) = placed(mesh, Replicate(), slots)
    plain = partial(sharding.reshape_and_cache, key, value, cache, slots)
    world.refuses(plain, ValueError, "kv_cache", "plain tensors")
    for cache_at, key_at in pairs:
        heads = tuple(Shard(1) if p == Shard(2) else p for p in cache_at)
        own = distribute_tensor(cache.clone(), mesh, cache_at)
        split = [distribute_tensor(x, mesh, [_less(p) for p in cache_at]) for x in cache.clone()]
        pair = [distribute_tensor(x, mesh, key_at) for x in (key, value)]
        calls = [
            partial(tpa.reshape_and_cache, *pair, own, there),
            partial(torch.ops.paged_attn.reshape_and_cache.split, *pair, *split, there),
        ]
        if any(p not in (Replicate(), Shard(2)) for p in cache_at):
            for call in calls:
                world.refuses(call, RuntimeError, "the cache", "lost", "Replicate()")
            for kept in (own, split):
                call = partial(sharding.reshape_and_cache, *pair, kept, slots)
                world.refuses(call, ValueError, "the cache", "lost", "Replicate()")
            continue
        for call in calls:
            if heads == tuple(key_at):
                call()
            else:
                world.refuses(call, RuntimeError, "key", "lost", "redistribute")
        sharding.reshape_and_cache(*pair, own, slots)
        sharding.reshape_and_cache(*pair, split, slots)
        assert torch.equal(own.full_tensor(), wanted), (cache_at, key_at)
        for x, y in zip(split, wanted, strict=True):
            assert torch.equal(x.full_tensor(), y), (cache_at, key_at)


def _less(placement):
    return Shard(placement.dim - 1) if isinstance(placement, Shard) else placement


def case_writes(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    caches, keys = (Shard(2), Replicate(), Shard(1)), (Shard(1), Replicate())
    writes(world, mesh, [((c,), (k,)) for c in caches for k in keys])


@only_of(4)
def case_two_dimensions(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    r = Replicate()
    writes(
        world,
        mesh,
        [
            ((Shard(2), r), (Shard(1), r)),
            ((Shard(2), r), (r, Shard(1))),
            ((r, Shard(2)), (r, Shard(1))),
            ((r, r), (r, Shard(1))),
            ((Shard(2), Shard(2)), (Shard(1), Shard(1))),
        ],
    )
    pack = Pack((5, 0, 40), options=CAUSAL)
    out, _ = tpa.flash_varlen(*pack.inputs(), pack.cu_seqlens, causal=True)
    for at in ([r, Shard(1)], [Shard(1), Shard(1)]):
        own = [distribute_tensor(x, mesh, at) for x in pack.inputs()]
        found, _ = sharding.flash_varlen(*own, pack.cu_seqlens, causal=True)
        # DTensor brings heads together one dimension after the other
        assert torch.equal(found.redistribute(placements=[r, r]).to_local(), out)


def case_uneven_heads_are_refused_by_all(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    (q,) = placed(mesh, Shard(1), world.randn(8, 6 * world.size, 16))
    (k,) = placed(mesh, Replicate(), world.randn(8, 3, 16))
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    world.refuses(partial(sharding.flash_varlen, q, k, k, bounds), RuntimeError, "num_kv_heads")
    (q,) = placed(mesh, Shard(1), world.randn(8, world.size + 1, 16))
    (k,) = placed(mesh, Replicate(), world.randn(8, 1, 16))
    world.refuses(partial(sharding.flash_varlen, q, k, k, bounds), RuntimeError, "num_heads")


def case_hints_find_their_rule_again(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    # tokens that travel: a call that is DTensor's
    (x,) = placed(mesh, Shard(0), world.randn(64, 8, 16))
    bounds = torch.tensor([0, 64], dtype=torch.int32)
    calls = []
    rule = sharding.attention_rule
    sharding.attention_rule = lambda *args, **options: calls.append(args) or rule(*args, **options)
    sharding._register()
    try:
        for hint in range(33, 65):
            sharding.flash_varlen(x, x, x, bounds, max_seqlen_q=hint, max_seqlen_k=hint)
    finally:
        sharding.attention_rule = rule
        sharding._register()
    assert len(calls) == 1, len(calls)


def case_options_are_part_of_the_rule(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    (x,) = placed(mesh, Shard(1), world.randn(8, 8, 16, dtype=torch.bfloat16))
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32, None):
        out, _ = sharding.flash_varlen(x, x, x, bounds, out_dtype=dtype)
        assert out.dtype == out.to_local().dtype == (dtype or torch.bfloat16)


def case_batches_of_ones_own(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    pack = Pack((5 + world.rank, 0, 40 - world.rank), seed=world.rank, options=CAUSAL)
    own = [DTensor.from_local(x, mesh, [Shard(0)], run_check=False) for x in pack.inputs()]
    out, lse = sharding.local_flash_varlen(*own, pack.cu_seqlens, causal=True)
    assert out.placements == (Shard(0),) and lse.placements == (Shard(1),)
    assert_accurate(out.to_local(), lse.to_local(), pack.truth())
    assert len(out.full_tensor()) == 45 * world.size


@only_of(2)
def case_compiled(world: World) -> None:
    """A tensor-parallel layer and its cache, as one graph."""
    mesh = init_device_mesh("cpu", (world.size,))
    pack = Pack((5, 0, 40), options=CAUSAL)
    bounds = pack.cu_seqlens
    trains = sharding.HAS_LISTS
    # torch 2.11 compiles no product of a matrix and a DTensor whose heads are sharded
    weight, project = world.randn(16, 16, seed=4), torch.matmul
    if not trains:
        weight, project = weight[0], torch.mul

    def layer(q, k, v, bounds, weight):
        out, _ = tpa.flash_varlen(project(q, weight), k, v, bounds, None, 64, 64, causal=True)
        return out.square()

    q, k, v = pack.inputs()
    (there, heavy) = placed(mesh, Replicate(), bounds, weight)
    own = [x.requires_grad_(trains) for x in placed(mesh, Shard(1), q, k, v)]
    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(*own, there, heavy)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wanted = layer(*leaves, bounds, weight)
    assert torch.equal(found.full_tensor(), wanted)
    if trains:
        found.sum().backward()
        wanted.sum().backward()
        for x, y in zip(own, leaves, strict=True):
            assert torch.equal(x.grad.full_tensor(), y.grad)
