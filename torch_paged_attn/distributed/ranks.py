"""The ranks that take part in a call, and how an error on one of them is raised on all."""

import builtins
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_paged_attn import environment
from torch_paged_attn.ops.checks import fail, refuse

# a process group, a mesh of one dimension, or None for all processes
Group = ProcessGroup | DeviceMesh | None


class Ranks(NamedTuple):
    """A process group, this process' rank in it, and its size."""

    group: ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, op: str, group: Group = None) -> "Ranks":
        """Raise ValueError unless `group` is a process group, or a mesh of one dimension."""
        if not dist.is_initialized():
            refuse(
                op,
                "torch.distributed is not initialized",
                "call torch.distributed.init_process_group first",
                ValueError,
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                got = f"a mesh of dimensions {group.mesh_dim_names or tuple(group.shape)}"
                fail(op, "group", got, 'a mesh of one dimension, such as mesh["cp"]')
            group = group.get_group()
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, ProcessGroup):
            fail(op, "group", type(group).__name__, "a ProcessGroup, a DeviceMesh or None")
        rank = dist.get_rank(group)
        if rank < 0:
            fail(op, "group", "a group of other processes", "a group that holds this process")
        return cls(group, rank, dist.get_world_size(group))

    def global_rank(self, rank: int) -> int:
        """A rank of the group as a rank among all processes."""
        return dist.get_global_rank(self.group, rank)


def agree(
    op: str,
    ranks: Ranks,
    device: torch.device,
    call: tuple[Any, ...],
    check: Callable[[], None],
    is_first: bool = False,
) -> None:
    """Run `check` on every rank; if it raises on one of them, raise its error on all.

    Raises ValueError if `call`, a description of the call, differs between ranks.

    This needs a collective of 16 bytes. On accelerators, where the host would wait for it, it runs
    only under PAGED_ATTN_CHECK=1; for the first call (`is_first`) also if the group has a backend
    for the CPU, on which it then runs. Otherwise an error is raised only on the rank that has it.
    """
    problem: Exception | None = None
    try:
        check()
    except Exception as error:
        problem = error
    is_heard = device.type == "cpu" or environment.CHECK
    if not is_heard and is_first and not torch.compiler.is_compiling() and _has_host(ranks):
        is_heard, device = True, torch.device("cpu")
    if torch.compiler.is_compiling() or not is_heard:
        if problem is not None:
            raise problem
        return
    text = repr(call)
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(digest, "big"), int(problem is not None)], device=device)
    found = mine.new_empty(ranks.size, 2)
    _all_gather(found, mine, ranks)
    found = found.cpu()
    if (found == found[0]).all() and not found[0, 1]:
        return
    said: list[Any] = [None] * ranks.size
    what = None if problem is None else (type(problem).__name__, str(problem))
    dist.all_gather_object(said, (what, text), ranks.group)
    _raise(op, ranks, problem, said)


def _has_host(ranks: Ranks) -> bool:
    """Whether the group has a backend for CPU tensors, such as "cpu:gloo,cuda:nccl"."""
    return "cpu:" in dist.get_backend_config(ranks.group)


def _all_gather(found: torch.Tensor, mine: torch.Tensor, ranks: Ranks) -> None:
    # gloo requires a flat result tensor
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    all_gather(found.flatten(), mine, group=ranks.group)


def _raise(op: str, ranks: Ranks, own: Exception | None, said: list[Any]) -> NoReturn:
    if own is not None:
        raise own
    for rank, (what, _) in enumerate(said):
        if what is not None:
            kind = getattr(builtins, what[0], RuntimeError)
            raise kind(f"{what[1]} (on rank {rank} of {ranks.size})")
    other = next(i for i, (_, text) in enumerate(said) if text != said[ranks.rank][1])
    got = f"{said[other][1]} on rank {other} and {said[ranks.rank][1]} on rank {ranks.rank}"
    fail(op, "the call", got, "the same on every rank of the group")
