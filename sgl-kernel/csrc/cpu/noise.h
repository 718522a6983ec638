// The noise that target and draft share: SGLang's hash of (seed, position, token id), and Gumbel noise and uniforms of it.
//
// MurmurHash3_x86_32 (Austin Appleby, public domain) of four blocks: the low and high half of the seed, the position,
// the token id. Written once for scalars (uint32_t) and vectors (uvec).
#pragma once

#include <algorithm>

#include "vec.h"

namespace ssd {

constexpr double LARGEST_HASH = 4294967295.0;
constexpr double LEAST_EXPONENTIAL = 1.0 / 4294967296.0;
// The largest noise there is, rounded up.
constexpr float MOST_NOISE = 22.2f;

template <typename U>
inline U rotate_left(U bits, int count) {
  return (bits << count) | (bits >> (32 - count));
}

template <typename U>
inline U absorb(U state, U block) {
  block = rotate_left(block * 0xCC9E2D51u, 15) * 0x1B873593u;
  return rotate_left(state ^ block, 13) * 5u + 0xE6546B64u;
}

// State of the hash before it reads a token id.
inline uint32_t row_state(int64_t seed, int64_t position) {
  uint32_t state = absorb(0u, static_cast<uint32_t>(seed));
  state = absorb(state, static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32));
  return absorb(state, static_cast<uint32_t>(position));
}

template <typename U>
inline U hash_of(U state, U token_id) {
  U bits = absorb(state, token_id) ^ 16u;
  bits = (bits ^ (bits >> 16)) * 0x85EBCA6Bu;
  bits = (bits ^ (bits >> 13)) * 0xC2B2AE35u;
  return bits ^ (bits >> 16);
}

// g = -log(E) with E = -log(h / (2^32 - 1)), clamped: always finite.
inline double gumbel(uint32_t state, int64_t token_id) {
  const double exponential = -std::log(hash_of(state, static_cast<uint32_t>(token_id)) / LARGEST_HASH);
  return -std::log(std::clamp(exponential, LEAST_EXPONENTIAL, std::numeric_limits<double>::max()));
}

// In [0, 1): the hash of an id that no vocabulary reaches, one for each stream.
inline double uniform(uint32_t state, uint32_t stream) {
  return hash_of(state, ~stream) / 4294967296.0;
}

}  // namespace ssd
