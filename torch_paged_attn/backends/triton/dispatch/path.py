"""`Backend.path` for GPUs: which kernels would run a call, with which tiles and splits.

All answers come from the functions that plan launches.
"""

import contextlib
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton import flash_varlen
from torch_paged_attn.backends.triton.dispatch import kernels, unpacked
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.backward import plan as hopper_backward
from torch_paged_attn.backends.triton.hopper.forward import tiles as hopper
from torch_paged_attn.backends.triton.hopper.forward.choices import Form, choose_tiles
from torch_paged_attn.backends.triton.hopper.mla import work as mla_work
from torch_paged_attn.backends.triton.hopper.selected import in_order_plan as columns
from torch_paged_attn.backends.triton.hopper.selected import index_scores
from torch_paged_attn.backends.triton.hopper.selected import plan as latent_lists
from torch_paged_attn.backends.triton.hopper.units import plan as selected_units
from torch_paged_attn.backends.triton.portable.forward import tiles as portable
from torch_paged_attn.backends.triton.runtime.launch import traced
from torch_paged_attn.backends.triton.runtime.launcher import unknown_triton
from torch_paged_attn.backends.triton.runtime.target import (
    INTERPRETED,
    Target,
    assume,
    assumed,
    target_of,
)
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops.checks import fail
from torch_paged_attn.ops.paths import Path
from torch_paged_attn.selection_calls import SelectKeysCall

# float32 and int32
WORD = 4


def path(op: str, call: Any, target: str | None = None) -> Path:
    if target is None and assumed() is None and not _runs_here(call):
        reason = f"torch {torch.__version__} finds no GPU here; target='sm90:132' would name one"
        return Path("triton", None, reason)
    # fake tensors have no addresses, so they are treated as in a trace
    with (
        contextlib.nullcontext() if target is None else assume(parse(target)),
        contextlib.nullcontext() if _has_addresses(call) else traced(),
    ):
        if op.startswith("select"):
            found = _selected(op, call)
        elif isinstance(call, AttentionCall):
            found = _attention(call)
        elif isinstance(call, BackwardCall):
            found = _backward(call)
        else:
            found = Path("triton", op, "there is one kernel for all GPUs")
    if (unknown := unknown_triton()) is None:
        return found
    return dataclasses.replace(found, details=found.details | {"launches": unknown})


def _runs_here(call: Any) -> bool:
    """Whether there is a GPU, or Triton's interpreter for tensors on the CPU."""
    is_interpreted = INTERPRETED and all(x.device.type != "cuda" for x in _tensors(call))
    return is_interpreted or torch.cuda.is_available()


def _has_addresses(call: Any) -> bool:
    return not any(isinstance(x, FakeTensor) or x.device.type == "meta" for x in _tensors(call))


def _tensors(call: Any) -> list[Tensor]:
    given = call if isinstance(call, dict) else call.tensors()
    return [x for x in given.values() if isinstance(x, Tensor)]


def parse(target: str) -> Target:
    """The GPU that a text such as `"sm90:132"` names (architecture, multiprocessors)."""
    arch, _, count = target.partition(":")
    known = arch.startswith("gfx") or (arch.startswith("sm") and arch[2:].isdigit())
    if not known or not count.isdigit() or int(count) == 0:
        expected = "an architecture and its multiprocessors, such as 'sm90:132' or 'gfx942:304'"
        fail("explain", "target", repr(target), expected)
    return Target.of_arch(arch, int(count))


def _selected(op: str, call: Any) -> Path:
    """Hopper has kernels of its own for lists of latent keys, for units that many tokens name, and
    for the scores of index keys.
    """
    if op == "select_keys":
        attention = SelectKeysCall.of(**call).attention()
        reason = index_scores.unsupported(attention) or index_scores.unprofitable(attention)
        if reason is not None:
            return Path("triton", "portable", reason)
        target = {"target": target_of(attention.q.device).arch}
        reason = "index heads fill its tiles; units are selected by the portable kernel"
        return Path("triton", "hopper and portable", reason, target)
    if op != "selected_attention":
        return Path("triton", "portable", "keys that lists name have this kernel alone")
    if (reason := latent_lists.unsupported(call)) is not None:
        of_units = selected_units.unsupported(call) or selected_units.unprofitable(call)
        if of_units is None:
            return _units(call)
        is_of_keys = call.selection.select_size == 1
        return Path("triton", "portable", reason if is_of_keys else of_units)
    options = latent_lists.options_of(call)
    groups, _, elements = latent_lists.shares_of_call(call, options)
    details = {
        "target": target_of(call.q.device).arch,
        "hopper": _tile(options.PACKED_HEADS, latent_lists.PAIR, groups * options.HEAD_TILES),
    }
    reason = "lists of single keys, whose values are columns of the keys; elsewhere, portable"
    return Path("triton", "hopper latent", reason, details, WORD * elements)


def _units(call: AttentionCall) -> Path:
    """Units that are read once for all tokens that name them."""
    options, target = selected_units.options_of(call), target_of(call.q.device)
    sizes = options.GROUP_SIZE, options.BLOCK_N, target.multiprocessors
    details = {"target": target.arch, "hopper": _tile(*sizes, queries=options.TOKENS)}
    reason = "many tokens name a unit, which is read once for all of them"
    return Path("triton", "hopper units", reason, details, None)


def _tile(heads: int, keys: int, *grid: int, queries: int | None = None) -> dict[str, Any]:
    """The sizes of a tile, and the grid. `queries`: None for one."""
    of_queries = {} if queries is None else {"queries_per_tile": queries}
    return of_queries | {"heads_per_tile": heads, "keys_per_tile": keys, "grid": grid}


def _attention(call: AttentionCall) -> Path:
    is_packed = call.block_table is None
    longest = flash_varlen.said_of_longest(call.max_seqlen_q, call.max_seqlen_k, is_packed)
    call = dataclasses.replace(
        call, max_seqlen_k=flash_varlen.said_of_reach(call.max_seqlen_k, is_packed)
    )
    call, _ = flash_varlen.with_aligned_copies(call)
    flash_varlen.refuse_other_bits(call)
    choice = flash_varlen.choose(call, longest)
    details: dict[str, Any] = {"target": target_of(call.q.device).arch}
    if ranking := kernels.ranking(call, longest, flash_varlen.unsupported_on_hopper(call)):
        details["microseconds"] = ranking
    workspace: int | None
    if choice.kernel == "hopper latent":
        details["hopper"], workspace = _latent(call, mla_work.options_of(call))
        reason = "one KV head whose values are columns of its keys; elsewhere, portable"
        return Path("triton", choice.kernel, reason, details, workspace)
    if choice.kernel == "hopper columns":
        details["hopper"], workspace = _latent(call, columns.options_of(call))
        reason = "few queries a sequence over rows of latents, their scales and rope keys"
        return Path("triton", choice.kernel, reason, details, workspace)
    if choice.kernel == "hopper and portable":
        details["workspace_keys"] = unpacked.capacity_of(call)
        workspace = unpacked.capacity_of(call) * unpacked.bytes_of_key(call)
        return Path("triton", choice.kernel, choice.reason or "", details, workspace)
    if choice.kernel == "hopper":
        details["hopper"], workspace = _hopper(call, choice.form)
        # the size of the lists of blocks is not known here
        workspace = workspace if call.layout is None else None
    else:
        details["portable"], workspace = _portable(call, choice)
    return Path("triton", choice.kernel, choice.reason or "its tiles are full", details, workspace)


def _portable(call: AttentionCall, choice: flash_varlen.Choice) -> tuple[dict[str, Any], int]:
    """Tiles of the portable kernel, and the bytes of its partial results and counters."""
    traits = portable.traits_of(call, target_of(call.q.device))
    sizes = call.total_q, call.batch, support.key_bound(call)
    config, splits = (None, None) if choice.way is None else (choice.way.config, choice.way.splits)
    tiles = portable.choose_tiles(traits, *sizes, config, splits, longest=choice.in_turns)
    found = _tile(tiles.pack, tiles.block_n, *tiles.grid, queries=tiles.tokens) | {
        "programs_share_keys": tiles.is_split,
        "config": dataclasses.asdict(tiles.config),
    }
    if not tiles.is_split:
        return found, 0
    return found, WORD * (tiles.part_elements(call.head_dim_v) + tiles.num_programs)


def _hopper(call: AttentionCall, form: Form) -> tuple[dict[str, Any], int]:
    """Tiles of Hopper's kernel, and the bytes of its tile list and partial results."""
    config, packed_heads = choose_tiles(call, form)
    options = hopper.options_of(call, config, packed_heads, form)
    listed: tuple[int, ...] = (0,)
    if options.IS_LISTED:
        listed = hopper.shape_of_tiles(call, hopper.tile_options_of(options))
    programs = hopper.grid_of(call, options, form)
    queries = options.ROW_GROUPS * options.TOKENS
    found = _tile(packed_heads, options.BLOCK_N, programs, queries=queries) | {
        "most_pieces_of_tiles": options.MOST_PARTS,
        # the numbers of stages are those that fit into shared memory
        "config": dataclasses.asdict(config)
        | {"KV_STAGES": options.KV_STAGES, "Q_STAGES": options.Q_STAGES},
    }
    return found, WORD * (math.prod(listed) + hopper.part_elements(options, programs))


def _latent(call: AttentionCall, options: Any) -> tuple[dict[str, Any], int]:
    """Tiles of a kernel for latent attention, and the bytes of its partial results."""
    programs = mla_work.programs_of(call, options)
    sizes = options.PACKED_HEADS, options.UNIT_KEYS, programs
    found = _tile(*sizes, queries=options.TOKENS)
    return found, WORD * mla_work.part_elements(programs, options)


def _backward(call: BackwardCall) -> Path:
    reason = hopper_backward.unsupported(call)
    details: dict[str, Any] = {"target": target_of(call.forward.q.device).arch}
    if reason is not None:
        return Path("triton", "portable", reason, details)
    configs = hopper_backward.choose_configs(call)
    details["hopper"] = {"one_pass": configs.queries is None, **dataclasses.asdict(configs)}
    return Path("triton", "hopper", "it has a backward for these heads", details)
