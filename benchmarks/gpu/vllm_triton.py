"""vLLM's Triton kernels as peers: its attention over caches with a scale for each token and head
(TRITON_ATTN), MiniMax M3's attention to selected blocks and Qwen's QSA.

`load` imports vLLM 0.32's own files from a folder, such as an unpacked wheel, without the rest of
vLLM: what they import of it is made here. Only FILES have to be there.
"""

import enum
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

OPS = "vllm.v1.attention.ops"
FILES = {
    "unified": f"{OPS}.triton_unified_attention",
    "write": f"{OPS}.triton_reshape_and_cache_flash",
    "int4": f"{OPS}.int4_per_token_head",
    "m3": "vllm.models.minimax_m3.common.ops.sparse_attn",
    "qsa": "vllm.models.qwen4_exp.nvidia.ops.qsa",
}  # and triton_attention_helpers, which the first imports
E4M3 = torch.float8_e4m3fn


class KVQuantMode(enum.IntEnum):
    """vLLM's numbers of the formats."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


class Platform:
    """What the files ask of vLLM's platform."""

    @staticmethod
    def get_device_capability() -> tuple[int, int]:
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)

    def has_device_capability(self, least: int) -> bool:
        major, minor = self.get_device_capability()
        return 10 * major + minor >= least

    def is_device_capability_family(self, family: int) -> bool:
        return 10 * self.get_device_capability()[0] == family

    def is_arch_support_pdl(self) -> bool:
        return torch.cuda.is_available() and self.get_device_capability()[0] >= 9

    def is_cuda(self) -> bool:
        return True

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_fp8_fnuz = is_rocm

    def fp8_dtype(self) -> torch.dtype:
        return E4M3


def module(name: str, **contents: Any) -> None:
    """Stand in for a module of vLLM."""
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(contents)


def load(folder: Path) -> SimpleNamespace:
    """The modules of FILES; `folder` is the one that vllm/ is in."""
    for name in {".".join(path.split(".")[:n]) for path in FILES.values() for n in range(1, 6)}:
        if (place := folder.joinpath(*name.split("."))).is_dir():
            module(name, __path__=[str(place)])
    quantized = "fp8", "int8_per_token_head", "int4_per_token_head"
    module("vllm.envs", VLLM_BATCH_INVARIANT=False)
    module("vllm.logger", init_logger=lambda name: None)
    module("vllm.platforms", current_platform=Platform())
    module("vllm.triton_utils", tl=triton.language, triton=triton, HAS_TRITON=True)
    module("vllm.utils.math_utils", largest_power_of_2_divisor=lambda n: n & -n)
    module("vllm.utils.torch_utils", is_quantized_kv_cache=lambda name: name.startswith(quantized))
    module("vllm.v1.kv_cache_interface", KVQuantMode=KVQuantMode)
    module(
        "vllm.model_executor.layers.quantization.utils.quant_utils",
        FP8_DTYPE=E4M3,
        get_fp8_min_max=lambda: (torch.finfo(E4M3).min, torch.finfo(E4M3).max),
    )
    module(
        "vllm.model_executor.warmup.jit_warmup_triton_helper",
        TritonWarmupTensor=None,
        triton_scalar_specialization_rep=None,
    )
    return SimpleNamespace(**{key: importlib.import_module(name) for key, name in FILES.items()})


class TokenHeadCache:
    """Keys and values with scales, written and read by TRITON_ATTN's kernels in vLLM's layout: the
    scale of a token and head behind its numbers, values behind keys. int4 is rotated and has a zero
    point in the scale's low bits.
    """

    def __init__(
        self, vllm: Any, dtype: torch.dtype, num_pages: int, page_size: int, k: Tensor
    ) -> None:
        """For keys and values as `k` `(tokens, heads, dim)`; uint8 is int4."""
        self.vllm, self.dim = vllm, k.shape[2]
        self.mode = {
            torch.int8: KVQuantMode.INT8_PER_TOKEN_HEAD,
            E4M3: KVQuantMode.FP8_PER_TOKEN_HEAD,
            torch.uint8: KVQuantMode.INT4_PER_TOKEN_HEAD,
        }[dtype]
        width = self.dim // 2 if dtype == torch.uint8 else self.dim
        pages = (num_pages, k.shape[1], page_size, 2, width + 4)
        memory = torch.zeros(pages, dtype=torch.uint8, device=k.device).transpose(1, 2)
        self.kv = [half[..., :width].view(dtype) for half in memory.unbind(3)]
        self.scales = [half[..., width:].view(torch.float32)[..., 0] for half in memory.unbind(3)]

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self.vllm.write.triton_reshape_and_cache_flash_per_token_head_quant(
            k, v, *self.kv, *self.scales, slots, self.mode
        )

    def attend(self, q: Tensor, cu: Tensor, used: Tensor, table: Tensor, most: int) -> Tensor:
        """As its backend calls it for more than 16 sequences, or with prefill in the batch."""
        out = torch.empty_like(q)
        self.vllm.unified.unified_attention(
            q, *self.kv, out, cu, most, used, table.shape[1] * self.kv[0].shape[1],
            q.shape[2] ** -0.5, True, (-1, -1), table, 0, None, None, None,
            kv_quant_mode=self.mode, k_scale_cache=self.scales[0], v_scale_cache=self.scales[1],
        )  # fmt: skip
        return out

    def numbers(self, table: Tensor, b: int, keys: int) -> list[Tensor]:
        """Keys and values (heads, keys, dim) of a sequence, in float64."""
        pages = table[b, : -(-keys // self.kv[0].shape[1])].long()
        found = []
        for x, scale in zip(self.kv, self.scales, strict=True):
            rows, scale = x[pages].permute(2, 0, 1, 3), scale[pages].permute(2, 0, 1)[..., None]
            if self.mode == KVQuantMode.INT4_PER_TOKEN_HEAD:
                rows = self.turned_back(rows, scale.contiguous().view(torch.int32))
            else:
                rows = rows.double() * scale.double()
            found.append(rows.flatten(1, 2)[:, :keys])
        return found

    def turned_back(self, rows: Tensor, bits: Tensor) -> Tensor:
        """int4 numbers before their rotation; `bits` are the scale and, in the last four, the zero
        point.
        """
        int4, dim = self.vllm.int4, self.dim
        rows = torch.stack([rows & 15, rows >> 4], -1).flatten(-2).double() - (bits & 15)
        rows = rows * (bits & -16).view(torch.float32).double()
        matrix = int4._get_hadamard_matrix(dim, torch.float64, rows.device)
        return rows @ matrix * int4._get_rht_signs(dim, 0, rows.device) / dim


def minimax_m3(
    vllm: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    cu: Tensor,
    used: Tensor,
    table: Tensor,
    tokens_each: int,
) -> Callable[[], Tensor]:
    """Attention to selected pages of 128 keys under the causal mask: `lists` (tokens, KV heads, K).

    Prefill is one sequence, decode some with up to 8 tokens each, as vLLM divides them.
    """
    cache = torch.cat([k, v], -1)
    topk = lists.transpose(0, 1).contiguous()
    heads, scale, out = k.shape[1], q.shape[2] ** -0.5, torch.empty_like(q)

    def decode() -> Tensor:
        vllm.m3.minimax_m3_sparse_attn_decode(
            q, cache, topk, table, used, heads, scale, out, tokens_each
        )
        return out

    def prefill() -> Tensor:
        vllm.m3.minimax_m3_sparse_attn(
            q, cache, topk, table, cu, used, before, tokens_each, heads, scale, out
        )
        return out

    before = used - tokens_each
    return decode if tokens_each <= 8 else prefill


def qsa(
    vllm: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    table: Tensor,
    positions: Tensor,
    size: int,
    tokens_each: int,
) -> Callable[[], Tensor]:
    """Attention to selected units of `size` keys: `lists` (tokens, 1, K), for all heads. The lists
    are expanded to tokens beforehand; the output's gate, which the kernel has always, is open.
    """
    keys = lists[:, 0, :, None] * size + torch.arange(size, dtype=torch.int32, device=q.device)
    keys = keys.flatten(1)
    later = keys > positions[:, None]
    keys = keys.where(~later, -1).gather(1, later.int().argsort(stable=True, dim=1))
    packed = torch.cat([keys, (~later).sum(1, dtype=torch.int32)[:, None]], 1)
    sequence = torch.arange(len(q), dtype=torch.int32, device=q.device) // tokens_each
    gate, pages = torch.full_like(q, 40.0), (k.transpose(1, 2), v.transpose(1, 2))

    def run() -> Tensor:
        return vllm.qsa.qsa_sparse_paged_attention(
            q, *pages, packed, table, sequence, tokens_each > 8, output_gate=gate
        )

    return run
