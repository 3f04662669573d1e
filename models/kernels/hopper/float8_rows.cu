// Products of up to 64 tokens with a block-scaled matrix in float8, for Hopper. Called by `float8.py`.
//
// Memory-bound: the matrix is read once by copies that are always in flight, the first before the preceding kernel has finished. A block, alone
// on its multiprocessor, has tiles of kPieces x 16 rows and one of the parts of the columns: the more rows, the fewer blocks read the tokens.
// Its two warp groups share the rows of a tile, or, if these are few, take turns with 128 columns and add their sums at the end:
//
//   tokens (64, 32 columns) from registers x W (up to 96 rows, 32 columns) -> (64, 96): four such products of tensor cores, then the scales
//
// Rows of shared memory have the 128-byte swizzle. Those of missing tokens keep what they are.

#include <algorithm>
#include <array>
#include <utility>

#include <cute/arch/mma_sm90_gmma.hpp>

#include "hopper_launch.cuh"

namespace float8_rows {

using namespace hopper;

constexpr int kTokens = 64, kRows = 16;  // of a product; of a piece
constexpr int kBlock = 128;  // rows or columns with one scale; bytes of a row of shared memory
constexpr int kGroups = 2, kThreads = 128;  // threads of a group
constexpr int kCopied = 16, kLanes = kBlock / kCopied, kRowsAtOnce = kGroups * kThreads / kLanes;  // bytes that a thread copies at once
constexpr int kMemory = 226 << 10, kMostStages = 12;

struct Params {
  unsigned char const* x;  // (T, width)
  float const* x_scales;  // (width / 128, x_stride)
  unsigned char const* weight;  // (num_out, width)
  float const* scales;  // (num_out / 128, stride)
  void* out;  // (parts, T, num_out) in float32 or bfloat16
  int num_tokens, width, num_out, num_blocks, x_stride, stride;  // blocks of a part's columns
  bool is_float;
};

DEVICE void copy_word(uint32_t to, void const* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory"); }

// Four 8 x 16-byte matrices, as wgmma expects a (64, 32) operand of float8 in registers.
DEVICE void load_matrices(uint32_t (&x)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

template <int>
struct Product;
template <>
struct Product<1> : cute::SM90::GMMA::MMA_64x16x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Product<2> : cute::SM90::GMMA::MMA_64x32x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Product<4> : cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Product<6> : cute::SM90::GMMA::MMA_64x96x32_F32E4M3E4M3_RS_TN<> {};

// c (64, 16 kN) = x (64, 32) w (16 kN, 32)', or += it.
template <int kN, int... I>
DEVICE void multiply_async(float (&c)[kN * 8], uint32_t const (&x)[4], uint64_t w, bool adds, std::integer_sequence<int, I...>) {
  Product<kN>::fma(x[0], x[1], x[2], x[3], w, c[I]..., adds ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// Stages, each of one block of columns for each group that has its own: those columns of W's rows, then of the tokens, then the scales of tokens
// and of up to four blocks of rows.
template <int kPieces>
struct Ring {
  static constexpr bool kTurns = kPieces <= 4;  // of the groups
  static constexpr int kColumns = kTurns ? kGroups : 1;  // blocks of a stage
  static constexpr int kOwn = kTurns ? kPieces : (kPieces + 1) / 2;  // pieces of a group
  static constexpr int kAtOnce = kOwn <= 2 ? kOwn : kOwn <= 4 || kOwn == 8 ? 4 : 6;  // pieces of a product, some of which may be no weights
  static constexpr int kAtTokens = kPieces * kRows * kBlock, kAtScales = kAtTokens + kTokens * kBlock, kBytes = kAtScales + 1024;
  static constexpr int kSums = kTurns ? kOwn * 8 * kThreads * int(sizeof(float)) : 0;
  static constexpr int kStages = std::min(kMostStages, (kMemory - kSums) / (kColumns * kBytes));
  static_assert(kStages >= 3);
  Params const& params;
  uint32_t address;
  int row, column, end;  // of this thread's bytes; of the part

  DEVICE uint32_t at(int stage, int of_columns) const { return address + (stage * kColumns + of_columns) * kBytes; }

  DEVICE uint32_t place(int stage, int of_columns) const { return at(stage, of_columns) + row * kBlock + (column ^ row % 8 * kCopied); }

  DEVICE void copy_weights(int stage, int tile, int block) const {
    int const first = tile * kPieces * kRows, of_rows = first / kBlock + int(threadIdx.x);
    UNROLL for (int i = 0; i < kColumns; ++i) {
      if (block + i >= end) break;
      unsigned char const* const from = params.weight + int64_t(first + row) * params.width + (block + i) * kBlock + column;
      UNROLL for (int next = 0; next < kPieces * kRows; next += kRowsAtOnce)
        if (next + row < kPieces * kRows && first + next + row < params.num_out)
          copy_async(place(stage, i) + next * kBlock, from + int64_t(next) * params.width);
      if (threadIdx.x < 4 && of_rows * kBlock < params.num_out)
        copy_word(at(stage, i) + kAtScales + (kTokens + threadIdx.x) * 4, params.scales + int64_t(of_rows) * params.stride + block + i);
    }
  }

  DEVICE void copy_tokens(int stage, int block) const {
    UNROLL for (int i = 0; i < kColumns; ++i) {
      if (block + i >= end) break;
      unsigned char const* const from = params.x + int64_t(row) * params.width + (block + i) * kBlock + column;
      UNROLL for (int next = 0; next < kTokens; next += kRowsAtOnce)
        if (next + row < params.num_tokens) copy_async(place(stage, i) + kAtTokens + next * kBlock, from + int64_t(next) * params.width);
      if (threadIdx.x * 4 < params.num_tokens)
        copy_async(at(stage, i) + kAtScales + threadIdx.x * kCopied, params.x_scales + int64_t(block + i) * params.x_stride + threadIdx.x * 4);
    }
  }
};

template <int kPieces>
__global__ void __launch_bounds__(kGroups* kThreads, 1) multiply_rows(Params const params) {
  using Stages = Ring<kPieces>;
  constexpr int kStages = Stages::kStages, kOwn = Stages::kOwn, kAtOnce = Stages::kAtOnce, kColumns = Stages::kColumns;
  extern __shared__ __align__(1024) unsigned char memory[];
  int const group = threadIdx.x / kThreads, thread = threadIdx.x % kThreads, lane = thread % 32;
  int const own_columns = Stages::kTurns ? group : 0, own_pieces = Stages::kTurns ? 0 : group * kOwn;
  int const num_tiles = (params.num_out + kPieces * kRows - 1) / (kPieces * kRows);
  int const first = int(blockIdx.y) * params.num_blocks, end = first + params.num_blocks;
  Stages const ring{params, shared_address(memory), int(threadIdx.x) / kLanes, int(threadIdx.x) % kLanes * kCopied, end};
  int next_tile = int(blockIdx.x), next_block = first;
  auto advance = [&] {
    if ((next_block += kColumns) >= end) next_block = first, next_tile += int(gridDim.x);
  };
  for (int i = 0; i + 1 < kStages; ++i, advance())
    if (next_tile < num_tiles) ring.copy_weights(i, next_tile, next_block);
  start();
  for (int i = 0, block = first; i + 1 < kStages; ++i, block = block + kColumns < end ? block + kColumns : first) ring.copy_tokens(i, block), end_copies();
  int const token = thread / 32 * 16 + lane / 4, row = thread / 32 * 16 + lane % 16;  // of results; of `load_matrices`
  int stage = 0;
  for (int tile = int(blockIdx.x); tile < num_tiles; tile += int(gridDim.x)) {
    float totals[kOwn][8] = {};
    int const first_row = tile * kPieces * kRows;
    for (int block = first; block < end; block += kColumns) {
      wait_for_copies<kStages - 2>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      int const free = (stage ? stage : kStages) - 1;
      if (next_tile < num_tiles) ring.copy_weights(free, next_tile, next_block), ring.copy_tokens(free, next_block);
      advance();
      end_copies();
      int const offset = (stage * kColumns + own_columns) * Stages::kBytes;
      if (++stage == kStages) stage = 0;
      if (block + own_columns >= end) continue;
      uint32_t const own = ring.address + offset;
      uint32_t x[4][4];
      UNROLL for (int step = 0; step < 4; ++step)
        load_matrices(x[step], own + Stages::kAtTokens + row * kBlock + ((step * 2 + lane / 16) ^ row % 8) * kCopied);
      float const* const scales = as<float>(memory + offset + Stages::kAtScales);
      float const upper = scales[token], lower = scales[token + 8];
      uint64_t const matrix = ((own + own_pieces * kRows * kBlock) >> 4) | uint64_t(1) << 16 | uint64_t(8 * kBlock >> 4) << 32 | uint64_t(1) << 62;
      UNROLL for (int piece = 0; piece < kOwn; piece += kAtOnce) {
        float sums[kAtOnce * 8];
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        UNROLL for (int step = 0; step < 4; ++step)
          multiply_async<kAtOnce>(sums, x[step], matrix + ((piece * kRows * kBlock + step * 32) >> 4), step > 0, std::make_integer_sequence<int, kAtOnce * 8>());
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        UNROLL for (int i = 0; i < kAtOnce * 8; ++i) asm volatile("" : "+f"(sums[i])::"memory");
        UNROLL for (int i = 0; i < kAtOnce && piece + i < kOwn; ++i) {
          float const scale = scales[kTokens + (first_row % kBlock + (own_pieces + piece + i) * kRows) / kBlock];
          UNROLL for (int j = 0; j < 8; ++j) totals[piece + i][j] += sums[i * 8 + j] * (scale * (j / 2 % 2 ? lower : upper));
        }
      }
    }
    if constexpr (Stages::kTurns) {
      float* const sums = as<float>(memory + kStages * kColumns * Stages::kBytes) + thread;
      UNROLL for (int i = 0; group && i < kOwn * 8; ++i) sums[i * kThreads] = totals[i / 8][i % 8];
      __syncthreads();
      if (group) continue;
      UNROLL for (int i = 0; i < kOwn * 8; ++i) totals[i / 8][i % 8] += sums[i * kThreads];
    }
    UNROLL for (int piece = 0; piece < kOwn; ++piece) {
      int const of_piece = first_row + (own_pieces + piece) * kRows;
      if (own_pieces + piece >= kPieces || of_piece >= params.num_out) continue;
      UNROLL for (int j = 0; j < 8; j += 2) {
        int const of_token = token + j / 2 % 2 * 8;
        if (of_token >= params.num_tokens) continue;
        int64_t const place = (int64_t(blockIdx.y) * params.num_tokens + of_token) * params.num_out + of_piece + j / 4 * 8 + lane % 4 * 2;
        if (params.is_float) *as<float2>(as<float>(params.out) + place) = {totals[piece][j], totals[piece][j + 1]};
        else *as<uint32_t>(as<BFloat16>(params.out) + place) = pack(totals[piece][j], totals[piece][j + 1]);
      }
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

template <int kPieces>
void launch(Params const& params, int num_blocks, int num_parts, DLDevice device) {
  using Stages = Ring<kPieces>;
  int const num_tiles = (params.num_out + kPieces * kRows - 1) / (kPieces * kRows);
  dim3 const grid(std::min(num_tiles, std::max(1, num_blocks / num_parts)), num_parts);
  launch_early(multiply_rows<kPieces>, params, grid, kGroups * kThreads, Stages::kStages * Stages::kColumns * Stages::kBytes + Stages::kSums, device);
}

constexpr std::array kSizes{1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 17};  // pieces of a tile
constexpr std::array kLaunches{launch<1>, launch<2>, launch<3>, launch<4>, launch<5>, launch<6>, launch<8>, launch<9>, launch<10>, launch<12>, launch<17>};

// x (>= T, K), x_scales (>= T, K / 128) column-major, weight (N, K), scales (N / 128, >= K / 128), out (parts, T, N) in float32 or bfloat16.
void run(View x, View x_scales, View weight, View scales, View out) {
  Params params{};
  params.x = values_of(x), params.x_scales = values_of(x_scales, true), params.weight = values_of(weight), params.scales = values_of(scales);
  params.is_float = is_float(out), params.out = bytes_of(out, params.is_float);
  int const num_parts = int(out.size(0));
  params.num_tokens = int(out.size(1)), params.num_out = int(out.size(2)), params.width = int(x.size(1));
  params.num_blocks = params.width / kBlock / num_parts, params.x_stride = int(x_scales.stride(1)), params.stride = int(scales.size(1));
  TVM_FFI_ICHECK(params.num_tokens > 0 && params.num_tokens <= kTokens && params.num_tokens <= x.size(0) && x.size(1) == weight.size(1));
  TVM_FFI_ICHECK(params.num_blocks * num_parts * kBlock == params.width && weight.size(0) == params.num_out && params.num_out % kBlock == 0);
  TVM_FFI_ICHECK(x_scales.stride(0) == 1 && params.x_stride % 4 == 0 && scales.size(0) * kBlock == params.num_out);
  int const num_blocks = num_multiprocessors(x.device());
  auto cost = [&](int pieces) {  // rows that a multiprocessor reads, of tokens at half their price: from L2
    int const num_tiles = (params.num_out + pieces * kRows - 1) / (pieces * kRows), at_once = std::max(1, num_blocks / num_parts);
    return (num_tiles + at_once - 1) / at_once * (pieces * kRows * 2 + params.num_tokens + kRows);
  };
  auto const best = std::min_element(kSizes.begin(), kSizes.end(), [&](int a, int b) { return cost(a) < cost(b); }) - kSizes.begin();
  kLaunches[best](params, num_blocks, num_parts, x.device());
}

}  // namespace float8_rows

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, float8_rows::run);
