// The target's draws by shared noise: argmax of score + g over the vocabulary, computing the noise of few tokens.
//
// With h the token's hash, E >= 1 - h / (2^32 - 1), so that g <= -log of that: a token can only beat the best score so far
// if 1 - h / (2^32 - 1) <= exp(score - best). That is a hash, an exponential in float32 and a comparison a token; those few
// that pass are compared in double, in the order of their ids, as in sglang_ssd.algorithm.shared_noise. Blocks whose
// best score is below the bound by more than any noise are not even hashed.
#include "noise.h"

namespace ssd {

constexpr int64_t BLOCK = 64;  // tokens whose maximum is looked at first

// As library.py passes it. Strides count elements; temperatures may be null; results and proposals are contiguous.
struct DrawArguments {
  const void* scores;
  const double* temperatures;
  const int64_t *seeds, *positions;
  const uint8_t* is_greedy;
  const int64_t *proposed, *lengths;
  int64_t *token_ids, *num_accepted, *bonus_tokens;
  int64_t batch_size, width, vocab_size, batch_stride, row_stride, dtype, num_threads;
};

// The best token so far. NaN beats nothing, nor does a tie, so that the lowest id keeps it.
struct Best {
  double score = -std::numeric_limits<double>::infinity();
  int64_t token = 0;

  bool take(double other, int64_t id) {
    if (!(other > score)) return false;
    score = other;
    token = id;
    return true;
  }
};

// The largest of a block's `count` scores; -inf for NaN.
template <typename T>
inline float block_max(const T* scores, int64_t count) {
  vec top = broadcast(-std::numeric_limits<float>::infinity());
  const int64_t whole = count / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) top = larger(load(scores + i), top);
  float most = max_lanes(top);
  for (int64_t i = whole; i < count; ++i) {
    if (const float score = to_float(scores[i]); score > most) most = score;
  }
  return most;
}

template <typename T>
int64_t draw_greedy(const T* scores, int64_t vocab_size) {
  Best best;
  for (int64_t start = 0; start < vocab_size; start += BLOCK) {
    const int64_t count = std::min(BLOCK, vocab_size - start);
    if (!(block_max(scores + start, count) > best.score)) continue;
    for (int64_t i = 0; i < count; ++i) best.take(to_float(scores[start + i]), start + i);
  }
  return best.token;
}

// What a rough score must reach, with any noise: below the best by more than float32 rounds anywhere on the way.
inline float rough_bound(double best) {
  if (best > std::numeric_limits<double>::max()) return std::numeric_limits<float>::infinity();
  const double bound = best - 1e-4 - 1e-6 * std::abs(best);
  return static_cast<float>(std::max<double>(bound, -std::numeric_limits<float>::max()));
}

template <typename T>
int64_t draw_with_noise(const T* scores, int64_t vocab_size, double temperature, uint32_t state) {
  const float scale = static_cast<float>(1.0 / temperature);
  Best best;
  float bound = -std::numeric_limits<float>::max();
  const auto contend = [&](int64_t id) {
    if (best.take(to_float(scores[id]) / temperature + gumbel(state, id), id)) bound = rough_bound(best.score);
  };
  for (int64_t start = 0; start < vocab_size; start += BLOCK) {
    const int64_t count = std::min(BLOCK, vocab_size - start);
    if (!(block_max(scores + start, count) * scale + MOST_NOISE >= bound)) continue;
    const int64_t num_vectors = count / LANES;
    ivec contends[BLOCK / LANES], any{};
    for (int64_t v = 0; v < num_vectors; ++v) {
      const int64_t first = start + v * LANES;
      const vec distance = load(scores + first) * scale - bound;
      const vec reach = exp((distance > 0.0f) ? vec{} : distance);  // NaN stays NaN, which is above nothing
      const uvec hashed = hash_of(broadcast(state), (uvec)(lane_numbers() + static_cast<int32_t>(first)));
      const vec quietness = __builtin_convertvector((ivec)(~hashed >> 1), vec) * 0x1p-31f;
      contends[v] = quietness <= reach;
      any |= contends[v];
    }
    if (any_lane(any)) {
      for (int64_t i = 0; i < num_vectors * LANES; ++i) {
        if (contends[i / LANES][i % LANES]) contend(start + i);
      }
    }
    for (int64_t i = num_vectors * LANES; i < count; ++i) contend(start + i);
  }
  return best.token;
}

template <typename T>
int64_t draw(const DrawArguments& args, int64_t request, int64_t offset) {
  const T* scores = static_cast<const T*>(args.scores) + request * args.batch_stride + offset * args.row_stride;
  if (args.is_greedy[request]) return draw_greedy(scores, args.vocab_size);
  const double temperature = args.temperatures ? args.temperatures[request] : 1.0;
  const uint32_t state = row_state(args.seeds[request], args.positions[request] + offset);
  return draw_with_noise(scores, args.vocab_size, temperature, state);
}

template <typename T>
void draw_all(const DrawArguments& args) {
  const int64_t num_rows = args.batch_size * args.width;
  if (args.num_threads == 1 || num_rows == 1) {
    for (int64_t row = 0; row < num_rows; ++row) {
      args.token_ids[row] = draw<T>(args, row / args.width, row % args.width);
    }
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(args.num_threads))
  for (int64_t row = 0; row < num_rows; ++row) {
    args.token_ids[row] = draw<T>(args, row / args.width, row % args.width);
  }
}

// How far each proposal agrees with the draws.
void agree(const DrawArguments& args) {
  const int64_t lookahead = args.width - 1;
  for (int64_t request = 0; request < args.batch_size; ++request) {
    const int64_t* drawn = args.token_ids + request * args.width;
    const int64_t* proposed = args.proposed + request * lookahead;
    const int64_t length = std::min(args.lengths[request], lookahead);
    int64_t accepted = 0;
    while (accepted < length && proposed[accepted] == drawn[accepted]) ++accepted;
    args.num_accepted[request] = accepted;
    args.bonus_tokens[request] = drawn[accepted];
  }
}

}  // namespace ssd

SSD_EXPORT void ssd_target_draw(const ssd::DrawArguments* args) {
  if (args->dtype == ssd::BFLOAT16) {
    ssd::draw_all<ssd::bf16>(*args);
  } else {
    ssd::draw_all<float>(*args);
  }
  ssd::agree(*args);
}
