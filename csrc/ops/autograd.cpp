#include "autograd.h"

#include "old_glibc.h"

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

namespace paged_attn {
namespace {

using torch::stable::Tensor;

// Methods are functions whose first argument is `this`. A handle of the stable ABI points to an
// at::Tensor, which is one pointer to its TensorImpl.
template <class Function>
Function* libtorch(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

#if defined(__APPLE__)
#define MANGLED_UINT64 "y"
#else
#define MANGLED_UINT64 "m"
#endif

struct Autograd {
  // bool c10::TensorImpl::requires_grad() const
  bool (*requires_grad)(const void*) =
      libtorch<bool(const void*)>("_ZNK3c1010TensorImpl13requires_gradEv");
  // const at::Tensor& c10::TensorImpl::_fw_grad(uint64_t level, const at::TensorBase& self) const
  AtenTensorHandle (*tangent)(const void*, uint64_t, AtenTensorHandle) =
      libtorch<AtenTensorHandle(const void*, uint64_t, AtenTensorHandle)>(
          "_ZNK3c1010TensorImpl8_fw_gradE" MANGLED_UINT64 "RKN2at10TensorBaseE");
  // void torch::autograd::impl::bump_version(const at::Tensor&)
  void (*bump_version)(AtenTensorHandle) =
      libtorch<void(AtenTensorHandle)>("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
};

const Autograd& autograd() {
  static const Autograd found;
  return found;
}

bool cpu_sees_gradients() { return sees_gradients(); }

}  // namespace

bool sees_gradients() { return autograd().requires_grad && autograd().tangent; }

bool needs_gradient(AtenTensorHandle handle, bool grad_mode) {
  if (!sees_gradients()) return false;
  const void* impl = *reinterpret_cast<const void* const*>(handle);
  if (grad_mode && autograd().requires_grad(impl)) return true;
  bool is_dual;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(autograd().tangent(impl, 0, handle), &is_dual));
  return is_dual;
}

void bump_version(AtenTensorHandle handle) {
  AtenTensorHandle own;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &own));
  StableIValue stack[] = {torch::stable::detail::from(own)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_inference", "", stack, TORCH_ABI_VERSION));
  if (torch::stable::detail::to<bool>(stack[0])) return;
  if (autograd().bump_version) return autograd().bump_version(handle);
  // an in-place op on an empty part of the tensor raises the version of the whole
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &own));
  Tensor whole(own), nothing = torch::stable::narrow(whole, 0, 0, 0);
  torch::stable::zero_(nothing);
}

}  // namespace paged_attn

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CompositeExplicitAutograd, m) {
  m.impl("cpu_sees_gradients", TORCH_BOX(&paged_attn::cpu_sees_gradients));
}
