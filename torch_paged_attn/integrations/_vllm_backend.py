"""vLLM's attention backend CUSTOM: its classes, which vLLM calls, and the metadata of a step.

vLLM's cache is (num_blocks, num_kv_heads, block_size, 2 * head_dim), keys and then values in the
last dimension, with any strides. Both halves are paged caches for the ops, without a copy, and the
result goes straight into vLLM's output: a layer of a step is one call of `flash_varlen_out`, after
one of `reshape_and_cache`, and nothing else.

With a scale for each token and head, each half ends with a float32 scale, as in vLLM's TRITON_ATTN:
the scales, too, are views.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from torch_paged_attn._serving import SCALE, rows_with_scales
from torch_paged_attn.integrations import _vllm_warmup
from torch_paged_attn.ops import flash_varlen_out, reshape_and_cache

# vLLM's name of an 8-bit cache format -> dtype; vLLM allocates these caches as uint8
FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# the same of caches with a scale for each token and head
BY_TOKEN = {
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
}
# TODO: always there once vLLM 0.32 is the oldest that is supported
HAS_SPECS = hasattr(AttentionBackend, "customize_spec")
# why vLLM's other cache with such scales is refused
NO_INT4 = (
    "torch_paged_attn has no int4_per_token_head, whose numbers have a zero point and are rotated:"
    " use int8_per_token_head or fp8_per_token_head"
)
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class PagedAttentionBackend(AttentionBackend):
    """The backend's properties, which vLLM reads before it chooses a backend."""

    # `do_kv_cache_update` writes the cache
    forward_includes_kv_cache_update = False
    # decoders read key and value from the cache alone, so that a fused op may have written it
    supports_kv_cache_update_bypass = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        *FLOAT8,
        *(BY_TOKEN if HAS_SPECS else ()),
    ]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # has to be a member of vLLM's enum

    @staticmethod
    def get_impl_cls() -> type["PagedAttention"]:
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type["MetadataBuilder"]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]  # the ops support any page_size, but smaller ones are slow

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Room for the scales behind each key and each value."""
        is_by_token = spec.kv_quant_mode.is_per_token_head
        if not is_by_token or spec.state_content_bytes is not None:
            return spec
        row = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
        return dataclasses.replace(spec, state_content_bytes=row + 2 * SCALE)

    @classmethod
    def supports_combination(cls, *args: Any, **options: Any) -> str | None:
        given = (*args, *options.values())
        if any(isinstance(x, str) and x == "int4_per_token_head" for x in given):
            return NO_INT4
        return super().supports_combination(*args, **options)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (*ENCODERS, AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # VLLM_BATCH_INVARIANT=1 is `batch_invariant` of the ops

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False  # only vLLM before 0.32 calls this


@dataclasses.dataclass
class Metadata:
    """The arguments of `flash_varlen` that all layers of a step share."""

    num_actual_tokens: int
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    seqused_k: Tensor
    max_seqlen_k: int
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Makes `Metadata` of vLLM's metadata. Nothing is computed, and the host reads no tensor.

    vLLM makes one for each group of layers when it starts, before it captures graphs: on a GPU,
    kernels are compiled then (`_vllm_warmup.py`).
    """

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    requires_block_table_width = True

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        block_table_width: int | None = None,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.is_cross = isinstance(kv_cache_spec, CrossAttentionSpec)
        _vllm_warmup.warm_up_layers(
            vllm_config, layer_names, kv_cache_spec, block_table_width, self.is_cross, device
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise NotImplementedError(
                "torch_paged_attn: steps that mix causal and non-causal requests are not supported:"
                " use a draft model whose requests are all causal"
            )
        return Metadata(
            common.num_actual_tokens,
            common.query_start_loc,
            common.max_query_len,
            common.seq_lens,
            common.max_seq_len,
            common.block_table_tensor,
            common.slot_mapping,
            common.causal and not self.is_cross,
        )

    def update_block_table(
        self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> Metadata:
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class PagedAttention(AttentionImpl[Metadata]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        # of an 8-bit cache
        self.cache_dtype = (FLOAT8 | BY_TOKEN).get(kv_cache_dtype)
        self.is_by_token = kv_cache_dtype in BY_TOKEN
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.is_encoder = attn_type in ENCODERS
        window = -1 if sliding_window is None else sliding_window - 1
        self.options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "softcap": logits_soft_cap or 0.0,
            "window_size_left": window,
            # an encoder's window looks both ways; before a causal mask it makes no difference
            "window_size_right": window,
        }
        if envs.VLLM_BATCH_INVARIANT:
            self.options["batch_invariant"] = True

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        # the tensors are filled only when the weights are loaded; the op needs float32
        if self.sinks is not None:
            self.options["sinks"] = self.sinks.float()
        if self.alibi_slopes is not None:
            self.options["alibi_slopes"] = self.alibi_slopes.float()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of query (tokens, num_heads, head_dim) to output, which has query's
        dtype, and rows of as many numbers.

        key, value: (tokens, num_kv_heads, head_dim), which are in the cache already, except in
            encoders, which have no cache
        """
        for name, scale in (
            ("output_scale", output_scale),
            ("output_block_scale", output_block_scale),
        ):
            if scale is not None:
                raise NotImplementedError(f"torch_paged_attn: {name} is not supported")
        if attn_metadata is None:  # vLLM measures how much memory a step takes
            return output.zero_()
        given = attn_metadata
        tokens = given.num_actual_tokens
        options = dict(
            self.options,
            cu_seqlens_q=given.cu_seqlens_q,
            max_seqlen_q=given.max_seqlen_q,
            causal=given.causal,
        )
        if self.is_encoder:
            k, v = key[:tokens], value[:tokens]
            options |= {"causal": False, "max_seqlen_k": given.max_seqlen_q}
        else:
            k, v, *scales = self._pages(layer, kv_cache)
            options |= {
                "seqused_k": given.seqused_k,
                "max_seqlen_k": given.max_seqlen_k,
                "block_table": given.block_table,
            }
            if scales:
                options |= {"k_descale": scales[0], "v_descale": scales[1]}
        out = output[:tokens].view(tokens, self.num_heads, self.head_size)
        flash_varlen_out(out, query[:tokens], k, v, **options)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values into the cache."""
        if self.is_encoder:
            return
        k, v, *scales = self._pages(layer, kv_cache)
        reshape_and_cache(key, value, (k, v), slot_mapping, *scales, quantize=self.is_by_token)

    def _pages(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Views of the keys and values, (num_blocks, num_kv_heads, block_size, head_dim), and of
        8-bit ones their scales: the layer's, or with a scale for each token and head views
        (num_blocks, num_kv_heads, block_size).
        """
        if self.cache_dtype is None:
            return kv_cache.split(self.head_size, -1)
        if not self.is_by_token:
            k, v = kv_cache.view(self.cache_dtype).split(self.head_size, -1)
            return k, v, layer._k_scale, layer._v_scale
        return rows_with_scales(kv_cache, self.head_size, self.cache_dtype)
