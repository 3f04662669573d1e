// Attention of few query tokens over paged keys and values, for Hopper. Compiled with HEAD_DIM, for a cache in float8 also with FLOAT8.
//
// Memory-bound: keys and values are read once for as many query tokens as fill 16 rows of a matrix product. With 4 query heads per KV
// head, row r is head r % 4 of token r / 4. A block has a work item (`work_items.py`) and a KV head; each of its 4 warps takes every fourth
// tile of 16 keys through its own ring buffer, so that warps do not wait for each other. At the end warps are merged, then items of a group.
//
// Float8 values become halves, which hold them exactly, as queries do up to 65,504. Their 16-bit pairs are loaded like bfloat16, so that a
// thread has four neighbouring values of a key where the product expects two and two: queries are loaded in that order, too. Of values, a
// thread has two neighbouring columns for two keys, and results of even columns are apart from those of odd ones until they are stored.
//
// It may run concurrently with `prefill_attention.cu`, which leaves it some of the multiprocessors.

#include "hopper_copy.cuh"

namespace split {

using namespace hopper;
static_assert(kStored % kChunk == 0);

constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlocks = 3;  // blocks per multiprocessor
constexpr int kStages = kFloat8 ? 4 : 2, kTile = 16, kRows = 16;  // tiles per ring buffer, keys per tile, rows of queries
constexpr int kChunkBytes = kTile * kChunk * sizeof(BFloat16), kMatrixBytes = kChunks * kChunkBytes, kStageBytes = 2 * kMatrixBytes;
constexpr int kNewTokens = 64;  // maximum of a row in one step: older keys are in the pool before the preceding kernel has finished
constexpr float kMaxHalf = 65504;
constexpr int kMaxParts = 512;  // of a group, see `work_items.py`

struct Params {
  Source k, v;
  BFloat16 const* q;
  BFloat16* out;
  int4 const* items;  // two int4 per item
  int const* pages;
  float *partials, *sums;
  int* arrivals;
  int num_heads, kv_heads, log2_group;  // log2_group: query heads per KV head
  int log2_page, box_rows;  // tokens per page and per copy
  float scale_log2;
  bool overlaps;  // concurrent with the preceding kernel, which starts after the producer of all inputs; must not finish before it
};

struct alignas(1024) Shared {  // swizzles repeat after 1024 bytes
  char stages[kWarps][kStages][kStageBytes];  // keys, then values; at the end the warp's results (kRows, kHeadDim)
  float top[kWarps][kRows], sum[kWarps][kRows];
  uint64_t barriers[kWarps][kStages];
  int is_last;
};
static_assert(kRows * kHeadDim * sizeof(float) <= kStages * kStageBytes);
static_assert(kRows * kMaxParts * sizeof(float) <= kWarps * kStages * kStageBytes);

struct WorkItem {
  int first_token, num_tokens, first_page, start, stop, part, first, count;  // see `work_items.py`

  DEVICE WorkItem(Params const& params, int number) {
    int4 const a = params.items[2 * number], b = params.items[2 * number + 1];
    first_token = a.x, num_tokens = a.y, first_page = a.z, start = a.w;
    stop = b.x, part = b.y, first = b.z, count = b.w;
  }

  DEVICE int num_tiles() const { return (stop - start + kTile - 1) / kTile; }

  // End of the keys that a row's query attends to. The last key of a group belongs to its last token only.
  DEVICE int end(Params const& params, int row) const {
    return part == first + count - 1 ? stop + (row >> params.log2_group) + 1 - num_tokens : stop;
  }

  // Offset in values of a row's vector from that of the first token's first head.
  DEVICE static int64_t vector(Params const& params, int row) {
    int const token = row >> params.log2_group, member = row - (token << params.log2_group);
    return (int64_t(token) * params.num_heads + (blockIdx.x << params.log2_group) + member) * kHeadDim;
  }

  DEVICE int64_t place(Params const& params, int row) const {
    return int64_t(first_token) * params.num_heads * kHeadDim + vector(params, row);
  }

  // Offset of a part's results in `partials`; divided by kHeadDim, in `sums`.
  DEVICE static int64_t partial(Params const& params, int part, int row) {
    return int64_t(part) * (kRows >> params.log2_group) * params.num_heads * kHeadDim + vector(params, row);
  }
};

// Ring buffer of one warp's tiles. One lane issues copies; all lanes wait for what they read.
struct Ring {
  Params const& params;
  WorkItem const& item;
  char* const stages;
  uint64_t* const barriers;
  int coming, stage = 0, phase = 0;  // the next tile to copy, and position of the next one to read

  DEVICE Ring(Params const& params, WorkItem const& item, Shared& shared, int warp, int lane)
      : params(params), item(item), stages(shared.stages[warp][0]), barriers(shared.barriers[warp]), coming(warp) {
    if (lane < kStages) initialize_barrier(barriers[lane], 1);
    cutlass::arch::fence_barrier_init();
    __syncwarp();
  }

  // Copies the next tile. Keys after the end are masked and read from the row's last page.
  DEVICE void copy(int to) {
    char* const place = stages + to * kStageBytes;
    set_barrier_transaction_bytes(barriers[to], kStageBytes);
    for (int row = 0; row < kTile; row += params.box_rows) {
      int const key = item.start + coming * kTile + row;
      int const page = __ldg(params.pages + item.first_page + (min(key, item.stop - 1) >> params.log2_page));
      int const slot = (page << params.log2_page) + (key & ((1 << params.log2_page) - 1));
      UNROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
        char* const target = place + chunk * kChunkBytes + row * kChunk * sizeof(BFloat16);
        auto const once = uint64_t(TMA::CacheHintSm90::EVICT_FIRST);
        SM90_TMA_LOAD_3D::copy(&params.k.chunks[chunk], &barriers[to], once, target, chunk * kChunk, blockIdx.x, slot);
        SM90_TMA_LOAD_3D::copy(&params.v.chunks[chunk], &barriers[to], once, target + kMatrixBytes, chunk * kChunk, blockIdx.x, slot);
      }
    }
    coming += kWarps;
  }

  // Copies tiles of keys before `end` into stages from `from` on. Returns the first free stage.
  DEVICE int fill(int from, int end) {
    for (; from < kStages && coming < item.num_tiles() && item.start + coming * kTile < end; ++from) copy(from);
    return from;
  }

  DEVICE uint32_t wait() {
    wait_barrier(barriers[stage], phase);
    return cast_smem_ptr_to_uint(stages + stage * kStageBytes);
  }

  DEVICE void release(int lane) {
    __syncwarp();
    if (lane == 0 && coming < item.num_tiles()) copy(stage);
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

#define LOAD_MATRICES(name, options) \
  DEVICE void name(uint32_t (&to)[4], uint32_t from) { \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4." options "shared.b16 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from)); \
  }
LOAD_MATRICES(load_matrices, "")
LOAD_MATRICES(load_transposed, "trans.")
#undef LOAD_MATRICES

DEVICE uint32_t halves_of(float low, float high) {
  __half2 const pair = __floats2half2_rn(fmaxf(fminf(low, kMaxHalf), -kMaxHalf), fmaxf(fminf(high, kMaxHalf), -kMaxHalf));
  return *as<uint32_t>(&pair);
}

// A warp's queries and its running result.
struct Rows {
  uint32_t q[kSteps][4];
  float out[kHeadDim / 8][4] = {};
  float top[2] = {kLowest, kLowest}, sum[2] = {0, 0};
  int ends[2];
  int const lane, matrix, line;  // for ldmatrix: the 8 x 8 matrix of four and its line that this lane addresses

  DEVICE Rows(Params const& params, WorkItem const& item, int lane) : lane(lane), matrix(lane / 8), line(lane % 8) {
    UNROLL for (int half = 0; half < 2; ++half) {
      int const row = lane / 4 + 8 * half;
      ends[half] = item.end(params, row);
      bool const is_query = row >> params.log2_group < item.num_tokens;
      BFloat16 const* const from = params.q + item.place(params, row) + lane % 4 * (kFloat8 ? 4 : 2);
      UNROLL for (int i = 0; i < 2 * kSteps; ++i) {
        int const column = kFloat8 ? i / 2 * 16 + i % 2 * 2 : 8 * i;
        uint32_t pair = is_query ? load_new<uint32_t>(from + column) : 0;
        if constexpr (kFloat8) pair = halves_of(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
        q[i / 2][2 * (i % 2) + half] = pair;
      }
    }
  }

  DEVICE static uint32_t piece(uint32_t matrix_of_rows, int row, int number) {  // piece of 16 bytes, see `hopper_copy.cuh`
    return matrix_of_rows + number / 8 * kChunkBytes + row * kChunk * sizeof(BFloat16) + ((number % 8 ^ row % 8) << 4);
  }

  // Processes the kTile keys from `key` on, which are in the tile at `tile`.
  DEVICE void attend(Params const& params, uint32_t tile, int key, int first_end) {
    float s[2][4] = {};
    UNROLL for (int i = 0; i < kStored / 16; ++i) {
      uint32_t k[4];
      load_matrices(k, piece(tile, matrix / 2 * 8 + line, 2 * i + matrix % 2));
      if constexpr (kFloat8) {
        UNROLL for (int m = 0; m < 4; ++m) {
          uint2 const pairs = to_halves(k[m]);
          multiply_halves(s[m / 2], q[2 * i + m % 2], pairs.x, pairs.y);
        }
      } else {
        multiply(s[0], q[i], k[0], k[1]);
        multiply(s[1], q[i], k[2], k[3]);
      }
    }
    if (key + kTile > first_end) {
      UNROLL for (int i = 0; i < 8; ++i)
        if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= ends[i % 4 / 2]) s[i / 4][i % 4] = -INFINITY;
    }
    to_weights(s, params.scale_log2);
    uint32_t weights[4];
    UNROLL for (int i = 0; i < 4; ++i) {
      float const low = s[i / 2][i % 2 * 2], high = s[i / 2][i % 2 * 2 + 1];
      weights[i] = kFloat8 ? halves_of(low, high) : pack(low, high);
    }
    UNROLL for (int i = 0; i < kStored / 16; ++i) {
      uint32_t v[4];
      load_transposed(v, piece(tile + kMatrixBytes, matrix % 2 * 8 + line, 2 * i + matrix / 2));
      if constexpr (kFloat8) {
        UNROLL for (int m = 0; m < 4; m += 2) {
          uint2 const low = to_halves(__byte_perm(v[m], 0, 0x3120)), high = to_halves(__byte_perm(v[m + 1], 0, 0x3120));
          multiply_halves(out[4 * i + m], weights, low.x, high.x);
          multiply_halves(out[4 * i + m + 1], weights, low.y, high.y);
        }
      } else {
        multiply(out[2 * i], weights, v[0], v[1]);
        multiply(out[2 * i + 1], weights, v[2], v[3]);
      }
    }
  }

  DEVICE void to_weights(float (&s)[2][4], float scale) {
    UNROLL for (int half = 0; half < 2; ++half) {
      int const a = 2 * half, b = a + 1;
      float const next = fmaxf(over_lanes<1, 4, true>(fmaxf(fmaxf(s[0][a], s[0][b]), fmaxf(s[1][a], s[1][b]))) * scale, top[half]);
      float const factor = exp2f(top[half] - next);
      top[half] = next;
      sum[half] *= factor;
      if (factor != 1) {
        UNROLL for (int i = 0; i < kHeadDim / 8; ++i) out[i][a] *= factor, out[i][b] *= factor;
      }
      UNROLL for (int i = 0; i < 4; ++i) {
        float& weight = s[i / 2][a + i % 2];
        weight = exp2f(weight * scale - next);
        sum[half] += weight;  // over this thread's keys
      }
    }
  }

  DEVICE void store(Shared& shared, int warp) const {
    float* const results = as<float>(shared.stages[warp]);
    UNROLL for (int half = 0; half < 2; ++half) {
      int const row = lane / 4 + 8 * half;
      float const total = over_lanes<1, 4, false>(sum[half]);
      if (lane % 4 == 0) shared.top[warp][row] = top[half], shared.sum[warp][row] = total;
      UNROLL for (int i = 0; i < kHeadDim / 8; i += 2) {
        float const (&a)[4] = out[i], (&b)[4] = out[i + 1];
        float* const to = results + row * kHeadDim + 8 * i + lane % 4 * (kFloat8 ? 4 : 2);
        int const low = 2 * half, high = low + 1;
        *as<float2>(to) = make_float2(a[low], kFloat8 ? b[low] : a[high]);
        *as<float2>(to + (kFloat8 ? 2 : 8)) = make_float2(kFloat8 ? a[high] : b[low], b[high]);
      }
    }
  }
};

// Weighted values with the maximum and the sum of the weights (base 2); `add` merges another part of the same row.
struct Merged {
  float top = kLowest, sum = 0;
  float2 value = {0, 0};

  DEVICE void add(float other_top, float other_sum, float2 other) {
    float const next = fmaxf(top, other_top), mine = exp2f(top - next), its = exp2f(other_top - next);
    top = next;
    sum = sum * mine + other_sum * its;
    value.x = value.x * mine + other.x * its;
    value.y = value.y * mine + other.y * its;
  }

  DEVICE uint32_t pair() const { return pack(value.x / sum, value.y / sum); }
};

// Calls `then(row, column)` for every pair of values of every query, each in one thread.
template <typename Then>
DEVICE void for_pairs(Params const& params, WorkItem const& item, Then then) {
  int const total = (item.num_tokens << params.log2_group) * (kHeadDim / 2);
  for (int i = threadIdx.x; i < total; i += kThreads) then(i / (kHeadDim / 2), i % (kHeadDim / 2) * 2);
}

// One warp: each part's share of a row's result, from the parts' logarithmic sums. Reads bypass L1: other blocks wrote them.
DEVICE void weigh_parts(Params const& params, WorkItem const& item, int row, float* weights, int lane) {
  float top = kLowest, total = 0;
  for (int part = lane; part < item.count; part += 32) {
    weights[part] = __ldcg(params.sums + WorkItem::partial(params, item.first + part, row) / kHeadDim);
    top = fmaxf(top, weights[part]);
  }
  top = over_lanes<1, 32, true>(top);
  for (int part = lane; part < item.count; part += 32) total += weights[part] = exp2f(weights[part] - top);
  total = over_lanes<1, 32, false>(total);
  for (int part = lane; part < item.count; part += 32) weights[part] /= total;
}

constexpr int kColumns = kHeadDim / 4;  // groups of four values per row

// The weighted sum of the parts, four values of a row per thread.
DEVICE void add_parts(Params const& params, WorkItem const& item, int num_rows, float const* weights) {
  for (int i = threadIdx.x; i < num_rows * kColumns; i += kThreads) {
    int const row = i / kColumns;
    float4 sum = {};
#pragma unroll 8
    for (int part = 0; part < item.count; ++part) {
      float const share = weights[row * item.count + part];
      float const* const partial = params.partials + WorkItem::partial(params, item.first + part, row);
      float4 const x = __ldcg(reinterpret_cast<float4 const*>(partial) + i % kColumns);
      sum.x += share * x.x, sum.y += share * x.y, sum.z += share * x.z, sum.w += share * x.w;
    }
    *as<uint2>(params.out + item.place(params, row) + i % kColumns * 4) = make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
  }
}

// The last item of a group to finish merges the results of all.
DEVICE void merge_items(Params const& params, WorkItem const& item, Shared& shared, int warp, int lane) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* const arrivals = params.arrivals + item.first * params.kv_heads + blockIdx.x;
    shared.is_last = atomicAdd(arrivals, 1) == item.count - 1;
    if (shared.is_last) *arrivals = 0;
  }
  __syncthreads();
  if (!shared.is_last) return;
  __threadfence();
  int const num_rows = item.num_tokens << params.log2_group;
  float* const weights = reinterpret_cast<float*>(shared.stages);  // (row, part): each part's share of the whole
  for (int row = warp; row < num_rows; row += kWarps) weigh_parts(params, item, row, weights + row * item.count, lane);
  __syncthreads();
  add_parts(params, item, num_rows, weights);
}

DEVICE void attend_item(Params const& params, WorkItem const& item, Shared& shared) {
  int const warp = cutlass::canonical_warp_idx_sync(), lane = cutlass::canonical_lane_idx();
  Ring ring(params, item, shared, warp, lane);
  int filled = 0;
  if (lane == 0) filled = ring.fill(0, item.stop - kNewTokens - kTile + 1);
  if (!params.overlaps) wait_for_preceding_kernel();
  launch_dependents();
  if (lane == 0) ring.fill(filled, item.stop);
  Rows rows(params, item, lane);
  int const first_end = item.end(params, 0);
  for (int tile = warp; tile < item.num_tiles(); tile += kWarps) {
    rows.attend(params, ring.wait(), item.start + tile * kTile, first_end);
    ring.release(lane);
  }
  rows.store(shared, warp);
  __syncthreads();
  for_pairs(params, item, [&](int row, int column) {
    Merged merged;
    UNROLL for (int i = 0; i < kWarps; ++i) {
      merged.add(shared.top[i][row], shared.sum[i][row], *as<float2>(as<float>(shared.stages[i]) + row * kHeadDim + column));
    }
    if (item.count == 1) {
      *as<uint32_t>(params.out + item.place(params, row) + column) = merged.pair();
      return;
    }
    int64_t const place = WorkItem::partial(params, item.part, row);
    *as<float2>(params.partials + place + column) = make_float2(merged.value.x / merged.sum, merged.value.y / merged.sum);
    if (column == 0) params.sums[place / kHeadDim] = merged.top + log2f(merged.sum);
  });
  if (item.count > 1) merge_items(params, item, shared, warp, lane);
}

__global__ void __launch_bounds__(kThreads, kBlocks) attend(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(1024) char memory[];
  WorkItem const item(params, blockIdx.y);
  if (item.stop > 0) attend_item(params, item, *reinterpret_cast<Shared*>(memory));
  if (params.overlaps && blockIdx.x == 0 && blockIdx.y == 0) wait_for_preceding_kernel();
}

// q, out (T, H, HEAD_DIM) and k, v (slots, KV heads, kStored) bfloat16, contiguous; the others: see `flash_decoding.py`.
void run(View q, View k, View v, View out, View items, View pages, View partials, View sums, View arrivals, int64_t page_size, double scale,
         bool overlaps) {
  int const group = int(q.size(1) / k.size(1)), box_rows = int(std::min<int64_t>(page_size, kTile));
  TVM_FFI_ICHECK(k.IsContiguous() && v.IsContiguous());
  TVM_FFI_ICHECK(group * k.size(1) == q.size(1) && kRows % group == 0 && page_size >= 8);  // swizzles repeat after 8 rows
  Params const params{source_of(k, 1, box_rows), source_of(v, 1, box_rows), values_of(q), values_of(out), values_of(items), values_of(pages),
                      values_of(partials), values_of(sums), values_of(arrivals), int(q.size(1)), int(k.size(1)), log2_of(group),
                      log2_of(page_size), box_rows, float(scale * M_LOG2E), overlaps};
  launch_early(attend, params, dim3(k.size(1), items.size(0)), kThreads, sizeof(Shared), q.device());
}

}  // namespace split

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, split::run);
