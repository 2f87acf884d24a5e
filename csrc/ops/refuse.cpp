#include "refuse.h"

#include <stdexcept>

namespace paged_attn {

void raise_explained(const std::string& answer, const char* error_op) {
  const size_t colon = answer.find(": ");
  if (colon == std::string::npos) {
    const std::string twin = error_op;
    throw std::runtime_error(twin.substr(0, twin.size() - sizeof("_error") + 1) +
                             ": internal: the CPU guard refused a call that the contract allows;"
                             " please report it");
  }
  const std::string type = answer.substr(0, colon), text = answer.substr(colon + 2);
  if (type == "ValueError") throw std::invalid_argument(text);
  if (type == "IndexError") throw std::out_of_range(text);
  throw std::runtime_error(text);
}

}  // namespace paged_attn
