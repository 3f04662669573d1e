// Token of the products in `float8_gemv.cu`: rounding to float8, and conversion of both factors to float16.

#pragma once

#include <cuda_fp16.h>

#include "hopper_launch.cuh"

namespace float8 {

using namespace hopper;

constexpr int kRows = 16, kHalf = kRows / 2;
constexpr int kGroup = 128;  // values with a scale
constexpr int kStep = 64;  // values of a row that a warp multiplies at once
constexpr int kWarps = 12, kStages = 2;  // per block of `multiply_token`: fewer warps or stages use less memory bandwidth
constexpr int kMaxWarps = 8, kBlocks = 3;  // warps per block of `multiply_tiles`; concurrent blocks of four warps per multiprocessor
constexpr int kChunk = 256;  // values of each of 16 rows in a warp's stage
constexpr int kPitch = kChunk + 64;  // bytes between rows of a stage: neighbouring rows are in different banks
constexpr int kMaxChosen = 12;  // maximum experts of `sum_experts`, one warp each
constexpr int kPiece = 8;  // values of the token that a lane rounds at once; 16 lanes per group
constexpr int kPieces = 8;  // pieces per lane at once
constexpr int kCopied = 16;  // bytes that a lane copies at once
constexpr float kLargest = 448.f, kLeastScale = 1e-30f;

struct Params {
  BFloat16 const* x;
  unsigned char const* norm_weight;
  uint8_t const* weight;
  float const* scales;  // num_scales for each block of rows
  int const* chosen;  // experts; null: one matrix. Negative: on another rank
  BFloat16 const* shares;  // weights of the chosen experts, for `sum_experts`
  BFloat16* out;
  int width, num_out, num_scales;  // values per row; of the result (per expert if there are several)
  int num_blocks;  // blocks of rows with separate scales that a block's tiles may span
  int norm_bytes;  // bytes per weight of the norm (bfloat16 or float32); 0: no norm
  float eps;
  bool adds;
};

DEVICE uint4 load_weights(uint8_t const* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}

// Two float8 values.
DEVICE uint32_t rounded_halves(float low, float high) {
  uint32_t pair;
  asm("{ .reg .b16 bytes; cvt.rn.satfinite.e4m3x2.f32 bytes, %2, %1; cvt.rn.f16x2.e4m3x2 %0, bytes; }" : "=r"(pair) : "f"(low), "f"(high));
  return pair;
}

// As `multiply`, for four values of each of two rows.
DEVICE void multiply_values(float (&c)[4], uint32_t a, uint32_t b, uint32_t b0, uint32_t b1) {
  uint2 const upper = to_halves(a), lower = to_halves(b);
  uint32_t const rows[4] = {upper.x, lower.x, upper.y, lower.y};
  multiply_halves(c, rows, b0, b1);
}

// Adds a step of this lane's two rows to c and d, two chains: a product waits for the previous one of its chain.
DEVICE void multiply_step(float (&c)[4], float (&d)[4], uint4 a, uint4 b, __half const* token) {
  uint4 const x = *as<uint4>(token), y = *as<uint4>(token + 8);
  multiply_values(c, a.x, b.x, x.x, x.y);
  multiply_values(d, a.y, b.y, x.z, x.w);
  multiply_values(c, a.z, b.z, y.x, y.y);
  multiply_values(d, a.w, b.w, y.z, y.w);
}

DEVICE void to_floats(uint4 const& piece, float (&values)[kPiece]) {
  uint32_t const words[4] = {piece.x, piece.y, piece.z, piece.w};
  UNROLL for (int i = 0; i < 4; ++i) {
    float2 const pair = floats(words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

DEVICE int chunks_of(int width) { return (width + kChunk - 1) / kChunk; }

// 1 / x, correctly rounded for normal x and 1 / x. `__frcp_rn` handles all values, with so many instructions that fetching them takes longer
// than multiplying.
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(y, fmaf(-x, y, 1.f), y);
}

// Rounds a lane's piece of a group of 16 lanes; writes it to `to` as float16, and the group's scale to `unit`.
DEVICE void store_rounded(float const (&values)[kPiece], __half* to, float* unit, int lane) {
  float largest = 0.f;
  UNROLL for (float value : values) largest = fmaxf(largest, fabsf(value));
  largest = over_lanes<1, 16, true>(largest);
  float const scale = fmaxf(largest * (1.f / kLargest), kLeastScale), inverse = reciprocal(scale);
  uint32_t halves[4];
  UNROLL for (int i = 0; i < 4; ++i) halves[i] = rounded_halves(values[2 * i] * inverse, values[2 * i + 1] * inverse);
  *as<uint4>(to) = {halves[0], halves[1], halves[2], halves[3]};
  if (lane % 16 == 0) *unit = scale;
}

// Rounds the token, normalised with the weights in `norm` if there is a norm, into `token`, `padded` values, by kNumWarps warps. A thread finds its
// pieces there as they were read. The weights have arrived when at most kLeft groups of copies are pending.
template <int kNumWarps, int kLeft>
DEVICE void round_token(Params const& params, int padded, unsigned char const* norm, __half* token, float* units, float (&sums)[kNumWarps]) {
  constexpr int kStride = 32 * kNumWarps * kPiece;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float square = 0.f;
  for (int start = int(threadIdx.x) * kPiece; start < padded; start += kPieces * kStride) {
    uint4 pieces[kPieces];
    UNROLL for (int i = 0; i < kPieces; ++i) {
      int const column = start + i * kStride;
      if (column < params.width) pieces[i] = load_new<uint4>(params.x + column);
      else pieces[i] = uint4{0, 0, 0, 0};
    }
    UNROLL for (int i = 0; i < kPieces; ++i) {
      if (start + i * kStride >= padded) break;
      *as<uint4>(token + start + i * kStride) = pieces[i];
      if (!params.norm_bytes) continue;
      float values[kPiece];
      to_floats(pieces[i], values);
      UNROLL for (float value : values) square += value * value;
    }
  }
  float factor = 1.f;
  if (params.norm_bytes) {
    square = over_lanes<1, 32, false>(square);
    if (lane == 0) sums[warp] = square;
    wait_for_copies<kLeft>();
    __syncthreads();
    square = 0.f;
    UNROLL for (int i = 0; i < kNumWarps; ++i) square += sums[i];
    factor = rsqrtf(square / float(params.width) + params.eps);
  }
#pragma unroll 1
  for (int column = int(threadIdx.x) * kPiece; column < padded; column += kStride) {  // uniform within a warp: its lanes have two whole groups
    float values[kPiece];
    to_floats(*as<uint4>(token + column), values);
    if (params.norm_bytes) {
      __align__(16) float weights[kPiece];
      if (params.norm_bytes == sizeof(float)) {
        float4 const* from = as<float4>(norm) + column / 4;
        as<float4>(weights)[0] = from[0], as<float4>(weights)[1] = from[1];
      } else {
        to_floats(*as<uint4>(norm + column * sizeof(BFloat16)), weights);
      }
      UNROLL for (int j = 0; j < kPiece; ++j) values[j] = __bfloat162float(__float2bfloat16_rn(values[j] * factor * weights[j]));
    }
    store_rounded(values, token + column, units + column / kGroup, lane);
  }
}

// Layout of a block's shared memory; its parts begin at multiples of 16 bytes.
struct Layout {
  int padded, groups;  // values of a token, padded to two whole groups; number of groups

  __host__ __device__ explicit Layout(int width) : padded((width + 2 * kGroup - 1) / (2 * kGroup) * (2 * kGroup)), groups(padded / kGroup) {}

  __host__ __device__ size_t num_bytes(int num_scales, int norm_bytes) const {
    return padded * (sizeof(__half) + norm_bytes) + size_t(groups) * sizeof(float) * (1 + num_scales);
  }
};

}  // namespace float8
