// Products of few rows with weights that were laid out for them, in bfloat16, on CPUs with AVX512-BF16; knows no heads.
//
// Several matrices of one size are multiplied in one call, each by rows of its own: what a draft's heads need, whose one
// row each would otherwise be a call each. Weights are read once, in the order in which they lie.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

namespace {

constexpr int64_t LANES = 16;   // columns of a panel: floats of a vector
constexpr int64_t MOST_ROWS = 6; // multiplied together: with four panels their sums fill the registers
constexpr int64_t PANELS = 4;

using bf16 = uint16_t; // its bits

// Rows of one matrix's product. Weights: [panels, inputs / 2, LANES, 2].
struct Rows {
  const bf16 *x, *weight, *bias; // bias: null where there is none
  bf16* out;
  int64_t inputs, columns, x_row;
};

inline __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m512bh both(const bf16* pair) { // two neighbours, in all lanes
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return (__m512bh)_mm512_set1_epi32(bits);
}

// R rows from `row` on, times C panels from `panel` on.
template <int R, int C>
void tile(const Rows& a, int64_t row, int64_t panel) {
  __mmask16 columns[C];
  __m512 sum[R][C];
  for (int c = 0; c < C; ++c) {
    const int64_t at = (panel + c) * LANES;
    columns[c] = __mmask16((1u << std::min(LANES, a.columns - at)) - 1);
    const __m512 bias = a.bias ? widened(_mm256_maskz_loadu_epi16(columns[c], a.bias + at)) : _mm512_setzero_ps();
    for (int r = 0; r < R; ++r) sum[r][c] = bias;
  }
  const bf16* weight = a.weight + panel * a.inputs * LANES;
  const bf16* x = a.x + row * a.x_row;
  for (int64_t i = 0; i < a.inputs; i += 2) {
    __m512bh weights[C];
    for (int c = 0; c < C; ++c) weights[c] = (__m512bh)_mm512_loadu_si512(weight + (c * a.inputs + i) * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512bh shared = both(x + r * a.x_row + i);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], weights[c], shared);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      _mm256_mask_storeu_epi16(a.out + (row + r) * a.columns + (panel + c) * LANES, columns[c],
                               (__m256i)_mm512_cvtneps_pbh(sum[r][c]));
}

using Tile = void (*)(const Rows&, int64_t, int64_t);

template <int C, std::size_t... R>
constexpr std::array<Tile, sizeof...(R)> tiles(std::index_sequence<R...>) {
  return {&tile<int(R) + 1, C>...}; // by their rows, from 1
}
constexpr auto WIDE = tiles<PANELS>(std::make_index_sequence<MOST_ROWS>());
constexpr auto NARROW = tiles<1>(std::make_index_sequence<MOST_ROWS>());

// All rows times the panels first..last, which stay in the nearest cache meanwhile.
void multiply(const Rows& a, int64_t rows, int64_t first, int64_t last) {
  for (int64_t row = 0; row < rows; row += MOST_ROWS) {
    const int64_t together = std::min(MOST_ROWS, rows - row);
    if (last - first == PANELS) WIDE[together - 1](a, row, first);
    else
      for (int64_t panel = first; panel < last; ++panel) NARROW[together - 1](a, row, panel);
  }
}

const bf16* data(const at::Tensor& x) { return static_cast<const bf16*>(x.const_data_ptr()); }

at::Tensor few_rows_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            int64_t columns) {
  for (const at::Tensor& given : {x, weight, bias.value_or(x)})
    TORCH_CHECK(given.scalar_type() == at::kBFloat16, "few_rows_product: everything has to be in bfloat16");
  TORCH_CHECK(x.dim() == 3 && weight.dim() == 5, "few_rows_product: rows [G, B, in], weights [G, panels, in / 2, 16, 2]");
  const int64_t count = x.size(0), rows = x.size(1), inputs = x.size(2), panels = weight.size(1);
  TORCH_CHECK(x.stride(2) == 1 && weight.is_contiguous() && count <= weight.size(0) && columns > 0 &&
                  panels == (columns + LANES - 1) / LANES && inputs == 2 * weight.size(2) &&
                  weight.size(3) == LANES && weight.size(4) == 2,
              "few_rows_product: no such sizes");
  if (bias)
    TORCH_CHECK(bias->dim() == 2 && bias->is_contiguous() && bias->size(0) >= count && bias->size(1) == columns,
                "few_rows_product: the bias has to be [G, out]");
  at::Tensor out = at::empty({count, rows, columns}, x.options());
  const int64_t parts = (panels + PANELS - 1) / PANELS;
  at::parallel_for(0, count * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t group = unit / parts, first = unit % parts * PANELS;
      const Rows a{data(x) + group * x.stride(0), data(weight) + group * panels * inputs * LANES,
                   bias ? data(*bias) + group * columns : nullptr,
                   static_cast<bf16*>(out.data_ptr()) + group * rows * columns, inputs, columns, x.stride(1)};
      multiply(a, rows, first, std::min(first + PANELS, panels));
    }
  });
  return out;
}

} // namespace

TORCH_LIBRARY_FRAGMENT(medusa_train, library) {
  library.def("few_rows_product(Tensor x, Tensor weight, Tensor? bias, int columns) -> Tensor");
}

TORCH_LIBRARY_IMPL(medusa_train, CPU, library) {
  library.impl("few_rows_product", &few_rows_product);
}
