// Attention inside segments, made for heads of 64 and 72 values, see `hopper_attention.cuh`. Compiled with HEAD_DIM.

#define TILE_KV (HEAD_DIM <= 72 ? 112 : 128)  // the fastest measured on an H200
#include "hopper_attention.cuh"

namespace segments {

using namespace hopper;

// A head with the patches of one segment that fill a tile, and the segment's keys.
struct Work : Item {
  struct Params {
    Source q, k, v;
    BFloat16* out;
    int64_t out_stride;
    Plan plan;
    float scale_log2;
  };

  int num_groups, num_unmasked_tiles;

  DEVICE Work(Params const& params, int number) : Item(params.plan.items, number) {
    num_groups = (num_tokens + 63) / 64;
    num_unmasked_tiles = end / kTileKV;
  }

  DEVICE int visible(Params const&, int) const { return end; }

  DEVICE BFloat16* place(Params const& params, int row) const {
    return row < num_tokens ? params.out + (first_token + row) * params.out_stride + head * kHeadDim : nullptr;
  }

  // Keys are copied one tile before values, in the order of their products.
  DEVICE static void produce(Params const& params, Shared& shared, Pipelines& pipelines) {
    if (cutlass::canonical_warp_idx_sync() != 0 || !elect_one_sync()) return;
    auto state_q = cutlass::make_producer_start_state<PipelineQ>();
    auto state_k = cutlass::make_producer_start_state<PipelineKV>(), state_v = state_k;
    for (int number = blockIdx.x, total = params.plan.num_items(); number < total; number += params.plan.num_blocks()) {
      Work const work(params, number);
      if (work.end_tile == 0) break;
      auto fetch_k = [&](int tile) { fetch<kTileKV>(pipelines.k, state_k, params.k, shared.k, work.head, work.first_key + tile * kTileKV); };
      auto fetch_v = [&](int tile) { fetch<kTileKV>(pipelines.v, state_v, params.v, shared.v, work.head, work.first_key + tile * kTileKV); };
      fetch_k(work.end_tile - 1);
      fetch<kTileQ>(pipelines.q, state_q, params.q, shared.q, work.head, work.first_token);
      for (int tile = work.end_tile - 1; tile > work.first_tile; --tile) {
        fetch_k(tile - 1);
        fetch_v(tile);
      }
      fetch_v(work.first_tile);
    }
  }
};

// q, k, v (P, H, HEAD_DIM) bfloat16: strides are multiples of 16 bytes, values contiguous. out (P, H * HEAD_DIM). The plan: see `tile_plan.py`.
void run(View q, View k, View v, View out, View items, View parts, View arrivals, int64_t num_blocks, double scale) {
  TVM_FFI_ICHECK(out.size(1) == q.size(1) * kHeadDim && out.stride(1) == 1);
  Work::Params const params{source_of(q, 1, kTileQ), source_of(k, 1, kTileKV), source_of(v, 1, kTileKV), values_of(out, /*is_strided=*/true),
                            out.stride(0), plan_of(items, parts, arrivals), float(scale * M_LOG2E)};
  launch<Work>(params, int(num_blocks), q.device());
}

}  // namespace segments

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, segments::run);
