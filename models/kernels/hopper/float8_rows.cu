// Products of up to 64 tokens with a block-scaled matrix in float8, for Hopper. Called by `float8.py`.
//
// Memory-bound: each block copies its rows of the matrix asynchronously and starts before the preceding kernel has finished. A block has kPieces x
// 16 rows and one split of the columns. It occupies a whole multiprocessor, and all blocks run concurrently, so that few blocks read the tokens.
// One warp group multiplies the even chunks of 128 columns, the other one the odd chunks. Each has its own stages; the sums are added at the end:
//
//   tokens (64, 32 columns) from registers x W (up to 96 rows, 32 columns) -> (64, 96): four tensor core instructions, then the scales
//
// Rows of shared memory have the 128-byte swizzle. Rows of missing tokens are not written; their results are not stored.

#include <algorithm>
#include <array>

#include <cute/arch/mma_sm90_gmma.hpp>

#include "hopper_launch.cuh"

namespace float8_rows {

using namespace hopper;

constexpr int kTokens = 64, kRows = 16;  // tokens; rows of a piece
constexpr int kBlock = 128;  // rows or columns with one scale; bytes of a row of shared memory
constexpr int kGroups = 2, kThreads = 128;  // threads of a group
constexpr int kCopied = 16, kLanes = kBlock / kCopied, kRowsAtOnce = kThreads / kLanes;  // bytes that a thread copies at once
constexpr int kMemory = 224 << 10, kMostStages = 8;
static_assert(kRowsAtOnce == kRows);

struct Params {
  unsigned char const* x;  // (T, width)
  float const* x_scales;  // (width / 128, x_stride)
  unsigned char const* weight;  // (num_out, width)
  float const* scales;  // (num_out / 128, stride)
  void* out;  // (parts, T, num_out) in float32 or bfloat16
  int num_tokens, width, num_out, num_blocks, x_stride, stride;  // blocks of a part's columns
  bool is_float;
};

// Four 8 x 16-byte matrices, as wgmma expects a (64, 32) operand of float8 in registers.
DEVICE void load_matrices(uint32_t (&x)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

template <int>
struct Atom;
template <>
struct Atom<1> : cute::SM90::GMMA::MMA_64x16x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Atom<2> : cute::SM90::GMMA::MMA_64x32x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Atom<4> : cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Atom<6> : cute::SM90::GMMA::MMA_64x96x32_F32E4M3E4M3_RS_TN<> {};

// c (64, 16 n) = x (64, 32) w (16 n, 32)', or += it.
template <int kN, int... I>
DEVICE void multiply_async(float (&c)[kN * 8], uint32_t const (&x)[4], uint64_t w, bool adds, std::integer_sequence<int, I...>) {
  Atom<kN>::fma(x[0], x[1], x[2], x[3], w, c[I]..., adds ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// Stages of a group: 128 columns of its rows of W, then of the tokens, then the scales of tokens and of up to four blocks of rows.
template <int kPieces>
struct Ring {
  static constexpr int kAtTokens = kPieces * kRows * kBlock, kAtScales = kAtTokens + kTokens * kBlock, kBytes = kAtScales + 1024;
  static constexpr int kStages = std::min(kMostStages, kMemory / kGroups / kBytes);
  static constexpr int kAtOnce = kPieces <= 2 ? kPieces : kPieces <= 4 || kPieces == 8 ? 4 : 6;  // pieces of a product; there may be fewer
  static_assert(kStages >= 2 && kStages * kBytes >= kPieces * 8 * kThreads * int(sizeof(float)), "sums replace stages");
  Params const& params;
  uint32_t address;
  int thread, first_row, row, place;  // of this thread: row of a piece and place of its bytes in there

  DEVICE Ring(Params const& params, uint32_t address, int thread)
      : params(params), address(address), thread(thread), first_row(int(blockIdx.x) * kPieces * kRows), row(thread / kLanes),
        place(row * kBlock + (thread % kLanes ^ row % 8) * kCopied) {}

  DEVICE void copy_weights(int stage, int block) const {
    uint32_t const to = address + stage * kBytes;
    unsigned char const* const from = params.weight + int64_t(first_row + row) * params.width + block * kBlock + thread % kLanes * kCopied;
    UNROLL for (int piece = 0; piece < kPieces; ++piece)
      if (first_row + piece * kRows < params.num_out) copy_async(to + place + piece * kRows * kBlock, from + int64_t(piece) * kRows * params.width);
    int const of_rows = first_row / kBlock + thread;
    if (thread < 4 && of_rows * kBlock < params.num_out)
      copy_float(to + kAtScales + (kTokens + thread) * 4, params.scales + int64_t(of_rows) * params.stride + block);
  }

  DEVICE void copy_tokens(int stage, int block) const {
    uint32_t const to = address + stage * kBytes;
    unsigned char const* const from = params.x + int64_t(row) * params.width + block * kBlock + thread % kLanes * kCopied;
    UNROLL for (int token = 0; token < kTokens; token += kRows)
      if (token + row < params.num_tokens) copy_async(to + kAtTokens + place + token * kBlock, from + int64_t(token) * params.width);
    if (thread * 4 < params.num_tokens) copy_async(to + kAtScales + thread * kCopied, params.x_scales + int64_t(block) * params.x_stride + thread * 4);
  }
};

template <int kPieces>
__global__ void __launch_bounds__(kGroups* kThreads, 1) multiply_rows(Params const params) {
  using Stages = Ring<kPieces>;
  constexpr int kStages = Stages::kStages, kAtOnce = Stages::kAtOnce, kOwn = kStages * Stages::kBytes;
  extern __shared__ __align__(1024) unsigned char memory[];
  int const group = threadIdx.x / kThreads, thread = threadIdx.x % kThreads, lane = thread % 32;
  uint32_t const address = shared_address(memory) + group * kOwn;
  Stages const ring(params, address, thread);
  int const first = int(blockIdx.y) * params.num_blocks + group, end = int(blockIdx.y + 1) * params.num_blocks;
  for (int i = 0; i + 1 < kStages; ++i)
    if (first + i * kGroups < end) ring.copy_weights(i, first + i * kGroups);
  wait_for_preceding_kernel();
  for (int i = 0; i + 1 < kStages; ++i) {
    if (first + i * kGroups < end) ring.copy_tokens(i, first + i * kGroups);
    end_copies();
  }
  float totals[kPieces][8] = {};
  int const token = thread / 32 * 16 + lane / 4, row = thread / 32 * 16 + lane % 16;  // of results; of `load_matrices`
  int stage = 0;
  for (int block = first; block < end; block += kGroups) {
    wait_for_copies<kStages - 2>();
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kThreads) : "memory");  // fence.proxy.async would wait for all copies
    int const next = block + (kStages - 1) * kGroups, free = (stage ? stage : kStages) - 1;
    if (next < end) ring.copy_weights(free, next), ring.copy_tokens(free, next);
    end_copies();
    uint32_t const own = address + stage * Stages::kBytes;
    uint32_t x[4][4];
    UNROLL for (int step = 0; step < 4; ++step)
      load_matrices(x[step], own + Stages::kAtTokens + row * kBlock + ((step * 2 + lane / 16) ^ row % 8) * kCopied);
    float const* const scales = as<float>(memory + group * kOwn + stage * Stages::kBytes + Stages::kAtScales);
    float const upper = scales[token], lower = scales[token + 8];
    uint64_t const matrix = (own >> 4) | uint64_t(1) << 16 | uint64_t(8 * kBlock >> 4) << 32 | uint64_t(1) << 62;  // swizzle of 128 bytes
    UNROLL for (int piece = 0; piece < kPieces; piece += kAtOnce) {
      float sums[kAtOnce * 8];
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      UNROLL for (int step = 0; step < 4; ++step)
        multiply_async<kAtOnce>(sums, x[step], matrix + ((piece * kRows * kBlock + step * 32) >> 4), step > 0, std::make_integer_sequence<int, kAtOnce * 8>());
      asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
      UNROLL for (int i = 0; i < kAtOnce * 8; ++i) asm volatile("" : "+f"(sums[i])::"memory");
      UNROLL for (int i = 0; i < kAtOnce && piece + i < kPieces; ++i) {
        float const scale = scales[kTokens + (ring.first_row % kBlock + (piece + i) * kRows) / kBlock];
        UNROLL for (int j = 0; j < 8; ++j) totals[piece + i][j] += sums[i * 8 + j] * (scale * (j / 2 % 2 ? lower : upper));
      }
    }
    if (++stage == kStages) stage = 0;
  }
  launch_dependents();  // if called earlier, blocks of the next kernel share the few idle multiprocessors
  // Each group adds the other group's sums to half of the pieces and stores them.
  asm volatile("cp.async.wait_all;\nbar.sync %0, %1;" ::"r"(group + 1), "n"(kThreads) : "memory");
  auto part = [&](int of_group, int piece, int j) -> float& { return as<float>(memory + of_group * kOwn)[(piece * 8 + j) * kThreads + thread]; };
  UNROLL for (int piece = 0; piece < kPieces; ++piece)
    UNROLL for (int j = 0; j < 8; ++j)
      if (piece % kGroups != group) part(group, piece, j) = totals[piece][j];
  __syncthreads();
  UNROLL for (int piece = 0; piece < kPieces; ++piece) {
    int const first_of_piece = ring.first_row + piece * kRows;
    if (piece % kGroups != group || first_of_piece >= params.num_out) continue;
    UNROLL for (int j = 0; j < 8; j += 2) {
      int const of_token = token + j / 2 % 2 * 8;
      if (of_token >= params.num_tokens) continue;
      int64_t const place = (int64_t(blockIdx.y) * params.num_tokens + of_token) * params.num_out + first_of_piece + j / 4 * 8 + lane % 4 * 2;
      float const low = totals[piece][j] + part(1 - group, piece, j), high = totals[piece][j + 1] + part(1 - group, piece, j + 1);
      if (params.is_float) *as<float2>(as<float>(params.out) + place) = {low, high};
      else *as<uint32_t>(as<BFloat16>(params.out) + place) = pack(low, high);
    }
  }
}

template <int kPieces>
void launch(Params const& params, int num_parts, DLDevice device) {
  dim3 const grid((params.num_out + kPieces * kRows - 1) / (kPieces * kRows), num_parts);
  using Stages = Ring<kPieces>;
  launch_early(multiply_rows<kPieces>, params, grid, kGroups * kThreads, kGroups * Stages::kStages * Stages::kBytes, device);
}

constexpr std::array kSizes{1, 2, 3, 4, 6, 8, 10, 12, 15, 18};  // pieces of a block
constexpr std::array kLaunches{launch<1>, launch<2>, launch<3>, launch<4>, launch<6>, launch<8>, launch<10>, launch<12>, launch<15>, launch<18>};

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
  auto cost = [&](int pieces) {  // rows read per multiprocessor: of W twice, since tokens come from L2; and the overhead of a block
    int const num_groups = (params.num_out + pieces * kRows - 1) / (pieces * kRows) * num_parts;
    return (num_groups + num_blocks - 1) / num_blocks * (pieces * kRows * 2 + params.num_tokens + kTokens);
  };
  auto const best = std::min_element(kSizes.begin(), kSizes.end(), [&](int a, int b) { return cost(a) < cost(b); }) - kSizes.begin();
  kLaunches[best](params, num_parts, x.device());
}

}  // namespace float8_rows

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, float8_rows::run);
