// Attention inside segments for Hopper, made for the heads of the vision towers (64 and 72 values; any multiple of 8 up to 128 works).
// Compiled by `segments_cuda.py`, which defines HEAD_DIM. How it computes: `hopper_attention.cuh`.

#include "hopper_attention.cuh"

namespace segments {

using namespace hopper;

// A tile of queries by number: all of head 0, then all of head 1, ... Blocks that run together share a head's keys and values.
struct Work {
  struct Params {
    Source q, k, v;
    __nv_bfloat16* out;
    int64_t out_stride;
    int4 const* tiles;  // index of the tile in its segment, first row of the segment, rows of the segment, unused
    int tiles_per_head, num_tiles;
    float scale_log2;
  };

  int head, first_row, length, first_query, num_kv_tiles, num_unmasked_tiles;

  CUTLASS_DEVICE Work(Params const& params, int number) {
    int4 const tile = params.tiles[number % params.tiles_per_head];
    head = number / params.tiles_per_head;
    first_row = tile.y;
    length = tile.z;
    first_query = tile.x * kTileQ;
    num_kv_tiles = (length + kTileKV - 1) / kTileKV;
    num_unmasked_tiles = num_kv_tiles - 1;  // only the last one may have rows behind the segment
  }

  CUTLASS_DEVICE static int num_tiles(Params const& params) { return params.num_tiles; }

  CUTLASS_DEVICE int visible(Params const&, int) const { return length; }

  CUTLASS_DEVICE __nv_bfloat16* place(Params const& params, int row) const {
    if (first_query + row >= length) return nullptr;
    return params.out + (first_row + first_query + row) * params.out_stride + head * kHeadDim;
  }

  // Keys are one tile ahead of values, as their products are.
  CUTLASS_DEVICE static void produce(Params const& params, Shared& shared, Pipelines& pipelines) {
    if (cutlass::canonical_warp_idx_sync() != 0 || !elect_one_sync()) return;
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
};

// q, k, v (P, H, HEAD_DIM) bfloat16: strides of whole 16 bytes, values side by side. out (P, H * HEAD_DIM). tiles (n, 4) int32: see Params.
void run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView out, ffi::TensorView tiles, int64_t num_tiles, double scale) {
  TVM_FFI_ICHECK(out.size(1) == q.size(1) * kHeadDim && out.stride(1) == 1);
  ffi::CUDADeviceGuard guard(q.device().device_id);
  int const total = static_cast<int>(num_tiles * q.size(1));
  Work::Params const params{source_of(q, 1, kTileQ), source_of(k, 1, kTileKV), source_of(v, 1, kTileKV),
                            static_cast<__nv_bfloat16*>(out.data_ptr()), out.stride(0), static_cast<int4 const*>(tiles.data_ptr()),
                            static_cast<int>(num_tiles), total, static_cast<float>(scale * M_LOG2E)};
  int num_sms = 0;
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, q.device().device_id);
  launch<Work>(params, std::min(total, num_sms), q.device());
}

int64_t tile_rows() { return kTileQ; }  // queries of a tile

}  // namespace segments

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, segments::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tile_rows, segments::tile_rows);
