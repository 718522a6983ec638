// Float vectors of the widest registers the compiler may use, and the arithmetic all kernels share.
//
// Written with the compiler's own vector types, so that one source serves AVX-512, AVX2, SSE2 and NEON. Everything is
// computed in float32; bfloat16 exists in memory only.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define SSD_EXPORT extern "C" __attribute__((visibility("default")))

namespace ssd {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

// Storage of one bfloat16: the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

// Codes of the element types, as library.py has them.
enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

inline vec broadcast(float x) { return x - vec{}; }
inline uvec broadcast(uint32_t x) { return x - uvec{}; }

inline ivec lane_numbers() {
  ivec numbers;
  for (int i = 0; i < LANES; ++i) numbers[i] = i;
  return numbers;
}

// --- memory ---------------------------------------------------------------------------------------------------

inline vec load(const float* from) {
  vec x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline vec load(const bf16* from) {
  halves h;
  std::memcpy(&h, from, sizeof h);
  return (vec)(__builtin_convertvector(h, uvec) << 16);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Nearest bfloat16, ties to even, as float bits; a NaN stays one instead of being carried into infinity.
inline uvec bf16_bits(vec x) {
  const uvec bits = (uvec)x;
  const uvec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (x == x) ? rounded : (bits | 0x400000u);
}

inline void store(float* to, vec x) { std::memcpy(to, &x, sizeof x); }

inline void store(bf16* to, vec x) {
  const halves h = __builtin_convertvector(bf16_bits(x) >> 16, halves);
  std::memcpy(to, &h, sizeof h);
}

// The first `count` lanes only, for the end of a row. The other lanes load as zero.
template <typename T>
inline vec load_some(const T* from, int64_t count) {
  T lanes[LANES] = {};
  std::memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}

template <typename T>
inline void store_some(T* to, vec x, int64_t count) {
  T lanes[LANES];
  store(lanes, x);
  std::memcpy(to, lanes, count * sizeof(T));
}

// Calls body(start, load, store) for each vector of a row: whole ones first, then the rest of the row.
template <typename Body>
inline void for_each_vector(int64_t width, Body body) {
  int64_t start = 0;
  for (; start + LANES <= width; start += LANES) {
    body(
        start, [](const auto* from) { return load(from); }, [](auto* to, vec x) { store(to, x); });
  }
  if (const int64_t rest = width - start; rest > 0) {
    body(
        start, [rest](const auto* from) { return load_some(from, rest); },
        [rest](auto* to, vec x) { store_some(to, x, rest); });
  }
}

// --- arithmetic -----------------------------------------------------------------------------------------------

// What remains of x once it has been written to memory as T and read back.
template <typename T>
inline vec rounded_to(vec x);
template <>
inline vec rounded_to<float>(vec x) {
  return x;
}
template <>
inline vec rounded_to<bf16>(vec x) {
  return (vec)(bf16_bits(x) & 0xffff0000u);
}

// Keeps the compiler from joining the multiplication that made x with a later addition: x is rounded by itself.
inline vec unfused(vec x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// Lanes [0, 2 HALF) joined until one is left, which ends up in lane 0: always the same order.
template <int HALF = LANES / 2, typename V, typename Join>
inline auto join_lanes(V x, Join join) {
  ivec from;
  for (int i = 0; i < LANES; ++i) from[i] = i ^ HALF;
  x = join(x, __builtin_shuffle(x, from));
  if constexpr (HALF > 1) {
    return join_lanes<HALF / 2>(x, join);
  } else {
    return x[0];
  }
}

inline vec larger(vec a, vec b) { return (a > b) ? a : b; }

inline float sum_lanes(vec x) {
  return join_lanes(x, [](vec a, vec b) { return a + b; });
}

inline float max_lanes(vec x) { return join_lanes(x, larger); }

// Whether a comparison holds in some lane.
inline bool any_lane(ivec holds) {
  return join_lanes(holds, [](ivec a, ivec b) { return a | b; }) != 0;
}

// e^x within 2 units of the last place; 0 below -87 (where float32 turns subnormal), undefined above 88, NaN for NaN.
inline vec exp(vec x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits;
  // 127 more and these are the exponent bits of 2^n.
  constexpr float shifter = 12582912.0f + 127.0f;
  const vec shifted = x * 1.44269504088896341f + shifter;
  const vec n = shifted - shifter;
  // ln 2 in two parts: the first has few enough bits for its product with n to be exact.
  const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  // Taylor's series to the seventh power: its remainder is below 1e-8 of the result.
  vec series = broadcast(1.0f / 5040);
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const vec power = (vec)((uvec)shifted << 23);
  return (x < -87.0f) ? vec{} : series * power;
}

}  // namespace ssd
