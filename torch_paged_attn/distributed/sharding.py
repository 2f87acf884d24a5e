"""Sharding rules of DTensor for the operators. Importing this module registers them.

    from torch_paged_attn.distributed import sharding

The operators, and the package's functions, then take DTensors that are sharded by heads or
replicated, on meshes with any number of dimensions. Sharded by heads means `Shard(1)` for q, k, v,
a paged cache's k and v and `out`, and `Shard(0)` for `softmax_lse`, sinks and slopes. A single KV
head (MQA, MLA) is replicated while q is sharded.

The functions in this module do what rules cannot: they round scheduling hints (DTensor caches rules
by all numbers of a call, and a new number costs 14 ms), they treat plain tensors as replicated
DTensors, and they give dropout the same mask as in one process.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map, register_sharding

from torch_paged_attn import ops
from torch_paged_attn.attention_call import arguments
from torch_paged_attn.backward_call import GRADIENTS
from torch_paged_attn.backward_call import arguments as backward_arguments
from torch_paged_attn.distributed.local_call import from_head
from torch_paged_attn.distributed.placed_calls import attend_locally, placed_alike
from torch_paged_attn.ops.checks import fail
from torch_paged_attn.ops.flash_varlen import fill_hints

__all__ = ["blocksparse", "flash_varlen", "local_flash_varlen", "reshape_and_cache"]

# the placements of results and those of arguments, for one dimension of a mesh
Strategy = tuple[list[Any], list[Any]]
PAGED_ATTN = torch.ops.paged_attn
# torch 2.11 cannot cache a rule whose options contain a list, as `output_mask` is: no backward
# rules
HAS_LISTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def is_tensor(x: Any) -> bool:
    """Whether an argument of a rule stands for a tensor (it is a DTensorSpec then)."""
    return hasattr(x, "tensor_meta")


def by_heads(name: str, x: Any, num_heads: int, shares_keys: bool) -> Any:
    """The placement of an attention argument if heads are sharded.

    shares_keys: whether there is one KV head for all ranks, so that k and v are replicated
    """
    shape = x.tensor_meta.shape
    per_head = {"q": 1, "dout": 1, "out": 1, "q_latent": 1}
    if name in per_head:
        return Shard(per_head[name])
    if name in ("softmax_lse", "dlse", "sinks"):
        return Shard(0)
    if name in ("k", "v"):
        return Replicate() if shares_keys else Shard(1)
    if name == "attn_bias":
        return Shard(0) if shape[0] == num_heads and num_heads > 1 else Replicate()
    if name == "alibi_slopes":
        return Shard(len(shape) - 1)
    if name.endswith("_descale"):
        # q_descale has one entry per KV head, too
        # and one of 3 dimensions is (num_pages, num_kv_heads, page_size)
        return Replicate() if shares_keys or not shape else Shard(min(len(shape) - 1, 1))
    if name in ("crow_indices", "col_indices"):
        heads = shape[-2]
        return Shard(len(shape) - 2) if heads > 1 else Replicate()
    return Replicate()  # lengths, tables, random state


def attention_rule(op: str, is_backward: bool, *args: Any, **options: Any) -> list[Strategy]:
    """The possible placements of a call of attention, or of its backward, on one mesh dimension."""
    listed = backward_arguments(op) if is_backward else arguments(op)
    names = [x.name for x in listed if not x.keyword_only][: len(args)]
    given = dict(zip(names, args, strict=True))
    q, k = given["q"], given["k"]
    num_heads, num_kv_heads = q.tensor_meta.shape[1], k.tensor_meta.shape[1]
    _refuse_uneven(op, q, num_kv_heads)
    found = [_placed(given, op, is_backward, options, lambda name, x: Replicate())]
    for shares_keys in (False, True) if num_kv_heads == 1 else (False,):
        if shares_keys and _layout_follows_keys(given, num_heads):
            continue
        place = functools.partial(by_heads, num_heads=num_heads, shares_keys=shares_keys)
        found.append(_placed(given, op, is_backward, options, place, shares_keys))
    return found


def _layout_follows_keys(given: dict[str, Any], num_heads: int) -> bool:
    """Whether there is a block layout with one head per KV head."""
    crow = given.get("crow_indices")
    return crow is not None and crow.tensor_meta.shape[-2] not in (1, num_heads)


def _placed(
    given: dict[str, Any],
    op: str,
    is_backward: bool,
    options: dict[str, Any],
    place: Callable[[str, Any], Any],
    shares_keys: bool = False,
) -> Strategy:
    """The strategy in which `place(name, x)` is the placement of each argument."""
    inputs = [place(name, x) if is_tensor(x) else None for name, x in given.items()]
    placed = dict(zip(given, inputs, strict=True))
    if not is_backward:
        is_sharded = placed["q"] == Shard(1)
        return [Shard(1), Shard(0)] if is_sharded else [Replicate(), Replicate()], inputs
    wanted = options.get("output_mask") or (True,) * len(GRADIENTS)
    results: list[Any] = []
    for name, is_wanted in zip(GRADIENTS.values(), wanted, strict=True):
        own = placed.get(name)
        is_whole = own is None or own == Replicate()
        if not is_wanted or own is None:
            results.append(Replicate())  # an empty tensor
        elif is_whole and placed["q"] == Shard(1):
            results.append(Partial())  # the sum over the heads of all ranks
        else:
            results.append(own)
    return results, inputs


def _refuse_uneven(op: str, q: Any, num_kv_heads: int) -> None:
    """Raise for a number of heads that the ranks do not divide. An error on one rank only, later,
    would leave the others waiting.
    """
    for dim, placement in enumerate(q.placements):
        size = q.mesh.size(dim)
        if placement == Shard(1) and num_kv_heads > 1 and num_kv_heads % size:
            expected = f"1 or a multiple of the {size} ranks that q's heads are sharded over"
            got = f"{num_kv_heads}: repeat heads of k and v, or replicate q"
            fail(op, "k's num_kv_heads", got, expected)
        if placement == Shard(1) and q.tensor_meta.shape[1] % size:
            expected = f"a multiple of the {size} ranks that they are sharded over"
            fail(op, "q's num_heads", q.tensor_meta.shape[1], expected)


def merge_rule(*args: Any, **_options: Any) -> list[Strategy]:
    """The placements of `merge_states` and its backward: all tensors are sharded by heads, or all
    by tokens, or replicated.
    """
    flat = [x for arg in args for x in (arg if isinstance(arg, tuple | list) else (arg,))]

    def placed(out: Any, lse: Any, number: int) -> Strategy:
        # `out` has three dimensions, softmax_lse two
        inputs = [None if x is None else out if _dims(x) == 3 else lse for x in flat]
        return [out, lse] * (number // 2), inputs

    number = 4 if _dims(args[0]) == 3 and len(args) == 8 else 2
    return [
        placed(out, lse, number)
        for out, lse in ((Replicate(), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(1)))
    ]


def _dims(x: Any) -> int:
    return len(x.tensor_meta.shape) if is_tensor(x) else 0


def _check_caches(op: str, heads: int, caches: Sequence[Any]) -> tuple[Any, ...]:
    """The placements of cache tensors; ValueError unless they are the same, by heads."""
    lies = tuple(caches[0].placements)
    for dim, placement in enumerate(lies):
        if placement not in (Replicate(), Shard(heads)):
            got = (
                f"{placement} on dimension {dim} of its mesh: a write would go into a copy and be"
                " lost. To shard by pages or positions, see torch_paged_attn.distributed.decode"
            )
            fail(op, "the cache", got, f"placed by heads, Shard({heads}), or Replicate()")
    if any(tuple(x.placements) != lies for x in caches):
        fail(op, "v_cache", caches[1].placements, f"placed as k_cache, {lies}")
    return lies


def write_rule(op: str, heads: int, number: int, *args: Any) -> list[Strategy]:
    """The rule of a write into `number` cache tensors, whose dimension `heads` is that of heads.

    Arguments that are not placed like the cache are refused: DTensor would redistribute them, which
    makes a copy of a cache, and a write into the copy is lost.
    """
    caches, scales = args[2 : 2 + number], args[3 + number :]
    lies = _check_caches(op, heads, caches)
    wanted = tuple(Shard(1) if p == Shard(heads) else p for p in lies)
    for name, x in zip(("key", "value"), args, strict=False):
        if tuple(x.placements) != wanted:
            got = (
                f"{tuple(x.placements)}: a write would go into a copy and be lost. Call"
                f" {name}.redistribute(placements={list(wanted)}) first, or"
                " torch_paged_attn.distributed.sharding.reshape_and_cache, which does"
            )
            fail(op, name, got, f"placed {wanted}, as the cache's heads {lies}")
    found: list[Strategy] = []
    for sharded in (False, True):
        placed: list[Any] = [Shard(1) if sharded else Replicate()] * 2
        placed += [Shard(heads) if sharded else Replicate()] * number + [Replicate()]
        for x in scales:
            by_head = sharded and is_tensor(x) and len(x.tensor_meta.shape) > 0
            placed.append(None if not is_tensor(x) else Shard(0) if by_head else Replicate())
        found.append(([], placed))
    return found


def _register() -> None:
    rules: dict[Any, Callable[..., list[Strategy]]] = {
        PAGED_ATTN.merge_states.default: merge_rule,
        PAGED_ATTN.merge_states.list: merge_rule,
        PAGED_ATTN.merge_states_backward.default: merge_rule,
    }
    for op in ("flash_varlen", "blocksparse"):
        for name in (op, f"{op}_backward")[: 1 + HAS_LISTS]:
            is_backward = name != op
            operator = getattr(PAGED_ATTN, name).default
            rules[operator] = functools.partial(attention_rule, name, is_backward)
    write = PAGED_ATTN.reshape_and_cache
    rules[write.default] = functools.partial(write_rule, "reshape_and_cache", 2, 1)
    rules[write.split] = functools.partial(write_rule, "reshape_and_cache", 1, 2)
    for op, rule in rules.items():
        register_sharding(op)(rule)
        info = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op]
        # dtypes and number of the results depend on options, so a cached rule depends on them, too
        options = [x.name for x in op._schema.arguments if x.kwarg_only]
        info.static_kwargkey = options or None
        # with needs_pytree, every call is searched in Python for lists of tensors, which is slow
        info.needs_pytree = any(_is_list(x.type) for x in op._schema.arguments)


def _is_list(of: torch.Type) -> bool:
    return isinstance(of, torch.ListType)


_register()


# operator -> the arguments that may be given by position
POSITIONAL = {
    op: tuple(x.name for x in arguments(op) if not x.keyword_only)
    for op in ("flash_varlen", "blocksparse")
}


RULES = {op: functools.partial(attention_rule, op, False) for op in POSITIONAL}


def _lift(mesh: DeviceMesh, x: Any) -> Any:
    """A plain tensor as a replicated DTensor: it is the same on all ranks."""
    if isinstance(x, Tensor) and not isinstance(x, DTensor):
        return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return x


def _rounded(hint: int) -> int:
    """The next power of two, so that DTensor's cache of rules gets few different hints."""
    return 1 << (hint - 1).bit_length() if hint > 0 else hint


def _by_heads_or_whole(mesh: DeviceMesh, given: dict[str, Any]) -> list[Any]:
    """Redistribute q, k and v in `given` so that each mesh dimension shards them by heads or
    replicates them, as dropout requires. Returns q's placements.
    """
    named = {name: _lift(mesh, given[name]) for name in ("q", "k", "v")}
    shared = [any(x.placements[i] == Shard(1) for x in named.values()) for i in range(mesh.ndim)]
    for name, x in named.items():
        is_whole = name != "q" and x.shape[1] == 1
        at = [Shard(1) if there and not is_whole else Replicate() for there in shared]
        given[name] = x.redistribute(placements=at)
    return list(given["q"].placements)


def _own_dropout(mesh: DeviceMesh, given: dict[str, Any]) -> None:
    """Give dropout the same mask as in one process: `rng_state` in `given` gets the number of this
    rank's first head. It then differs between ranks, although rules treat it as replicated.
    """
    placements = _by_heads_or_whole(mesh, given)
    heads, first = given["q"].shape[1], 0
    for dim, placement in enumerate(placements):
        if placement == Shard(1):
            heads //= mesh.size(dim)
            first += heads * mesh.get_local_rank(dim)
    rng = given["rng_state"]
    local = rng.to_local() if isinstance(rng, DTensor) else rng
    given["rng_state"] = _lift(mesh, from_head(local, first))


def _attend(op: str, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    given = dict(zip(POSITIONAL[op], args, strict=False)) | options
    mesh = next((x.device_mesh for x in given.values() if isinstance(x, DTensor)), None)
    if mesh is not None and given.get("rng_state") is not None:
        _own_dropout(mesh, given)
    if (placed := placed_alike(POSITIONAL[op], given, RULES[op])) is not None:
        return attend_locally(getattr(ops, op), given, placed)
    q, k = given["q"], given["k"]
    if mesh is None:
        return getattr(ops, op)(**given)
    names = ("block_table", "max_seqlen_q", "max_seqlen_k")
    hints = fill_hints(q, k, *(given.get(name) for name in names))
    given |= zip(names[1:], map(_rounded, hints), strict=True)
    return getattr(ops, op)(**{name: _lift(mesh, x) for name, x in given.items()})


@functools.wraps(ops.flash_varlen)
def flash_varlen(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _attend("flash_varlen", *args, **options)


@functools.wraps(ops.blocksparse)
def blocksparse(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _attend("blocksparse", *args, **options)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: DTensor | Sequence[DTensor],
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`reshape_and_cache` with a cache of DTensors. Keys and values with other placements are
    redistributed first.

    Args:
        key, value, slot_mapping, k_scale, v_scale: as for the package's function; DTensors, or
            plain tensors that are the same on all ranks.
        kv_cache: a DTensor, or a pair of them, sharded by heads or replicated on each dimension of
            the mesh.

    Raises:
        ValueError: on all ranks: the cache has other placements, or is no DTensor.
    """
    caches = [kv_cache] if isinstance(kv_cache, DTensor) else list(kv_cache)
    if not all(isinstance(x, DTensor) for x in caches):
        got = (
            f"a {type(kv_cache).__name__} of plain tensors, for torch_paged_attn.reshape_and_cache"
        )
        fail("reshape_and_cache", "kv_cache", got, "a DTensor, or a pair of them")
    mesh, heads = caches[0].device_mesh, 2 if len(caches) == 1 else 1
    lies = _check_caches("reshape_and_cache", heads, caches)  # DTensor would wrap the error
    at = [Shard(1) if p == Shard(heads) else Replicate() for p in lies]
    pair = [_lift(mesh, x).redistribute(placements=at) for x in (key, value)]
    rest = [_lift(mesh, x) for x in (slot_mapping, k_scale, v_scale)]
    both = PAGED_ATTN.reshape_and_cache
    write = both.default if len(caches) == 1 else both.split
    write(*pair, *caches, *rest)


def local_flash_varlen(
    q: DTensor, k: DTensor, v: DTensor, cu_seqlens: Tensor, **options: Any
) -> tuple[DTensor, DTensor]:
    """Attention of each rank over its own packed batch of whole documents (data parallelism); q, k
    and v are sharded by tokens. No sharding rule can express this, because a rank's `cu_seqlens` is
    no slice of a common one.

    Args:
        q, k, v: `(tokens, heads, head_dim)` on a mesh of one dimension, `Shard(0)`.
        cu_seqlens: `(documents + 1,)` int32, a plain tensor, of this rank's documents.
        options: as for `flash_varlen`, plain tensors.

    Returns:
        `out`, `Shard(0)`, and `softmax_lse`, `Shard(1)`. If ranks have different numbers of tokens,
        use the results only locally (`to_local`): DTensor assumes that all shards but the last are
        of one size. Or pad all ranks to the same number; rows past `cu_seqlens[-1]` are 0.
    """
    run = local_map(
        functools.partial(ops.flash_varlen, **options),
        out_placements=([Shard(0)], [Shard(1)]),
        in_placements=([Shard(0)],) * 3 + (None,),
        device_mesh=q.device_mesh,
    )
    return run(q, k, v, cu_seqlens)
