// Products of a single token with float8 matrices in scaled blocks of 128 x 128, for Hopper, fused with the norm and rounding before them and with SwiGLU
// and residual after them. Called by `float8.py`.
//
// Memory-bound if conversions are cheap: one instruction converts two values to float16, and tensor cores accumulate in float32, which is exact. A
// warp has 16 rows. A lane reads 16 bytes of row lane / 4 and of the row 8 below; it reads the token's values in the matching order:
//
//   W (16 rows, 16 values) x token (16 values, 8 times the same column) -> (16 rows, 8 times the same)
//
// Data that the preceding kernel does not write is prefetched before that kernel has finished. Earlier kernels are done: each waits for its predecessor.
//
// Large matrices take `multiply_token`, one block per multiprocessor with copies in shared memory. Experts and small matrices take
// `multiply_tiles`: its small blocks start while the preceding kernel still occupies some multiprocessors, and load all weights at once.

#include <algorithm>

#include "float8_token.cuh"

namespace float8 {

// A warp's chunks of a block's tiles in order: pipeline stages are being copied or multiplied.
template <bool kGated>
struct Ring {
  static constexpr int kTileRows = kGated ? kHalf : kRows, kLanes = kChunk / kCopied, kRowsAtOnce = 32 / kLanes;
  uint8_t const* from;  // the next chunk
  int64_t between;  // bytes between the two halves of a tile
  unsigned char* stages;
  int width, column, left, lane;  // column: of the next chunk; left: chunks
  int stage = 0;

  // Copies chunks `first` to `end` of a tile of `rows` and the following ones.
  DEVICE Ring(uint8_t const* rows, int64_t between, unsigned char* stages, int width, int first, int end, int lane)
      : between(between), stages(stages), width(width), left(end - first), lane(lane) {
    int const per_tile = chunks_of(width), tile = first / per_tile;
    column = (first - tile * per_tile) * kChunk;
    from = rows + int64_t(tile) * kTileRows * width + column;
    UNROLL for (int i = 0; i < kStages; ++i) fill();
  }

  DEVICE void fill() {
    if (left-- > 0) {
      int const row_of_lane = lane / kLanes, at = lane % kLanes * kCopied;
      uint8_t const* const source = from + int64_t(row_of_lane) * width + at;
      unsigned char* const to = stages + (stage * kRows + row_of_lane) * kPitch + at;
      if (column + at < width) {
        UNROLL for (int row = 0; row < kRows; row += kRowsAtOnce)
          copy_async(to + row * kPitch, source + int64_t(row) * width + (row < kHalf ? 0 : between));
      }
      column += kChunk, from += kChunk;
      if (column >= width) from += int64_t(kTileRows) * width - column, column = 0;
    }
    end_copies();
    stage = (stage + 1) % kStages;
  }
};

// Block i: the i-th share of the tiles of 16 rows. If gated, a tile has 8 rows of the gate and 8 of the up projection.
template <bool kGated>
__global__ void __launch_bounds__(32 * kWarps) multiply_token(Params const params) {
  constexpr int kTileRows = kGated ? kHalf : kRows, kFactors = kGated ? 2 : 1;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float sums[kWarps];
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Layout const layout(params.width);
  __half* const token = reinterpret_cast<__half*>(memory + kWarps * kStages * kRows * kPitch);
  unsigned char* const norm = reinterpret_cast<unsigned char*>(token + layout.padded);
  float* const units = reinterpret_cast<float*>(norm + layout.padded * params.norm_bytes);
  float* const scales = units + layout.groups;  // (factors, blocks of rows, groups)
  float* const parts = scales + kFactors * params.num_blocks * layout.groups;  // (tiles, warps, 16)
  int const num_tiles = params.num_out / kTileRows;
  int const first_tile = num_tiles * int(blockIdx.x) / int(gridDim.x), end_tile = num_tiles * (int(blockIdx.x) + 1) / int(gridDim.x);
  int const own_tiles = end_tile - first_tile, per_tile = chunks_of(params.width), num_chunks = own_tiles * per_tile;
  float* const before = parts + own_tiles * kWarps * kRows;  // (tiles, 16)
  auto share = [&](int of_warp) { return num_chunks * of_warp / kWarps; };
  int const norm_end = params.width * params.norm_bytes;
  for (int i = threadIdx.x * kCopied; i < norm_end; i += blockDim.x * kCopied) copy_async(norm + i, params.norm_weight + i);
  int const first_block = first_tile * kTileRows / kGroup, num_groups = params.width / kGroup;
  int const num_blocks = (end_tile * kTileRows - 1) / kGroup - first_block + 1;
  for (int i = threadIdx.x; i < kFactors * num_blocks * num_groups; i += blockDim.x) {
    int const group = i % num_groups, block = i / num_groups % num_blocks, factor = i / num_groups / num_blocks;
    int64_t const of_row = int64_t(factor) * params.num_out / kGroup + first_block + block;
    copy_float(scales + (factor * params.num_blocks + block) * layout.groups + group, params.scales + of_row * params.num_scales + group);
  }
  end_copies();
  int const first = share(warp), end = share(warp + 1);
  int64_t const between = kGated ? int64_t(params.num_out - kHalf) * params.width : 0;
  unsigned char* const stages = memory + warp * kStages * kRows * kPitch;
  Ring<kGated> ring(params.weight + int64_t(first_tile) * kTileRows * params.width, between, stages, params.width, first, end, lane);
  start();
  round_token<kWarps, kStages>(params, layout.padded, norm, token, units, sums);
  BFloat16* const out = params.out + first_tile * kTileRows;
  if (params.adds)
    for (int i = threadIdx.x; i < own_tiles * kTileRows; i += blockDim.x) before[i] = __bfloat162float(out[i]);
  wait_for_copies<kStages>();
  __syncthreads();
  float2 totals = {0.f, 0.f};
  for (int i = first, tile = first / per_tile, in_tile = first - tile * per_tile; i < end; ++i) {
    int const column = in_tile * kChunk;
    unsigned char const* const weights = stages + (ring.stage * kRows + lane / 4) * kPitch + lane % 4 * 16;
    float const* const upper_scales = scales + ((first_tile + tile) * kTileRows / kGroup - first_block) * layout.groups;
    float const* const lower_scales = upper_scales + (kGated ? params.num_blocks * layout.groups : 0);
    __half const* const inputs = token + column + lane % 4 * 16;
    wait_for_copies<kStages - 1>();
    __syncwarp();
    UNROLL for (int j = 0; j < kChunk / kGroup; ++j) {
      if (column + j * kGroup >= params.width) break;
      float c[4]{}, d[4]{};
      UNROLL for (int k = 0; k < kGroup / kStep; ++k) {
        int const at = j * kGroup + k * kStep;
        multiply_step(c, d, *as<uint4>(weights + at), *as<uint4>(weights + at + kHalf * kPitch), inputs + at);
      }
      int const group = column / kGroup + j;
      totals.x += (c[0] + d[0]) * (units[group] * upper_scales[group]);
      totals.y += (c[2] + d[2]) * (units[group] * lower_scales[group]);
    }
    __syncwarp();
    ring.fill();
    if (++in_tile == per_tile || i + 1 == end) {
      float* const place = parts + (tile * kWarps + warp) * kRows + lane / 4;
      if (lane % 4 == 0) place[0] = totals.x, place[kHalf] = totals.y;
      totals = {0.f, 0.f}, in_tile = 0, ++tile;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < own_tiles * kTileRows; i += blockDim.x) {
    int const own = i / kTileRows, from = own * per_tile, to = from + per_tile;
    float result = 0.f, other = 0.f;
    for (int w = 0; w < kWarps; ++w) {
      if (max(share(w), from) >= min(share(w + 1), to)) continue;
      float const* const place = parts + (own * kWarps + w) * kRows + i % kTileRows;
      result += place[0];
      if (kGated) other += place[kHalf];
    }
    if (kGated) result = silu(result) * other;
    out[i] = __float2bfloat16_rn(params.adds ? result + before[i] : result);
  }
}

// Steps `first` to `end` of a warp's 16 rows; kPrefetched steps are in registers or being loaded.
template <int kPrefetched>
struct Tile {
  uint8_t const *upper, *lower;  // the lane's first 16 bytes of its two rows
  int first, end;  // steps
  uint4 a[kPrefetched], b[kPrefetched];

  DEVICE void load(int slot, int step) {
    if (step < end) a[slot] = load_weights(upper + step * kStep), b[slot] = load_weights(lower + step * kStep);
  }

  // Row i of the lower half is `below` rows after row i of the upper half.
  DEVICE void begin(uint8_t const* rows, int64_t below, int width, int first_step, int end_step, int lane) {
    first = first_step, end = end_step, upper = rows + int64_t(lane / 4) * width + lane % 4 * 16, lower = upper + below * width;
    UNROLL for (int i = 0; i < kPrefetched; ++i) load(i, first + i);
  }

  // Computes the two rows' products. `units`: scales of the token's groups; the others: scales of the rows' blocks.
  DEVICE float2 multiply(__half const* token, float const* units, float const* upper_scales, float const* lower_scales, int lane) {
    float2 totals = {0.f, 0.f};
    for (int start = first; start < end; start += kPrefetched) {
      UNROLL for (int i = 0; i < kPrefetched; ++i) {
        int const step = start + i;
        if (step >= end) break;
        float c[4]{}, d[4]{};
        multiply_step(c, d, a[i], b[i], token + step * kStep + lane % 4 * 16);
        load(i, step + kPrefetched);
        int const group = step / (kGroup / kStep);
        totals.x += (c[0] + d[0]) * (units[group] * upper_scales[group]);
        totals.y += (c[2] + d[2]) * (units[group] * lower_scales[group]);
      }
    }
    return totals;
  }
};

// Partial sums of 16 rows by the warps of a block.
template <int kNumWarps>
struct Parts {
  float of_warp[kNumWarps][kRows];

  DEVICE void put(float2 totals, int warp, int lane) {
    if (lane % 4 == 0) of_warp[warp][lane / 4] = totals.x, of_warp[warp][lane / 4 + kHalf] = totals.y;
  }

  DEVICE float sum(int row, int first_warp, int num_warps) const {
    float sum = 0.f;
    for (int warp = first_warp; warp < first_warp + num_warps; ++warp) sum += of_warp[warp][row];
    return sum;
  }
};

// Block (i, k): kNumWarps / kSplits tiles of 16 rows of the k-th chosen expert's matrix, or of the only matrix; kSplits warps share each tile.
// If gated, tiles of 8 rows each of the gate and of the up projection.
template <int kNumWarps, int kSplits, bool kGated>
__global__ void __launch_bounds__(32 * kNumWarps, kNumWarps == 4 ? kBlocks : 2) multiply_tiles(Params const params) {
  constexpr int kTiles = kNumWarps / kSplits, kTileRows = kGated ? kHalf : kRows;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Parts<kNumWarps> parts;
  __shared__ float sums[kNumWarps];
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile_of_warp = warp / kSplits, split = warp % kSplits;
  Layout const layout(params.width);
  __half* const token = as<__half>(memory);
  unsigned char* const norm = as<unsigned char>(token + layout.padded);
  float* const units = as<float>(norm + layout.padded * params.norm_bytes);
  float* const own = units + layout.groups * (1 + 2 * tile_of_warp);  // scales of the two halves' blocks
  int const num_steps = params.width / kStep, below = kGated ? params.num_out : kHalf, norm_end = params.width * params.norm_bytes;
  int64_t row = (int64_t(blockIdx.x) * kTiles + tile_of_warp) * kTileRows;
  for (int i = threadIdx.x * kCopied; i < norm_end; i += blockDim.x * kCopied) copy_async(norm + i, params.norm_weight + i);
  // Smaller grids load all weights at once; tiles of larger ones leave registers for the next kernel.
  Tile<kSplits == kNumWarps ? 8 : 4> tile;
  auto fetch = [&] {
    tile.begin(params.weight + row * params.width, below, params.width, num_steps * split / kSplits, num_steps * (split + 1) / kSplits, lane);
    for (int i = split * 32 + lane; i < 2 * layout.groups; i += 32 * kSplits) {
      int const group = i % layout.groups;
      if (group * kGroup >= params.width) continue;
      copy_float(own + i, params.scales + (row + (i < layout.groups ? 0 : below)) / kGroup * params.num_scales + group);
    }
    end_copies();
  };
  if (!params.chosen) fetch(), start();
  round_token<kNumWarps, 0>(params, layout.padded, norm, token, units, sums);
  if (params.chosen) {
    start();
    int const expert = __ldcg(params.chosen + blockIdx.y);
    if (expert < 0) return;
    row += int64_t(expert) * (kGated ? 2 : 1) * params.num_out;
    fetch();
  }
  wait_for_copies<0>();
  __syncthreads();
  parts.put(tile.multiply(token, units, own, own + layout.groups, lane), warp, lane);
  __syncthreads();
  int const i = threadIdx.x, of_tile = i / kTileRows, in_tile = i % kTileRows;
  if (of_tile >= kTiles) return;
  float result = parts.sum(in_tile, of_tile * kSplits, kSplits);
  if (kGated) result = silu(result) * parts.sum(in_tile + kHalf, of_tile * kSplits, kSplits);
  put(params.out + int64_t(blockIdx.y) * params.num_out + blockIdx.x * kTiles * kTileRows + i, result, params.adds);
}

// Block i: values from 16 i on of the sum over all chosen experts, one warp per expert: x (chosen, width).
__global__ void __launch_bounds__(32 * kMaxChosen) sum_experts(Params const params) {
  constexpr int kPairs = 3;  // pairs of groups that are rounded at once
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Parts<kMaxChosen> parts;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_steps = params.width / kStep, num_groups = params.width / kGroup;
  int64_t row = int64_t(blockIdx.x) * kRows;
  Layout const layout(params.width);
  __half* const token = as<__half>(memory + warp * layout.num_bytes(1, 0));
  float* const units = as<float>(token + layout.padded);
  float* const scales = units + layout.groups;
  int const expert = __ldcg(params.chosen + warp);
  float const share = __bfloat162float(params.shares[warp]);
  row += int64_t(max(expert, 0)) * params.num_out;
  Tile<12> tile;
  tile.begin(params.weight + row * params.width, kHalf, params.width, 0, expert < 0 ? 0 : num_steps, lane);
  for (int group = lane; group < num_groups; group += 32) copy_float(scales + group, params.scales + row / kGroup * params.num_scales + group);
  end_copies();
  start();
  BFloat16* const place = params.out + blockIdx.x * kRows + threadIdx.x % kRows;
  float const before = params.adds ? __bfloat162float(*place) : 0.f;
  if (expert >= 0) {
    BFloat16 const* const x = params.x + int64_t(warp) * params.width;
    for (int start = 0; start < num_groups; start += 2 * kPairs) {
      uint4 pieces[kPairs];
      UNROLL for (int i = 0; i < kPairs; ++i) {
        int const group = start + 2 * i + lane / 16;
        if (group < num_groups) pieces[i] = load_new<uint4>(x + group * kGroup + lane % 16 * kPiece);
        else pieces[i] = uint4{0, 0, 0, 0};
      }
      UNROLL for (int i = 0; i < kPairs; ++i) {
        if (start + 2 * i >= num_groups) break;
        int const group = start + 2 * i + lane / 16;
        float values[kPiece];
        to_floats(pieces[i], values);
        store_rounded(values, token + group * kGroup + lane % 16 * kPiece, units + group, lane);
      }
    }
  }
  wait_for_copies<0>();
  __syncwarp();
  float2 totals = tile.multiply(token, units, scales, scales, lane);
  totals.x *= share, totals.y *= share;
  if (expert < 0) totals = {0.f, 0.f};  // its share is undefined
  parts.put(totals, warp, lane);
  __syncthreads();
  if (threadIdx.x < kRows) *place = __float2bfloat16_rn(before + parts.sum(threadIdx.x, 0, blockDim.x / 32));
}

Params params_of(View x, View weight, View scales, Optional chosen, View out, bool adds) {
  Params params{};
  params.x = values_of(x), params.weight = values_of(weight), params.scales = values_of(scales), params.chosen = values_of(chosen);
  params.width = int(x.size(1)), params.num_out = int(out.size(1)), params.num_scales = int(scales.size(1));
  params.out = values_of(out), params.adds = adds;
  TVM_FFI_ICHECK(params.width % kGroup == 0 && params.num_out % kGroup == 0 && weight.size(1) == params.width);
  return params;
}

// One block per multiprocessor.
template <bool kGated>
void launch_token(Params params, int num_multiprocessors, DLDevice device) {
  constexpr int kTileRows = kGated ? kHalf : kRows;
  int const num_tiles = params.num_out / kTileRows, num_blocks = std::min(num_tiles, num_multiprocessors);
  int const most = (num_tiles + num_blocks - 1) / num_blocks;
  params.num_blocks = most == 1 ? 1 : (most * kTileRows + kGroup - 2) / kGroup + 1;
  size_t const num_bytes = kWarps * kStages * kRows * kPitch + Layout(params.width).num_bytes((kGated ? 2 : 1) * params.num_blocks, params.norm_bytes) +
                           most * kRows * (kWarps + 1) * sizeof(float);
  launch_early(multiply_token<kGated>, params, num_blocks, 32 * kWarps, num_bytes, device);
}

template <int kNumWarps, int kSplits, bool kGated>
void launch_tiles(Params const& params, int num_experts, DLDevice device) {
  constexpr int kTiles = kNumWarps / kSplits;
  dim3 const grid(params.num_out / (kTiles * (kGated ? kHalf : kRows)), num_experts);
  size_t const num_bytes = Layout(params.width).num_bytes(2 * kTiles, params.norm_bytes);
  launch_early(multiply_tiles<kNumWarps, kSplits, kGated>, params, grid, 32 * kNumWarps, num_bytes, device);
}

// A matrix is small if the stages of `multiply_token` hold all of it. Grids of `multiply_tiles` have enough blocks for all multiprocessors, but
// no more than can run at once, since each block rounds the token.
template <bool kGated>
void launch(Params const& params, int num_experts, DLDevice device) {
  int const count = num_multiprocessors(device), num_tiles = params.num_out / (kGated ? kHalf : kRows) * num_experts, most = kBlocks * count;
  bool const is_small = int64_t(num_tiles) * params.width <= int64_t(count) * kWarps * kStages * kChunk;
  if (!params.chosen && !is_small) return launch_token<kGated>(params, count, device);
  auto const run = num_tiles <= count      ? launch_tiles<kMaxWarps, kMaxWarps, kGated>
                   : num_tiles <= most     ? launch_tiles<4, 4, kGated>
                   : num_tiles <= 2 * most ? launch_tiles<4, 2, kGated>
                                           : launch_tiles<4, 1, kGated>;
  run(params, num_experts, device);
}

// x (1, K), weight (N, K), or (experts * N, K) with N of the result (chosen, N), twice as many rows if gated. norm_weight (K).
void run(View x, Optional norm_weight, double eps, View weight, View scales, Optional chosen, View out, bool is_gated, bool adds) {
  Params params = params_of(x, weight, scales, chosen, out, adds);
  set_norm(params, norm_weight, eps);
  (is_gated ? launch<true> : launch<false>)(params, int(out.size(0)), x.device());
}

// x (chosen, K), weight (experts * N, K), shares (chosen), out (1, N).
void run_sum(View x, View weight, View scales, View chosen, View shares, View out, bool adds) {
  Params params = params_of(x, weight, scales, chosen, out, adds);
  params.shares = values_of(shares);
  int const num_chosen = int(chosen.size(0));
  TVM_FFI_ICHECK(num_chosen <= kMaxChosen) << "float8: " << num_chosen << " experts of a token";
  launch_early(sum_experts, params, params.num_out / kRows, 32 * num_chosen, num_chosen * Layout(params.width).num_bytes(1, 0), x.device());
}

}  // namespace float8

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, float8::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_sum, float8::run_sum);
