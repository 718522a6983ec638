// Which builds of the kernels this processor can run. Called in the portable build, which runs everywhere.
#include "vec.h"

// 0: portable, 1: AVX2 with FMA, 2: AVX-512 as well.
SSD_EXPORT int ssd_isa_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has_avx512 ? 2 : 1;
#else
  return 0;
#endif
}
