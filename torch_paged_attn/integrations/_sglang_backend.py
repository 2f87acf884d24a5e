"""An attention backend of SGLang that reads SGLang's KV pool without copying it.

A pool is (slots, num_kv_heads, head_dim), and a request's row of `req_to_token` lists its slots.
With SGLang's page_size 1 these are the pages, so that `req_to_token` is the block table; larger
pages are consecutive slots. The host reads only tensors that SGLang has on the CPU. A step makes
lengths and the table once for all layers; a layer copies nothing and returns the op's result.
SGLang has no hook for a warm-up: call `torch_paged_attn.warmup` before it serves.
"""

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.ops import flash_varlen

FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


class Metadata(NamedTuple):
    """Arguments of `flash_varlen` that all layers of a step share."""

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    block_table: Tensor


class PagedAttnBackend(AttentionBackend):
    """Attention of decoder and encoder-only layers: decode, prefill, chunks after a cached prefix,
    windows, softcap, sinks, float8 pools. CUDA graphs are not supported: run SGLang with
    `--disable-cuda-graph`.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.pool = runner.token_to_kv_pool
        self.page_size = getattr(self.pool, "page_size", 1)
        self.forward_metadata: Metadata | None = None
        # layer -> its sinks, and the same in float32: SGLang's GPT-OSS has bfloat16
        self._sinks: dict[int, tuple[Tensor, int, Tensor]] = {}
        if getattr(self.pool, "swa_layer_nums", 0) > 0:
            _refuse("a pool of its own for sliding windows", "--disable-hybrid-swa-memory")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make lengths and the block table, once per step for all layers."""
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            _refuse("the verification of a tree of drafts", "no speculation")
        lengths = forward_batch.seq_lens
        if mode.is_decode():
            starts = _constants.multiples(1, len(lengths), lengths)
        else:
            ends = forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            starts = torch.nn.functional.pad(ends, (1, 0))
        rows = self.req_to_token_pool.req_to_token
        on_host = getattr(forward_batch, "seq_lens_cpu", None)
        longest = rows.shape[1] if on_host is None else int(on_host.max())
        table = rows[forward_batch.req_pool_indices, : longest : self.page_size]
        if self.page_size > 1:
            table = table // self.page_size
        self.forward_metadata = Metadata(starts, lengths.to(torch.int32), table.to(torch.int32))

    def forward_extend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Prefill, or a chunk of one."""
        return self._attend(*args, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """One token of each request."""
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """q: (num_tokens, num_heads * head_dim); k, v: new keys and values, written to the pool.

        Returns (num_tokens, num_heads * head_dim_v).
        """
        if layer.is_cross_attention:
            _refuse("cross attention", "decoder and encoder-only layers")
        if given := [name for name, x in others.items() if x is not None]:
            _refuse(given[0], "sinks")
        if save_kv_cache and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, None)
            self.pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        keys = self._pages(self.pool.get_key_buffer(layer.layer_id))
        values = self._pages(self.pool.get_value_buffer(layer.layer_id))
        options: dict[str, Any] = {}
        if keys.dtype in FLOAT8:
            options |= {"k_descale": layer.k_scale, "v_descale": layer.v_scale}
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        if causal and layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            options["window_size_left"] = layer.sliding_window_size
        shared = self.forward_metadata
        assert shared is not None
        out, _ = flash_varlen(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            values,
            shared.cu_seqlens_q,
            seqused_k=shared.seqused_k,
            block_table=shared.block_table,
            sinks=None if sinks is None else self._sinks_of(layer.layer_id, sinks),
            softmax_scale=layer.scaling,
            softcap=layer.logit_cap or 0.0,
            causal=causal,
            **options,
        )
        return out.flatten(1)

    def _sinks_of(self, layer: int, sinks: Tensor) -> Tensor:
        """A layer's sinks in float32, cast once."""
        # inference tensors have no version
        version = 0 if sinks.is_inference() else sinks._version
        kept = self._sinks.get(layer)
        if kept is None or kept[0] is not sinks or kept[1] != version:
            kept = self._sinks[layer] = sinks, version, sinks.float()
        return kept[2]

    def _pages(self, pool: Tensor) -> Tensor:
        """The pool as (num_pages, num_kv_heads, page_size, head_dim)."""
        return pool.unflatten(0, (-1, self.page_size)).transpose(1, 2)

    def support_triton(self) -> bool:
        """Whether SGLang has to use Triton kernels of its own to prepare a batch: never."""
        return False


def _refuse(feature: str, instead: str) -> None:
    raise NotImplementedError(
        f"--attention-backend paged_attn does not support {feature} of SGLang: use {instead}"
    )
