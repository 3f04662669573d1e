// Products of a single token with matrices of 4-bit integers that have a scale for 32, 64 or 128 values, for Hopper, fused with the norm before them
// and with SwiGLU and residual after them. Called by `int4_gemv.py`. The library humming-kernels 0.1.19 defines the layout of matrices:
//
//   codes   for each 16 columns and 64 rows 32 x 16 bytes, those of lane l at 16 l. Word i holds rows 16 i + l / 4 and 8 more of columns
//           l % 4 * 2 + {0, 1} and 8 more, in the order of tensor cores: nibbles j and j + 4 are neighbours of one row
//   scales  (groups, rows), and zero points, 4 bits each: of 64 rows those of rows r, r + 8, ..., r + 56 are at 8 r
//
// Stacked matrices are consecutive, so a matrix is also some of the chunks of a longer one.
//
// 128 columns are a chunk. The chunks of 64 rows are divided among the warps of two blocks; the first block adds both sums. A warp loads one or
// two chunks before it waits for the preceding kernel. Codes become mantissas of 128 in bfloat16, with one instruction for two; what that adds is
// subtracted once for each group, with the zero point.

#include <algorithm>

#include "hopper_launch.cuh"

namespace one_token {

using namespace hopper;

constexpr int kRows = 64, kEighths = kRows / 8;
constexpr int kColumns = 16, kChunk = 128, kSteps = kChunk / kColumns;
constexpr int kFewWarps = 8, kManyWarps = 16;  // of a block, and of one with long rows that is its multiprocessor's only one
constexpr int kLong = 64;  // chunks of such a row: two for each warp
constexpr int kCluster = 2;  // blocks that share rows
constexpr int kUnit = 32;  // columns whose sum is kept
constexpr float kAdded = 128.f, kMiddle = 8.f;  // to codes; the zero point of symmetric matrices
constexpr int kPiece = 8;  // values of the token that a thread loads at once

struct Params {
  BFloat16 const* x;
  unsigned char const* norm_weight;
  uint4 const* codes;
  BFloat16 const* scales;
  uint32_t const* zeros;
  BFloat16* out;
  int width, height, num_out;  // values of a row; rows; values of the result
  int norm_bytes;  // of a weight of the norm, bfloat16 or float32; 0: no norm
  float eps;
  bool adds;
  int const* chosen;  // matrices of which each is multiplied, or null: the only one; -1: none
  int x_stride;  // from one choice's values to the next one's
  bool is_chosen_early;  // the preceding kernel has not written `chosen`
};

DEVICE uint4 load_once(uint4 const* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}

// Two codes plus kAdded as bfloat16.
DEVICE uint32_t pair_of(uint32_t shifted) {
  uint32_t pair;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(pair) : "r"(shifted));
  return pair;
}

DEVICE float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }

DEVICE float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }

DEVICE float scale_of(uint4 const& eight, int i) {
  uint32_t const word = word_of(eight, i / 2);
  return i % 2 ? high_of(word) : low_of(word);
}

// 64 rows' chunks `first` to `end` of a warp, of which kPrefetched are in registers or on their way.
template <int kGroup, bool kZeros, int kPrefetched>
struct Tile {
  static constexpr int kGroups = kChunk / kGroup;
  Params const& params;
  uint4 const* codes;  // of this lane, from the first of the chunks that come
  int64_t step;  // from 16 columns to the next
  int row, end, lane;  // the first of the 64
  uint4 words[kPrefetched][kSteps], scales[kPrefetched][kGroups];
  uint32_t zeros[kPrefetched][kGroups];

  DEVICE Tile(Params const& params, int row, int first, int end, int lane) : params(params), step(params.height / 2), row(row), end(end), lane(lane) {
    codes = params.codes + (int64_t(first) * kSteps * params.height + row) / 2 + lane;
    UNROLL for (int slot = 0; slot < kPrefetched; ++slot) {
      if (first + slot >= end) break;
      UNROLL for (int i = 0; i < kSteps; ++i) words[slot][i] = load_once(codes + (slot * kSteps + i) * step);
      load_scales(slot, first + slot);
    }
    codes += kPrefetched * kSteps * step;
  }

  DEVICE void load_scales(int slot, int chunk) {
    UNROLL for (int group = 0; group < kGroups; ++group) {
      int64_t const at = (int64_t(chunk) * kGroups + group) * params.height + row + lane / 4 * kEighths;
      scales[slot][group] = __ldg(as<uint4>(params.scales + at));
      if (kZeros) zeros[slot][group] = __ldg(params.zeros + at / 8);
    }
  }

  // What rows lane / 4, and 8 more each, have of the chunks; `token`, in the order of `place_of`, and the sums begin with those of the first one.
  DEVICE void multiply(uint32_t const* token, float const* sums, int first, float (&totals)[kEighths]) {
    for (int start = first; start < end; start += kPrefetched) {
      UNROLL for (int slot = 0; slot < kPrefetched; ++slot, token += kChunk / 2, sums += kChunk / kUnit) {
        int const chunk = start + slot;
        if (chunk >= end) break;
        bool const is_followed = chunk + kPrefetched < end;
        float c[4][4]{};
        UNROLL for (int i = 0; i < kSteps; ++i) {
          uint2 const x = *as<uint2>(token + i * 8 + lane % 4 * 2);
          UNROLL for (int tile = 0; tile < 4; ++tile) {
            uint32_t const word = word_of(words[slot][i], tile);
            uint32_t const a[4] = {pair_of(word), pair_of(word >> 8), pair_of(word >> 4), pair_of(word >> 12)};
            hopper::multiply(c[tile], a, x.x, x.y);
          }
          if (is_followed) words[slot][i] = load_once(codes + i * step);
          if ((i + 1) * kGroups % kSteps) continue;
          int const group = i * kGroups / kSteps;
          float sum = 0.f;
          UNROLL for (int unit = 0; unit < kGroup / kUnit; ++unit) sum += sums[group * (kGroup / kUnit) + unit];
          UNROLL for (int eighth = 0; eighth < kEighths; ++eighth) {
            float& value = c[eighth / 2][eighth % 2 * 2];
            float const zero = kZeros ? float(zeros[slot][group] >> (4 * eighth) & 15) : kMiddle;
            totals[eighth] += (value - (kAdded + zero) * sum) * scale_of(scales[slot][group], eighth);
            value = 0.f;
          }
        }
        if (is_followed) load_scales(slot, chunk + kPrefetched);
        codes += kSteps * step;
      }
    }
  }
};

// Where two neighbours of the token lie, of which the first has this column: a lane's four values of 16 columns lie side by side.
DEVICE int place_of(int column) { return column / 16 * 8 + column % 8 + column / 8 % 2; }

// Loads columns `begin` to `end` of the token times the norm's weights into `token`, and the sums of kUnit of them into `sums`. Returns this
// thread's part of the sum of the whole token's squares.
template <int kWarps>
DEVICE float load_token(Params const& params, BFloat16 const* x, uint32_t* token, float* sums, int begin, int end) {
  float squares = 0.f;
  int const from = params.norm_bytes ? 0 : begin, to = params.norm_bytes ? params.width : end;
  for (int column = from + threadIdx.x * kPiece; column < to; column += 32 * kWarps * kPiece) {
    uint4 const piece = load_new<uint4>(x + column);
    bool const is_own = column >= begin && column < end;
    float sum = 0.f;
    UNROLL for (int i = 0; i < kPiece / 2; ++i) {
      uint32_t pair = word_of(piece, i);
      if (params.norm_bytes) {
        float const low = low_of(pair), high = high_of(pair);
        squares += low * low + high * high;
        if (!is_own) continue;
        int const at = column / 2 + i;
        float2 const weights = params.norm_bytes == 2 ? __bfloat1622float2(as<__nv_bfloat162>(params.norm_weight)[at])
                                                      : as<float2>(params.norm_weight)[at];
        pair = pack(low * weights.x, high * weights.y);
      }
      sum += low_of(pair) + high_of(pair);
      token[place_of(column + 2 * i - begin)] = pair;
    }
    if (!is_own) continue;
    unsigned const unit = 0xfu << (threadIdx.x % 32 & ~3u);  // the four lanes that have it
    sum += __shfl_xor_sync(unit, sum, 1);
    sum += __shfl_xor_sync(unit, sum, 2);
    if (threadIdx.x % 4 == 0) sums[(column - begin) / kUnit] = sum;
  }
  return squares;
}

// Chunks that two blocks have at most, each.
DEVICE int most_chunks(int num_chunks) { return (num_chunks + kCluster - 1) / kCluster; }

// Cluster (i, k): 64 values of the result, or of that of the k-th choice. If gated, half of the warps have the rows of the gate, the others those of
// the up projection.
template <int kGroup, bool kZeros, bool kGated, int kPrefetched, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kWarps == kManyWarps ? 1 : 4 - kPrefetched) multiply_token(Params const params) {
  constexpr int kHalves = kGated ? 2 : 1, kSharing = kWarps / kHalves;  // warps that share rows
  extern __shared__ __align__(16) uint32_t token[];
  __shared__ float parts[kWarps][kRows], of_blocks[kCluster][kHalves * kRows], squares[kWarps];
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / kSharing;
  int const rank = blockIdx.x % kCluster, first_row = blockIdx.x / kCluster * kRows, num_chunks = params.width / kChunk;
  auto share = [&](int i) { return num_chunks * i / (kCluster * kSharing); };
  int const share_of_warp = rank * kSharing + warp % kSharing;
  int const first = share(share_of_warp), begin = share(rank * kSharing), end = share((rank + 1) * kSharing);
  float* const sums = as<float>(token + most_chunks(num_chunks) * kChunk / 2);
  int expert = 0, choice = blockIdx.y;
  if (params.chosen) {
    if (!params.is_chosen_early) wait_for_preceding_kernel();
    expert = __ldcg(params.chosen + choice);
    if (expert < 0) return;
  }
  int const offset = expert * num_chunks;
  announce_block();
  Tile<kGroup, kZeros, kPrefetched> tile(params, first_row + half * params.num_out, offset + first, offset + share(share_of_warp + 1), lane);
  start();
  BFloat16 const* const x = params.x + choice * params.x_stride;
  float const sum = over_lanes<1, 32, false>(load_token<kWarps>(params, x, token, sums, begin * kChunk, end * kChunk));
  if (lane == 0) squares[warp] = sum;
  __syncthreads();
  float totals[kEighths]{};
  tile.multiply(token + (first - begin) * kChunk / 2, sums + (first - begin) * kChunk / kUnit, offset + first, totals);
  if (lane % 4 == 0) {
    UNROLL for (int i = 0; i < kEighths; ++i) parts[warp][i * 8 + lane / 4] = totals[i];
  }
  wait_for_blocks();
  __syncthreads();
  int const i = threadIdx.x;
  if (i < kHalves * kRows) {
    float result = 0.f;
    UNROLL for (int other = 0; other < kSharing; ++other) result += parts[i / kRows * kSharing + other][i % kRows];
    store_in(0, &of_blocks[rank][i], result);
  }
  wait_for_writes();
  if (rank > 0 || i >= kRows) return;
  float factor = 1.f;
  if (params.norm_bytes) {
    float all = 0.f;
    UNROLL for (float one : squares) all += one;
    factor = rsqrtf(all / params.width + params.eps);
  }
  float result = (of_blocks[0][i] + of_blocks[1][i]) * factor;
  if (kGated) result = silu(result) * ((of_blocks[0][i + kRows] + of_blocks[1][i + kRows]) * factor);
  put(params.out + choice * params.num_out + first_row + i, result, params.adds);
}

template <int kGroup, bool kZeros, int kPrefetched, int kWarps = kFewWarps>
void launch(Params const& params, dim3 grid, bool is_gated, DLDevice device) {
  int const most = (params.width / kChunk + kCluster - 1) / kCluster;
  auto const kernel = is_gated ? multiply_token<kGroup, kZeros, true, kPrefetched, kWarps>
                               : multiply_token<kGroup, kZeros, false, kPrefetched, kWarps>;
  launch_early(kernel, params, grid, 32 * kWarps, most * (kChunk * sizeof(BFloat16) + kChunk / kUnit * sizeof(float)), device, kCluster);
}

// Two chunks ahead where so many blocks with so many registers run at once.
template <int kGroup, bool kZeros>
void launch(Params const& params, int num_choices, bool is_gated, DLDevice device) {
  dim3 const grid(params.num_out / kRows * kCluster, num_choices);
  int const num_blocks = grid.x * num_choices, count = num_multiprocessors(device);
  auto const run = num_blocks <= count && params.width >= kLong * kChunk ? launch<kGroup, kZeros, 2, kManyWarps>
                   : num_blocks <= 2 * count                             ? launch<kGroup, kZeros, 2>
                                                                         : launch<kGroup, kZeros, 1>;
  run(params, grid, is_gated, device);
}

// x (1, K), or one for each choice, norm_weight (K), codes (K / 16, 2 N), scales (groups, N), zeros (groups, N / 8), all of these of one or of
// stacked matrices with `groups` groups each, chosen (choices), out (1 or choices, N), or N / 2 if gated.
void run(View x, Optional norm_weight, double eps, View codes, View scales, int64_t groups, Optional zeros, Optional chosen, bool is_chosen_early,
         View out, bool is_gated, bool adds) {
  Params params{};
  set_norm(params, norm_weight, eps);
  params.x = values_of(x), params.codes = values_of(codes), params.scales = values_of(scales), params.zeros = values_of(zeros);
  params.out = values_of(out), params.chosen = values_of(chosen), params.is_chosen_early = is_chosen_early, params.adds = adds;
  params.width = int(x.size(1)), params.height = int(scales.size(1)), params.num_out = int(out.size(1));
  params.x_stride = x.size(0) > 1 ? params.width : 0;
  int const group = params.width / int(groups), num_choices = chosen ? int((*chosen).size(0)) : 1;
  TVM_FFI_ICHECK(params.width % kChunk == 0 && params.num_out % kRows == 0 && params.height == params.num_out * (is_gated ? 2 : 1))
      << "int4: a matrix of " << params.height << " x " << params.width;
  TVM_FFI_ICHECK(out.size(0) == num_choices && (x.size(0) == 1 || x.size(0) == num_choices)) << "int4: " << out.size(0) << " results";
  TVM_FFI_ICHECK(group == 32 || group == 64 || group == 128) << "int4: groups of " << group;
  auto const launch_group = zeros ? (group == 128 ? launch<128, true> : group == 64 ? launch<64, true> : launch<32, true>)
                                  : (group == 128 ? launch<128, false> : group == 64 ? launch<64, false> : launch<32, false>);
  launch_group(params, num_choices, is_gated, x.device());
}

}  // namespace one_token

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, one_token::run);
