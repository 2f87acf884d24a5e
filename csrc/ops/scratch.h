// Memory and threads for the kernels.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

namespace paged_attn {

// An aligned buffer that a thread keeps between calls, unless it has become large.
class Scratch {
 public:
  static constexpr int64_t KEPT_BYTES = 32 << 20;

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // nullptr when memory is exhausted
  float* floats(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      const size_t bytes = (size_t(count) * sizeof(float) + 63) / 64 * 64;
      data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      capacity_ = data_ ? count : 0;
    }
    return data_;
  }

  // Frees a buffer that has become large. To be called when it is not in use.
  void trim() {
    if (capacity_ * int64_t(sizeof(float)) <= KEPT_BYTES) return;
    std::free(data_);
    data_ = nullptr;
    capacity_ = 0;
  }

 private:
  float* data_ = nullptr;
  int64_t capacity_ = 0;
};

// The same of a vector.
template <class T>
void trim(std::vector<T>& items) {
  if (int64_t(items.capacity() * sizeof(T)) > Scratch::KEPT_BYTES) std::vector<T>().swap(items);
}

// Runs task(0) ... task(count - 1); each thread takes the next one that is left. `task` returns
// false if there was no memory for it.
template <class Function>
void run_tasks(int64_t count, int64_t threads, const Function& task) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count && !failed; i = next++)
      if (!task(i)) failed = true;
  };
  if (threads == 1 || count <= 1)
    work(0, 1);
  else
    torch::stable::parallel_for(0, threads < count ? threads : count, 1, work);
  if (failed) throw std::bad_alloc();
}

}  // namespace paged_attn
