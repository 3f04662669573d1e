// Common code of our attention kernels for Hopper, for heads of a multiple of 8 values up to 128. A source defines TILE_KV, the keys per tile, and is
// compiled with HEAD_DIM.
//
// A block keeps a tile of a head's queries in shared memory and iterates over keys and values: one warp group copies tiles (TMA), others of 128
// threads compute 64 queries each and issue their products alternately, so that some multiply while others compute exponentials.
//
// A row of a tile is stored in chunks of 64 values with a 128-byte swizzle: narrower swizzles cost more time than they save. For a head of 72:
//
//                     chunk 0, 64 values      chunk 1: 8 values, 8 zeros, not used
//    scores = q k^T   4 steps of 16         + 1 step
//    out += p v       64 columns            + 8 columns, in one instruction
//
// A kernel is `attend<Work>`, where Work is an `Item` and has
//
//    Params, with plan and scale_log2     what all blocks read
//    num_groups                           groups of 64 rows with a query; other groups skip
//    num_unmasked_tiles                   number of first key tiles that every query attends to completely
//    visible(params, row)                 number of keys that a query attends to
//    place(params, row)                   address of its result, or null
//    produce(params, shared, pipelines)   one warp group: fills the pipelines from an item's last tile to its first

#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "hopper_copy.cuh"
#include "hopper_products.cuh"

namespace hopper {

constexpr int kGroupThreads = cutlass::NumThreadsPerWarpGroup;

// Measured on an H200 for 64 and 72. Three groups leave 160 registers per thread; a wide head needs more.
constexpr int kTileQ = kHeadDim <= 72 ? 192 : 128, kTileKV = TILE_KV, kStages = 2;
constexpr int kStagesQ = 2;  // so that the next tile's queries have arrived when a tile is done
constexpr int kGroups = kTileQ / 64;  // computing warp groups; one more copies
constexpr int kComputeThreads = kGroups * kGroupThreads, kComputeWarps = kComputeThreads / 32;
constexpr int kThreads = kGroupThreads + kComputeThreads;
constexpr int kWidth = kChunks * kChunk;
constexpr int kRowBytes = kSteps * 16 * sizeof(bfloat16_t);  // copied per row

// A tile of a head's queries with all or part of their key tiles, see `tile_plan.py`. The last part to finish merges all parts.
struct Item {
  int first_token, num_tokens;  // tokens of the tile
  int first_key, end;  // start of the keys, and end of those that the last token attends to
  int head, first_tile, end_tile;  // range of key tiles; empty for an empty item
  int first_part, part, num_parts;  // the tile's parts are numbered consecutively

  DEVICE Item(int4 const* items, int number) {
    int4 const tile = items[3 * number + 3], keys = items[3 * number + 4], parts = items[3 * number + 5];
    first_token = tile.x, num_tokens = tile.y, first_key = tile.z, end = tile.w;
    head = keys.x, first_tile = keys.y, end_tile = keys.z;
    first_part = parts.x, part = parts.y, num_parts = parts.z;
  }
};

// Block b computes items b, b + num_blocks and so on up to the first empty one.
struct Plan {
  int4 const* items;  // three for the header, three per item
  float* parts;  // kPartFloats per part
  int* arrivals;  // kComputeWarps per part, zero before and after

  DEVICE int num_items() const { return items[0].x; }
  DEVICE int num_blocks() const { return items[0].y; }
};

using Groups = Layout<Shape<Int<kGroups>, _1, _1>>;
using Scores = Shape<Int<kTileQ>, Int<kTileKV>>;
using Output = Shape<Int<kTileQ>, Int<kHeadDim>>;
using ProductQK = conditional_t<kTileKV == 112, Product112<>,
                                decltype(GMMA::ss_op_selector<bfloat16_t, bfloat16_t, float, Shape<Int<kTileQ>, Int<kTileKV>, _16>>())>;
using MmaQK = decltype(make_tiled_mma(ProductQK{}, Groups{}));
template <int Columns>
using ProductPV =
    conditional_t<Columns == 72, Product72<>,
                  decltype(GMMA::rs_op_selector<bfloat16_t, bfloat16_t, float, Shape<Int<kTileQ>, Int<Columns>, _16>, GMMA::Major::K, GMMA::Major::MN>())>;
template <int Columns>
using MmaValues = decltype(make_tiled_mma(ProductPV<Columns>{}, Groups{}));
using MmaPV = MmaValues<kHeadDim>;

using Atom = GMMA::Layout_K_SW128_Atom<bfloat16_t>;
using LayoutQ = decltype(tile_to_shape(Atom{}, Shape<Int<kTileQ>, Int<kWidth>, Int<kStagesQ>>{}));
using LayoutKV = decltype(tile_to_shape(Atom{}, Shape<Int<kTileKV>, Int<kWidth>, Int<kStages>>{}));
using LayoutVt = decltype(composition(LayoutKV{}, make_ordered_layout(Shape<Int<kWidth>, Int<kTileKV>, Int<kStages>>{}, Step<_2, _1, _3>{})));

// A thread's part of the output, and the maxima and sums of its rows.
constexpr int kPartValues = kTileQ * kHeadDim / kComputeThreads + 4, kPartFloats = kPartValues * kComputeThreads;

using PipelineQ = cutlass::PipelineTmaAsync<kStagesQ>;
using PipelineKV = cutlass::PipelineTmaAsync<kStages>;

struct Shared {
  alignas(1024) bfloat16_t q[cosize_v<LayoutQ>];  // swizzles repeat after 1024 bytes
  alignas(1024) bfloat16_t k[cosize_v<LayoutKV>];
  alignas(1024) bfloat16_t v[cosize_v<LayoutKV>];
  PipelineQ::SharedStorage pipeline_q;
  PipelineKV::SharedStorage pipeline_k, pipeline_v;
};

template <typename Pipeline>
DEVICE Pipeline make_pipeline(typename Pipeline::SharedStorage& storage, int rows) {
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

  DEVICE explicit Pipelines(Shared& shared)
      : q(make_pipeline<PipelineQ>(shared.pipeline_q, kTileQ)),
        k(make_pipeline<PipelineKV>(shared.pipeline_k, kTileKV)),
        v(make_pipeline<PipelineKV>(shared.pipeline_v, kTileKV)) {}
};

// Releases a stage: one arrival per warp.
template <typename Pipeline, typename State>
DEVICE void release(Pipeline& pipeline, State& state) {
  if (cutlass::canonical_lane_idx() == 0) pipeline.consumer_release(state);
  ++state;
}

// Issues the copy of one box of a chunk to `place`, a row of the chunk's part of the stage.
template <typename Pipeline, typename State>
DEVICE void copy(Pipeline& pipeline, State const& state, Source const& source, int chunk, bfloat16_t* place, int head, int row) {
  SM90_TMA_LOAD_3D::copy(&source.chunks[chunk], pipeline.producer_get_barrier(state), uint64_t(TMA::CacheHintSm90::EVICT_NORMAL), place,
                         chunk * kChunk, head, row);
}

// Fills the next free stage with a tile, one box per chunk. Called by a single thread.
template <int Rows, typename Pipeline, typename State>
DEVICE void fetch(Pipeline& pipeline, State& state, Source const& source, bfloat16_t* stages, int head, int row) {
  pipeline.producer_acquire(state);
  UNROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
    copy(pipeline, state, source, chunk, stages + (state.index() * kChunks + chunk) * Rows * kChunk, head, row);
  }
  ++state;
}

// Starts c = a b (Clear) or c += a b: `a` in registers and `c` must not be touched before `warpgroup_wait`.
template <bool Clear, int Steps, typename Mma, typename A, typename B, typename C>
DEVICE void start_product(Mma mma, A& a, B const& b, C& c) {
  constexpr bool kFromRegisters = !is_base_of<GMMA::DescriptorIterator, typename Mma::FrgTypeA>::value;
  if constexpr (kFromRegisters) warpgroup_fence_operand(a);
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  mma.accumulate_ = Clear ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  UNROLL for (int step = 0; step < Steps; ++step) {
    cute::gemm(mma, a(_, _, step), b(_, _, step), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// Softmax over tiles of scores. A thread holds parts of two rows: of every four values of an accumulator, the first two belong to row 0.
struct Softmax {
  float const scale;  // converts scores to exponents of two
  float top[2] = {kLowest, kLowest}, sum[2] = {0, 0}, factor[2];  // factor by which earlier sums must be multiplied

  DEVICE explicit Softmax(float scale) : scale(scale) {}

  template <typename Values>
  DEVICE void to_weights(Values& scores) {
    float next[2] = {-INFINITY, -INFINITY};
    UNROLL for (int i = 0; i < size(scores); ++i) next[i / 2 % 2] = fmaxf(next[i / 2 % 2], scores(i));
    UNROLL for (int row = 0; row < 2; ++row) {
      next[row] = fmaxf(over_lanes<1, 4, true>(next[row]) * scale, top[row]);
      factor[row] = exp2f(top[row] - next[row]);
      top[row] = next[row];
      sum[row] *= factor[row];
    }
    UNROLL for (int i = 0; i < size(scores); ++i) {
      scores(i) = exp2f(scores(i) * scale - top[i / 2 % 2]);
      sum[i / 2 % 2] += scores(i);
    }
  }

  DEVICE void sum_rows() {
    UNROLL for (int row = 0; row < 2; ++row) sum[row] = over_lanes<1, 4, false>(sum[row]);
  }

  template <typename Values>
  DEVICE void rescale(Values& out) const {
    UNROLL for (int i = 0; i < size(out); ++i) out(i) *= factor[i / 2 % 2];
  }
};

// Masks the scores of keys that a query does not attend to.
template <typename Work, typename Places, typename Values>
DEVICE void mask(typename Work::Params const& params, Work const& work, int tile, Places const& places, Values& scores) {
  UNROLL for (int i = 0; i < size(scores); ++i) {
    int const row = get<0>(places(i)), key = get<1>(places(i));
    if (key >= work.visible(params, row) - tile * kTileKV) scores(i) = -INFINITY;
  }
}

// Stores a part's results; if all parts have arrived, merges them in order. Done per warp, since each row belongs to one warp.
template <typename Values>
DEVICE bool merge(Plan const& plan, Item const& item, int thread, Softmax& softmax, Values& out) {
  auto place = [&](int part) { return plan.parts + int64_t(item.first_part + part) * kPartFloats + thread; };
  float* const mine = place(item.part);
  UNROLL for (int i = 0; i < size(out); ++i) __stcg(mine + i * kComputeThreads, out(i));
  UNROLL for (int row = 0; row < 2; ++row) {
    __stcg(mine + (size(out) + row) * kComputeThreads, softmax.top[row]);
    __stcg(mine + (size(out) + 2 + row) * kComputeThreads, softmax.sum[row]);
  }
  __threadfence();
  __syncwarp();
  int arrived = 0;
  if (cutlass::canonical_lane_idx() == 0) {
    int* const arrivals = plan.arrivals + item.first_part * kComputeWarps + thread / 32;
    arrived = atomicAdd(arrivals, 1) + 1;
    if (arrived == item.num_parts) *arrivals = 0;
  }
  if (__shfl_sync(~0u, arrived, 0) < item.num_parts) return false;
  __threadfence();
  clear(out);
  UNROLL for (int row = 0; row < 2; ++row) softmax.top[row] = kLowest, softmax.sum[row] = 0;
#pragma unroll 1
  for (int part = 0; part < item.num_parts; ++part) {  // written by other blocks: reads bypass L1
    float const* const theirs = place(part);
    float weight[2];
    UNROLL for (int row = 0; row < 2; ++row) {
      float const top = __ldcg(theirs + (size(out) + row) * kComputeThreads), sum = __ldcg(theirs + (size(out) + 2 + row) * kComputeThreads);
      float const next = fmaxf(softmax.top[row], top);
      softmax.factor[row] = exp2f(softmax.top[row] - next);
      weight[row] = exp2f(top - next);
      softmax.top[row] = next;
      softmax.sum[row] = softmax.sum[row] * softmax.factor[row] + sum * weight[row];
    }
    UNROLL for (int i = 0; i < size(out); ++i) {
      out(i) = out(i) * softmax.factor[i / 2 % 2] + __ldcg(theirs + i * kComputeThreads) * weight[i / 2 % 2];
    }
  }
  return true;
}

// Writes a tile of the output: pairs of values, divided by their row's sum.
template <typename Work, typename Values>
DEVICE void store(typename Work::Params const& params, Work const& work, Softmax const& softmax, Values const& values, int thread) {
  auto places = MmaPV{}.get_slice(thread).partition_C(make_identity_tensor(Output{}));
  float const factor[2] = {1 / softmax.sum[0], 1 / softmax.sum[1]};
  BFloat16* const targets[2] = {work.place(params, get<0>(places(0))), work.place(params, get<0>(places(2)))};
  UNROLL for (int i = 0; i < size(values); i += 2) {
    if (targets[i / 2 % 2] == nullptr) continue;
    *as<__nv_bfloat162>(targets[i / 2 % 2] + get<1>(places(i))) =
        __floats2bfloat162_rn(values(i) * factor[i / 2 % 2], values(i + 1) * factor[i / 2 % 2]);
  }
}

// A computing group: converts the scores of a tile to weights while the tensor cores multiply the previous tile's weights by its values.
template <typename Work>
DEVICE void consume(typename Work::Params const& params, Shared& shared, Pipelines& pipelines) {
  int const group = cutlass::canonical_warp_group_idx() - 1, thread = threadIdx.x - kGroupThreads;
  MmaQK mma_qk;
  MmaPV mma_pv;
  // Sliced for the group's first thread, so that addresses are uniform within a warp and stay in uniform registers.
  auto slice_qk = mma_qk.get_slice(group * kGroupThreads);
  auto slice_v = MmaValues<kWidth>{}.get_slice(group * kGroupThreads);  // addresses whole chunks; MmaPV uses only its columns
  auto q = slice_qk.partition_fragment_A(make_tensor(make_smem_ptr(shared.q), LayoutQ{}));
  auto k = slice_qk.partition_fragment_B(make_tensor(make_smem_ptr(shared.k), LayoutKV{}));
  auto v = slice_v.partition_fragment_B(make_tensor(make_smem_ptr(shared.v), LayoutVt{}));
  auto scores = partition_fragment_C(mma_qk, Scores{});
  auto weights = make_tensor<bfloat16_t>(partition_shape_A(mma_pv, Scores{}));  // the same layout as the scores
  auto out = partition_fragment_C(mma_pv, Output{});
  auto places = mma_qk.get_slice(thread).partition_C(make_identity_tensor(Scores{}));
  cutlass::PipelineState<kStagesQ> state_q;
  cutlass::PipelineState<kStages> state_k, state_v;

  auto uniform = [](int value) { return __shfl_sync(~0u, value, 0); };
  auto take_turn = [&] { cutlass::arch::NamedBarrier::sync(2 * kGroupThreads, group); };
  auto pass_turn = [&] { cutlass::arch::NamedBarrier::arrive(2 * kGroupThreads, (group + 1) % kGroups); };
  auto start_scores = [&] {
    pipelines.k.consumer_wait(state_k);
    auto queries = q(_, _, _, uniform(state_q.index()));
    start_product</*Clear=*/true, kSteps>(mma_qk, queries, k(_, _, _, uniform(state_k.index())), scores);
  };
  auto finish_scores = [&](auto running) {  // `running`: products that may still be pending
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
    UNROLL for (int i = 0; i < size(pairs); ++i) pairs(i) = __floats2bfloat162_rn(scores(2 * i), scores(2 * i + 1));
  };

  auto skip = [&](Work const& work) {  // takes part in the alternation and releases the stages copied for all groups
    auto skip_keys = [&] {
      take_turn();
      pass_turn();
      pipelines.k.consumer_wait(state_k);
      release(pipelines.k, state_k);
    };
    auto skip_values = [&] {
      pipelines.v.consumer_wait(state_v);
      release(pipelines.v, state_v);
    };
    pipelines.q.consumer_wait(state_q);
    skip_keys();
    for (int tile = work.end_tile - 1; tile > work.first_tile; --tile) {
      skip_keys();
      skip_values();
    }
    release(pipelines.q, state_q);
    skip_values();
  };

  if (group == kGroups - 1) pass_turn();  // group 0 starts
  for (int number = blockIdx.x, end = params.plan.num_items(); number < end; number += params.plan.num_blocks()) {
    Work const work(params, number);
    if (work.end_tile == 0) break;
    if (group >= work.num_groups) {
      skip(work);
      continue;
    }
    Softmax softmax(params.scale_log2);
    clear(out);
    pipelines.q.consumer_wait(state_q);
    take_turn();
    start_scores();
    pass_turn();
    finish_scores(_0{});
    int tile = work.end_tile - 1;
    mask(params, work, tile, places, scores);
    softmax.to_weights(scores);
    round_weights();
    auto advance = [&](auto masked) {  // from the scores of a tile to those of the previous one
      take_turn();
      start_scores();
      start_out();
      pass_turn();
      finish_scores(_1{});
      --tile;
      if constexpr (masked) mask(params, work, tile, places, scores);
      softmax.to_weights(scores);
      finish_out();
      softmax.rescale(out);
      round_weights();
    };
#pragma unroll 1
    while (tile > max(work.num_unmasked_tiles, work.first_tile)) advance(true_type{});
#pragma unroll 1
    while (tile > work.first_tile) advance(false_type{});
    release(pipelines.q, state_q);
    start_out();
    softmax.sum_rows();
    finish_out();
    if (work.num_parts > 1 && !merge(params.plan, work, thread, softmax, out)) continue;
    store(params, work, softmax, out, thread);
  }
}

template <typename Work>
__global__ void __launch_bounds__(kThreads, 1) attend(CUTE_GRID_CONSTANT typename Work::Params const params) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *as<Shared>(memory);
  if (blockIdx.x >= params.plan.num_blocks()) return;
  Pipelines pipelines(shared);
  start();  // not earlier: a concurrent kernel relies on the completion of all kernels before this one
  __syncthreads();
  if (cutlass::canonical_warp_group_idx() == 0) {  // needs few registers, which the other groups get
    cutlass::arch::warpgroup_reg_dealloc<kGroups == 2 ? 24 : 32>();
    Work::produce(params, shared, pipelines);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kGroups == 2 ? 240 : 160>();
    consume<Work>(params, shared, pipelines);
  }
}

// items (1 + n, 12) int32; the other buffers have space for the plan's parts.
inline Plan plan_of(View items, View parts, View arrivals) {
  TVM_FFI_ICHECK(items.size(1) == 12 && parts.size(1) == kPartFloats && arrivals.size(1) == kComputeWarps);
  return {values_of(items), values_of(parts), values_of(arrivals)};
}

template <typename Work>
void launch(typename Work::Params const& params, int num_blocks, DLDevice device) {
  launch_early(attend<Work>, params, num_blocks, kThreads, sizeof(Shared), device);
}

}  // namespace hopper

#define EXPORT(name, value) \
  inline int64_t name() { return hopper::value; } \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, ::name)
EXPORT(tile_rows, kTileQ)  // rows of a tile: queries of all its heads
EXPORT(tile_keys, kTileKV)
EXPORT(part_floats, kPartFloats)
EXPORT(part_arrivals, kComputeWarps)
