// Causal attention of chunks of prompts over paged keys and values, see `hopper_attention.cuh`. Compiled with HEAD_DIM.
//
// Query heads that share a KV head are rows of one tile, so that keys are read once: with 4 of them, row r is head r % 4 of token r / 4. Pages
// can be anywhere in the pool: each needs its own copy, and each lane of a warp issues one.

#define TILE_KV 128  // whole pages
#include "hopper_attention.cuh"

namespace prefill {

using namespace hopper;

// One KV head with its query heads, and the tokens of one row that fill a tile.
struct Work : Item {
  struct Params {
    Source q, k, v;
    BFloat16* out;
    Plan plan;
    int const* pages;
    int log2_group;  // query heads per KV head
    int num_heads;  // query heads
    int log2_page, box_rows;  // tokens per page and per copy
    float scale_log2;
  };

  int num_groups, num_unmasked_tiles;

  DEVICE Work(Params const& params, int number) : Item(params.plan.items, number) {
    num_groups = ((num_tokens << params.log2_group) + 63) / 64;
    num_unmasked_tiles = visible(params, 0) / kTileKV;
  }

  // Also for tokens after the tile's last one, whose results are discarded.
  DEVICE int visible(Params const& params, int row) const { return end - num_tokens + 1 + (row >> params.log2_group); }

  DEVICE BFloat16* place(Params const& params, int row) const {
    int const token = row >> params.log2_group, member = row - (token << params.log2_group);
    if (token >= num_tokens) return nullptr;
    return params.out + (int64_t(first_token + token) * params.num_heads + (head << params.log2_group) + member) * kHeadDim;
  }

  // Position of a key in the pool. Keys after the end are masked and read from the row's last page.
  DEVICE int slot(Params const& params, int key) const {
    int const page = min(key, end - 1) >> params.log2_page;
    return (__ldg(params.pages + first_key + page) << params.log2_page) + (key & ((1 << params.log2_page) - 1));
  }

  // One warp copies keys and queries, another values, each as far in advance as its pipeline has free stages.
  DEVICE static void produce(Params const& params, Shared& shared, Pipelines& pipelines) {
    int const warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0) {
      auto state_q = cutlass::make_producer_start_state<PipelineQ>();
      copy_tiles(params, pipelines.k, params.k, shared.k, [&](Work const& work) {
        fetch<kTileQ>(pipelines.q, state_q, params.q, shared.q, work.head << params.log2_group, work.first_token);
      });
    } else if (warp == 1) {
      copy_tiles(params, pipelines.v, params.v, shared.v, [](Work const&) {});
    }
  }

  // Copies keys or values of all of the block's items. One lane calls `then` when an item's first tile has been issued.
  template <typename Then>
  DEVICE static void copy_tiles(Params const& params, PipelineKV& pipeline, Source const& source, bfloat16_t* stages, Then then) {
    int const lane = cutlass::canonical_lane_idx(), row = lane * params.box_rows;  // row of a tile at which this lane's box begins
    auto state = cutlass::make_producer_start_state<PipelineKV>();
    for (int number = blockIdx.x, total = params.plan.num_items(); number < total; number += params.plan.num_blocks()) {
      Work const work(params, number);
      if (work.end_tile == 0) break;
      int const last = work.end_tile - 1;
      int slot = work.slot(params, last * kTileKV + row);
#pragma unroll 1
      for (int tile = last; tile >= work.first_tile; --tile) {
        int const next_slot = work.slot(params, max(tile - 1, work.first_tile) * kTileKV + row);
        if (lane == 0) pipeline.producer_acquire(state);
        __syncwarp();
        if (row < kTileKV) {
          UNROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
            copy(pipeline, state, source, chunk, stages + ((state.index() * kChunks + chunk) * kTileKV + row) * kChunk, work.head, slot);
          }
        }
        ++state;
        slot = next_slot;
        if (tile == last && lane == 0) then(work);
      }
    }
  }
};

// q, out (T, H, HEAD_DIM) and k, v (slots, KV heads, HEAD_DIM) bfloat16, contiguous; pages int32; the plan: see `tile_plan.py`.
void run(View q, View k, View v, View out, View items, View parts, View arrivals, View pages, int64_t page_size, int64_t num_blocks, double scale) {
  int const group = int(q.size(1) / k.size(1)), box_rows = int(std::min<int64_t>(page_size, kTileKV));
  TVM_FFI_ICHECK(q.IsContiguous() && k.IsContiguous() && v.IsContiguous());
  TVM_FFI_ICHECK(group * k.size(1) == q.size(1) && kTileQ % group == 0 && page_size >= 8);  // swizzles repeat after 8 rows
  Work::Params const params{source_of(q, group, kTileQ / group), source_of(k, 1, box_rows), source_of(v, 1, box_rows), values_of(out),
                            plan_of(items, parts, arrivals), values_of(pages), log2_of(group), int(q.size(1)), log2_of(page_size), box_rows,
                            float(scale * M_LOG2E)};
  launch<Work>(params, int(num_blocks), q.device());
}

}  // namespace prefill

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, prefill::run);
