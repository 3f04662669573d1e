// Products of up to 64 tokens with a matrix in bfloat16, also fused with SwiGLU, or in block-scaled float8, for Hopper. Called by `few_rows.py`.
//
// Memory-bound: a thread copies the matrix (TMA) into stages, the first ones before the preceding kernel has finished, another one the tokens. A
// block occupies a multiprocessor and has a tile of kPieces x 16 rows of one split of the columns at a time. A warp group multiplies the even chunks
// of 128 bytes of columns, another one the odd chunks; their sums are added at the end of a tile:
//
//   tokens (64, 32 bytes) x W (up to 96 rows, 32 bytes) -> (64, 96): four tensor core instructions for a chunk
//
// They run while the sums of the last chunk are scaled (float8). If gated, a piece has 8 rows of the gate, then the same 8 of the up projection,
// whose sums the same threads have. Rows of shared memory have the 128-byte swizzle. Results of missing tokens are not stored.
// Products also read what follows the tokens, and their sums are not used.
//
// Compiled with `-Xptxas -v` it must have no message C7510 or C7514 (serialized products), which a call or a divergent loop would cause.

#include <cutlass/arch/barrier.h>
#include <cutlass/cuda_host_adapter.hpp>

#include <algorithm>
#include <array>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "hopper_launch.cuh"

namespace few_rows {

using namespace hopper;
using namespace cute::SM90;

constexpr int kTokens = 64, kRows = 16, kHalf = kRows / 2;  // tokens; rows of a piece
constexpr int kChunk = 128;  // bytes of a row of shared memory; rows or columns with one scale
constexpr int kGroups = 2, kThreads = 128, kMultiplying = kGroups * kThreads, kCopying = 64;  // threads
constexpr int kMostScales = 1024;  // of W that a block needs; the published sizes need up to 400
constexpr int kMemory = 216 << 10, kMostStages = 16;  // bytes; the rest of a multiprocessor is for blocks of other kernels
constexpr int kMostEarly = 16;  // tokens; with more, an early start of the next kernel made the products of a layer slower

struct Params {
  CUtensorMap x, weight;  // (T, width), and (pieces, 2, 8, width) bytes
  float const* x_scales;  // (width / 128, x_stride)
  float const* scales;  // (num_scales, stride)
  void* out;  // (splits, T, num_out) in float32 or bfloat16
  int num_tokens, num_out, num_tiles, num_chunks;  // chunks of a split
  int num_stages, stage_bytes;  // a stage: a chunk of the rows of W, then of the tokens
  int x_stride, num_scales, stride;
  bool is_float, is_gated;
};

template <bool kFloat8, int>
struct Atom;
#define ATOM(pieces, rows) \
  template <> \
  struct Atom<true, pieces> : GMMA::MMA_64x##rows##x32_F32E4M3E4M3_SS_TN<> {}; \
  template <> \
  struct Atom<false, pieces> : GMMA::MMA_64x##rows##x16_F32BF16BF16_SS<GMMA::Major::K, GMMA::Major::K> {};
ATOM(1, 16)
ATOM(2, 32)
ATOM(4, 64)
ATOM(6, 96)
#undef ATOM

template <bool kFloat8, int kN, int... I>
DEVICE void multiply_async(float (&c)[kN * 8], uint64_t x, uint64_t w, bool adds, std::integer_sequence<int, I...>) {
  Atom<kFloat8, kN>::fma(x, w, c[I]..., adds ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero);
}

// c (64, 16 n) = x (64, 128 bytes) w (16 n, 128 bytes)', or += it.
template <bool kFloat8, int kN>
DEVICE void multiply_chunk(float (&c)[kN * 8], uint64_t x, uint64_t w) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  UNROLL for (int step = 0; step < 4; ++step)
    multiply_async<kFloat8, kN>(c, x + (step * 32 >> 4), w + (step * 32 >> 4), !kFloat8 || step > 0, std::make_integer_sequence<int, kN * 8>());
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kLeft chunks are being multiplied; `c` has sums of another one.
template <int kLeft, int kCount>
DEVICE void wait_for_products(float (&c)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
  UNROLL for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// Describes rows in shared memory.
DEVICE uint64_t matrix_at(unsigned char const* place) {
  return shared_address(place) >> 4 | uint64_t(1) << 16 | uint64_t(8 * kChunk >> 4) << 32 | uint64_t(1) << 62;
}

// Tokens that are copied: whole patterns of the swizzle.
constexpr int padded(int num_tokens) { return (num_tokens + 7) / 8 * 8; }

// Shared memory of a block: stages, then their tokens' scales, then sums that a group adds to the other one's.
template <int kPieces>
struct Layout {
  static constexpr int kWeightBytes = kPieces * kRows * kChunk, kScaleBytes = kTokens * int(sizeof(float));  // of a stage
  static constexpr int kParts = std::max(kPieces * 8 * kThreads * int(sizeof(float)), kTokens * kChunk);  // the latter is read as missing tokens
  static constexpr int kAtOnce = kPieces == 3 ? 4 : kPieces == 5 ? 6 : kPieces;  // pieces of an instruction, the last one without use
};

// Stage of a chunk, and the parity of its use.
struct Place {
  int const num_stages;
  int stage, phase = 0;

  DEVICE void advance(int by) {
    if ((stage += by) >= num_stages) stage -= num_stages, phase ^= 1;
  }
};

template <bool kFloat8, int kPieces>
__global__ void __launch_bounds__(kMultiplying + kCopying, 1) multiply_rows(Params const __grid_constant__ params) {
  using L = Layout<kPieces>;
  constexpr int kSums = L::kAtOnce * 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  __shared__ float scales[kFloat8 ? kMostScales : 1];  // (tiles, 2, chunks)
  int const thread = threadIdx.x % kThreads, lane = thread % 32, group = __shfl_sync(~0u, threadIdx.x / kThreads, 0);  // known to be uniform
  int const num_chunks = params.num_chunks, first = int(blockIdx.y) * num_chunks, step = int(gridDim.x);
  int const num_stages = params.num_stages, stage_bytes = params.stage_bytes;
  float* const x_scales = as<float>(memory + num_stages * stage_bytes);
  if (threadIdx.x == kMultiplying) {
    for (int i = 0; i < num_stages; ++i) cute::initialize_barrier(full[i], kCopying / 32), cute::initialize_barrier(empty[i], kThreads / 32);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (group == kGroups) {
    if (lane > 0) return;
    bool const is_weights = thread == 0;
    int const scale_bytes = kFloat8 ? (params.num_tokens + 3) / 4 * 16 : 0;
    uint32_t const num_bytes = is_weights ? L::kWeightBytes : stage_bytes - L::kWeightBytes + scale_bytes;
    if (!is_weights) cute::prefetch_tma_descriptor(&params.x), wait_for_preceding_kernel();
    Place place{num_stages, 0};
    int copied = 0;
    for (int tile = blockIdx.x; tile < params.num_tiles; tile += step)
      for (int chunk = first; chunk < first + num_chunks; ++chunk, place.advance(1)) {
        if (++copied > num_stages) cute::wait_barrier(empty[place.stage], place.phase ^ 1);
        uint64_t* const barrier = &full[place.stage];
        unsigned char* const to = memory + place.stage * stage_bytes;
        cute::set_barrier_transaction_bytes(*barrier, num_bytes);
        if (is_weights) {
          auto const once = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
          cute::SM90_TMA_LOAD_4D::copy(&params.weight, barrier, once, to, chunk * kChunk, 0, 0, tile * kPieces);
        } else {
          auto const often = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
          cute::SM90_TMA_LOAD_2D::copy(&params.x, barrier, often, to + L::kWeightBytes, chunk * kChunk, 0);
          float const* const of_chunk = params.x_scales + int64_t(chunk) * params.x_stride;
          if (kFloat8) cute::SM90_BULK_COPY_G2S::copy(of_chunk, barrier, x_scales + place.stage * kTokens, scale_bytes);
        }
      }
    if (is_weights && params.num_tokens <= kMostEarly) start();  // when all weights are asked for; a next kernel relies on the preceding one's end
    return;
  }
  auto wait_for_groups = [] { asm volatile("bar.sync 1, %0;" ::"n"(kMultiplying) : "memory"); };
  if (kFloat8) {
    for (int i = threadIdx.x; i < (params.num_tiles + step - 1) / step * 2 * num_chunks; i += kMultiplying) {
      int const tile = int(blockIdx.x) + i / num_chunks / 2 * step, row = tile * kPieces * kRows / kChunk + i / num_chunks % 2;
      if (row < params.num_scales) scales[i] = params.scales[int64_t(row) * params.stride + first + i % num_chunks];
    }
    wait_for_groups();
  }
  int const token = thread / 32 * 16 + lane / 4;  // of results
  float* const parts = x_scales + num_stages * kTokens;
  float const* row_scales = scales;
  Place place{num_stages, group};
  for (int tile = blockIdx.x, done = 0; tile < params.num_tiles; tile += step, done += num_chunks, row_scales += 2 * num_chunks) {
    int const first_row = tile * kPieces * kRows;
    float totals[kSums] = {}, sums[2][kFloat8 ? kSums : 1], x_scale[2][2], row_scale[2][2];
    auto add_scaled = [&](int turn) {
      UNROLL for (int piece = 0; piece < kPieces; ++piece) {
        float const scale = first_row % kChunk + piece * kRows < kChunk ? row_scale[turn][0] : row_scale[turn][1];
        UNROLL for (int j = 0; j < 8; ++j) totals[piece * 8 + j] += sums[turn][piece * 8 + j] * (scale * x_scale[turn][j / 2 % 2]);
      }
    };
    auto release_last = [&] {
      if (lane == 0) cute::arrive_barrier(empty[place.stage < kGroups ? place.stage + num_stages - kGroups : place.stage - kGroups]);
    };
    // Multiplies a chunk, the group's even or odd one, and completes the last one.
    auto multiply = [&](int chunk, auto of_turn, auto has_last) {
      constexpr int turn = of_turn();
      cute::wait_barrier(full[place.stage], place.phase);
      unsigned char const* const at = memory + place.stage * stage_bytes;
      if constexpr (kFloat8) {
        multiply_chunk<true, L::kAtOnce>(sums[turn], matrix_at(at + L::kWeightBytes), matrix_at(at));
        UNROLL for (int i = 0; i < 2; ++i) {
          x_scale[turn][i] = x_scales[place.stage * kTokens + token + i * 8];
          row_scale[turn][i] = row_scales[i * num_chunks + chunk];
        }
        if constexpr (has_last()) wait_for_products<1>(sums[1 - turn]), add_scaled(1 - turn);
      } else {
        multiply_chunk<false, L::kAtOnce>(totals, matrix_at(at + L::kWeightBytes), matrix_at(at));
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      }
      if (has_last()) release_last();
      place.advance(kGroups);
    };
    auto finish = [&](auto turn) {
      if constexpr (kFloat8) wait_for_products<0>(sums[turn()]), add_scaled(turn());
      else wait_for_products<0>(totals);
      release_last();
    };
    std::integral_constant<int, 0> const even{};
    std::integral_constant<int, 1> const odd{};
    if (int chunk = (group ^ done) & 1; chunk < num_chunks) {
      multiply(chunk, even, std::false_type());
      while (true) {  // the compiler must know which registers products use
        if ((chunk += kGroups) >= num_chunks) {
          finish(even);
          break;
        }
        multiply(chunk, odd, std::true_type());
        if ((chunk += kGroups) >= num_chunks) {
          finish(odd);
          break;
        }
        multiply(chunk, even, std::true_type());
      }
    }
    if (tile + step >= params.num_tiles) launch_dependents();
    // Each group adds the other group's sums to half of the pieces and stores them.
    auto part = [&](int piece, int j) -> float& { return parts[(piece * 8 + j) * kThreads + thread]; };
    wait_for_groups();
    UNROLL for (int piece = 0; piece < kPieces; ++piece)
      UNROLL for (int j = 0; j < 8; ++j)
        if (piece % kGroups != group) part(piece, j) = totals[piece * 8 + j];
    wait_for_groups();
    UNROLL for (int piece = 0; piece < kPieces; ++piece) {
      int const row = params.is_gated ? first_row / 2 + piece * kHalf : first_row + piece * kRows;
      if (piece % kGroups != group || row >= params.num_out) continue;
      float* const total = totals + piece * 8;
      UNROLL for (int j = 0; j < 8; ++j) total[j] += part(piece, j);
      if (params.is_gated)
        UNROLL for (int j = 0; j < 4; ++j) total[j] = silu(total[j]) * total[j + 4];
      UNROLL for (int j = 0; j < 8; j += 2) {
        int const of_token = token + j / 2 % 2 * 8;
        if (of_token >= params.num_tokens || (params.is_gated && j >= 4)) continue;
        int64_t const place = (int64_t(blockIdx.y) * params.num_tokens + of_token) * params.num_out + row + j / 4 * kHalf + lane % 4 * 2;
        if (params.is_float) *as<float2>(as<float>(params.out) + place) = {total[j], total[j + 1]};
        else *as<uint32_t>(as<BFloat16>(params.out) + place) = pack(total[j], total[j + 1]);
      }
    }
  }
}

// Describes a tensor of bytes for TMA, which copies a box. Values of the first dimension are contiguous. Reads outside the tensor give zeros.
template <size_t kDims>
CUtensorMap map_of(void const* values, std::array<int64_t, kDims> shape, std::array<int64_t, kDims> strides, std::array<int, kDims> box) {
  CUtensorMap map;
  cuuint64_t shapes[kDims], bytes[kDims];
  cuuint32_t boxes[kDims], steps[kDims];
  for (size_t i = 0; i < kDims; ++i) shapes[i] = shape[i], bytes[i] = strides[i], boxes[i] = box[i], steps[i] = 1;
  CUresult const status = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kDims, const_cast<void*>(values), shapes, bytes + 1, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);  // no promotion: 2 % faster
  TVM_FFI_ICHECK(status == CUDA_SUCCESS) << "few_rows: tensor map, error " << status;
  return map;
}

template <bool kFloat8, int kPieces>
void launch(Params& params, View weight, void const* values, int num_splits) {
  using L = Layout<kPieces>;
  int64_t const rows = weight.size(0), width = weight.size(1) * (kFloat8 ? 1 : sizeof(BFloat16));
  int64_t const half = params.is_gated ? rows / 2 : kHalf, piece = params.is_gated ? kHalf : kRows;  // distances in rows
  params.weight = map_of<4>(values, {width, kHalf, 2, rows / kRows}, {1, width, half * width, piece * width}, {kChunk, kHalf, 2, kPieces});
  params.num_tiles = int((rows / kRows + kPieces - 1) / kPieces);
  dim3 const grid(std::min(params.num_tiles, num_multiprocessors(weight.device()) / num_splits), num_splits);
  int const num_scales = (params.num_tiles + int(grid.x) - 1) / int(grid.x) * 2 * params.num_chunks;
  TVM_FFI_ICHECK(!kFloat8 || num_scales <= kMostScales) << "few_rows: a matrix with too many scales";
  params.stage_bytes = L::kWeightBytes + padded(params.num_tokens) * kChunk;
  int const with_scales = params.stage_bytes + L::kScaleBytes;
  params.num_stages = std::min(kMostStages, (kMemory - L::kParts) / with_scales) / kGroups * kGroups;  // each is of one group
  launch_early(multiply_rows<kFloat8, kPieces>, params, grid, kMultiplying + kCopying, params.num_stages * with_scales + L::kParts, weight.device());
}

template <bool kFloat8>
void launch_fastest(Params& params, View weight, void const* values, int num_splits) {
  constexpr std::array launches{launch<kFloat8, 1>, launch<kFloat8, 2>, launch<kFloat8, 3>,
                                launch<kFloat8, 4>, launch<kFloat8, 5>, launch<kFloat8, 6>};
  int const num_blocks = num_multiprocessors(weight.device()) / num_splits, num_pieces = int(weight.size(0)) / kRows;
  auto cost = [&](int pieces) {  // rows read per multiprocessor: of W twice, since tokens come from L2; and the overhead of a tile
    int const num_tiles = (num_pieces + pieces - 1) / pieces;
    return (num_tiles + num_blocks - 1) / num_blocks * (pieces * kRows * 2 + params.num_tokens + kTokens);
  };
  int best = 1;
  for (int pieces = 2; pieces <= int(launches.size()); ++pieces) best = cost(pieces) < cost(best) ? pieces : best;
  launches[best - 1](params, weight, values, num_splits);
}

// x (>= T, K), weight (N, K), out (splits, T, N), or (1, T, N / 2) if gated, in float32 or bfloat16. Of float8 values as bytes: x_scales
// (>= T, K / 128), column-major, scales (N / 128, >= K / 128).
void run(View x, Optional x_scales, View weight, Optional scales, View out, bool is_gated) {
  Params params{};
  bool const is_float8 = bool(scales);
  auto bytes = [&](View of) { return is_float8 ? static_cast<unsigned char*>(values_of(of)) : bytes_of(of, false); };
  int const num_splits = int(out.size(0)), width = int(x.size(1) * (is_float8 ? 1 : sizeof(BFloat16)));
  params.is_float = is_float(out), params.is_gated = is_gated, params.out = bytes_of(out, params.is_float);
  params.num_tokens = int(out.size(1)), params.num_out = int(out.size(2)), params.num_chunks = width / kChunk / num_splits;
  params.x_scales = values_of(x_scales, true), params.scales = values_of(scales);
  TVM_FFI_ICHECK(params.num_tokens > 0 && params.num_tokens <= kTokens && params.num_tokens <= x.size(0) && x.size(1) == weight.size(1));
  TVM_FFI_ICHECK(params.num_chunks * num_splits * kChunk == width && weight.size(0) == params.num_out * (is_gated ? 2 : 1));
  TVM_FFI_ICHECK(weight.size(0) % kRows == 0 && !(is_gated && is_float8));
  if (is_float8) {
    params.x_stride = int((*x_scales).stride(1)), params.num_scales = int((*scales).size(0)), params.stride = int((*scales).size(1));
    TVM_FFI_ICHECK((*x_scales).stride(0) == 1 && params.x_stride % 4 == 0 && params.num_scales * kChunk == params.num_out);
  }
  params.x = map_of<2>(bytes(x), {width, params.num_tokens}, {1, width}, {kChunk, padded(params.num_tokens)});
  (is_float8 ? launch_fastest<true> : launch_fastest<false>)(params, weight, bytes(weight), num_splits);
}

}  // namespace few_rows

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, few_rows::run);
