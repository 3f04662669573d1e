// Attention inside segments for Hopper, made for the heads of the vision towers (64 and 72 values; any multiple of 8 up to 128 works).
// Compiled by `segments_cuda.py`, which defines HEAD_DIM.
//
// A block keeps a tile of a head's queries in shared memory and walks over the keys and values of their segment, tile by tile: one thread copies
// them (TMA), warp groups of 128 threads compute 64 queries each and issue their products in turn, so that some multiply while others take exponentials.
//
// A row of a tile lies in shared memory in chunks of 64 values, 128 bytes swizzled: narrower swizzles cost more time than they save work. A head of 72
// fills one chunk and an eighth of the next, and little more than that is copied or multiplied: a box of the copy engine may be narrower than
// a chunk, and an instruction touches only the columns that it multiplies.
//
//                     chunk 0, 64 values      chunk 1: 8 values, 8 zeros, not used
//    scores = q k^T   4 steps of 16         + 1 step
//    out += p v       64 columns            + 8 columns, in one instruction

#include <cuda_bf16.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cuda_host_adapter.hpp>
#include <cutlass/numeric_types.h>
#include <cutlass/pipeline/pipeline.hpp>

#include <cute/tensor.hpp>

#include "tvm_ffi_utils.h"

namespace segments {

using namespace cute;
using BFloat16 = cutlass::bfloat16_t;
constexpr int kGroupThreads = cutlass::NumThreadsPerWarpGroup;

constexpr int kHeadDim = HEAD_DIM;
static_assert(kHeadDim % 8 == 0 && kHeadDim <= 128, "tensor maps want strides of 16 bytes");
// The best of those measured on an H200 for 64 and 72. Three groups leave a thread 160 registers: scores, weights and output of a wide head need more.
constexpr int kTileQ = kHeadDim <= 72 ? 192 : 128, kTileKV = 128, kStages = 2;
constexpr int kGroups = kTileQ / 64;  // that compute; one more copies
constexpr int kThreads = (1 + kGroups) * kGroupThreads;
constexpr int kSteps = (kHeadDim + 15) / 16;  // instructions along a head
constexpr int kChunk = 64, kChunks = (kHeadDim + kChunk - 1) / kChunk, kWidth = kChunks * kChunk;
constexpr int kLastBox = kSteps * 16 - (kChunks - 1) * kChunk;  // columns copied into the last chunk
constexpr int kRowBytes = kSteps * 16 * sizeof(BFloat16);       // copied for a row

using Groups = Layout<Shape<Int<kGroups>, _1, _1>>;
using Scores = Shape<Int<kTileQ>, Int<kTileKV>>;
using Output = Shape<Int<kTileQ>, Int<kHeadDim>>;
using MmaQK = decltype(make_tiled_mma(GMMA::ss_op_selector<BFloat16, BFloat16, float, Shape<Int<kTileQ>, Int<kTileKV>, _16>>(), Groups{}));
template <int Columns>
using MmaValues = decltype(make_tiled_mma(
    GMMA::rs_op_selector<BFloat16, BFloat16, float, Shape<Int<kTileQ>, Int<Columns>, _16>, GMMA::Major::K, GMMA::Major::MN>(), Groups{}));
using MmaPV = MmaValues<kHeadDim>;

using Atom = GMMA::Layout_K_SW128_Atom<BFloat16>;
using LayoutQ = decltype(tile_to_shape(Atom{}, Shape<Int<kTileQ>, Int<kWidth>>{}));
using LayoutKV = decltype(tile_to_shape(Atom{}, Shape<Int<kTileKV>, Int<kWidth>, Int<kStages>>{}));
using LayoutVt = decltype(composition(LayoutKV{}, make_ordered_layout(Shape<Int<kWidth>, Int<kTileKV>, Int<kStages>>{}, Step<_2, _1, _3>{})));

using PipelineQ = cutlass::PipelineTmaAsync<1>;
using PipelineKV = cutlass::PipelineTmaAsync<kStages>;

struct Shared {
  alignas(1024) BFloat16 q[cosize_v<LayoutQ>];  // swizzles repeat after 1024 bytes
  alignas(1024) BFloat16 k[cosize_v<LayoutKV>];
  alignas(1024) BFloat16 v[cosize_v<LayoutKV>];
  PipelineQ::SharedStorage pipeline_q;
  PipelineKV::SharedStorage pipeline_k, pipeline_v;
};

// A tensor (P, H, kHeadDim) for the copy engine, chunk by chunk. What lies outside of the tensor reads as zero.
struct Source {
  CUtensorMap chunks[kChunks];
};

struct Params {
  Source q, k, v;
  __nv_bfloat16* out;
  int64_t out_stride;
  int4 const* tiles;  // index of the tile in its segment, first row of the segment, rows of the segment, unused
  int tiles_per_head, num_tiles;
  float scale_log2;
};

// A tile of queries by number: all of head 0, then all of head 1, ... Blocks that run together share a head's keys and values.
struct Work {
  int head, first_row, length, first_query, num_kv_tiles;

  CUTLASS_DEVICE Work(Params const& params, int number) {
    int4 const tile = params.tiles[number % params.tiles_per_head];
    head = number / params.tiles_per_head;
    first_row = tile.y;
    length = tile.z;
    first_query = tile.x * kTileQ;
    num_kv_tiles = (length + kTileKV - 1) / kTileKV;
  }
};

template <typename Pipeline>
CUTLASS_DEVICE Pipeline make_pipeline(typename Pipeline::SharedStorage& storage, int rows) {
  typename Pipeline::Params params;
  params.is_leader = cutlass::canonical_warp_group_idx() == 0;
  params.role = params.is_leader ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
  params.num_consumers = kGroups * cutlass::NumWarpsPerWarpGroup;  // see `release`
  params.transaction_bytes = rows * kRowBytes;
  return Pipeline(storage, params, /*cluster_shape=*/Shape<_1, _1, _1>{});
}

struct Pipelines {
  PipelineQ q;
  PipelineKV k, v;

  CUTLASS_DEVICE explicit Pipelines(Shared& shared)
      : q(make_pipeline<PipelineQ>(shared.pipeline_q, kTileQ)),
        k(make_pipeline<PipelineKV>(shared.pipeline_k, kTileKV)),
        v(make_pipeline<PipelineKV>(shared.pipeline_v, kTileKV)) {}
};

// Gives a stage back: one arrival a warp.
template <typename Pipeline, typename State>
CUTLASS_DEVICE void release(Pipeline& pipeline, State& state) {
  if (cutlass::canonical_lane_idx() == 0) pipeline.consumer_release(state);
  ++state;
}

// Fills the next free stage with rows of a head.
template <int Rows, typename Pipeline, typename State>
CUTLASS_DEVICE void fetch(Pipeline& pipeline, State& state, Source const& source, BFloat16* stages, int head, int row) {
  pipeline.producer_acquire(state);
  CUTLASS_PRAGMA_UNROLL
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    SM90_TMA_LOAD_3D::copy(&source.chunks[chunk], pipeline.producer_get_barrier(state), static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                           stages + (state.index() * kChunks + chunk) * Rows * kChunk, chunk * kChunk, head, row);
  }
  ++state;
}

// The thread that copies. Keys are one tile ahead of values, as their products are; tiles go from the last to the first.
CUTLASS_DEVICE void produce(Params const& params, Shared& shared, Pipelines& pipelines) {
  auto state_q = cutlass::make_producer_start_state<PipelineQ>();
  auto state_k = cutlass::make_producer_start_state<PipelineKV>(), state_v = state_k;
  for (int number = blockIdx.x; number < params.num_tiles; number += gridDim.x) {
    Work const work(params, number);
    auto fetch_k = [&](int tile) { fetch<kTileKV>(pipelines.k, state_k, params.k, shared.k, work.head, work.first_row + tile * kTileKV); };
    auto fetch_v = [&](int tile) { fetch<kTileKV>(pipelines.v, state_v, params.v, shared.v, work.head, work.first_row + tile * kTileKV); };
    fetch_k(work.num_kv_tiles - 1);
    fetch<kTileQ>(pipelines.q, state_q, params.q, shared.q, work.head, work.first_row + work.first_query);
    for (int tile = work.num_kv_tiles - 1; tile > 0; --tile) {
      fetch_k(tile - 1);
      fetch_v(tile);
    }
    fetch_v(0);
  }
}

// Starts c = a b (Clear) or c += a b on the tensor cores. `warpgroup_wait` waits for it; `a` in registers and `c` must not be touched before.
template <bool Clear, int Steps, typename Mma, typename A, typename B, typename C>
CUTLASS_DEVICE void start_product(Mma mma, A& a, B const& b, C& c) {
  constexpr bool kFromRegisters = !is_base_of<GMMA::DescriptorIterator, typename Mma::FrgTypeA>::value;
  if constexpr (kFromRegisters) warpgroup_fence_operand(a);
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  mma.accumulate_ = Clear ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  CUTLASS_PRAGMA_UNROLL
  for (int step = 0; step < Steps; ++step) {
    cute::gemm(mma, a(_, _, step), b(_, _, step), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// Softmax over tiles of scores. A thread holds parts of two rows: of every four values of an accumulator, the first two belong to row 0.
struct Softmax {
  float const scale;                                                  // of scores, to powers of two
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, factor[2];  // what sums of weights must be multiplied by

  CUTLASS_DEVICE explicit Softmax(float scale) : scale(scale) {}

  template <typename Values>
  CUTLASS_DEVICE void to_weights(Values& scores) {
    float next[2] = {-INFINITY, -INFINITY};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(scores); ++i) next[i / 2 % 2] = fmaxf(next[i / 2 % 2], scores(i));
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < 2; ++row) {
      next[row] = fmaxf(next[row], __shfl_xor_sync(~0u, next[row], 1));
      next[row] = fmaxf(next[row], __shfl_xor_sync(~0u, next[row], 2));
      next[row] = fmaxf(next[row] * scale, top[row]);
      factor[row] = exp2f(top[row] - next[row]);
      top[row] = next[row];
      sum[row] *= factor[row];
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(scores); ++i) {
      scores(i) = exp2f(scores(i) * scale - top[i / 2 % 2]);
      sum[i / 2 % 2] += scores(i);
    }
  }

  CUTLASS_DEVICE void finish() {
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < 2; ++row) {
      sum[row] += __shfl_xor_sync(~0u, sum[row], 1);
      sum[row] += __shfl_xor_sync(~0u, sum[row], 2);
      factor[row] = 1 / sum[row];
    }
  }

  template <typename Values>
  CUTLASS_DEVICE void rescale(Values& out) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(out); ++i) out(i) *= factor[i / 2 % 2];
  }
};

// Writes a tile of the output: pairs of values, only rows of the segment.
template <typename Values>
CUTLASS_DEVICE void store(Params const& params, Work const& work, Values const& values, int thread) {
  auto places = MmaPV{}.get_slice(thread).partition_C(make_identity_tensor(Output{}));
  __nv_bfloat16* out = params.out + (work.first_row + work.first_query) * params.out_stride + work.head * kHeadDim;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(values); i += 2) {
    int const row = get<0>(places(i)), column = get<1>(places(i));
    if (work.first_query + row >= work.length) continue;
    *reinterpret_cast<__nv_bfloat162*>(out + row * params.out_stride + column) = __floats2bfloat162_rn(values(i), values(i + 1));
  }
}

// A group that computes. While the tensor cores multiply the weights of one tile by its values, it turns the scores of the next into weights.
CUTLASS_DEVICE void consume(Params const& params, Shared& shared, Pipelines& pipelines) {
  int const group = cutlass::canonical_warp_group_idx() - 1, thread = threadIdx.x - kGroupThreads;
  MmaQK mma_qk;
  MmaPV mma_pv;
  // Sliced for the group's first thread, which the compiler sees to be the same in a warp: addresses stay in uniform registers.
  auto slice_qk = mma_qk.get_slice(group * kGroupThreads);
  auto slice_v = MmaValues<kWidth>{}.get_slice(group * kGroupThreads);  // addresses whole chunks, of which MmaPV takes the columns that it has
  auto q = slice_qk.partition_fragment_A(make_tensor(make_smem_ptr(shared.q), LayoutQ{}));
  auto k = slice_qk.partition_fragment_B(make_tensor(make_smem_ptr(shared.k), LayoutKV{}));
  auto v = slice_v.partition_fragment_B(make_tensor(make_smem_ptr(shared.v), LayoutVt{}));
  auto scores = partition_fragment_C(mma_qk, Scores{});
  auto weights = make_tensor<BFloat16>(partition_shape_A(mma_pv, Scores{}));  // the same places as scores
  auto out = partition_fragment_C(mma_pv, Output{});
  auto places = mma_qk.get_slice(thread).partition_C(make_identity_tensor(Scores{}));
  cutlass::PipelineState<1> state_q;
  cutlass::PipelineState<kStages> state_k, state_v;

  auto uniform = [](int value) { return __shfl_sync(~0u, value, 0); };
  auto take_turn = [&] { cutlass::arch::NamedBarrier::sync(2 * kGroupThreads, group); };
  auto pass_turn = [&] { cutlass::arch::NamedBarrier::arrive(2 * kGroupThreads, (group + 1) % kGroups); };
  auto start_scores = [&] {
    pipelines.k.consumer_wait(state_k);
    start_product</*Clear=*/true, kSteps>(mma_qk, q, k(_, _, _, uniform(state_k.index())), scores);
  };
  auto finish_scores = [&](auto running) {  // products that may go on running
    warpgroup_wait<running>();
    warpgroup_fence_operand(scores);
    release(pipelines.k, state_k);
  };
  auto start_out = [&] {
    pipelines.v.consumer_wait(state_v);
    start_product</*Clear=*/false, kTileKV / 16>(mma_pv, weights, v(_, _, _, uniform(state_v.index())), out);
  };
  auto finish_out = [&] {
    warpgroup_wait<0>();
    warpgroup_fence_operand(weights);
    warpgroup_fence_operand(out);
    release(pipelines.v, state_v);
  };
  auto round_weights = [&] {
    auto pairs = recast<__nv_bfloat162>(weights);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(pairs); ++i) pairs(i) = __floats2bfloat162_rn(scores(2 * i), scores(2 * i + 1));
  };

  if (group == kGroups - 1) pass_turn();  // group 0 begins
  for (int number = blockIdx.x; number < params.num_tiles; number += gridDim.x) {
    Work const work(params, number);
    Softmax softmax(params.scale_log2);
    clear(out);
    pipelines.q.consumer_wait(state_q);
    take_turn();
    start_scores();
    pass_turn();
    finish_scores(_0{});
    int const valid = work.length - (work.num_kv_tiles - 1) * kTileKV;  // the last tile comes first: the only one with rows behind the segment
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(scores); ++i) {
      if (get<1>(places(i)) >= valid) scores(i) = -INFINITY;
    }
    softmax.to_weights(scores);
    round_weights();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = work.num_kv_tiles - 1; tile > 0; --tile) {
      take_turn();
      start_scores();  // of the next tile
      start_out();
      pass_turn();
      finish_scores(_1{});
      softmax.to_weights(scores);
      finish_out();
      softmax.rescale(out);
      round_weights();
    }
    release(pipelines.q, state_q);
    start_out();
    softmax.finish();
    finish_out();
    softmax.rescale(out);
    store(params, work, out, thread);
  }
}

__global__ void __launch_bounds__(kThreads, 1) attend(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Pipelines pipelines(shared);
  __syncthreads();
  if (cutlass::canonical_warp_group_idx() == 0) {  // needs few registers; the others get them
    cutlass::arch::warpgroup_reg_dealloc<kGroups == 2 ? 24 : 32>();
    if (cutlass::canonical_warp_idx_sync() == 0 && elect_one_sync()) produce(params, shared, pipelines);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kGroups == 2 ? 240 : 160>();
    consume(params, shared, pipelines);
  }
}

Source source_of(ffi::TensorView x, int rows) {
  TVM_FFI_ICHECK(x.size(2) == kHeadDim && x.stride(2) == 1);
  Source source;
  cuuint64_t const shape[3] = {kHeadDim, static_cast<cuuint64_t>(x.size(1)), static_cast<cuuint64_t>(x.size(0))};
  cuuint64_t const strides[2] = {x.stride(1) * sizeof(BFloat16), x.stride(0) * sizeof(BFloat16)};  // of heads and rows
  cuuint32_t const steps[3] = {1, 1, 1};
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    cuuint32_t const box[3] = {chunk == kChunks - 1 ? kLastBox : kChunk, 1, static_cast<cuuint32_t>(rows)};
    CUresult const status = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &source.chunks[chunk], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, x.data_ptr(), shape, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    TVM_FFI_ICHECK(status == CUDA_SUCCESS) << "segment attention: tensor map, error " << status;
  }
  return source;
}

// q, k, v (P, H, HEAD_DIM) bfloat16: strides of whole 16 bytes, values side by side. out (P, H * HEAD_DIM). tiles (n, 4) int32: see Params.
void run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView out, ffi::TensorView tiles, int64_t num_tiles, double scale) {
  TVM_FFI_ICHECK(out.size(1) == q.size(1) * kHeadDim && out.stride(1) == 1);
  ffi::CUDADeviceGuard guard(q.device().device_id);
  int const total = static_cast<int>(num_tiles * q.size(1));
  Params const params{source_of(q, kTileQ), source_of(k, kTileKV), source_of(v, kTileKV), static_cast<__nv_bfloat16*>(out.data_ptr()),
                      out.stride(0), static_cast<int4 const*>(tiles.data_ptr()), static_cast<int>(num_tiles), total,
                      static_cast<float>(scale * M_LOG2E)};
  int num_sms = 0;
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, q.device().device_id);
  cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  attend<<<std::min(total, num_sms), kThreads, sizeof(Shared), get_stream(q.device())>>>(params);
  cudaError_t const status = cudaGetLastError();
  TVM_FFI_ICHECK(status == cudaSuccess) << "segment attention: " << cudaGetErrorString(status);
}

int64_t tile_rows() { return kTileQ; }  // queries of a tile

}  // namespace segments

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, segments::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tile_rows, segments::tile_rows);
