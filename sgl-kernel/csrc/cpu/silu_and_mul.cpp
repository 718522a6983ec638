// Gated activation: out = silu(gate) * up, where x holds gate and up side by side.
#include "vec.h"

namespace ssd {

// x [rows, 2 * width] with row stride x_stride, out [rows, width] contiguous.
template <typename T>
void silu_and_mul(const T* x, T* out, int64_t rows, int64_t width, int64_t x_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = x + row * x_stride;
    for_each_vector(width, [&](int64_t d, auto get, auto put) {
      const vec g = get(gate + d);
      const vec infinity = broadcast(std::numeric_limits<float>::infinity());
      const vec divisor = (g < -88.0f) ? infinity : 1.0f + exp(-g);  // exp is undefined above 88
      // silu is rounded by itself, as an operation of its own would.
      const vec silu = rounded_to<T>(g / divisor);
      put(out + row * width + d, silu * get(gate + width + d));
    });
  }
}

}  // namespace ssd

SSD_EXPORT void ssd_silu_and_mul(const void* x, void* out, int64_t rows, int64_t width, int64_t x_stride,
                                 int64_t dtype) {
  if (dtype == ssd::BFLOAT16) {
    ssd::silu_and_mul(static_cast<const ssd::bf16*>(x), static_cast<ssd::bf16*>(out), rows, width, x_stride);
  } else {
    ssd::silu_and_mul(static_cast<const float*>(x), static_cast<float*>(out), rows, width, x_stride);
  }
}
