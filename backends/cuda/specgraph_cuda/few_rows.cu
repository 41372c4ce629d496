// A linear of 1 to 32 rows in bfloat16 on Hopper, whose blocks fill a ring with weights before the kernel before ends:
//
//   out = x @ weight.T + residual   [rows, columns], the product rounded before the sum
//
// or, with BEST, the largest of each row of x @ weight.T, rounded, in each part of the columns, and which column it is.
//
// few_rows.py puts before this text the constants below, hopper.cuh and few_rows.cuh:
//   ROWS     rows of x, padded: 8, 16 or 32
//   COLUMNS  columns of a part, a multiple of 16; a block computes one part after the other
//   STAGE_TILES  tiles of 64 input columns in one stage of the ring; the input columns are whole stages
//   BEST     1 for the largest of each row
//   STAGES, STAGE_BYTES, WINDOW   as in two_linears.cu; AHEAD is not used

constexpr int STEP = 64 * STAGE_TILES, SUMS_BYTES = 4 * WARPS * ROWS * (COLUMNS + 4);
constexpr int EACH = (COLUMNS + 63) / 64;  // pairs of columns that a thread writes in one row

// What a launch leaves.
struct Output {
    const u16* residual;  // [rows, columns], or null
    u16* out;
    float* best;            // [rows, parts]: -infinity where all are NaN
    int* best_column;       // [rows, parts], the first of equals
    const long long* step;  // copied to `step_copy` where not null, as the kernel after this one changes it
    long long* step_copy;
    int rows, depth, columns, residual_stride;

    __device__ __forceinline__ int parts() const { return (columns + COLUMNS - 1) / COLUMNS; }

    __device__ __forceinline__ bool has(int row, int column) const { return row < rows && column < columns; }

    __device__ __forceinline__ void read_residual(u32 (&to)[EACH], int part, int row) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int m = 2 * (threadIdx.x & 31) + 64 * i, column = part * COLUMNS + m;
            to[i] = 0;
            if (residual != nullptr && m < COLUMNS && has(row, column))
                to[i] = __ldcg(reinterpret_cast<const u32*>(residual + (long long)row * residual_stride + column));
        }
    }

    // One row of a part, by one warp.
    __device__ __forceinline__ void write(const float* shared, int part, int row, const u32 (&residuals)[EACH]) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int m = 2 * (threadIdx.x & 31) + 64 * i, column = part * COLUMNS + m;
            if (m >= COLUMNS || !has(row, column)) break;
            const float low = added<COLUMNS>(shared, row, m), high = added<COLUMNS>(shared, row, m + 1);
            u32 both = packed(low, high);
            if (residual != nullptr)
                both = packed(unpacked(both, 0) + unpacked(residuals[i], 0), unpacked(both, 1) + unpacked(residuals[i], 1));
            *reinterpret_cast<u32*>(out + (long long)row * columns + column) = both;
        }
    }

    __device__ __forceinline__ void write_best(const float* shared, int part, int row) const {
        const int lane = threadIdx.x & 31;
        float largest = __int_as_float(0xff800000);  // -infinity
        int at = lane;
        for (int m = lane; m < COLUMNS && part * COLUMNS + m < columns; m += 32) {
            const float value = rounded(added<COLUMNS>(shared, row, m));
            if (value > largest) largest = value, at = m;
        }
#pragma unroll
        for (int other = 16; other; other /= 2) {
            const float value = __shfl_xor_sync(~0u, largest, other);
            const int its = __shfl_xor_sync(~0u, at, other);
            if (value > largest || (value == largest && its < at)) largest = value, at = its;
        }
        if (lane == 0) best[row * parts() + part] = largest;
        if (lane == 0) best_column[row * parts() + part] = part * COLUMNS + at;
    }
};

extern "C" __global__ void __launch_bounds__(32 * (CONSUMERS + 2), 1) few_rows(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
    const __grid_constant__ Output output) {
    asm volatile("griddepcontrol.launch_dependents;");
    extern __shared__ unsigned char memory[];
    const u32 tiles = (address_of(memory) + 1023) & ~1023u, barriers = tiles + STAGES * STAGE_BYTES + SUMS_BYTES;
    float* const shared = reinterpret_cast<float*>(memory + (tiles - address_of(memory)) + STAGES * STAGE_BYTES);
    Ring ring = {tiles, barriers, barriers + 8 * STAGES, barriers + 16 * STAGES, 0};
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, parts = output.parts(), steps = output.depth / STEP;
    Loads<COLUMNS, STAGE_TILES, 1, false> loads = {&x_map, &weight_map, 0, 0, steps};
    if (threadIdx.x == 32 * CONSUMERS) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(ring.weights + 8 * stage, 1);
            barrier_init(ring.xs + 8 * stage, 1);
            barrier_init(ring.empty + 8 * stage, CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (warp == CONSUMERS) {
        for (int part = blockIdx.x; lane == 0 && part < parts; part += gridDim.x) {
            loads.row = part * COLUMNS;
            loads.weights(ring);
        }
    } else if (warp == CONSUMERS + 1) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        for (int part = blockIdx.x; lane == 0 && part < parts; part += gridDim.x) loads.x(ring);
    } else {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        if (BEST && blockIdx.x == 0 && threadIdx.x == 0 && output.step != nullptr) *output.step_copy = *output.step;
        for (int part = blockIdx.x; part < parts; part += gridDim.x) {
            u32 residuals[ROWS / CONSUMERS][EACH];
#pragma unroll
            for (int i = 0; !BEST && i < ROWS / CONSUMERS; ++i) output.read_residual(residuals[i], part, warp + CONSUMERS * i);
            Sums<COLUMNS> sums[1];
            consume<COLUMNS, STAGE_TILES, 1>(sums, ring, steps);
            consumers_meet();  // nobody reads `shared` any more
            share<COLUMNS>(sums[0], shared, warp);
            consumers_meet();
#pragma unroll
            for (int i = 0; i < ROWS / CONSUMERS; ++i) {
                const int row = warp + CONSUMERS * i;
                if (row >= output.rows) break;
                if (BEST) {
                    output.write_best(shared, part, row);
                } else {
                    output.write(shared, part, row, residuals[i]);
                }
            }
        }
    }
}
