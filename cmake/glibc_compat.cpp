// What libstdc++.a of newer compilers takes from glibc after 2.28; linked when the plan has a glibc floor.
// All of it is hidden, so that nothing outside of our own files sees it.
#include <sys/random.h>
#include <sys/stat.h>

#include <cstdint>

extern "C" {

// glibc 2.32. False: there may be several threads, and reference counts are always atomic.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// glibc 2.33; an inline function over this one before.
int __fxstat64(int version, int file, struct stat64* result);
__attribute__((visibility("hidden"))) int fstat64(int file, struct stat64* result) noexcept {
  constexpr int kStatVersion = 1;
  return __fxstat64(kStatVersion, file, result);
}

// glibc 2.36; std::random_device.
__attribute__((visibility("hidden"))) uint32_t arc4random() noexcept {
  uint32_t value = 0;
  while (getrandom(&value, sizeof value, 0) != ssize_t(sizeof value)) {
  }
  return value;
}

}  // extern "C"
