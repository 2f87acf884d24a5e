// The names of glibc's symbols as they were before 2.28, so that a library that was built with a
// newer glibc loads with that one too. What a wheel needs, `auditwheel show` says.
#pragma once

#include <cstdlib>

#if defined(__GLIBC__)
// moved from libdl to libc in 2.34, under a new version; libtorch brings libdl along
#if defined(__x86_64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
#endif
#endif
