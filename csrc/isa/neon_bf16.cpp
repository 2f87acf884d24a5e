#define PAGED_ATTN_NEON
#include "../kernels.inl"

PAGED_ATTN_KERNELS(neon_bf16);
