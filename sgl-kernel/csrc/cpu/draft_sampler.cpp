// The draft's token, fork candidates and law from its logits, which are read once.
//
// One pass keeps the top M: a token enters when it exceeds the M-th best so far, which few do, so that most of the
// vocabulary costs one comparison of its block's maximum. Noise, law and draw then look at M tokens. NaN counts as -inf,
// ties go to the lowest id; what decides is computed in double, as in sglang_ssd.algorithm.
#include <functional>
#include <vector>

#include "noise.h"

namespace ssd {

constexpr int64_t BLOCK = 64;         // tokens whose maximum is compared at once
constexpr uint32_t DRAFT_STREAM = 0;  // of uniforms, as shared_noise.Stream.DRAFT

// As library.py passes it. Results are [rows, ..], contiguous; fan_out, c and q are null under shared noise.
struct DraftArguments {
  const void* logits;
  const double* temperatures;
  const int64_t *seeds, *positions;
  const uint8_t* is_greedy;
  const int64_t* fan_out;
  const double* c;
  int64_t *token_ids, *ranked_ids;
  double* scores;
  int64_t* top_ids;
  float *top_logits, *q;
  int64_t rows, row_stride, vocab_size, num_ranked, top_m, dtype, num_threads;
};

// --- the top M ------------------------------------------------------------------------------------------------

// Ordered by logit, then by falling id: the logit's bits, made to rise with it, above the id's complement.
inline uint64_t key_of(float logit, int64_t id) {
  const float clean = (logit == logit) ? logit + 0.0f : -std::numeric_limits<float>::infinity();  // -0 is 0
  uint32_t bits;
  std::memcpy(&bits, &clean, sizeof bits);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | ~static_cast<uint32_t>(id);
}

inline int64_t id_of(uint64_t key) { return ~static_cast<uint32_t>(key); }

inline float logit_of(uint64_t key) {
  uint32_t bits = static_cast<uint32_t>(key >> 32);
  bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
  float logit;
  std::memcpy(&logit, &bits, sizeof logit);
  return logit;
}

// Leaves the keys of the top_m largest logits, largest first.
template <typename T>
void select_top(const T* logits, int64_t vocab_size, size_t top_m, std::vector<uint64_t>& keys) {
  float bound;  // the M-th best logit when last looked at
  const auto prune = [&] {
    std::nth_element(keys.begin(), keys.begin() + (top_m - 1), keys.end(), std::greater<uint64_t>());
    keys.resize(top_m);
    bound = logit_of(keys.back());
  };
  // Ids rise, so that a later token with the bound's own logit loses to the M tokens that are kept.
  const auto take = [&](int64_t first, int64_t last) {
    for (int64_t id = first; id < last; ++id) {
      const float logit = to_float(logits[id]);
      if (!(logit > bound)) continue;
      keys.push_back(key_of(logit, id));
      if (keys.size() >= 2 * top_m + BLOCK) prune();
    }
  };
  keys.clear();
  int64_t start = static_cast<int64_t>(top_m);
  for (int64_t id = 0; id < start; ++id) keys.push_back(key_of(to_float(logits[id]), id));
  prune();
  const int64_t first_block = std::min(vocab_size, (start + BLOCK - 1) / BLOCK * BLOCK);
  take(start, first_block);
  for (start = first_block; start + BLOCK <= vocab_size; start += BLOCK) {
    vec top = broadcast(bound);
    for (int64_t i = 0; i < BLOCK; i += LANES) top = larger(load(logits + start + i), top);
    if (max_lanes(top) > bound) take(start, start + BLOCK);
  }
  take(start, vocab_size);
  prune();
  std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
}

// --- laws -----------------------------------------------------------------------------------------------------

struct Scored {
  double score;
  int64_t id;
};

inline bool is_better(const Scored& a, const Scored& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// q of the paper's sigma_{F,C}: C times the softmax in the first F places, normalised; unscaled if nothing is left else.
void saguaro_law(const std::vector<Scored>& top, int64_t fan_out, double c, float* q) {
  constexpr double limit = std::numeric_limits<float>::max();
  const int64_t size = static_cast<int64_t>(top.size());
  const int64_t num_cached = std::clamp<int64_t>(fan_out, 0, size);
  const auto finite = [limit](double score) { return std::clamp(score, -limit, limit); };
  thread_local std::vector<double> weights;
  weights.resize(size);
  double sum = 0.0, rest = 0.0, scaled_sum = 0.0;
  for (int64_t i = 0; i < size; ++i) {
    weights[i] = std::exp(finite(top[i].score) - finite(top[0].score));
    sum += weights[i];
  }
  for (double& weight : weights) weight /= sum;
  for (int64_t i = num_cached; i < size; ++i) rest += weights[i];
  for (int64_t i = 0; i < size; ++i) {
    if (i < num_cached && rest > 0) weights[i] *= c;
    scaled_sum += weights[i];
  }
  for (int64_t i = 0; i < size; ++i) q[i] = static_cast<float>(weights[i] / scaled_sum);
}

// The place at which the running sum of q first exceeds u times its total.
int64_t inverse_cdf(const float* q, int64_t size, double u) {
  double total = 0.0, running = 0.0;
  for (int64_t i = 0; i < size; ++i) total += q[i];
  for (int64_t i = 0; i < size; ++i) {
    running += q[i];
    if (running > u * total) return i;
  }
  return 0;  // no weight at all
}

template <typename T>
void sample_row(const DraftArguments& args, int64_t row) {
  const int64_t top_m = args.top_m;
  thread_local std::vector<uint64_t> keys;
  thread_local std::vector<Scored> top;
  select_top(static_cast<const T*>(args.logits) + row * args.row_stride, args.vocab_size, top_m, keys);
  const bool is_greedy = args.is_greedy[row];
  const uint32_t state = row_state(args.seeds[row], args.positions[row]);
  const bool has_noise = !args.q && !is_greedy;
  top.resize(top_m);
  for (int64_t i = 0; i < top_m; ++i) {
    const float logit = logit_of(keys[i]);
    const int64_t id = id_of(keys[i]);
    args.top_ids[row * top_m + i] = id;
    args.top_logits[row * top_m + i] = logit;
    double score = is_greedy ? logit : logit / args.temperatures[row];
    if (has_noise) score += gumbel(state, id);
    // NaN (of a temperature that is none) would break the sort.
    top[i] = {score == score ? score : -std::numeric_limits<double>::infinity(), id};
  }
  if (has_noise) std::partial_sort(top.begin(), top.begin() + args.num_ranked, top.end(), is_better);
  for (int64_t i = 0; i < args.num_ranked; ++i) {
    args.ranked_ids[row * args.num_ranked + i] = top[i].id;
    args.scores[row * args.num_ranked + i] = top[i].score;
  }
  int64_t drawn = 0;
  if (args.q) {
    float* q = args.q + row * top_m;
    if (is_greedy) {
      std::fill(q, q + top_m, 0.0f);
      q[0] = 1.0f;
    } else {
      saguaro_law(top, args.fan_out[row], args.c[row], q);
      drawn = inverse_cdf(q, top_m, uniform(state, DRAFT_STREAM));
    }
  }
  args.token_ids[row] = top[drawn].id;
}

template <typename T>
void sample_rows(const DraftArguments& args) {
  if (args.num_threads == 1 || args.rows == 1) {
    for (int64_t row = 0; row < args.rows; ++row) sample_row<T>(args, row);
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(args.num_threads))
  for (int64_t row = 0; row < args.rows; ++row) sample_row<T>(args, row);
}

}  // namespace ssd

SSD_EXPORT void ssd_draft_sampler(const ssd::DraftArguments* args) {
  if (args->dtype == ssd::BFLOAT16) {
    ssd::sample_rows<ssd::bf16>(*args);
  } else {
    ssd::sample_rows<float>(*args);
  }
}
