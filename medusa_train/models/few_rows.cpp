// Attention of few rows over many keys in bfloat16, on CPUs with AVX512-BF16; knows no draft and no tree.
//
// All query heads that share a key/value head stand as the rows of one query. Rows lie in the lanes of vectors, so that
// a key or a value is read once for all of them, where it lies in the cache, and a row's maximum, sum and rescaling are
// single instructions. Keys are looked at in blocks, and a block that a mask hides from all rows is not read.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>

namespace {

constexpr int64_t KEYS = 64;       // of a block: what becomes of them stays in the nearest cache
constexpr int64_t LANES = 16;      // floats of a vector
constexpr int64_t MOST_ROWS = 64;  // looked at together
constexpr int64_t MOST_SIZE = 256; // of a head
constexpr float LOG2_E = 1.44269504088896340736f;

using bf16 = uint16_t; // its bits

// What one unit of work looks at: the query heads of one key/value head. Strides are in elements.
struct Attention {
  const bf16 *query, *key, *value, *mask; // mask: null where every row sees every key
  bf16* out;
  int64_t heads, rows, size, keys;
  int64_t query_head, query_row, key_row, value_row, mask_row, out_head, out_row;
  float scale; // of the scores, to the base of 2

  const bf16* query_at(int64_t row) const { return query + row / rows * query_head + row % rows * query_row; }
  const bf16* mask_at(int64_t row) const { return mask + row % rows * mask_row; }
  bf16* out_at(int64_t row) const { return out + row / rows * out_head + row % rows * out_row; }
};

// The state of V vectors of rows, from block to block.
template <int V>
struct alignas(64) Block {
  static constexpr int64_t ROWS = V * LANES;
  static constexpr int AT_ONCE = V > 2 ? 4 : V == 2 ? 8 : 16; // keys or components, so that sums fill the registers

  bf16 query[MOST_SIZE * ROWS]; // [d / 2, rows, 2]
  float scores[KEYS * ROWS];    // [keys, rows]
  bf16 weights[KEYS * ROWS];    // [keys / 2, rows, 2]
  bf16 values[KEYS * MOST_SIZE]; // [keys / 2, d, 2]
  float masks[ROWS * KEYS];     // [rows, keys]
  float sums[MOST_SIZE * ROWS]; // [d, rows]
  float most[ROWS], total[ROWS], kept[ROWS];
};

enum class Seen { all, some, none };

inline __m512bh both(const bf16* pair) { // two neighbours, in all lanes
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return (__m512bh)_mm512_set1_epi32(bits);
}

inline __m512 exp2_of(__m512 x) { // 3e-6 of the value; 0 for anything below 2^-149; NaN stays
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
  const __m512 whole = _mm512_roundscale_ps(x, 0);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(0.009560510516166687f);
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.05591703951358795f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.24024981260299683f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.6931219696998596f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.9999991655349731f));
  return _mm512_scalef_ps(sum, whole);
}

template <int V>
void begin(Block<V>& b, const Attention& a, int64_t first, int64_t last) {
  constexpr int64_t ROWS = Block<V>::ROWS;
  for (int64_t r = 0; r < ROWS; ++r) {
    const bf16* from = a.query_at(std::min(first + r, last - 1)); // lanes without a row repeat the last one
    for (int64_t i = 0; i < a.size / 2; ++i) std::memcpy(b.query + (i * ROWS + r) * 2, from + 2 * i, 4);
    b.most[r] = -INFINITY;
    b.total[r] = 0;
  }
  std::fill_n(b.sums, a.size * ROWS, 0.0f);
}

Seen seen(const Attention& a, int64_t first, int64_t last, int64_t from, int64_t count) {
  if (a.mask == nullptr) return Seen::all;
  bool all = true, none = true;
  for (int64_t row = first; row < std::min(last, first + a.rows); ++row) {
    const bf16* mask = a.mask_at(row) + from;
    bf16 any = 0;
    bool hidden = true;
    for (int64_t j = 0; j < count; ++j) {
      any |= mask[j];
      hidden &= mask[j] == 0xff80; // minus infinity
    }
    all &= (any & 0x7fff) == 0;
    none &= hidden;
  }
  return all ? Seen::all : none ? Seen::none : Seen::some;
}

template <int V>
void score(Block<V>& b, const Attention& a, int64_t from, int64_t count) {
  constexpr int64_t ROWS = Block<V>::ROWS;
  constexpr int J = Block<V>::AT_ONCE;
  for (int64_t j = 0; j < count; j += J) {
    __m512 sum[J][V];
    const bf16* key[J];
    for (int x = 0; x < J; ++x) {
      key[x] = a.key + (from + std::min(j + x, count - 1)) * a.key_row;
      for (int y = 0; y < V; ++y) sum[x][y] = _mm512_setzero_ps();
    }
    for (int64_t i = 0; i < a.size / 2; ++i) {
      __m512bh query[V];
      for (int y = 0; y < V; ++y) query[y] = (__m512bh)_mm512_load_si512(b.query + (i * ROWS + y * LANES) * 2);
#pragma GCC unroll 16
      for (int x = 0; x < J; ++x) {
        const __m512bh shared = both(key[x] + 2 * i);
        for (int y = 0; y < V; ++y) sum[x][y] = _mm512_dpbf16_ps(sum[x][y], query[y], shared);
      }
    }
    const __m512 scale = _mm512_set1_ps(a.scale);
    for (int x = 0; x < J; ++x)
      for (int y = 0; y < V; ++y)
        _mm512_store_ps(b.scores + (j + x) * ROWS + y * LANES, _mm512_mul_ps(sum[x][y], scale));
  }
}

template <int V>
void add_mask(Block<V>& b, const Attention& a, int64_t first, int64_t last, int64_t from, int64_t count) {
  constexpr int64_t ROWS = Block<V>::ROWS;
  for (int64_t r = 0; r < ROWS; ++r) {
    const bf16* mask = a.mask_at(std::min(first + r, last - 1)) + from;
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t bits = uint32_t(mask[j]) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      b.masks[r * KEYS + j] = value * LOG2_E;
    }
  }
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i row = _mm512_mullo_epi32(lane, _mm512_set1_epi32(KEYS));
  for (int y = 0; y < V; ++y)
    for (int64_t j = 0; j < count; ++j) {
      float* at = b.scores + j * ROWS + y * LANES;
      const __m512 mask = _mm512_i32gather_ps(row, b.masks + y * LANES * KEYS + j, 4);
      _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), mask));
    }
}

// Scores become weights relative to the largest so far; says whether that is still what it was for every row.
template <int V>
bool weigh(Block<V>& b, int64_t count) {
  constexpr int64_t ROWS = Block<V>::ROWS;
  const __m512i beside = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                          5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512 lowest = _mm512_set1_ps(-FLT_MAX); // a row that has seen no key yet has no largest score
  bool same = true;
  if (count % 2) std::fill_n(b.scores + count * ROWS, ROWS, -INFINITY);
  for (int64_t y = 0; y < ROWS; y += LANES) {
    const __m512 before = _mm512_load_ps(b.most + y);
    __m512 most = before;
    for (int64_t j = 0; j < count; ++j) most = _mm512_max_ps(most, _mm512_load_ps(b.scores + j * ROWS + y));
    const __m512 base = _mm512_max_ps(most, lowest);
    const __mmask16 as_before = _mm512_cmp_ps_mask(before, most, _CMP_EQ_OQ);
    // exactly 1 where nothing changed, or a row would depend on whom it shares the block with
    const __m512 factor = exp2_of(_mm512_sub_ps(_mm512_max_ps(before, lowest), base));
    const __m512 kept = _mm512_mask_mov_ps(factor, as_before, _mm512_set1_ps(1.0f));
    __m512 total = _mm512_mul_ps(_mm512_load_ps(b.total + y), kept);
    for (int64_t j = 0; j < count; j += 2) {
      const __m512 one = exp2_of(_mm512_sub_ps(_mm512_load_ps(b.scores + j * ROWS + y), base));
      const __m512 two = exp2_of(_mm512_sub_ps(_mm512_load_ps(b.scores + (j + 1) * ROWS + y), base));
      total = _mm512_add_ps(total, _mm512_add_ps(one, two));
      const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(two, one);
      _mm512_store_si512(b.weights + (j / 2 * ROWS + y) * 2, _mm512_permutexvar_epi16(beside, pair));
    }
    same &= as_before == 0xffff;
    _mm512_store_ps(b.most + y, most);
    _mm512_store_ps(b.total + y, total);
    _mm512_store_ps(b.kept + y, kept);
  }
  return same;
}

template <int V>
void pair_values(Block<V>& b, const Attention& a, int64_t from, int64_t count) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                       36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t j = 0; j < count; j += 2) {
    const bf16* one = a.value + (from + j) * a.value_row;
    const bf16* two = j + 1 < count ? one + a.value_row : one; // its weight is zero then
    for (int64_t i = 0; i < a.size; i += 32) {
      const __m512i x = _mm512_loadu_si512(one + i), y = _mm512_loadu_si512(two + i);
      bf16* to = b.values + (j / 2 * a.size + i) * 2;
      _mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
      _mm512_store_si512(to + 32, _mm512_permutex2var_epi16(x, high, y));
    }
  }
}

template <int V>
void add_values(Block<V>& b, const Attention& a, int64_t count, bool same) {
  constexpr int64_t ROWS = Block<V>::ROWS;
  constexpr int J = Block<V>::AT_ONCE;
  for (int64_t i = 0; i < a.size; i += J) {
    __m512 sum[J][V];
    for (int x = 0; x < J; ++x)
      for (int y = 0; y < V; ++y) {
        sum[x][y] = _mm512_load_ps(b.sums + (i + x) * ROWS + y * LANES);
        if (!same) sum[x][y] = _mm512_mul_ps(sum[x][y], _mm512_load_ps(b.kept + y * LANES));
      }
    for (int64_t j = 0; j < (count + 1) / 2; ++j) {
      __m512bh weights[V];
      for (int y = 0; y < V; ++y) weights[y] = (__m512bh)_mm512_load_si512(b.weights + (j * ROWS + y * LANES) * 2);
#pragma GCC unroll 16
      for (int x = 0; x < J; ++x) {
        const __m512bh shared = both(b.values + (j * a.size + i + x) * 2);
        for (int y = 0; y < V; ++y) sum[x][y] = _mm512_dpbf16_ps(sum[x][y], weights[y], shared);
      }
    }
    for (int x = 0; x < J; ++x)
      for (int y = 0; y < V; ++y) _mm512_store_ps(b.sums + (i + x) * ROWS + y * LANES, sum[x][y]);
  }
}

template <int V>
void finish(const Block<V>& b, const Attention& a, int64_t first, int64_t last) {
  constexpr int64_t ROWS = Block<V>::ROWS;
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i component = _mm512_mullo_epi32(lane, _mm512_set1_epi32(ROWS));
  for (int64_t row = first; row < last; ++row) {
    const float total = b.total[row - first];
    const __m512 share = _mm512_set1_ps(total == 0 ? 0 : 1 / total); // a row that sees nothing becomes 0
    for (int64_t i = 0; i < a.size; i += LANES) {
      const __m512 sum = _mm512_i32gather_ps(component, b.sums + i * ROWS + row - first, 4);
      _mm256_storeu_si256((__m256i*)(a.out_at(row) + i), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(sum, share)));
    }
  }
}

// Rows first..last of all heads' rows, at most V * LANES.
template <int V>
void attend(const Attention& a, int64_t first, int64_t last) {
  Block<V> b;
  begin(b, a, first, last);
  for (int64_t from = 0; from < a.keys; from += KEYS) {
    const int64_t count = std::min(KEYS, a.keys - from);
    const Seen what = seen(a, first, last, from, count);
    if (what == Seen::none) continue;
    score(b, a, from, count);
    if (what == Seen::some) add_mask(b, a, first, last, from, count);
    const bool same = weigh(b, count);
    pair_values(b, a, from, count);
    add_values(b, a, count, same);
  }
  finish(b, a, first, last);
}

void attend_rows(const Attention& a, int64_t first, int64_t last) {
  const int64_t vectors = (last - first + LANES - 1) / LANES;
  if (vectors == 1) attend<1>(a, first, last);
  else if (vectors == 2) attend<2>(a, first, last);
  else if (vectors == 3) attend<3>(a, first, last);
  else attend<4>(a, first, last);
}

const bf16* at(const at::Tensor& x, int64_t batch, int64_t head) {
  return static_cast<const bf16*>(x.const_data_ptr()) + batch * x.stride(0) + head * x.stride(1);
}

at::Tensor few_rows(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const std::optional<at::Tensor>& mask, double scale) {
  const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2), size = query.size(3);
  const int64_t kv_heads = key.size(1), keys = key.size(2);
  for (const at::Tensor& x : {query, key, value})
    TORCH_CHECK(x.dim() == 4 && x.scalar_type() == at::kBFloat16 && x.stride(3) == 1 && x.size(3) == size,
                "few_rows: query, key and value have to be [B, heads, n, d] in bfloat16, dense in d");
  TORCH_CHECK(size % 32 == 0 && size <= MOST_SIZE && kv_heads > 0 && heads % kv_heads == 0 && value.size(2) == keys &&
                  value.size(1) == kv_heads && key.size(0) == batch && value.size(0) == batch,
              "few_rows: no such sizes");
  if (mask)
    TORCH_CHECK(mask->dim() == 4 && mask->scalar_type() == at::kBFloat16 && mask->stride(3) == 1 &&
                    mask->size(1) == 1 && mask->size(2) == rows && mask->size(3) == keys &&
                    (mask->size(0) == 1 || mask->size(0) == batch),
                "few_rows: the mask has to be [1 or B, 1, q, S] in bfloat16");
  const int64_t group = heads / kv_heads;
  at::Tensor out = at::empty({batch, rows, heads, size}, query.options());
  int64_t together = MOST_ROWS; // rows of a unit: fewer where cores would have nothing to do
  auto units = [&] { return (group * rows + together - 1) / together; };
  while (together > LANES && batch * kv_heads * units() < at::get_num_threads()) together /= 2;
  const int64_t parts = units();
  at::parallel_for(0, batch * kv_heads * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit % parts * together, head = unit / parts % kv_heads, b = unit / parts / kv_heads;
      const Attention a{at(query, b, head * group), at(key, b, head), at(value, b, head),
                        mask ? at(*mask, mask->size(0) > 1 ? b : 0, 0) : nullptr,
                        static_cast<bf16*>(out.data_ptr()) + (b * rows * heads + head * group) * size,
                        group, rows, size, keys, query.stride(1), query.stride(2), key.stride(2), value.stride(2),
                        mask ? mask->stride(2) : 0, size, heads * size, float(scale) * LOG2_E};
      attend_rows(a, first, std::min(first + together, group * rows));
    }
  });
  return out;
}

} // namespace

TORCH_LIBRARY(medusa_train, library) {
  library.def("few_rows(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(medusa_train, CPU, library) {
  library.impl("few_rows", &few_rows);
}
