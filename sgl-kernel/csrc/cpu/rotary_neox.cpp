// Rotary position embedding, neox style: element d of a head turns together with element d + rotary_dim / 2.
#include "vec.h"

namespace ssd {

// Every product is rounded to the model's dtype before it is added: SGLang computes in operations of that dtype.
template <typename T>
inline vec product(vec a, vec b) {
  return unfused(rounded_to<T>(a * b));
}

// Turns the heads of one row in place. cos_sin: [rotary_dim], cosines then sines.
template <typename T, typename C>
void rotate_heads(T* heads, const C* cos_sin, int64_t num_heads, int64_t head_size, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  for (int64_t h = 0; h < num_heads; ++h) {
    T* first = heads + h * head_size;
    T* second = first + half;
    for_each_vector(half, [&](int64_t d, auto get, auto put) {
      const vec cos = rounded_to<T>(get(cos_sin + d)), sin = rounded_to<T>(get(cos_sin + half + d));
      const vec a = get(first + d), b = get(second + d);
      put(first + d, product<T>(a, cos) - product<T>(b, sin));
      put(second + d, product<T>(b, cos) + product<T>(a, sin));
    });
  }
}

}  // namespace ssd

// x [rows, num_heads * head_size] with row stride x_stride, in place; cache [max position, rotary_dim], contiguous.
SSD_EXPORT void ssd_rotary_neox(const int64_t* positions, void* x, const void* cache, int64_t rows, int64_t num_heads,
                                int64_t head_size, int64_t rotary_dim, int64_t x_stride, int64_t dtype,
                                int64_t cache_dtype) {
  const auto run = [&](auto zero, auto cache_zero) {
    using T = decltype(zero);
    using C = decltype(cache_zero);
    for (int64_t row = 0; row < rows; ++row) {
      const C* cos_sin = static_cast<const C*>(cache) + positions[row] * rotary_dim;
      ssd::rotate_heads(static_cast<T*>(x) + row * x_stride, cos_sin, num_heads, head_size, rotary_dim);
    }
  };
  if (dtype == ssd::FLOAT32) {
    run(float{}, float{});
  } else if (cache_dtype == ssd::FLOAT32) {
    run(ssd::bf16{}, float{});
  } else {
    run(ssd::bf16{}, ssd::bf16{});
  }
}
