// Attention of few decode rows, for Hopper, with norm and rotation of the new token's queries and key and the store of its key and value.
// Compiled with HEAD_DIM.
//
// Latency-bound. A row's KV head belongs to a cluster of blocks. Tiles of 16 keys are assigned to warps round-robin, over blocks
// first. A warp reads its first tile into registers, in the layout of the products, before the preceding kernel is done: older keys exist. Then every
// block computes the queries and the new key and value, which replace the values read from their slot. At the end warps merge in shared memory, and
// blocks in distributed shared memory.
//
//   K (16 keys, 128) x q (128, 8 heads) -> scores (16 keys, 8 heads)        V (128, 16 keys) x weights (16 keys, 8 heads) -> (128, 8 heads)
//
// The order of the 128 values only has to be equal on both sides: here the one in which a thread reads 16 bytes at once.

#include "hopper_launch.cuh"

namespace fused {

using namespace hopper;
static_assert(kHeadDim == 128, "four lanes of 16 bytes, four times");

constexpr int kTile = 16, kHalf = kHeadDim / 2, kHeads = 8;  // keys per tile; rotated pairs; heads per product
constexpr int kMaxSplits = 16;  // blocks per cluster
constexpr int kQueryStride = kHeadDim + 32, kPartStride = kHeadDim + 4;  // in shared memory, against bank conflicts

struct Params {
  BFloat16 const *qkv, *q_weight, *k_weight;
  float const* cos_sin;
  BFloat16 *k, *v, *out;
  int64_t const* slots;
  int2 const* rows;  // keys of a row including the new one, and start of its pages (0 for the first row)
  int const* pages;
  int num_pages;  // readable pages, not only those of the rows
  int num_heads, kv_heads, heads_in_row;  // numbers of heads: of queries, of keys, and in a row of `qkv`
  int log2_group, log2_page;
  float eps, scale_log2;
};

template <int kHeadTiles>
struct alignas(16) Shared {
  BFloat16 q[kHeadTiles * kHeads][kQueryStride];
  BFloat16 k[kHeadDim], v[kHeadDim];  // key and value of the new token
  float received[kHeadTiles * kHeads * kHeadDim];  // this block's share of the result, from every block
  float tops[kMaxSplits][kHeadTiles * kHeads], sums[kMaxSplits][kHeadTiles * kHeads];  // of every block
  float warp_top[16][kHeadTiles * kHeads], warp_sum[16][kHeadTiles * kHeads];
  float part[1];  // (warps, heads of the group, kPartStride)

  static size_t num_bytes(int warps, int group) { return sizeof(Shared) + sizeof(float) * warps * group * kPartStride; }
};

DEVICE uint4 load_shared(BFloat16 const* from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared_address(from)));
  return x;
}

// Transposes an 8 x 8 matrix with two values of a row per lane.
DEVICE uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The i-th values of two keys side by side.
DEVICE uint32_t of_both(uint4 const& first, uint4 const& second, int i) {
  return __byte_perm(word_of(first, i / 2), word_of(second, i / 2), i % 2 ? 0x7632 : 0x5410);
}

// A tile of one KV head's keys and values in a warp's registers, 64 values per lane.
struct Tile {
  Params const& params;
  int const length, begin, head, lane;
  int page[2];  // for eight keys each: a page has at least eight
  uint4 k[2][4];  // of keys lane / 4 and + 8, values from lane % 4 * 8 and + 32, + 64, + 96
  uint4 v[4][2];  // of keys lane % 4 * 2 and + 1, + 8, + 9, values from lane / 4 * 8 and + 64

  DEVICE Tile(Params const& params, int row, int head, int lane)
      : params(params), length(__ldg(&params.rows[row].x)), begin(row ? __ldg(&params.rows[row].y) : 0), head(head), lane(lane) {}

  // Ignores the row's length: values after its end are not used.
  DEVICE void find_pages(int tile) {
    UNROLL for (int half = 0; half < 2; ++half) {
      page[half] = __ldg(params.pages + min(begin + ((tile * kTile + 8 * half) >> params.log2_page), params.num_pages - 1));
    }
  }

  DEVICE int64_t place(int key, int half) const {
    int64_t const slot = (int64_t(page[half]) << params.log2_page) + (key & ((1 << params.log2_page) - 1));
    return (slot * params.kv_heads + head) * kHeadDim;
  }

  DEVICE int key_of_k(int half) const { return 8 * half + lane / 4; }

  DEVICE int key_of_v(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

  // Called before the values are loaded. Keys after the end are masked and read from one of the row's pages.
  DEVICE void load_keys(int tile) {
    if (tile * kTile + 8 >= length) page[1] = page[0];
    UNROLL for (int half = 0; half < 2; ++half) {
      BFloat16 const* const from = params.k + place(tile * kTile + key_of_k(half), half) + lane % 4 * 8;
      UNROLL for (int i = 0; i < 4; ++i) k[half][i] = load_new<uint4>(from + 32 * i);
    }
  }

  DEVICE void load_values(int tile) {
    UNROLL for (int i = 0; i < 4; ++i) {
      BFloat16 const* const from = params.v + place(tile * kTile + key_of_v(i), i / 2) + lane / 4 * 8;
      UNROLL for (int half = 0; half < 2; ++half) v[i][half] = load_new<uint4>(from + 64 * half);
    }
  }

  // Replaces what was read before the new key and value existed.
  DEVICE void put_new(int tile, BFloat16 const* new_k, BFloat16 const* new_v) {
    int const key = length - 1 - tile * kTile;
    UNROLL for (int half = 0; half < 2; ++half)
      if (key_of_k(half) == key)
        UNROLL for (int i = 0; i < 4; ++i) k[half][i] = *as<uint4>(new_k + 32 * i + lane % 4 * 8);
    UNROLL for (int i = 0; i < 4; ++i)
      if (key_of_v(i) == key)
        UNROLL for (int half = 0; half < 2; ++half) v[i][half] = *as<uint4>(new_v + 64 * half + lane / 4 * 8);
  }
};

// A warp's running result. A lane has heads lane % 4 * 2 and + 1 of each eight, and 8 values from lane / 4 * 8 and from + 64 on.
template <int kHeadTiles>
struct Found {
  float out[kHeadTiles][8][4] = {};
  float top[kHeadTiles][2], sum[kHeadTiles][2] = {};

  DEVICE Found() {
    UNROLL for (int h = 0; h < kHeadTiles; ++h) top[h][0] = top[h][1] = kLowest;
  }

  // Adds a tile with `num_keys` keys of the row; if it `has_next`, its keys are replaced by those of tile `next`.
  DEVICE void add(Tile& tile, Shared<kHeadTiles> const& shared, int num_keys, bool has_next, int next) {
    float s[kHeadTiles][2][4] = {};
    UNROLL for (int i = 0; i < 4; ++i) {
      uint32_t const even[4] = {tile.k[0][i].x, tile.k[1][i].x, tile.k[0][i].y, tile.k[1][i].y};
      uint32_t const odd[4] = {tile.k[0][i].z, tile.k[1][i].z, tile.k[0][i].w, tile.k[1][i].w};
      UNROLL for (int h = 0; h < kHeadTiles; ++h) {
        uint4 const q = load_shared(&shared.q[kHeads * h + tile.lane / 4][32 * i + tile.lane % 4 * 8]);
        multiply(s[h][0], even, q.x, q.y);
        multiply(s[h][1], odd, q.z, q.w);
      }
    }
    if (has_next) tile.load_keys(next);
    uint32_t weights[kHeadTiles][2];
    UNROLL for (int h = 0; h < kHeadTiles; ++h) {
      UNROLL for (int i = 0; i < 4; ++i) s[h][0][i] = tile.key_of_k(i / 2) < num_keys ? s[h][0][i] + s[h][1][i] : -INFINITY;
      to_weights(h, s[h][0], tile.params.scale_log2);
      weights[h][0] = transposed(pack(s[h][0][0], s[h][0][1]));
      weights[h][1] = transposed(pack(s[h][0][2], s[h][0][3]));
    }
    UNROLL for (int i = 0; i < 8; ++i) {
      uint32_t const values[4] = {of_both(tile.v[0][0], tile.v[1][0], i), of_both(tile.v[0][1], tile.v[1][1], i),
                                  of_both(tile.v[2][0], tile.v[3][0], i), of_both(tile.v[2][1], tile.v[3][1], i)};
      UNROLL for (int h = 0; h < kHeadTiles; ++h) multiply(out[h][i], values, weights[h][0], weights[h][1]);
    }
  }

  DEVICE void to_weights(int h, float (&s)[4], float scale) {
    UNROLL for (int i = 0; i < 2; ++i) {
      float const next = fmaxf(over_lanes<4, 32, true>(fmaxf(s[i], s[i + 2])) * scale, top[h][i]), factor = exp2f(top[h][i] - next);
      top[h][i] = next;
      s[i] = exp2f(s[i] * scale - next), s[i + 2] = exp2f(s[i + 2] * scale - next);
      sum[h][i] = sum[h][i] * factor + s[i] + s[i + 2];  // of this lane's keys
      UNROLL for (int j = 0; j < 8; ++j) out[h][j][i] *= factor, out[h][j][i + 2] *= factor;
    }
  }

  DEVICE void store(Shared<kHeadTiles>& shared, int warp, int lane, int group) const {
    UNROLL for (int h = 0; h < kHeadTiles; ++h) {
      UNROLL for (int i = 0; i < 2; ++i) {
        float const total = over_lanes<4, 32, false>(sum[h][i]);
        int const head = kHeads * h + lane % 4 * 2 + i;
        if (head >= group) continue;
        if (lane < 4) shared.warp_top[warp][head] = top[h][i], shared.warp_sum[warp][head] = total;
        UNROLL for (int half = 0; half < 4; half += 2) {
          float4* const to = reinterpret_cast<float4*>(shared.part + (warp * group + head) * kPartStride + 32 * half + lane / 4 * 8);
          to[0] = make_float4(out[h][0][half + i], out[h][1][half + i], out[h][2][half + i], out[h][3][half + i]);
          to[1] = make_float4(out[h][4][half + i], out[h][5][half + i], out[h][6][half + i], out[h][7][half + i]);
        }
      }
    }
  }
};

// Data of a lane for two pairs of a head, loaded before the head exists.
struct Rotation {
  uint32_t q[2], k[2];  // weights of the norms
  float2 cosine, sine;
  int64_t slot;

  DEVICE Rotation(Params const& params, int row, int lane) {
    float const* const angles = params.cos_sin + int64_t(row) * kHeadDim;
    cosine = __ldcg(reinterpret_cast<float2 const*>(angles) + lane), sine = __ldcg(reinterpret_cast<float2 const*>(angles + kHalf) + lane);
    UNROLL for (int half = 0; half < 2; ++half) {
      q[half] = load_new<uint32_t>(params.q_weight + kHalf * half + 2 * lane);
      k[half] = load_new<uint32_t>(params.k_weight + kHalf * half + 2 * lane);
    }
    slot = __ldcg(params.slots + row);
  }

  DEVICE void apply(float2& low, float2& high, bool is_query, float eps) const {
    float const squares = over_lanes<1, 32, false>(low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y);
    float const scale = rsqrtf(squares / kHeadDim + eps);
    float2 const a = floats(is_query ? q[0] : k[0]), b = floats(is_query ? q[1] : k[1]);
    float2 const x = {low.x * scale * a.x, low.y * scale * a.y}, y = {high.x * scale * b.x, high.y * scale * b.y};
    low = {x.x * cosine.x - y.x * sine.x, x.y * cosine.y - y.y * sine.y};
    high = {y.x * cosine.x + x.x * sine.x, y.y * cosine.y + x.y * sine.y};
  }
};

// One warp: writes the new token's i-th head of the group, its key, or its value to shared memory; the last two also to the pool if it `stores`.
template <int kHeadTiles>
DEVICE void make_head(Params const& params, Shared<kHeadTiles>& shared, Rotation const& rotation, int i, bool stores, int lane) {
  int const group = 1 << params.log2_group, head = blockIdx.y;
  bool const is_query = i < group, is_key = i == group;
  int const index = is_query ? head * group + i : params.num_heads + (is_key ? head : params.kv_heads + head);
  BFloat16 const* const from = params.qkv + (int64_t(blockIdx.z) * params.heads_in_row + index) * kHeadDim + 2 * lane;
  float2 low = floats(load_new<uint32_t>(from)), high = floats(load_new<uint32_t>(from + kHalf));
  if (is_query || is_key) {
    rotation.apply(low, high, is_query, params.eps);
  } else {  // see `Ops.norm_rope_store_`
    auto finite = [](float x) { return fabsf(x) < INFINITY ? x : 0.0f; };
    low = {finite(low.x), finite(low.y)}, high = {finite(high.x), finite(high.y)};
  }
  uint32_t* const to = as<uint32_t>(is_query ? shared.q[i] : is_key ? shared.k : shared.v);
  to[lane] = pack(low.x, low.y), to[kHalf / 2 + lane] = pack(high.x, high.y);
  if (!is_query && stores) {
    uint32_t* const pool = as<uint32_t>((is_key ? params.k : params.v) + (rotation.slot * params.kv_heads + head) * kHeadDim);
    pool[lane] = pack(low.x, low.y), pool[kHalf / 2 + lane] = pack(high.x, high.y);
  }
}

// Sends the results of this block's `num_warps`: values to the block whose share they are, maximum and sum to all blocks.
template <int kHeadTiles, int kSplits, int kWarps>
DEVICE void send(Shared<kHeadTiles>& shared, int num_warps, int rank, int log2_group) {
  int const group = 1 << log2_group, num_quads = group * kHeadDim / 4, share = num_quads / kSplits;
  auto top_of = [&](int head) {
    float top = kLowest;
    UNROLL for (int warp = 0; warp < kWarps; ++warp)
      if (warp < num_warps) top = fmaxf(top, shared.warp_top[warp][head]);
    return top;
  };
  for (int i = 32 * kWarps - 1 - threadIdx.x; i < group * kSplits; i += 32 * kWarps) {  // by the threads with less other work
    int const head = i & (group - 1), to = i >> log2_group;
    float const top = top_of(head);
    float sum = 0;
    UNROLL for (int warp = 0; warp < kWarps; ++warp)
      if (warp < num_warps) sum += shared.warp_sum[warp][head] * exp2f(shared.warp_top[warp][head] - top);
    store_in(to, &shared.tops[rank][head], top);
    store_in(to, &shared.sums[rank][head], sum);
  }
  for (int i = threadIdx.x; i < num_quads; i += 32 * kWarps) {
    int const head = i / (kHeadDim / 4), column = i % (kHeadDim / 4) * 4;
    float const top = top_of(head);
    float4 total = {0, 0, 0, 0};
    UNROLL for (int warp = 0; warp < kWarps; ++warp) {
      if (warp >= num_warps) break;
      float const factor = exp2f(shared.warp_top[warp][head] - top);
      float4 const x = *as<float4>(shared.part + (warp * group + head) * kPartStride + column);
      total.x += factor * x.x, total.y += factor * x.y, total.z += factor * x.z, total.w += factor * x.w;
    }
    uint32_t const to = address_in(i / share, &shared.received[(rank * share + i % share) * 4]);
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(total.x), "f"(total.y), "f"(total.z), "f"(total.w) : "memory");
  }
}

// Computes this block's share of the result.
template <int kHeadTiles, int kSplits>
DEVICE void merge(Params const& params, Shared<kHeadTiles> const& shared, int rank) {
  int const share = (kHeadDim << params.log2_group) / kSplits;
  for (int i = 2 * threadIdx.x; i < share; i += 2 * blockDim.x) {
    int const value = rank * share + i, head = value / kHeadDim;
    float top = kLowest, sum = 0;
    UNROLL for (int from = 0; from < kSplits; ++from) top = fmaxf(top, shared.tops[from][head]);
    float2 result = {0, 0};
    UNROLL for (int from = 0; from < kSplits; ++from) {
      float const factor = exp2f(shared.tops[from][head] - top);
      float2 const x = *as<float2>(&shared.received[from * share + i]);
      sum += factor * shared.sums[from][head], result.x += factor * x.x, result.y += factor * x.y;
    }
    int64_t const place = (int64_t(blockIdx.z) * params.num_heads + (blockIdx.y << params.log2_group)) * kHeadDim + value;
    *as<uint32_t>(params.out + place) = pack(result.x / sum, result.y / sum);
  }
}

// Block (split, KV head, row).
template <int kHeadTiles, int kSplits, int kWarps, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps, kBlocks) attend(__grid_constant__ Params const params) {
  constexpr int kStep = kSplits * kWarps;  // tiles processed at once
  // Whether the next kernel starts only after the new heads, so that its weights do not delay our keys and values. Measured for clusters of eight: with
  // sixteen warps (four KV heads), the following float8 products lose more than attention gains.
  constexpr bool kWaits = kWarps == 8 && kSplits == 8;
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<Shared<kHeadTiles>*>(memory);
  announce_block();
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x, group = 1 << params.log2_group;
  int number = rank + kSplits * warp;
  Tile tile(params, blockIdx.z, blockIdx.y, lane);
  tile.find_pages(number);
  int const num_tiles = (tile.length + kTile - 1) / kTile;
  bool const has_tiles = number < num_tiles;
  if (has_tiles) {
    tile.load_keys(number);
    tile.load_values(number);
    tile.find_pages(number + kStep);
  }
  Rotation const rotation(params, blockIdx.z, lane);
  for (int i = threadIdx.x; i < (kHeadTiles * kHeads - group) * kHalf; i += 32 * kWarps) {  // padding heads
    as<uint32_t>(shared.q[group + i / kHalf])[i % kHalf] = 0;
  }
  wait_for_preceding_kernel();
  if constexpr (!kWaits) launch_dependents();
  for (int i = warp; i < group + 2; i += kWarps) make_head(params, shared, rotation, i, rank == 0, lane);
  __syncthreads();
  if constexpr (kWaits) launch_dependents();
  if (has_tiles) {
    Found<kHeadTiles> found;
    while (true) {
      int const next = number + kStep, num_keys = tile.length - number * kTile;
      if (num_keys <= kTile) tile.put_new(number, shared.k, shared.v);
      found.add(tile, shared, num_keys, next < num_tiles, next);
      if (next >= num_tiles) break;
      tile.load_values(next);
      tile.find_pages(next + kStep);
      number = next;
    }
    found.store(shared, warp, lane, group);
  }
  wait_for_blocks();
  __syncthreads();
  send<kHeadTiles, kSplits, kWarps>(shared, min(kWarps, max(0, (num_tiles - rank + kSplits - 1) / kSplits)), rank, params.log2_group);
  wait_for_writes();
  merge<kHeadTiles, kSplits>(params, shared, rank);
}

template <int kHeadTiles, int kSplits, int kWarps, int kBlocks>
void launch(Params const& params, int num_rows, DLDevice device) {
  size_t const num_bytes = Shared<kHeadTiles>::num_bytes(kWarps, 1 << params.log2_group);
  dim3 const grid(kSplits, params.kv_heads, num_rows);
  launch_early(attend<kHeadTiles, kSplits, kWarps, kBlocks>, params, grid, 32 * kWarps, num_bytes, device, kSplits);
}

// qkv (R, heads, HEAD_DIM), out (R, H, HEAD_DIM), k, v (slots, KV heads, HEAD_DIM) contiguous. The others: see `fused_decoding.py`.
void run(View qkv, View k, View v, View rows, View pages, View out, int64_t page_size, int64_t splits, int64_t warps, View q_weight, View k_weight,
         double eps, View cos_sin, View slots) {
  int const num_heads = int(out.size(1)), kv_heads = int(k.size(1)), group = num_heads / kv_heads;
  TVM_FFI_ICHECK(group * kv_heads == num_heads && group <= 2 * kHeads && page_size >= 8 && k.size(2) == kHeadDim && cos_sin.size(1) == kHeadDim);
  Params params{};
  params.qkv = values_of(qkv), params.k = values_of(k), params.v = values_of(v), params.out = values_of(out), params.rows = values_of(rows);
  params.pages = values_of(pages), params.num_pages = int(pages.size(0));
  params.num_heads = num_heads, params.kv_heads = kv_heads, params.heads_in_row = int(qkv.size(1));
  params.log2_group = log2_of(group), params.log2_page = log2_of(page_size);
  params.scale_log2 = float(M_LOG2E / std::sqrt(double(kHeadDim)));
  params.q_weight = values_of(q_weight), params.k_weight = values_of(k_weight), params.eps = float(eps);
  params.cos_sin = values_of(cos_sin), params.slots = values_of(slots);
  bool const is_small = group <= kHeads, is_narrow = splits == 16 && warps == 8;
  TVM_FFI_ICHECK(is_narrow || (is_small && splits == 8 && (warps == 8 || warps == 16)))
      << "attention: clusters of " << splits << " blocks of " << warps << " warps";
  auto const chosen = !is_small ? launch<2, 16, 8, 1> : is_narrow ? launch<1, 16, 8, 2> : warps == 8 ? launch<1, 8, 8, 1> : launch<1, 8, 16, 1>;
  chosen(params, int(rows.size(0)), qkv.device());
}

}  // namespace fused

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, fused::run);
