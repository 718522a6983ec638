// Attention of decode rows that share prefixes: each group's prefix is read once, for all its rows and heads.
//
// Why a row's bits depend on its own keys alone:
// - keys are cut into blocks of 64 by their place in the row's own sequence, whether they come from prefix or tail;
// - each score is a chain over d, each output element a chain over the keys, both in order and one lane each, so that
//   neither the number of rows in a register tile nor its width changes any sum;
// - keys beyond the end of a row never enter an addition (but for the exact zeros of the softmax's sum).
#include <algorithm>
#include <vector>

#include "vec.h"

namespace ssd {

constexpr int64_t BLOCK = 64;       // keys
constexpr int64_t MAX_STRIP = 6;    // query rows of a register tile
constexpr int64_t WIDTH_UNIT = 16;  // rows of scratch buffers are padded to a multiple of this, for whole vectors
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int PANEL = 4;  // vectors of a register tile: 6 x 4 accumulators of 32 registers
#else
constexpr int PANEL = 2;  // 6 x 2 accumulators of 16 registers
#endif

// As ForkAttentionArguments in fork_attention.py has it. Strides count elements.
struct Arguments {
  const void *q, *k_pool, *v_pool;
  void* out;  // [rows, Hq, Dv], contiguous
  const int32_t *prefix_slots, *prefix_starts, *prefix_lens, *tail_slots, *tail_lens, *row_order, *group_starts;
  int64_t q_row_stride, q_head_stride, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride;
  int64_t num_groups, tail_depth, num_heads, num_kv_heads, key_width, value_width;
  double scaling;
  int64_t dtype, num_threads;
};

inline int64_t padded(int64_t width) { return (width + WIDTH_UNIT - 1) / WIDTH_UNIT * WIDTH_UNIT; }

// --- matrix product in registers ------------------------------------------------------------------------------

// c[ROWS, VECS vectors] (+)= a[ROWS, depth] b[depth, VECS vectors]: one multiply-add per element and step of depth.
template <int ROWS, int VECS>
inline void multiply_panel(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                           int64_t c_stride, int64_t depth, bool accumulate) {
  vec sums[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECS; ++v) sums[r][v] = accumulate ? load(c + r * c_stride + v * LANES) : vec{};
  }
  for (int64_t t = 0; t < depth; ++t, b += b_stride) {
    vec right[VECS];
    for (int v = 0; v < VECS; ++v) right[v] = load(b + v * LANES);
    for (int r = 0; r < ROWS; ++r) {
      const vec left = broadcast(a[r * a_stride + t]);
      for (int v = 0; v < VECS; ++v) sums[r][v] += left * right[v];
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECS; ++v) store(c + r * c_stride + v * LANES, sums[r][v]);
  }
}

template <int ROWS>
void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                   int64_t depth, int64_t columns, bool accumulate) {
  int64_t j = 0;
  for (; j + PANEL * LANES <= columns; j += PANEL * LANES) {
    multiply_panel<ROWS, PANEL>(a, a_stride, b + j, b_stride, c + j, c_stride, depth, accumulate);
  }
  for (; j < columns; j += LANES) {
    multiply_panel<ROWS, 1>(a, a_stride, b + j, b_stride, c + j, c_stride, depth, accumulate);
  }
}

using MultiplyRows = decltype(&multiply_rows<1>);
constexpr MultiplyRows MULTIPLY[MAX_STRIP + 1] = {
    nullptr,          multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
    multiply_rows<4>, multiply_rows<5>, multiply_rows<6>,
};

// --- scratch --------------------------------------------------------------------------------------------------

// Buffers for one (group, kv head). A tile row is one query head of one row; rows stand in the plan's order.
struct Scratch {
  int64_t key_width, value_width; // padded
  float* q = nullptr;             // [tile rows, key_width], times scaling
  float* out = nullptr;           // [tile rows, value_width], not yet divided by `sums`
  float* maxima = nullptr;        // [tile rows], largest score so far
  float* sums = nullptr;          // [tile rows, LANES], of the weights so far, yet to be added up
  float* keys = nullptr;          // [BLOCK, key_width]
  float* keys_t = nullptr;        // [key_width, BLOCK]
  float* values = nullptr;        // [BLOCK, value_width]
  float* weights = nullptr;       // [MAX_STRIP, BLOCK], scores, then softmax weights
};

// The calling thread's buffers, kept between calls: fresh pages would cost more than a small attention.
Scratch make_scratch(int64_t tile_rows, int64_t key_width, int64_t value_width) {
  thread_local std::vector<float> memory;
  Scratch s{padded(key_width), padded(value_width)};
  const int64_t counts = padded(tile_rows);
  const int64_t total = tile_rows * (s.key_width + s.value_width) + (1 + LANES) * counts +
                        BLOCK * (2 * s.key_width + s.value_width) + MAX_STRIP * BLOCK;
  if (static_cast<int64_t>(memory.size()) < total + WIDTH_UNIT) memory.resize(total + WIDTH_UNIT);
  // Vectors that cross cache lines are slow: start at one.
  const uintptr_t line = WIDTH_UNIT * sizeof(float);
  float* next = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + line - 1) / line * line);
  const auto take = [&next](int64_t count) { return next += count, next - count; };
  s.q = take(tile_rows * s.key_width);
  s.out = take(tile_rows * s.value_width);
  s.maxima = take(counts);
  s.sums = take(counts * LANES);
  s.keys = take(BLOCK * s.key_width);
  s.keys_t = take(BLOCK * s.key_width);
  s.values = take(BLOCK * s.value_width);
  s.weights = take(MAX_STRIP * BLOCK);
  std::fill(s.out, s.out + tile_rows * s.value_width, 0.0f);
  std::fill(s.maxima, s.maxima + tile_rows, -std::numeric_limits<float>::infinity());
  std::fill(s.sums, s.sums + tile_rows * LANES, 0.0f);
  return s;
}

// to[0 .. width padded) = from[0 .. width) * factor, with zeros after.
template <typename T>
inline void convert(const T* from, float* to, int64_t width, float factor) {
  for_each_vector(width, [&](int64_t d, auto get, auto) { store(to + d, get(from + d) * factor); });
  const int64_t written = (width + LANES - 1) / LANES * LANES;
  std::fill(to + written, to + padded(width), 0.0f);
}

// Lanes whose number has bit STEP change places between the two vectors. Over all steps this transposes.
template <int STEP>
inline void exchange(vec& low, vec& high) {
  ivec low_from, high_from;  // lanes from LANES on are those of `high`
  for (int i = 0; i < LANES; ++i) {
    low_from[i] = i & STEP ? i - STEP + LANES : i;
    high_from[i] = i & STEP ? i + LANES : i + STEP;
  }
  const vec old_low = low;
  low = __builtin_shuffle(old_low, high, low_from);
  high = __builtin_shuffle(old_low, high, high_from);
}

template <int STEP>
inline void transpose_square(vec (&rows)[LANES]) {
  for (int i = 0; i < LANES; ++i) {
    if (!(i & STEP)) exchange<STEP>(rows[i], rows[i + STEP]);
  }
  if constexpr (STEP > 1) transpose_square<STEP / 2>(rows);
}

// Brings keys [first, last) of the scratch block from keys to keys_t, in whole squares.
void transpose_keys(const Scratch& s, int64_t first, int64_t last) {
  for (int64_t j = first / LANES * LANES; j < last; j += LANES) {
    for (int64_t d = 0; d < s.key_width; d += LANES) {
      vec square[LANES];
      for (int i = 0; i < LANES; ++i) square[i] = load(s.keys + (j + i) * s.key_width + d);
      transpose_square<LANES / 2>(square);
      for (int i = 0; i < LANES; ++i) store(s.keys_t + (d + i) * BLOCK + j, square[i]);
    }
  }
}

// Puts the pool's `slots` in places [first, last) of the scratch block. Other places keep their keys.
template <typename T>
void load_block(const Arguments& args, const Scratch& s, int64_t kv_head, const int32_t* slots, int64_t first,
                int64_t last) {
  const T* k = static_cast<const T*>(args.k_pool) + kv_head * args.k_head_stride;
  const T* v = static_cast<const T*>(args.v_pool) + kv_head * args.v_head_stride;
  for (int64_t j = first; j < last; ++j) {
    const int64_t slot = slots[j - first];
    convert(k + slot * args.k_slot_stride, s.keys + j * s.key_width, args.key_width, 1.0f);
    convert(v + slot * args.v_slot_stride, s.values + j * s.value_width, args.value_width, 1.0f);
  }
  transpose_keys(s, first, last);
}

// --- softmax --------------------------------------------------------------------------------------------------

// One step of the online softmax for tile row `row`: its `num_keys` scores become weights, what was summed under a
// smaller maximum is scaled down. Not inlined: one body of code, hence the same bits for all rows.
__attribute__((noinline)) void soften(const Scratch& s, int64_t row, float* scores, int64_t num_keys) {
  if (const int64_t whole = num_keys / LANES * LANES; whole < num_keys) {
    const ivec place = lane_numbers() + static_cast<int32_t>(whole);
    const vec absent = broadcast(-std::numeric_limits<float>::infinity());
    store(scores + whole, (place < static_cast<int32_t>(num_keys)) ? load(scores + whole) : absent);
  }
  vec top = load(scores);
  for (int64_t j = LANES; j < num_keys; j += LANES) top = larger(load(scores + j), top);
  const float old_max = s.maxima[row];
  const float new_max = std::max(old_max, max_lanes(top));
  vec sums = load(s.sums + row * LANES);
  if (new_max != old_max) {
    const float shrink = exp(broadcast(old_max - new_max))[0];
    float* out = s.out + row * s.value_width;
    for (int64_t d = 0; d < s.value_width; d += LANES) store(out + d, load(out + d) * shrink);
    sums *= shrink;
    s.maxima[row] = new_max;
  }
  for (int64_t j = 0; j < num_keys; j += LANES) {
    const vec weight = exp(load(scores + j) - new_max);
    sums += weight;
    store(scores + j, weight);
  }
  store(s.sums + row * LANES, sums);
}

// Tile rows [first, last) take in the first `num_keys` keys of the scratch block.
void attend_block(const Scratch& s, int64_t first, int64_t last, int64_t num_keys) {
  const int64_t columns = padded(num_keys);
  while (first < last) {
    // Strips of about equal height: one of a single row would wait for its own additions.
    const int64_t num_strips = (last - first + MAX_STRIP - 1) / MAX_STRIP;
    const int64_t rows = (last - first + num_strips - 1) / num_strips;
    MULTIPLY[rows](s.q + first * s.key_width, s.key_width, s.keys_t, BLOCK, s.weights, BLOCK, s.key_width, columns,
                   false);
    for (int64_t r = 0; r < rows; ++r) soften(s, first + r, s.weights + r * BLOCK, num_keys);
    MULTIPLY[rows](s.weights, BLOCK, s.values, s.value_width, s.out + first * s.value_width, s.value_width, num_keys,
                   s.value_width, true);
    first += rows;
  }
}

// --- one group, one kv head -----------------------------------------------------------------------------------

// Rows of the group are numbered by their place in the plan's order: longest part of the prefix first. So those that
// reach a block of the prefix are the first ones, and those that see equally much of it are neighbours.
template <typename T>
struct GroupAttention {
  const Arguments& args;
  const int64_t kv_head, heads;  // heads: query heads of the kv head
  const int32_t* const rows;     // [num_rows], row numbers in q and out
  const int64_t num_rows;
  const int32_t* const prefix;  // slots
  const Scratch s;

  GroupAttention(const Arguments& args, int64_t group, int64_t kv_head)
      : args(args),
        kv_head(kv_head),
        heads(args.num_heads / args.num_kv_heads),
        rows(args.row_order + args.group_starts[group]),
        num_rows(args.group_starts[group + 1] - args.group_starts[group]),
        prefix(args.prefix_slots + args.prefix_starts[group]),
        s(make_scratch(num_rows * heads, args.key_width, args.value_width)) {}

  int64_t prefix_len(int64_t i) const { return args.prefix_lens[rows[i]]; }
  int64_t tail_len(int64_t i) const { return args.tail_lens[rows[i]]; }
  const int32_t* tail(int64_t i) const { return args.tail_slots + rows[i] * args.tail_depth; }

  void run() {
    if (num_rows == 0) return;
    load_queries();
    for (int64_t start = 0; start < prefix_len(0); start += BLOCK) attend_prefix_block(start);
    for (int64_t i = 0; i < num_rows; ++i) attend_tail_blocks(i);
    store_out();
  }

  void load_queries() {
    const T* q = static_cast<const T*>(args.q) + kv_head * heads * args.q_head_stride;
    for (int64_t i = 0; i < num_rows; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        convert(q + rows[i] * args.q_row_stride + h * args.q_head_stride, s.q + (i * heads + h) * s.key_width,
                args.key_width, static_cast<float>(args.scaling));
      }
    }
  }

  // Keys of row i at `start` and after, within one block, that come from the prefix.
  int64_t prefix_keys(int64_t i, int64_t start) const { return std::clamp<int64_t>(prefix_len(i) - start, 0, BLOCK); }

  // Its tail begins in this block of the prefix, so that the row has a block of its own here.
  bool is_mixed(int64_t i, int64_t start) const { return prefix_keys(i, start) < BLOCK && tail_len(i) > 0; }

  void attend_prefix_block(int64_t start) {
    load_block<T>(args, s, kv_head, prefix + start, 0, prefix_keys(0, start));
    int64_t end = 0;
    for (int64_t i = 0; i < num_rows && prefix_keys(i, start) > 0; i = end) {
      end = i + 1;
      if (is_mixed(i, start)) continue;
      const int64_t num_keys = prefix_keys(i, start);
      while (end < num_rows && prefix_keys(end, start) == num_keys && !is_mixed(end, start)) ++end;
      attend_block(s, i * heads, end * heads, num_keys);
    }
    // Now the shared block may be written over. Each row needs its first keys only, and no row before it had fewer.
    for (int64_t i = 0; i < num_rows && prefix_keys(i, start) > 0; ++i) {
      if (is_mixed(i, start)) attend_own_block(i, prefix_keys(i, start), tail(i), tail_len(i));
    }
  }

  // The block of row i alone: `first` keys lie in the scratch block already, the rest are the next slots of its tail.
  void attend_own_block(int64_t i, int64_t first, const int32_t* slots, int64_t num_slots) {
    const int64_t num_keys = std::min(BLOCK, first + num_slots);
    load_block<T>(args, s, kv_head, slots, first, num_keys);
    attend_block(s, i * heads, (i + 1) * heads, num_keys);
  }

  // The blocks that lie wholly in the tail of row i.
  void attend_tail_blocks(int64_t i) {
    const int64_t in_mixed_block = (BLOCK - prefix_len(i) % BLOCK) % BLOCK;
    for (int64_t start = in_mixed_block; start < tail_len(i); start += BLOCK) {
      attend_own_block(i, 0, tail(i) + start, tail_len(i) - start);
    }
  }

  void store_out() {
    T* out = static_cast<T*>(args.out) + kv_head * heads * args.value_width;
    for (int64_t t = 0; t < num_rows * heads; ++t) {
      T* to = out + (rows[t / heads] * args.num_heads + t % heads) * args.value_width;
      const float* from = s.out + t * s.value_width;
      const float sum = sum_lanes(load(s.sums + t * LANES));
      for_each_vector(args.value_width, [&](int64_t d, auto, auto put) { put(to + d, load(from + d) / sum); });
    }
  }
};

template <typename T>
void fork_attention(const Arguments& args) {
  const int64_t num_tasks = args.num_groups * args.num_kv_heads;
  const auto run_task = [&args](int64_t task) {
    GroupAttention<T>(args, task / args.num_kv_heads, task % args.num_kv_heads).run();
  };
  if (args.num_threads == 1 || num_tasks == 1) {  // not even a look at the thread pool
    for (int64_t task = 0; task < num_tasks; ++task) run_task(task);
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(args.num_threads))
  for (int64_t task = 0; task < num_tasks; ++task) run_task(task);
}

}  // namespace ssd

SSD_EXPORT void ssd_fork_attention(const ssd::Arguments* args) {
  if (args->dtype == ssd::BFLOAT16) {
    ssd::fork_attention<ssd::bf16>(*args);
  } else {
    ssd::fork_attention<float>(*args);
  }
}
