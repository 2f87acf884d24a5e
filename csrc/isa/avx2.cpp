#include "../kernels.inl"

PAGED_ATTN_KERNELS(avx2);
