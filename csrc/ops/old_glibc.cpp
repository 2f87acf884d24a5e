// libstdc++ reads this variable of glibc 2.32 to know whether there is only one thread, and counts
// references without atomics then. An older glibc lacks it; zero is always right.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
