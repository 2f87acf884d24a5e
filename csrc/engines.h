// Which kernels serve which calls: the one place that says so.
#pragma once

#include "kernels.h"

namespace paged_attn {

// The engines of an instruction set. What multiplies as pairs of bfloat16 has one for each kind of
// work, and so have gradients of float16; everything else is done by `rest`.
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
  bool ahead_into_second_level = false;  // what decode asks for ahead of its use
};

// Makes one table of a set's engines, which is what the operators call. One set at a time.
const Kernels& combine(const Engines&);

}  // namespace paged_attn
