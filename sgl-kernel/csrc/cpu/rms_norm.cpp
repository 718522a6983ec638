// Root-mean-square norm, with the residual addition before it.
#include "vec.h"

namespace ssd {

// All [rows, width], contiguous, but weight [width]. residual and residual_out are null together.
template <typename T>
void rms_norm(const T* x, const T* residual, const T* weight, T* out, T* residual_out, int64_t rows, int64_t width,
              float eps) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * width;
    // The norm goes on with the unrounded sum; it is formed twice rather than kept.
    const auto value = [&](int64_t d, auto get) {
      const vec own = get(x + at + d);
      return residual ? own + get(residual + at + d) : own;
    };
    vec squares{};
    for_each_vector(width, [&](int64_t d, auto get, auto) {
      const vec v = value(d, get);
      squares += v * v;
    });
    const float factor = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(width) + eps);
    for_each_vector(width, [&](int64_t d, auto get, auto put) {
      const vec v = value(d, get);
      if (residual) put(residual_out + at + d, v);
      put(out + at + d, v * factor * get(weight + d));
    });
  }
}

}  // namespace ssd

SSD_EXPORT void ssd_rms_norm(const void* x, const void* residual, const void* weight, void* out, void* residual_out,
                             int64_t rows, int64_t width, float eps, int64_t dtype) {
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    ssd::rms_norm(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight),
                  static_cast<T*>(out), static_cast<T*>(residual_out), rows, width, eps);
  };
  if (dtype == ssd::BFLOAT16) {
    run(ssd::bf16{});
  } else {
    run(float{});
  }
}
