"""Right calls of every op, and what makes each of them wrong: changes, and the error's text."""

import math

import torch

INT32_MAX = 2**31 - 1


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


def states():
    return {
        "out_a": torch.randn(3, 2, 4),
        "lse_a": torch.randn(2, 3),
        "out_b": torch.randn(3, 2, 4),
        "lse_b": torch.randn(2, 3),
    }


BASES = {
    "packed": ("flash_varlen", packed),
    "paged": ("flash_varlen", paged),
    "sparse": ("blocksparse", sparse),
    "cached": ("reshape_and_cache", cached),
    "split": ("reshape_and_cache.split", split),
    "states": ("merge_states", states),
}


def r(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


STATIC = [
    ("packed", {"q": r(7, 32)}, "q has shape (7, 32); allowed: (total_q, num_heads, head_dim)"),
    ("packed", {"q": r(1, 7, 4, 8)}, "q has shape"),
    ("packed", {"k": r(9, 16)}, "k has shape (9, 16); allowed: (total_k"),
    ("packed", {"k": r(5, 2, 4, 8)}, "without block_table"),
    ("packed", {"v": r(9, 2, 2, 6)}, "v has shape"),
    ("paged", {"k": r(9, 2, 8)}, "with block_table"),
    ("paged", {"v": r(5, 2, 4, 6, 1)}, "v has shape"),
    (
        "packed",
        {"q": r(7, 4, 8, dtype=torch.float64)},
        "q has dtype float64; allowed: float32, bfloat16",
    ),
    ("packed", {"q": torch.ones(7, 4, 8, dtype=torch.int64)}, "q has dtype int64"),
    (
        "packed",
        {"k": r(9, 2, 8, dtype=torch.float16)},
        "k has dtype float16; allowed: float32, float8",
    ),
    ("packed", {"v": r(9, 2, 6, dtype=torch.bfloat16)}, "v has dtype bfloat16; allowed: float32"),
    ("packed", {"k": torch.ones(9, 2, 8, dtype=torch.uint8)}, "k has dtype uint8"),
    ("packed", {"v": r(8, 2, 6)}, "v has shape (8, 2, 6); allowed: k's (9, 2, 8)"),
    ("packed", {"v": r(9, 1, 6)}, "v has shape"),
    ("paged", {"v": r(5, 2, 3, 6)}, "v has shape"),
    ("packed", {"q": r(7, 0, 8)}, "q's num_heads is 0; allowed: at least 1"),
    ("packed", {"k": r(9, 0, 8), "v": r(9, 0, 6)}, "k's num_kv_heads is 0"),
    ("packed", {"q": r(7, 4, 0), "k": r(9, 2, 0)}, "q's head_dim is 0"),
    ("packed", {"v": r(9, 2, 0)}, "v's head_dim is 0"),
    ("paged", {"k": r(5, 2, 0, 8), "v": r(5, 2, 0, 6)}, "k's page_size is 0"),
    ("packed", {"q": r(7, 3, 8)}, "q's num_heads is 3; allowed: a multiple of k's num_kv_heads, 2"),
    ("packed", {"q": r(7, 4, 10)}, "k has head_dim 8; allowed: q's head_dim, 10"),
    ("packed", {"q": r(7, 4, 16)[..., ::2]}, "q has strides (64, 16, 2)"),
    ("packed", {"k": r(2, 8, 9).permute(2, 0, 1)}, "k has strides"),
    ("paged", {"v": r(5, 2, 6, 4).transpose(2, 3)}, "v has strides"),
    (
        "packed",
        {"cu_seqlens_q": ints(0, 3, 7).long()},
        "cu_seqlens_q has dtype int64; allowed: int32",
    ),
    ("packed", {"cu_seqlens_q": ints(0, 3, 7).view(1, 3)}, "cu_seqlens_q has shape (1, 3)"),
    ("packed", {"cu_seqlens_q": ints()}, "cu_seqlens_q is empty"),
    (
        "packed",
        {"cu_seqlens_k": ints(0, 9)},
        "cu_seqlens_k has shape (2,); allowed: (batch + 1) = (3,)",
    ),
    ("packed", {"cu_seqlens_k": torch.tensor([0.0, 4.0, 9.0])}, "cu_seqlens_k has dtype float32"),
    ("paged", {"seqused_k": ints(4, 7, 1)}, "seqused_k has shape (3,); allowed: (batch) = (2,)"),
    ("paged", {"seqused_k": ints(4, 7).long()}, "seqused_k has dtype int64"),
    ("paged", {"seqused_k": None}, "seqused_k is None"),
    (
        "paged",
        {"block_table": ints(4, 0)},
        "block_table has shape (2,); allowed: (batch, max_pages)",
    ),
    ("paged", {"block_table": ints(4, 0, 1).view(3, 1)}, "block_table has 3 rows"),
    ("paged", {"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "block_table has dtype int64"),
    ("packed", {"max_seqlen_q": -1}, "max_seqlen_q is -1"),
    ("packed", {"max_seqlen_k": -7}, "max_seqlen_k is -7"),
    ("packed", {"attn_bias": r(7, 9)}, "attn_bias has shape (7, 9)"),
    ("packed", {"attn_bias": r(2, 7, 9)}, "attn_bias has 2 heads; allowed: 1 or num_heads = 4"),
    ("packed", {"attn_bias": r(1, 6, 9)}, "attn_bias has 6 rows; allowed: total_q = 7"),
    ("packed", {"attn_bias": r(1, 7, 9).long()}, "attn_bias has dtype int64"),
    ("packed", {"alibi_slopes": r(3)}, "alibi_slopes has shape (3,)"),
    ("packed", {"alibi_slopes": r(4).double()}, "alibi_slopes has dtype float64"),
    ("packed", {"sinks": r(2)}, "sinks has shape (2,); allowed: (num_heads) = (4,)"),
    ("packed", {"sinks": r(4, dtype=torch.bfloat16)}, "sinks has dtype bfloat16"),
    ("packed", {"q_descale": r(4)}, "q_descale has shape (4,)"),
    ("packed", {"k_descale": r(2).half()}, "k_descale has dtype float16"),
    ("packed", {"v_descale": r(2, 2, 1)}, "v_descale has shape (2, 2, 1)"),
    ("packed", {"out_dtype": torch.int8}, "out_dtype is int8"),
    ("packed", {"out_scale": r(1)}, "out_scale came with a float32 output"),
    ("packed", {"out_scale": r(2), "out_dtype": torch.float8_e5m2}, "out_scale has shape (2,)"),
    ("packed", {"softmax_scale": math.nan}, "softmax_scale is nan; allowed: a number of at most"),
    ("packed", {"softmax_scale": math.inf}, "softmax_scale is inf"),
    ("packed", {"softmax_scale": 1e300}, "softmax_scale is 1e+300"),
    ("packed", {"softmax_scale": -3e38}, "softmax_scale is -3e+38"),
    ("sparse", {"softmax_scale": 3e38}, "softmax_scale is 3e+38"),
    ("packed", {"window_size_left": -2}, "window_size_left is -2"),
    ("packed", {"window_size_right": -5}, "window_size_right is -5"),
    ("packed", {"softcap": -1.0}, "softcap is -1.0"),
    ("packed", {"softcap": math.nan}, "softcap is nan"),
    ("packed", {"softcap": math.inf}, "softcap is inf; allowed: 0 (off), or from 2**-126"),
    ("packed", {"softcap": 3e38}, "softcap is 3e+38"),
    ("packed", {"softcap": 1e-40}, "softcap is 1e-40"),
    (
        "packed",
        {"softcap": 1e-30, "softmax_scale": -1e20},
        "softcap is 1e-30 for a softmax_scale of -1e+20; allowed: at least 2**-126 of",
    ),
    ("packed", {"dropout_p": 1.0}, "dropout_p is 1.0; allowed: a number in [0, 1)"),
    ("packed", {"dropout_p": -0.1}, "dropout_p is -0.1"),
    ("packed", {"dropout_p": math.nan}, "dropout_p is nan"),
    ("packed", {"dropout_p": 0.5}, "rng_state is None"),
    ("packed", {"dropout_p": 0.5, "rng_state": ints(1, 2)}, "rng_state has dtype int32"),
    ("packed", {"dropout_p": 0.5, "rng_state": torch.tensor([1])}, "rng_state has shape (1,)"),
    ("packed", {"dropout_p": 0.5, "rng_state": torch.zeros(3).long()}, "rng_state has shape (3,)"),
    (
        "packed",
        {"q_latent": r(7, 4, 8)},
        "q_latent has shape (7, 4, 8); allowed: (total_q, num_heads, head_dim_v) = (7, 4, 6)",
    ),
    ("packed", {"q_latent": r(7, 24)}, "q_latent has shape (7, 24)"),
    ("packed", {"q_latent": r(7, 4, 6).half()}, "q_latent has dtype float16; allowed: float32"),
    ("packed", {"q_latent": r(7, 6, 4).mT}, "q_latent has strides"),
    (
        "packed",
        {"q_latent": r(7, 4, 6), "v": r(9, 2, 6).half()},
        "v has dtype float16; allowed: float32, float8_e4m3fn",
    ),
    (
        "packed",
        {"tail_mask": r(7, 4) > 0, "q": r(6, 4, 8)},
        "tail_mask has 7 rows; allowed: total_q",
    ),
    ("packed", {"tail_mask": r(7, 4)}, "tail_mask has dtype float32; allowed: bool"),
    ("packed", {"tail_mask": r(1, 7, 4) > 0}, "tail_mask has shape (1, 7, 4)"),
    ("packed", {"k_start": ints(0, 4).long()}, "k_start has dtype int64; allowed: int32"),
    ("packed", {"k_start": ints(0, 4, 9)}, "k_start has shape (3,); allowed: (batch) = (2,)"),
    ("paged", {"k_start": ints(0, 4)}, "k_start came with block_table; allowed: packed keys"),
    ("packed", {"q_position": ints(0, 4, 9)}, "q_position has shape (3,)"),
    ("packed", {"q_position": torch.zeros(2)}, "q_position has dtype float32"),
    ("packed", {"key_ranks": 0}, "key_ranks is 0; allowed: 1 to 32768"),
    ("packed", {"key_ranks": 2**15 + 1}, "key_ranks is 32769"),
    ("packed", {"key_ranks": 4, "key_rank": 4}, "key_rank is 4; allowed: 0 to key_ranks - 1 = 3"),
    ("packed", {"key_rank": 1}, "key_rank is 1"),
    ("packed", {"key_rank": -1}, "key_rank is -1"),
    ("packed", {"key_interleave": 0}, "key_interleave is 0"),
    ("sparse", {"key_interleave": 2**31}, "key_interleave is 2147483648; allowed: 1 to"),
    ("sparse", {"q": r(7, 32)}, "q has shape"),
    ("sparse", {"crow_indices": ints(0, 1, 3)}, "crow_indices has shape (3,)"),
    ("sparse", {"crow_indices": torch.zeros(1, 3)}, "crow_indices has dtype float32"),
    (
        "sparse",
        {"col_indices": torch.zeros(1, 3, dtype=torch.int64)},
        "col_indices has dtype int64",
    ),
    (
        "sparse",
        {"col_indices": torch.zeros(2, 3, dtype=torch.int32)},
        "col_indices has shape (2, 3)",
    ),
    ("sparse", {"crow_indices": torch.zeros(1, 0, dtype=torch.int32)}, "rows + 1 >= 1"),
    ("sparse", {"q_block_size": 8}, "q_block_size is 8; allowed: 16, 32, 64, 128, 256"),
    ("sparse", {"k_block_size": 48}, "k_block_size is 48"),
    ("sparse", {"k_block_size": 512}, "k_block_size is 512"),
    (
        "sparse",
        {"crow_indices": ints(*[0] * 9).view(3, 3), "col_indices": ints(*[0] * 9).view(3, 3)},
        "crow_indices has 3 heads; allowed: 1, num_kv_heads = 2 or num_heads = 4",
    ),
    (
        "sparse",
        {"crow_indices": ints(0, 1, 3).view(1, 1, 3), "col_indices": ints(0, 0, 1).view(1, 1, 3)},
        "crow_indices has a batch of 1; allowed: cu_seqlens_q's, 2",
    ),
    ("cached", {"key": r(4, 16)}, "key has shape (4, 16)"),
    ("cached", {"value": r(4, 2, 2, 4)}, "value has shape"),
    ("cached", {"key": r(4, 2, 8).double()}, "key has dtype float64"),
    ("cached", {"value": r(4, 2, 8).half()}, "value has dtype float16; allowed: float32"),
    ("cached", {"value": r(3, 2, 8)}, "value has shape (3, 2, 8)"),
    ("cached", {"kv_cache": r(5, 2, 4, 8)}, "kv_cache has shape (5, 2, 4, 8)"),
    ("cached", {"kv_cache": r(3, 5, 2, 4, 8)}, "keys and values: a first dimension of 2"),
    ("cached", {"kv_cache": r(2, 5, 2, 4, 8).half()}, "kv_cache has dtype float16"),
    (
        "cached",
        {"kv_cache": r(2, 5, 3, 4, 8)},
        "kv_cache has 3 KV heads of 8; allowed: key's 2 KV heads of 8",
    ),
    ("cached", {"kv_cache": r(2, 5, 2, 4, 9)}, "kv_cache has 2 KV heads of 9"),
    ("cached", {"kv_cache": r(2, 5, 2, 0, 8)}, "at least 1 head, slot and element"),
    ("cached", {"kv_cache": r(2, 5, 2, 8, 4).mT}, "kv_cache has strides"),
    ("cached", {"key": r(4, 8, 2).mT}, "key has strides"),
    ("cached", {"slot_mapping": torch.zeros(5, dtype=torch.int64)}, "slot_mapping has 5 slots"),
    ("cached", {"slot_mapping": torch.zeros(2, 2, dtype=torch.int64)}, "slot_mapping has shape"),
    (
        "cached",
        {"slot_mapping": torch.zeros(4)},
        "slot_mapping has dtype float32; allowed: int32, int64",
    ),
    ("cached", {"k_scale": torch.tensor(1.0)}, "k_scale came with a torch.float32 cache"),
    ("split", {"v_cache": r(5, 2, 5, 8)}, "v_cache is (5, 2, 5, 8)"),
    ("split", {"v_cache": r(6, 2, 4, 8)}, "v_cache is (6, 2, 4, 8)"),
    (
        "split",
        {
            "k_cache": r(5, 2, 4, 8).to(torch.int8),
            "v_cache": r(5, 2, 4, 8).to(torch.int8),
            "v_scale": r(3),
        },
        "v_scale has shape (3,)",
    ),
    ("states", {"out_a": r(3, 8)}, "out_a has shape (3, 8)"),
    ("states", {"out_b": r(3, 2, 5)}, "out_b has shape (3, 2, 5)"),
    ("states", {"out_b": r(3, 2, 4).half()}, "out_b has dtype float16"),
    (
        "states",
        {"lse_a": r(3, 2)},
        "lse_a has shape (3, 2); allowed: (num_heads, total_q) = (2, 3)",
    ),
    ("states", {"lse_b": r(2, 3).double()}, "lse_b has dtype float64"),
]

VALUES = [
    ("packed", {"cu_seqlens_q": ints(1, 3, 7)}, ValueError, "cu_seqlens_q[0] is 1; allowed: 0"),
    ("packed", {"cu_seqlens_q": ints(0, 5, 3)}, ValueError, "cu_seqlens_q[2] is 3, below 5"),
    (
        "packed",
        {"cu_seqlens_q": ints(0, 3, 8)},
        ValueError,
        "cu_seqlens_q[-1] is 8; allowed: at most total_q",
    ),
    ("packed", {"cu_seqlens_q": ints(0, -3, 7)}, ValueError, "cu_seqlens_q[1] is -3"),
    ("packed", {"cu_seqlens_q": ints(0, INT32_MAX, -(2**31))}, ValueError, "cu_seqlens_q[2]"),
    ("packed", {"cu_seqlens_k": ints(-1, 4, 9)}, ValueError, "cu_seqlens_k[0] is -1"),
    (
        "packed",
        {"cu_seqlens_k": ints(0, 4, 10)},
        ValueError,
        "cu_seqlens_k[-1] is 10; allowed: at most total_k",
    ),
    ("packed", {"cu_seqlens_k": ints(0, 6, 4)}, ValueError, "cu_seqlens_k[2] is 4, below 6"),
    (
        "packed",
        {"cu_seqlens_k": None, "k": r(6, 2, 8), "v": r(6, 2, 6)},
        ValueError,
        "at most total_k = 6",
    ),
    (
        "packed",
        {"seqused_k": ints(4, 6)},
        ValueError,
        "seqused_k[1] is 6; allowed: at most the 5 keys",
    ),
    ("packed", {"seqused_k": ints(-1, 5)}, ValueError, "seqused_k[0] is -1; allowed: at least 0"),
    (
        "packed",
        {"attn_bias": r(1, 7, 4)},
        ValueError,
        "attn_bias has 4 columns; allowed: at least Lk[1] = 5",
    ),
    (
        "packed",
        {"k_start": ints(0, 5)},
        ValueError,
        "k_start[1] is 5; allowed: 0 to total_k - Lk[1] = 4",
    ),
    ("packed", {"k_start": ints(-1, 0)}, ValueError, "k_start[0] is -1"),
    ("packed", {"k_start": ints(0, INT32_MAX)}, ValueError, f"k_start[1] is {INT32_MAX}"),
    (
        "packed",
        {"k_start": ints(0, 0), "seqused_k": ints(4, 10)},
        ValueError,
        "k_start[1] is 0; allowed: 0 to total_k - Lk[1] = -1",
    ),
    (
        "packed",
        {"tail_mask": r(7, 3) > 0},
        ValueError,
        "tail_mask has 3 columns; allowed: at least Lq[1] = 4",
    ),
    (
        "packed",
        {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2, 65532, 0, 0])},
        ValueError,
        "rng_state's first head is 65532; allowed: 0 to 65531",
    ),
    (
        "packed",
        {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2, 0, -1, 0])},
        ValueError,
        "rng_state's first row is -1",
    ),
    (
        "packed",
        {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2, 0, 0, 2**31])},
        ValueError,
        f"rng_state's first column is {2**31}",
    ),
    (
        "sparse",
        {"q_position": ints(0, 29)},
        ValueError,
        "crow_indices has 2 rows of 16 for position 32 of sequence 1",
    ),
    ("paged", {"seqused_k": ints(4, -2)}, ValueError, "seqused_k[1] is -2"),
    (
        "paged",
        {"seqused_k": ints(4, 9)},
        RuntimeError,
        "block_table has 2 pages of 4 for Lk[1] = 9",
    ),
    ("paged", {"seqused_k": ints(4, INT32_MAX)}, RuntimeError, "block_table has 2 pages"),
    (
        "paged",
        {"cu_seqlens_k": ints(0, 4, 3), "seqused_k": None},
        ValueError,
        "cu_seqlens_k[2] is 3",
    ),
    (
        "paged",
        {"block_table": ints(5, 0, 0, 2).view(2, 2)},
        IndexError,
        "block_table[0, 0] is 5; allowed: pages 0 to 4",
    ),
    ("paged", {"block_table": ints(1, 0, 0, -1).view(2, 2)}, IndexError, "block_table[1, 1] is -1"),
    (
        "paged",
        {"block_table": ints(1, 0, INT32_MAX, 1).view(2, 2)},
        IndexError,
        f"block_table[1, 0] is {INT32_MAX}",
    ),
    (
        "sparse",
        {"crow_indices": ints(0).view(1, 1), "col_indices": ints(0).view(1, 1)},
        ValueError,
        "crow_indices has 0 rows of 16",
    ),
    (
        "sparse",
        {"crow_indices": ints(0, 4, 4).view(1, 3)},
        ValueError,
        "crow_indices runs from 0 to 4",
    ),
    (
        "sparse",
        {"crow_indices": ints(2, 1, 3).view(1, 3)},
        ValueError,
        "crow_indices runs from 2 to 1",
    ),
    (
        "sparse",
        {"crow_indices": ints(-1, 1, 3).view(1, 3)},
        ValueError,
        "crow_indices runs from -1",
    ),
    (
        "sparse",
        {"col_indices": ints(-1, 0, 1).view(1, 3)},
        IndexError,
        "col_indices hold -1 in row 0",
    ),
    (
        "sparse",
        {"crow_indices": ints(0, 2, 3).view(1, 3)},
        ValueError,
        "col_indices repeat a column in row 0",
    ),
    ("sparse", {"cu_seqlens_q": ints(0, 3, 8)}, ValueError, "cu_seqlens_q[-1] is 8"),
    (
        "cached",
        {"slot_mapping": torch.tensor([0, 20, 1])},
        IndexError,
        "slot_mapping[1] is 20; allowed: slots below",
    ),
    ("cached", {"slot_mapping": torch.tensor([0, 1, 2, 2**62])}, IndexError, "slot_mapping[3]"),
    ("split", {"slot_mapping": ints(INT32_MAX)}, IndexError, f"slot_mapping[0] is {INT32_MAX}"),
]
