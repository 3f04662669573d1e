// Copies of heads to shared memory. A row is stored in chunks of 64 values with a 128-byte swizzle: piece p of 16 bytes of row r is at p ^ r % 8.
// With FLOAT8, a stored value is a pair of float8 values.

#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cuda_host_adapter.hpp>
#include <cutlass/numeric_types.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "hopper_launch.cuh"

namespace hopper {

using namespace cute;

#ifdef FLOAT8
constexpr bool kFloat8 = true;
#else
constexpr bool kFloat8 = false;
#endif
constexpr int kSteps = (kHeadDim + 15) / 16;  // instructions along a head
constexpr int kStored = kFloat8 ? kHeadDim / 2 : kHeadDim;  // values of a row
constexpr int kChunk = 64, kChunks = (kStored + kChunk - 1) / kChunk;
constexpr int kLastBox = (kStored + 15) / 16 * 16 - (kChunks - 1) * kChunk;  // columns copied into the last chunk

// Describes a tensor (rows, heads, kStored) for TMA, chunk by chunk. Reads outside the tensor give zeros.
struct Source {
  CUtensorMap chunks[kChunks];
};

// x (rows, heads, kStored): strides are multiples of 16 bytes, values contiguous. A copy transfers a box.
inline Source source_of(View x, int box_heads, int box_rows) {
  TVM_FFI_ICHECK(x.size(2) == kStored && x.stride(2) == 1);
  BFloat16* const values = values_of(x, /*is_strided=*/true);
  Source source;
  cuuint64_t const shape[3] = {kStored, cuuint64_t(x.size(1)), cuuint64_t(x.size(0))};
  cuuint64_t const strides[2] = {x.stride(1) * sizeof(BFloat16), x.stride(0) * sizeof(BFloat16)};  // of heads and rows
  cuuint32_t const steps[3] = {1, 1, 1};
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    int const width = chunk == kChunks - 1 ? kLastBox : kChunk;
    cuuint32_t const box[3] = {cuuint32_t(width), cuuint32_t(box_heads), cuuint32_t(box_rows)};
    CUresult const status = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &source.chunks[chunk], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, values, shape, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    TVM_FFI_ICHECK(status == CUDA_SUCCESS) << "attention: tensor map, error " << status;
  }
  return source;
}

}  // namespace hopper
