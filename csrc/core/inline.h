// Inlining that holds in every build: a per-ISA object must not leave an out-of-line copy of shared
// code behind, or the linker could hand AVX-512 code to a machine that lacks it.
#pragma once

#define PAGED_ATTN_INLINE __attribute__((always_inline)) inline
// For what few calls ask for: inlined, it would take the registers of the loops around it.
#define PAGED_ATTN_APART __attribute__((noinline)) inline
