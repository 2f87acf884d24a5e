#include "../kernels.inl"

PAGED_ATTN_KERNELS(avx512bf16);
