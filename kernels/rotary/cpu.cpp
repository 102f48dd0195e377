// Rotary position embedding: the first rotary_dim elements of each head turn by their position's angles.
// One thread works on whole tokens, query and key heads alike; cosines and sines come from a table.
// Method: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
#include <algorithm>

#include "../common/simd.h"
#include "rotary.h"

namespace pelton::cpu {
namespace {

// Pairs (i, i + half): two halves that turn element by element.
template <class T>
void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
  for_each_vector(half, [&](int64_t i, int n, auto full) {
    const Vec c = load_step(cos + i, n, full), s = load_step(sin + i, n, full);
    const Vec first = load_step(x + i, n, full), second = load_step(x + half + i, n, full);
    store_step(x + i, first * c - second * s, n, full);
    store_step(x + half + i, second * c + first * s, n, full);
  });
}

// Elements of a head that are turned together when pairs are interleaved.
constexpr int64_t kChunk = 128;

// The angles of interleaved pairs, spread so that each element has its own factor for itself and
// for its partner: x[2i] * cos - x[2i+1] * sin and x[2i+1] * cos + x[2i] * sin.
struct SpreadAngles {
  float own[kChunk], partner[kChunk];

  SpreadAngles(const float* cos, const float* sin, int64_t pairs) {
    for (int64_t i = 0; i < pairs; ++i) {
      own[2 * i] = own[2 * i + 1] = cos[i];
      partner[2 * i] = -sin[i];
      partner[2 * i + 1] = sin[i];
    }
  }
};

template <class T>
void rotate_pairs(T* x, const SpreadAngles& angles, int64_t count) {
  for_each_vector(count, [&](int64_t i, int n, auto full) {
    const Vec v = load_step(x + i, n, full);
    const Vec c = load_step(angles.own + i, n, full), s = load_step(angles.partner + i, n, full);
    store_step(x + i, v * c + swap_pairs(v) * s, n, full);
  });
}

template <class T, class F>
void for_each_head(const RotaryHeads& heads, int64_t token, F&& f) {
  T* x = static_cast<T*>(heads.data) + token * heads.token_stride;
  for (int64_t head = 0; head < heads.heads; ++head) f(x + head * heads.head_stride);
}

template <class T>
void rotate_tokens(const RotaryArgs& a, int64_t first_token, int64_t last_token) {
  const int64_t half = a.rotary_dim / 2;
  for (int64_t token = first_token; token < last_token; ++token) {
    const float* cos = a.cos_sin_cache + a.positions[token] * a.rotary_dim;
    const float* sin = cos + half;
    if (!a.interleaved) {
      const auto rotate = [&](T* x) { rotate_halves(x, cos, sin, half); };
      for_each_head<T>(a.query, token, rotate);
      for_each_head<T>(a.key, token, rotate);
      continue;
    }
    for (int64_t first = 0; first < a.rotary_dim; first += kChunk) {
      const int64_t count = std::min(kChunk, a.rotary_dim - first);
      const SpreadAngles angles(cos + first / 2, sin + first / 2, count / 2);
      const auto rotate = [&](T* x) { rotate_pairs(x + first, angles, count); };
      for_each_head<T>(a.query, token, rotate);
      for_each_head<T>(a.key, token, rotate);
    }
  }
}

}  // namespace

void rotary_embedding(const RotaryArgs& a, int64_t first_token, int64_t last_token) {
  dispatch(a.dtype, [&](auto t) { rotate_tokens<decltype(t)>(a, first_token, last_token); });
}

}  // namespace pelton::cpu
