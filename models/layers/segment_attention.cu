// Attention inside segments for Hopper, made for the heads of the vision towers (64 and 72 values; any multiple of 8 up to 128 works).
// Compiled by `segments_cuda.py`, which defines HEAD_DIM. How it computes: `hopper_attention.cuh`.

#define TILE_KV (HEAD_DIM <= 72 ? 112 : 128)  // the best of those measured on an H200
#include "hopper_attention.cuh"

namespace segments {

using namespace hopper;

// A tile of queries by number: all large ones of head 0, then of head 1, ..., then all small ones in the same order. Blocks that run together
// share a head's keys and values.
struct Work {
  struct Params {
    Source q, k, v;
    __nv_bfloat16* out;
    int64_t out_stride;
    int4 const* tiles;  // first query in its segment, number of queries, first row of the segment, rows of the segment
    int num_large, num_small, num_heads;  // tiles of a head
    float scale_log2;
  };

  int head, first_query, num_queries, first_row, length, num_groups, num_kv_tiles, num_unmasked_tiles;

  CUTLASS_DEVICE Work(Params const& params, int number) {
    int const rest = number - params.num_large * params.num_heads;
    head = rest < 0 ? number / params.num_large : rest / params.num_small;
    int4 const tile = params.tiles[rest < 0 ? number - head * params.num_large : params.num_large + rest - head * params.num_small];
    first_query = tile.x;
    num_queries = tile.y;
    first_row = tile.z;
    length = tile.w;
    num_groups = (num_queries + 63) / 64;
    num_kv_tiles = (length + kTileKV - 1) / kTileKV;
    num_unmasked_tiles = num_kv_tiles - 1;  // only the last one may have rows behind the segment
  }

  CUTLASS_DEVICE static int num_tiles(Params const& params) { return (params.num_large + params.num_small) * params.num_heads; }

  CUTLASS_DEVICE static int num_blocks(Params const&) { return gridDim.x; }

  CUTLASS_DEVICE int visible(Params const&, int) const { return length; }

  CUTLASS_DEVICE __nv_bfloat16* place(Params const& params, int row) const {
    if (row >= num_queries) return nullptr;
    return params.out + (first_row + first_query + row) * params.out_stride + head * kHeadDim;
  }

  // Keys are one tile ahead of values, as their products are.
  CUTLASS_DEVICE static void produce(Params const& params, Shared& shared, Pipelines& pipelines) {
    if (cutlass::canonical_warp_idx_sync() != 0 || !elect_one_sync()) return;
    auto state_q = cutlass::make_producer_start_state<PipelineQ>();
    auto state_k = cutlass::make_producer_start_state<PipelineKV>(), state_v = state_k;
    for (int number = blockIdx.x; number < num_tiles(params); number += num_blocks(params)) {
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
};

// q, k, v (P, H, HEAD_DIM) bfloat16: strides of whole 16 bytes, values side by side. out (P, H * HEAD_DIM). tiles (n, 4) int32: see Params.
void run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView out, ffi::TensorView tiles, int64_t num_large, int64_t num_small,
         int64_t num_blocks, double scale) {
  TVM_FFI_ICHECK(out.size(1) == q.size(1) * kHeadDim && out.stride(1) == 1);
  ffi::CUDADeviceGuard guard(q.device().device_id);
  Work::Params const params{source_of(q, 1, kTileQ), source_of(k, 1, kTileKV), source_of(v, 1, kTileKV),
                            static_cast<__nv_bfloat16*>(out.data_ptr()), out.stride(0), static_cast<int4 const*>(tiles.data_ptr()),
                            static_cast<int>(num_large), static_cast<int>(num_small), static_cast<int>(q.size(1)),
                            static_cast<float>(scale * M_LOG2E)};
  launch<Work>(params, static_cast<int>(num_blocks), q.device());
}

int64_t tile_rows() { return kTileQ; }  // queries of a large tile; a small one has a multiple of 64 fewer

}  // namespace segments

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, segments::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tile_rows, segments::tile_rows);
