// The names of ISAs, for messages. Not in kernels.h, which the ISA files include: these must not
// include the STL.
#pragma once

#include <string>

namespace paged_attn {

// The ISAs this processor and this build have, from the slowest to the fastest.
std::string available_names();

// The other ISAs of this architecture, a line for each: "name: why it cannot run here".
std::string missing_names();

}  // namespace paged_attn
