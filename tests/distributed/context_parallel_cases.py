"""Tokens cut over ranks: the bits, or by the accuracy rule, of one process; errors on all ranks."""

import contextlib
import shutil
import tempfile
from functools import partial
from unittest import mock

import packs
import torch
import torch.distributed as dist
from packs import Pack
from torch.distributed.device_mesh import init_device_mesh
from worlds import World, only_of

import torch_paged_attn as tpa
from torch_paged_attn import reference
from torch_paged_attn.distributed import shared_keys
from torch_paged_attn.distributed.context_parallel import (
    Shards,
    SharedKeys,
    all_gather_attention,
    ring_attention,
    ulysses_attention,
)
from torch_paged_attn.testing import (
    Gradients,
    Truth,
    assert_accurate,
    assert_accurate_gradients,
)

SCHEMES = (all_gather_attention, ring_attention, ulysses_attention)
CUTS = ("contiguous", "head_tail", "documents")
NAN = float("nan")

# an empty document, one that is on all ranks, and cuts everywhere; but none leaves alone eight
# queries of a document or fewer, which would take the decode kernel, whose bits are others
BITS = Pack((60, 0, 36, 192, 60, 36), head_dim=32)
WINDOW = (("causal", True), ("window_size_left", 9))


def shared(shards, x):
    """A rank's rows; those that no query may see are NaN."""
    own = shards.shard(x).clone()
    own[len(shards.indices) :] = NAN
    return own.detach().requires_grad_(x.requires_grad)


def run(scheme, pack, shards):
    """`out`, `softmax_lse` and the gradients of the whole batch, on every rank."""
    inputs = [shared(shards, x.requires_grad_()) for x in pack.inputs()]
    options = pack.call()
    if pack.sinks:
        options["sinks"].requires_grad_()
    out, lse = scheme(*inputs, shards, **options)
    assert out.shape == (shards.rows, pack.num_heads, pack.head_dim)
    assert (out[len(shards.indices) :] == 0).all()
    if scheme is all_gather_attention:
        # without gradients keys lie elsewhere, each row once
        with torch.no_grad():
            again = scheme(*inputs, shards, **options)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    dout, dlse = pack.gradients_in()
    given = [shared(shards, dout), shared(shards, dlse.mT).mT]
    torch.autograd.backward([out, lse], given)
    grads = [shards.unshard(x.grad) for x in inputs]
    dsinks = options["sinks"].grad if pack.sinks else dout.new_empty(0)
    if pack.sinks:
        dist.all_reduce(dsinks, group=shards.ranks.group)
    found = shards.unshard(out.detach()), shards.unshard(lse.detach().mT).mT
    return *found, (*grads, dout.new_empty(0), dsinks)


def case_bits_of_one_process(world: World) -> None:
    """Each scheme with each cut, masks and types in turn."""
    masks = (((), ""), ((("causal", True),), ""), (WINDOW, "batch"))
    for i, (options, alibi) in enumerate(masks):
        for j, dtype in enumerate((torch.float32, torch.bfloat16)):
            pack = Pack(**{**vars(BITS), "options": options, "alibi": alibi, "dtype": dtype})
            pack = Pack(**{**vars(pack), "sinks": bool(alibi)})
            out, lse = tpa.flash_varlen(*pack.inputs(), pack.cu_seqlens, **pack.call())
            for k, scheme in enumerate((all_gather_attention, ulysses_attention)):
                for cut in CUTS if packs.IS_THOROUGH else (CUTS[(i + j + k) % 3],):
                    shards = Shards(pack.cu_seqlens, load_balance=cut)
                    found = run(scheme, pack, shards)
                    assert torch.equal(found[0], out), (scheme.__name__, cut, pack)
                    assert torch.equal(found[1], lse), (scheme.__name__, cut, pack)


def truths_of(pack):
    """What is right, on the first rank, which is in all groups: it judges for the others."""
    return (pack.truth(), pack.gradients()) if dist.get_rank() == 0 else (None, None)


def judge(scheme, cut, pack, truth, gradients, group=None):
    shards = Shards(pack.cu_seqlens, group, load_balance=cut)
    out, lse, grads = run(scheme, pack, shards)
    for x in (out, lse, *grads):
        bits = x.detach().contiguous().view(torch.uint8)
        first = bits.clone()
        dist.broadcast(first, 0, group)
        assert torch.equal(bits, first), f"{scheme.__name__}, {cut}, {pack}: ranks differ"
    if dist.get_rank() > 0:
        return
    try:
        assert_accurate(out, lse.contiguous(), truth)
        # each rank's share of a key's gradient is rounded to 16 bits before they are added up
        if pack.dtype == torch.float32 or scheme is ulysses_attention:
            assert_accurate_gradients(grads, gradients)
    except AssertionError as error:
        raise AssertionError(f"{scheme.__name__}, {cut}, {pack}: {error}") from None


def case_under_a_default_device(world: World) -> None:
    """What ranks keep on the host stays there."""
    inputs = Pack((9, 0, 14)).inputs()
    cu_seqlens = torch.tensor([0, 9, 9, 23], dtype=torch.int32)
    expected = None
    for device in ("cpu", "meta"):
        with torch.device(device):
            shards = Shards(cu_seqlens)
            own = [shards.shard(x).requires_grad_() for x in inputs]
            found = []
            for scheme in SCHEMES:
                out, _ = scheme(*own, shards, causal=True)
                found += [out, *torch.autograd.grad(out.sum(), own)]
        expected = found if expected is None else expected
        assert all(map(torch.equal, found, expected))


def case_drawn_packs(world: World) -> None:
    groups = {n: dist.new_group(range(n)) for n in range(2, world.size + 1)}
    for i, pack in enumerate(packs.PACKS):
        ranks = min(pack.ranks, world.size)
        if not sum(pack.lengths) or world.rank >= ranks:
            continue
        truth, gradients = truths_of(pack)
        options = dict(pack.options)
        schemes = list(SCHEMES)
        if "window_size_left" in options or pack.alibi:
            schemes.remove(ring_attention)
        if pack.num_heads % ranks:
            schemes.remove(ulysses_attention)
        for j, scheme in enumerate(schemes):
            cuts = CUTS if packs.IS_THOROUGH else (CUTS[(i + j) % 3],)
            for cut in cuts:
                judge(scheme, cut, pack, truth, gradients, groups[ranks])
    dist.barrier()


def case_masks_compare_positions_of_the_whole(world: World) -> None:
    window = (("window_size_left", 9), ("window_size_right", 4))
    for options, alibi in ((window, ""), (WINDOW, "batch"), ((), "heads"), (window, "batch")):
        pack = Pack((33, 0, 70, 5), options=options, alibi=alibi)
        truth, gradients = truths_of(pack)
        judge(ring_attention, "contiguous", pack, truth, gradients)
        for cut in CUTS:
            judge(all_gather_attention, cut, pack, truth, gradients)


def case_bits_wherever_it_is_cut(world: World) -> None:
    """With batch_invariant, cuts that leave a query or two alone have one process' bits as well."""
    pack = Pack((17, 1, 70, 5), options=(("causal", True), ("batch_invariant", True)))
    out, lse = tpa.flash_varlen(*pack.inputs(), pack.cu_seqlens, **pack.call())
    for cut in CUTS:
        shards = Shards(pack.cu_seqlens, load_balance=cut)
        own = [shards.shard(x) for x in pack.inputs()]
        for scheme in (all_gather_attention, ulysses_attention):
            found, found_lse = scheme(*own, shards, **pack.call())
            assert torch.equal(shards.unshard(found), out), (cut, scheme.__name__)
            assert torch.equal(shards.unshard(found_lse.mT).mT, lse), (cut, scheme.__name__)


def case_gradients_wherever_it_is_cut(world: World) -> None:
    """With batch_invariant, dq has one process' bits; dk and dv do where one rank has all queries
    of a document, as with Ulysses. The ring adds up in another order, and refuses.
    """
    for lengths, is_whole in (((17, 1, 70, 5), False), ((30,) * 2 * world.size, True)):
        for dtype in (torch.float32, torch.bfloat16):
            options = (("causal", True), ("batch_invariant", True))
            pack = Pack(lengths, options=options, dtype=dtype)
            inputs = [x.requires_grad_() for x in pack.inputs()]
            results = tpa.flash_varlen(*inputs, pack.cu_seqlens, **pack.call())
            expected = torch.autograd.grad(results, inputs, pack.gradients_in())
            shards = Shards(pack.cu_seqlens, load_balance="contiguous")
            for scheme in (all_gather_attention, ulysses_attention):
                *_, (dq, dk, dv, _, _) = run(scheme, pack, shards)
                assert torch.equal(dq, expected[0]), (scheme.__name__, pack)
                if is_whole or scheme is ulysses_attention:
                    assert torch.equal(dk, expected[1]), (scheme.__name__, pack)
                    assert torch.equal(dv, expected[2]), (scheme.__name__, pack)
            own = [shards.shard(x) for x in pack.inputs()]
            refused = partial(ring_attention, *own, shards, **pack.call())
            world.refuses(refused, NotImplementedError, "batch_invariant")


class FileMemory:
    """Memory that all ranks see, in files; what is asked of torch's symmetric memory."""

    def __init__(self, folder):
        self.folder, self.made = folder, 0

    def empty(self, size, dtype, device):
        self.made, self.size = self.made + 1, size
        return self._of(dist.get_rank(), dtype)

    def rendezvous(self, buffer, group):
        dist.barrier(group)
        self.barrier = lambda channel, timeout_ms: dist.barrier(group)
        return self

    def get_buffer(self, rank, shape, dtype, offset=0):
        found = self._of(rank, dtype)[offset:]
        return found[: torch.Size(shape).numel()].view(shape)

    def _of(self, rank, dtype):
        name = f"{self.folder}/{self.made}-{rank}"
        return torch.from_file(name, shared=True, size=self.size, dtype=dtype)


def case_shared_memory(world: World) -> None:
    """Keys written into other ranks' memory give the bits of those that are sent."""
    folder = [tempfile.mkdtemp()] if world.rank == 0 else [None]
    dist.broadcast_object_list(folder)
    on_host = mock.patch.object(torch, "get_device_module", lambda device: Host)
    files = FileMemory(folder[0])
    with on_host, mock.patch.object(shared_keys, "symmetric_memory", lambda *args: files):
        pack = Pack((33, 0, 70, 5), options=(("causal", True),))
        memory = SharedKeys(None, 108, pack.num_kv_heads, 16, 16, torch.float32, "cpu")
        ahead = SharedKeys(None, 108, pack.num_kv_heads, 16, 16, torch.float32, "cpu")
        ahead.least_ahead = ahead.least_rows = 0
        for cut in CUTS:
            shards = Shards(pack.cu_seqlens, load_balance=cut)
            own = [shards.shard(x) for x in pack.inputs()]
            wanted = all_gather_attention(*own, shards, causal=True)
            for way in (memory, ahead, memory, ahead):
                found = all_gather_attention(*own, shards, causal=True, memory=way)
                assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
        own[0].requires_grad_()
        trains = partial(all_gather_attention, *own, shards, memory=memory)
        world.refuses(trains, NotImplementedError, "memory", "no gradient")
        other = partial(all_gather_attention, *(x.detach().bfloat16() for x in own), shards)
        world.refuses(partial(other, memory=memory), ValueError, "memory", "bfloat16")
    if world.rank == 0:
        shutil.rmtree(folder[0])


class Host(contextlib.nullcontext):
    """A device's module, and a stream of it: the host does one thing after the other."""

    def __init__(self, device=None):
        super().__init__()

    def wait_stream(self, other):
        pass


Host.Stream = Host.current_stream = Host.stream = Host


def case_nothing_at_all(world: World) -> None:
    for pack in (Pack(()), Pack((0, 0)), Pack((1,))):
        for scheme in SCHEMES:
            for cut in CUTS:
                run(scheme, pack, Shards(pack.cu_seqlens, load_balance=cut))


def case_bias(world: World) -> None:
    pack = Pack((30, 7, 0, 50), options=(("causal", True),))
    bias = world.randn(pack.num_heads, sum(pack.lengths), 50, seed=5)
    given = dict(zip("qkv", pack.inputs(), strict=True), attn_bias=bias, causal=True)
    given |= {"cu_seqlens_q": pack.cu_seqlens, "max_seqlen_q": 0, "max_seqlen_k": 0}
    truth = Truth.of(reference.flash_varlen, **given)
    gradients = Gradients.by_reference("flash_varlen", given, *pack.gradients_in())
    for cut in CUTS:
        shards = Shards(pack.cu_seqlens, load_balance=cut)
        own = [shared(shards, x.requires_grad_()) for x in pack.inputs()]
        rows = shared(shards, bias.transpose(0, 1)).transpose(0, 1).requires_grad_()
        out, lse = all_gather_attention(*own, shards, attn_bias=rows, causal=True)
        dout, dlse = (
            shared(shards, x) for x in (pack.gradients_in()[0], pack.gradients_in()[1].mT)
        )
        torch.autograd.backward([out, lse], [dout, dlse.mT])
        lse = shards.unshard(lse.detach().mT).mT
        assert_accurate(shards.unshard(out.detach()), lse.contiguous(), truth)
        dbias = shards.unshard(rows.grad.transpose(0, 1).contiguous()).transpose(0, 1)
        grads = *(shards.unshard(x.grad) for x in own), dbias, out.new_empty(0)
        assert_accurate_gradients(grads, gradients)


def case_autocast(world: World) -> None:
    """Casts come before checks, and before anything is sent."""
    pack = Pack((30, 7, 0, 50), options=(("causal", True),))
    shards = Shards(pack.cu_seqlens)
    q, k, v = (shared(shards, x) for x in pack.inputs())
    for scheme in SCHEMES:
        wanted = scheme(*(x.bfloat16() for x in (q, k, v)), shards, causal=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = scheme(q, k.bfloat16(), v, shards, causal=True)
        assert all(map(torch.equal, found, wanted)), scheme.__name__


def case_repeated_heads(world: World) -> None:
    pack = Pack((30, 7, 0, 50), num_kv_heads=1, options=(("causal", True),))
    judge(ulysses_attention, "contiguous", pack, *truths_of(pack))


def case_dropout_of_one_process(world: World) -> None:
    """Ulysses: whole sequences, and heads that know which they are."""
    pack = Pack((30, 7, 0, 50), options=(("causal", True), ("dropout_p", 0.3)))
    rng = torch.tensor([5, 7])
    out, lse = tpa.flash_varlen(*pack.inputs(), pack.cu_seqlens, rng_state=rng, **pack.call())
    shards = Shards(pack.cu_seqlens)
    own = [shards.shard(x) for x in pack.inputs()]
    found, found_lse = ulysses_attention(*own, shards, rng_state=rng, **pack.call())
    assert torch.equal(shards.unshard(found), out)
    assert torch.equal(shards.unshard(found_lse.mT).mT, lse)


def case_rows_may_be_padded(world: World) -> None:
    shards = Shards(BITS.cu_seqlens, rows=300)
    out, lse, _ = run(all_gather_attention, BITS, shards)
    assert shards.rows == 300
    assert_accurate(out, lse.contiguous(), BITS.truth())


def case_everyone_has_every_token_once(world: World) -> None:
    for pack in packs.PACKS:
        for cut in CUTS:
            shards = Shards(pack.cu_seqlens, load_balance=cut)
            rows = torch.arange(sum(pack.lengths))
            assert torch.equal(shards.unshard(shards.shard(rows)), rows)
            positions = torch.cat([torch.arange(n) for n in (0, *pack.lengths)])
            assert torch.equal(shards.positions[: len(shards.indices)], positions[shards.indices])


@only_of(4)
def case_one_dimension_of_a_mesh(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    pack = Pack((33, 4 + 40 * mesh["dp"].get_local_rank(), 70), options=(("causal", True),))
    shards = Shards(pack.cu_seqlens, mesh["cp"])
    for scheme in SCHEMES:
        out, lse, grads = run(scheme, pack, shards)
        assert_accurate(out, lse.contiguous(), pack.truth())
        assert_accurate_gradients(grads, pack.gradients())
    world.refuses(partial(Shards, pack.cu_seqlens, mesh), ValueError, "group", 'mesh["cp"]')


def case_errors_are_everyones(world: World) -> None:
    pack = Pack((33, 70))
    shards = Shards(pack.cu_seqlens)
    q, k, v = (shards.shard(x) for x in pack.inputs())
    rng = torch.zeros(2, dtype=torch.int64)
    for scheme in SCHEMES[:2]:
        name = scheme.__name__
        refused = partial(scheme, q, k, v, shards, dropout_p=0.5, rng_state=rng)
        world.refuses(refused, NotImplementedError, name, "dropout_p")
    for scheme in SCHEMES:  # on one rank only
        name = scheme.__name__
        wrong = q.double() if world.rank == 1 else q
        world.refuses(partial(scheme, wrong, k, v, shards), ValueError, name, "got float64")
        other = partial(scheme, q, k, v, shards, causal=world.rank == 0)
        world.refuses(other, ValueError, name, "the same on every rank")
    some_train = q.clone().requires_grad_(world.rank == 0)
    trains = partial(all_gather_attention, some_train, k, v, shards)
    world.refuses(trains, ValueError, "the same on every rank")
    window = partial(ring_attention, q, k, v, shards, causal=True, window_size_left=3)
    world.refuses(window, NotImplementedError, "window_size_left", "'contiguous'")
    odd = partial(ulysses_attention, q[:, :3], k[:, :1], v[:, :1], shards)
    world.refuses(odd, ValueError, "num_heads", "got 3")
    bounds = pack.cu_seqlens + (world.rank == 0) * torch.tensor([0, 0, 1], dtype=torch.int32)
    world.refuses(partial(Shards, bounds), ValueError, "the same on every rank")
    # ranks speak on the host about tensors that lie elsewhere
    elsewhere = partial(Shards, bounds, device="meta")
    world.refuses(elsewhere, ValueError, "the same on every rank")
    bounds = pack.cu_seqlens
    world.refuses(partial(Shards, bounds.flip(0)), ValueError, "nondecreasing")
    world.refuses(partial(Shards, bounds, load_balance="x"), ValueError, "head_tail")
    world.refuses(partial(Shards, bounds, rows=1), ValueError, "rows")
