"""Named problems of `selected_attention`: what models do with it, in small, and its edge cases."""

import torch

from torch_paged_attn.testing.problem import Problem, Selected
from torch_paged_attn.testing.problems import bf16, e4m3, f16

DECODE = ((1, 120), (1, 40), (1, 0), (1, 333))
MTP = ((8, 90), (2, 5), (0, 9), (8, 0))  # speculative tokens
CHUNK = ((17, 30), (40, 0), (1, 77), (0, 0), (3, -2))

SELECTED = {
    p.name: p
    for p in (
        # DeepSeek V3.2 and GLM-5: latents of 576 whose first 512 columns are the values
        Problem(
            "deepseek_v3_2/decode/bf16",
            DECODE,
            16,
            1,
            576,
            512,
            dtype=bf16,
            page_size=64,
            cache_layout="mla",
            softmax_scale=0.0722,
            selected=Selected(48),
        ),
        Problem(
            "deepseek_v3_2/prefill/bf16",
            CHUNK,
            16,
            1,
            576,
            512,
            dtype=bf16,
            cache_layout="mla",
            softmax_scale=0.0722,
            selected=Selected(24, holes=0.2),
        ),
        Problem(
            "deepseek_v3_2/latent_e4m3/bf16",
            MTP,
            16,
            1,
            64,
            512,
            dtype=bf16,
            v_dtype=e4m3,
            page_size=64,
            latent=True,
            descale="heads",
            softmax_scale=0.0722,
            selected=Selected(40),
        ),
        # DeepSeek V4: the window of 128 is a call of flash_varlen, the sink in one of the two
        Problem(
            "deepseek_v4/compressed/bf16",
            MTP,
            16,
            1,
            512,
            512,
            dtype=bf16,
            page_size=64,
            cache_layout="mla",
            causal=False,
            sinks=True,
            selected=Selected(32, counted=True),
        ),
        # FlashMLA's and vLLM's form: slots of the cache
        Problem(
            "flashmla/slots/bf16",
            MTP,
            16,
            1,
            576,
            512,
            dtype=bf16,
            page_size=64,
            cache_layout="mla",
            causal=False,
            selected=Selected(32, slots=True, holes=0.3),
        ),
        Problem(
            "glm_5_3_flash/pooled/f16",
            CHUNK,
            8,
            1,
            512,
            512,
            dtype=f16,
            causal=False,
            softmax_scale=0.05,
            selected=Selected(20),
        ),
        # blocks of 128 keys for each KV head, the token's own among them
        Problem(
            "minimax_m3/prefill/bf16",
            ((40, 500), (130, 0), (1, 290)),
            16,
            2,
            128,
            dtype=bf16,
            page_size=128,
            cache_layout="nhd",
            selected=Selected(3, 128, "kv", own=True),
        ),
        Problem(
            "minimax_m3/decode/bf16",
            ((1, 700), (1, 127), (1, 128), (1, 3)),
            16,
            1,
            128,
            dtype=bf16,
            page_size=128,
            selected=Selected(4, 128, "kv", own=True),
        ),
        Problem(
            "minimax_m3/kv_e4m3/bf16",
            ((2, 700), (1, 127)),
            16,
            2,
            128,
            dtype=bf16,
            kv_dtype=e4m3,
            page_size=128,
            descale="heads",
            selected=Selected(4, 128, "kv", own=True),
        ),
        # units of 4 keys; the last may be cut by Lk or by the causal mask
        Problem(
            "qwen_qsa/mixed/bf16",
            ((1, 130), (9, 61), (22, 0)),
            24,
            2,
            256,
            dtype=bf16,
            page_size=16,
            selected=Selected(10, 4, "kv", own=True),
        ),
        Problem(
            "nsa/selected_blocks/f16",
            CHUNK,
            16,
            1,
            192,
            128,
            dtype=f16,
            selected=Selected(3, 16, "kv", own=True),
        ),
        Problem(
            "moba/prefill/f32",
            ((70, 60), (33, 0)),
            4,
            4,
            64,
            selected=Selected(2, 32, "kv", own=True),
        ),
        Problem(
            "quest/decode/f16",
            DECODE,
            8,
            8,
            64,
            dtype=f16,
            page_size=16,
            selected=Selected(3, 16, "kv"),
        ),
        # edge cases
        Problem(
            "selected/all_units/f32",
            CHUNK,
            4,
            2,
            40,
            24,
            padding_rows=2,
            selected=Selected("all", 4, "kv"),
        ),
        Problem(
            "selected/nothing/f32",
            CHUNK,
            4,
            2,
            32,
            page_size=8,
            sinks=True,
            selected=Selected(5, 2, holes=1.0),
        ),
        Problem("selected/no_entries/f32", CHUNK, 4, 2, 32, page_size=8, selected=Selected(0)),
        Problem(
            "selected/past_lk/f32",
            CHUNK,
            4,
            2,
            32,
            page_size=1,
            selected=Selected(30, 8, "kv", past=True, holes=0.2),
        ),
        Problem(
            "selected/everything/f32",
            CHUNK,
            6,
            3,
            33,
            17,
            page_size=544,
            cache_layout="packed_last",
            padding_rows=3,
            window_size_left=50,
            causal=False,
            window_size_right=2,
            softcap=4.0,
            sinks=True,
            descale="batch",
            q_positions=(31, 2, 90, 0, 5),
            selected=Selected(11, 4, "kv", holes=0.1, counted=True, past=True),
        ),
        Problem(
            "selected/slots_of_units/f32",
            ((8, 88), (2, 6), (0, 16), (8, 0)),  # whole units: no length cuts one
            4,
            2,
            64,
            page_size=16,
            cache_layout="interleaved",
            causal=False,
            selected=Selected(4, 8, "kv", slots=True, holes=0.2),
        ),
        Problem(
            "selected/int8_packed/f32",
            CHUNK,
            4,
            2,
            64,
            kv_dtype=torch.int8,
            descale="scalar",
            out_dtype=bf16,
            fused_qkv=True,
            selected=Selected(13, 1, "kv"),
        ),
        Problem(
            "selected/shared_ranges/bf16",
            ((40, 60), (33, -10), (0, 12), (7, 0), (1, 130)),
            4,
            2,
            64,
            dtype=bf16,
            k_ranges="shared",
            q_positions=(100, 7, 0, -9, 64),
            selected=Selected(9, 8, "kv"),
        ),
        Problem(
            "selected/out_e4m3/bf16",
            CHUNK,
            4,
            2,
            64,
            dtype=bf16,
            out_dtype=e4m3,
            out_scale=True,
            batch_invariant=True,
            selected=Selected(3, 16, "one"),
        ),
        Problem(
            "selected/many_keys/bf16",
            ((2, 1300),),
            4,
            2,
            64,
            dtype=bf16,
            page_size=16,
            selected=Selected(1024),
        ),
    )
}

SHORT = ((5, 0), (37, 0), (0, 9), (1, 33), (10, 14))

# further ones with gradients
_TRAINING = {
    p.name: p
    for p in (
        Problem(
            "selected/training/bf16",
            SHORT,
            8,
            2,
            64,
            dtype=bf16,
            padding_rows=2,
            selected=Selected(4, 8, "kv", holes=0.1, own=True),
        ),
        Problem(
            "selected/training_shared_list/f32",
            SHORT,
            4,
            2,
            32,
            48,
            softcap=3.0,
            sinks=True,
            window_size_left=20,
            selected=Selected(9, 1, counted=True),
        ),
    )
}


def _trains(p: Problem) -> bool:
    floats = {p.kv_dtype, p.out_dtype} <= {None, p.dtype}
    return p.page_size is None and not p.latent and floats and p.cache_layout != "mla"


SELECTED_DIFFERENTIABLE = {p.name: p for p in SELECTED.values() if _trains(p)} | _TRAINING
