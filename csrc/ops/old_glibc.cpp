// libstdc++ asks this variable of glibc 2.32 whether there is but one thread, to count references without
// atomics. An older glibc has none; zero is always right.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
