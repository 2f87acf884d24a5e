// What a kernel has to ask and tell autograd.
//
// Autograd's dispatch keys fall through for these ops, so that no call takes time there. The kernel
// itself asks whether a result would need a gradient, and tells autograd which tensors it has
// written. The stable ABI has no functions for either; libtorch exports some, which are looked up
// once by name.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace paged_attn {

// Whether a result of this input would need a gradient: it requires one under `grad_mode`, or it
// carries a tangent of forward-mode AD.
bool needs_gradient(AtenTensorHandle, bool grad_mode);

// Whether those functions were found. Otherwise Python looks, before the kernel is called.
bool sees_gradients();

// To be called for a tensor that a kernel writes: by its version, autograd knows whether a tensor
// that it saved for a backward pass has changed since. Inference tensors have no version.
void bump_version(AtenTensorHandle);

}  // namespace paged_attn
