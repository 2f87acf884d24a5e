"""A right call of every op, small enough to see what a change makes of it."""

import torch

from torch_paged_attn.ops.backend import serving_device


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def packed():
    return {
        "q": torch.randn(7, 4, 8),
        "k": torch.randn(9, 2, 8),
        "v": torch.randn(9, 2, 6),
        "cu_seqlens_q": ints(0, 3, 7),
        "cu_seqlens_k": ints(0, 4, 9),
        "max_seqlen_q": 4,
        "max_seqlen_k": 5,
    }


def paged():
    return {
        "q": torch.randn(7, 4, 8),
        "k": torch.randn(5, 2, 4, 8),
        "v": torch.randn(5, 2, 4, 6),
        "cu_seqlens_q": ints(0, 3, 7),
        "cu_seqlens_k": None,
        "max_seqlen_q": 4,
        "max_seqlen_k": 8,
        "seqused_k": ints(4, 7),
        "block_table": torch.tensor([[4, -1], [0, 2]], dtype=torch.int32),
    }


def sparse():
    return packed() | {
        "crow_indices": ints(0, 1, 3).view(1, 3),
        "col_indices": ints(0, 0, 1).view(1, 3),
        "q_block_size": 16,
        "k_block_size": 16,
    }


def cached():
    return {
        "key": torch.randn(4, 2, 8),
        "value": torch.randn(4, 2, 8),
        "kv_cache": torch.randn(2, 5, 2, 4, 8),
        "slot_mapping": torch.tensor([0, 19, -1, 7]),
    }


def split():
    args = cached()
    args["k_cache"], args["v_cache"] = torch.randn(5, 2, 4, 8), torch.randn(5, 2, 4, 8)
    del args["kv_cache"]
    return args


def quantized():
    return {
        "key": torch.randn(4, 2, 8),
        "value": torch.randn(4, 2, 6),
        "k_cache": torch.zeros(5, 2, 4, 8, dtype=torch.int8),
        "v_cache": torch.zeros(5, 2, 4, 6, dtype=torch.int8),
        "k_scale": torch.ones(5, 2, 4),
        "v_scale": torch.ones(5, 2, 4),
        "slot_mapping": torch.tensor([0, 19, -1, 7]),
    }


def states():
    return {
        "out_a": torch.randn(3, 2, 4),
        "lse_a": torch.randn(2, 3),
        "out_b": torch.randn(3, 2, 4),
        "lse_b": torch.randn(2, 3),
    }


_ALL = {
    "packed": ("flash_varlen", packed),
    "paged": ("flash_varlen", paged),
    "sparse": ("blocksparse", sparse),
    "cached": ("reshape_and_cache", cached),
    "split": ("reshape_and_cache.split", split),
    "quantized": ("reshape_and_cache.quantize", quantized),
    "states": ("merge_states", states),
}
# without ops that the backend lacks: the CPU's, or under PAGED_ATTN_NEURON_EMULATE=1 Neuron's
_BACKEND, _ = serving_device(torch.device("cpu"))
BASES = {name: base for name, base in _ALL.items() if base[0] not in _BACKEND.lacks_ops}
