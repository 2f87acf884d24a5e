// What torch's headers take from libstdc++ that GCC 8's, the system's on the oldest Linux that
// torch supports, does not have: members of string streams that were added in GCC 9 and 11. The
// linker would not say so: torch's libc10 happens to export them, too, without a version.

#include <sstream>

template class std::basic_stringbuf<char>;
template class std::basic_stringstream<char>;
template class std::basic_ostringstream<char>;
