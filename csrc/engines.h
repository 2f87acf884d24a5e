// Which kernels serve which calls: the kinds of calls, and a table of kernels that chooses by them.
// Which kernels an instruction set has for each kind, dispatch.cpp says.
#pragma once

#include "kernels.h"

namespace paged_attn {

// The engines of an instruction set: a table of kernels for each kind of work with pairs of
// bfloat16 (`multiply_as_pairs`) and for gradients of float16. `rest` does everything else.
struct Engines {
  const char* name;
  const Kernels* one_row;      // one or two query rows of bfloat16 keys: decode without groups
  const Kernels* few_rows;     // the rest of decode with bfloat16 keys
  const Kernels* int8_rows;    // decode with int8 keys
  const Kernels* float8_rows;  // decode with float8 keys
  const Kernels* tiles;        // prefill
  const Kernels* backward;
  const Kernels* half_backward;  // of float16, which is no pair of bfloat16
  const Kernels* rest;
  bool ahead_into_second_level = false;  // decode prefetches into the second-level cache
};

// A table of kernels, which the operators call, that chooses among a set's engines. There is one at
// a time: a later call replaces it.
const Kernels& combine(const Engines&);

}  // namespace paged_attn
