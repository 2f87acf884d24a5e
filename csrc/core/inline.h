// Functions that are inlined in every build. An ISA's object must not have out-of-line copies of
// shared code: the linker keeps one of several copies, which may be AVX-512 code on a machine that
// lacks it.
#pragma once

#define PAGED_ATTN_INLINE __attribute__((always_inline)) inline
// For code that few calls need: inlined, it would take registers from the loops around it.
#define PAGED_ATTN_APART __attribute__((noinline)) inline
