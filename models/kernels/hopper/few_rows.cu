// Products of few tokens with a matrix in bfloat16, for Hopper, fused with SwiGLU or with the addition to the residual. Called by `few_rows.py`.
//
// Memory-bound: the matrix is read once, in order, by copies that are always in flight, the first before the preceding kernel has finished. A block
// has kTiles tiles of 16 rows at a time; its warps take turns with 64 columns of all of these rows, and add their sums at the end:
//
//   W (16 rows, 32 columns) x tokens (32 columns, 8) -> (16 rows, 8): two products of tensor cores
//
// A lane reads 16 bytes of row lane / 4 of W, of the row 8 below, and of token lane / 4. That orders the values of both operands alike, but not as
// the products of tensor cores are defined, which makes no difference to a sum. If gated, a tile has 8 rows of the gate and the same 8 of the up
// projection below, which are in the same lanes.

#include <algorithm>

#include "hopper_launch.cuh"

namespace few_rows {

using namespace hopper;

constexpr int kRows = 16, kHalf = kRows / 2;  // of a tile
constexpr int kWarps = 8;
constexpr int kMostTokens = 16;
constexpr int kChunk = 128, kStep = 64;  // bytes of a row that a warp copies, and multiplies, at once
constexpr int kCopied = 16;  // bytes that a lane copies at once
constexpr int kLanes = kChunk / kCopied, kRowsAtOnce = 32 / kLanes;  // of a copy
constexpr int kMostStages = 6;
constexpr int kMemory = 216 << 10;  // bytes of shared memory; less holds back copies

struct Params {
  unsigned char const* x;  // (num_tokens, width) bytes
  unsigned char const* weight;  // (num_out, width), twice as many rows if gated
  void* out;  // (num_tokens, num_out) in float32 or bfloat16
  int num_tokens, width, num_out;
  bool adds, is_float;
};

// Stages of a warp: a chunk of each row of its tiles, then of each token. Odd rows have their halves exchanged, which avoids conflicts of banks.
template <int kTiles, int kColumns, bool kGated>
struct Ring {
  static constexpr int kTileRows = kGated ? kHalf : kRows;
  static constexpr int kTokens = kTiles * kRows * kChunk, kBytes = kTokens + kColumns * 8 * kChunk;
  static constexpr int kParts = kWarps * kTiles * kColumns * 32 * int(sizeof(float4));
  static constexpr int kStages = std::min(kMostStages, (kMemory - kParts) / (kWarps * kBytes));
  static_assert(kStages >= 2, "a stage is copied while another one is multiplied");
  Params const& params;
  uint32_t address;  // of the stages in shared memory
  int lane, num_tiles;

  DEVICE uint32_t place(int stage, int row) const { return address + stage * kBytes + row * kChunk + (lane % kLanes ^ (row & 1) * 4) * kCopied; }

  DEVICE void copy_weights(int stage, int tile, int chunk) const {
    int const row_of_lane = lane / kLanes;
    int64_t const between = kGated ? int64_t(params.num_out - kHalf) * params.width : 0;
    unsigned char const* const from = params.weight + (int64_t(tile) * kTileRows + row_of_lane) * params.width + chunk * kChunk + lane % kLanes * kCopied;
    uint32_t const to = place(stage, row_of_lane);
    UNROLL for (int i = 0; i < kTiles; ++i) {
      if (tile + i >= num_tiles) break;
      UNROLL for (int row = 0; row < kRows; row += kRowsAtOnce)
        copy_async(to + (i * kRows + row) * kChunk, from + int64_t(i * kTileRows + row) * params.width + (row < kHalf ? 0 : between));
    }
  }

  // Columns of missing tokens keep what they are.
  DEVICE void copy_tokens(int stage, int chunk) const {
    UNROLL for (int row = 0; row < kColumns * 8; row += kRowsAtOnce) {
      int const token = row + lane / kLanes;
      if (token < params.num_tokens)
        copy_async(place(stage, token) + kTokens, params.x + int64_t(token) * params.width + chunk * kChunk + lane % kLanes * kCopied);
    }
  }
};

template <int kTiles, int kColumns, bool kGated>
__global__ void __launch_bounds__(32 * kWarps) multiply_rows(Params const params) {
  using Stages = Ring<kTiles, kColumns, kGated>;
  constexpr int kTileRows = Stages::kTileRows, kStages = Stages::kStages;
  extern __shared__ __align__(128) unsigned char memory[];
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int const num_tiles = params.num_out / kTileRows, round = int(gridDim.x) * kTiles, num_chunks = params.width / kChunk;
  unsigned char* const own = memory + warp * kStages * Stages::kBytes;
  float4* const parts = as<float4>(memory + kWarps * kStages * Stages::kBytes);  // (warps, tiles, columns, lanes)
  Stages const ring{params, shared_address(own), lane, num_tiles};
  int next_tile = int(blockIdx.x) * kTiles, next_chunk = warp;
  auto advance = [&] {
    if ((next_chunk += kWarps) >= num_chunks) next_chunk = warp, next_tile += round;
  };
  auto has_next = [&] { return next_chunk < num_chunks && next_tile < num_tiles; };
  for (int i = 0; i + 1 < kStages; ++i, advance())
    if (has_next()) ring.copy_weights(i, next_tile, next_chunk);
  start();
  if (warp < num_chunks)
    for (int i = 0, chunk = warp; i + 1 < kStages; ++i, chunk = chunk + kWarps < num_chunks ? chunk + kWarps : warp) ring.copy_tokens(i, chunk);
  asm volatile("cp.async.wait_all;" ::: "memory");
  int stage = 0;
  for (int tile = int(blockIdx.x) * kTiles; tile < num_tiles; tile += round) {
    float sums[kTiles][kColumns][4] = {};
    for (int chunk = warp; chunk < num_chunks; chunk += kWarps) {
      wait_for_copies<kStages - 2>();
      __syncwarp();
      int const free = (stage ? stage : kStages) - 1;
      if (has_next()) ring.copy_weights(free, next_tile, next_chunk), ring.copy_tokens(free, next_chunk);
      advance();
      end_copies();
      unsigned char const* const rows = own + stage * Stages::kBytes + lane / 4 * kChunk + lane % 4 * kCopied;
      UNROLL for (int half = 0; half < kChunk / kStep; ++half) {
        unsigned char const* const of_half = rows + (half ^ (lane / 4 & 1)) * kStep;
        uint4 x[kColumns];
        UNROLL for (int column = 0; column < kColumns; ++column) x[column] = *as<uint4>(of_half + Stages::kTokens + column * 8 * kChunk);
        UNROLL for (int i = 0; i < kTiles; ++i) {
          uint4 const upper = *as<uint4>(of_half + i * kRows * kChunk), lower = *as<uint4>(of_half + (i * kRows + kHalf) * kChunk);
          uint32_t const first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
          UNROLL for (int column = 0; column < kColumns; ++column) {
            multiply(sums[i][column], first, x[column].x, x[column].y);
            multiply(sums[i][column], second, x[column].z, x[column].w);
          }
        }
      }
      if (++stage == kStages) stage = 0;
      __syncwarp();
    }
    UNROLL for (int i = 0; i < kTiles; ++i)
      UNROLL for (int column = 0; column < kColumns; ++column)
        parts[((warp * kTiles + i) * kColumns + column) * 32 + lane] = *as<float4>(sums[i][column]);
    __syncthreads();
    for (int i = threadIdx.x; i < kTiles * kColumns * 32; i += 32 * kWarps) {
      float total[4] = {};
      UNROLL for (int w = 0; w < kWarps; ++w) {
        float4 const part = parts[w * kTiles * kColumns * 32 + i];
        total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
      }
      int const of_part = tile + i / (32 * kColumns), token = i / 32 % kColumns * 8 + lane % 4 * 2;
      if (of_part >= num_tiles) continue;
      UNROLL for (int j = 0; j < (kGated ? 2 : 4); ++j) {
        if (token + j % 2 >= params.num_tokens) continue;
        int64_t const place = int64_t(token + j % 2) * params.num_out + of_part * kTileRows + lane / 4 + j / 2 * kHalf;
        float const value = kGated ? silu(total[j]) * total[j + 2] : total[j];
        if (params.is_float) as<float>(params.out)[place] = value;
        else put(as<BFloat16>(params.out) + place, value, params.adds);
      }
    }
    __syncthreads();
  }
}

template <int kTiles, int kColumns, bool kGated>
void launch(Params const& params, int num_blocks, DLDevice device) {
  using Stages = Ring<kTiles, kColumns, kGated>;
  int const num_groups = (params.num_out / Stages::kTileRows + kTiles - 1) / kTiles;
  int const num_bytes = kWarps * Stages::kStages * Stages::kBytes + Stages::kParts;
  launch_early(multiply_rows<kTiles, kColumns, kGated>, params, std::min(num_groups, num_blocks), 32 * kWarps, num_bytes, device);
}

// As many tiles at once as need the fewest rounds of them.
template <int kColumns, bool kGated>
void launch(Params const& params, DLDevice device) {
  int const num_tiles = params.num_out / (kGated ? kHalf : kRows), num_blocks = num_multiprocessors(device);
  auto rounds = [&](int tiles) { return (num_tiles + tiles * num_blocks - 1) / (tiles * num_blocks) * tiles; };
  auto const run = rounds(3) <= std::min(rounds(1), rounds(2)) ? launch<3, kColumns, kGated>
                   : rounds(2) <= rounds(1)                    ? launch<2, kColumns, kGated>
                                                               : launch<1, kColumns, kGated>;
  run(params, num_blocks, device);
}

// x (T, K), weight (N, K), out (T, N), or (T, N / 2) if gated, in float32 or bfloat16. At most kMostTokens; K is a multiple of 64, N of 16.
void run(View x, View weight, View out, bool is_gated, bool adds) {
  Params params{};
  params.x = bytes_of(x, false), params.weight = bytes_of(weight, false), params.is_float = is_float(out), params.adds = adds;
  params.out = bytes_of(out, params.is_float);
  params.num_tokens = int(out.size(0)), params.num_out = int(out.size(1)), params.width = int(x.size(1) * sizeof(BFloat16));
  TVM_FFI_ICHECK(params.num_tokens > 0 && params.num_tokens <= kMostTokens && x.size(0) == out.size(0) && x.size(1) == weight.size(1));
  TVM_FFI_ICHECK(params.width % kChunk == 0 && weight.size(0) % kRows == 0 && weight.size(0) == params.num_out * (is_gated ? 2 : 1));
  auto const launch_columns = is_gated ? (params.num_tokens <= 8 ? launch<1, true> : launch<2, true>)
                                       : (params.num_tokens <= 8 ? launch<1, false> : launch<2, false>);
  launch_columns(params, x.device());
}

}  // namespace few_rows

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, few_rows::run);
