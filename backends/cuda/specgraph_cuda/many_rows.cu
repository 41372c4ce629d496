// Products x @ weight.T of up to 384 rows in bfloat16, on Hopper, and what follows them: see KIND.
//
// many_rows.py puts before this text: the functions `multiply` and `keep` (wgmma over COLUMNS weight rows, which takes
// as many operands as a thread has accumulators), and the constants
//   KIND      GATED: silu(gate) * up of (gate | up) = x @ weight.T, bfloat16 [rows, columns]
//             BEST: the largest of each row of x @ weight.T, rounded, in each block's columns, float32 [rows, tiles]: see Best
//             PARTS: float32 [SPLIT, rows, columns], whose sum over the first dimension is x @ weight.T
//   GROUPS    warpgroups, each of which multiplies 64 rows of x; one thread also loads
//   COLUMNS   weight rows per block, a multiple of 8, at most 256; half of them gates where GATED (a multiple of 16)
//   STAGES    tiles of x and weight in flight, 64 input columns each
//   SPLIT     blocks that share the input columns of one output tile, at least 64 columns for each; 1 where GATED

constexpr int ROWS = 64 * GROUPS;
constexpr int X_BYTES = ROWS * 128, STAGE_BYTES = X_BYTES + COLUMNS * 128;
constexpr int WRITTEN = KIND == GATED ? COLUMNS / 2 : COLUMNS;  // output columns of a tile

// What wgmma is told of an operand: rows of 128 bytes, swizzled, each 8 of them 1024 bytes after the 8 before.
__device__ __forceinline__ u64 operand(u32 address) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// What one thread loads: tiles of 64 input columns, into a ring of STAGES.
struct Loads {
    const TensorMap *x_map, *weight_map;
    u32 tiles, full, empty;
    int row, column, columns, first, steps;
    u64 weight_hint;

    __device__ __forceinline__ void weight(int i, int stage) const {
        const u32 to = tiles + stage * STAGE_BYTES + X_BYTES, barrier = full + 8 * stage;
        const int from = (first + i) * 64;
        barrier_expect(barrier, STAGE_BYTES);
        load(to, weight_map, barrier, from, column, weight_hint);
        if (KIND == GATED) load(to + WRITTEN * 128, weight_map, barrier, from, columns + column, weight_hint);
    }

    __device__ __forceinline__ void x(int i, int stage) const {
        const u64 again = 0x14F0000000000000ull;  // stay in L2: every block reads the same x
        const u32 to = tiles + stage * STAGE_BYTES, barrier = full + 8 * stage;
        const int from = (first + i) * 64;
        load(to, x_map, barrier, from, row, again);
    }

    __device__ __forceinline__ void begin() const {
        const int ahead = steps < STAGES ? steps : STAGES;
        for (int i = 0; i < ahead; ++i) weight(i, i);
        asm volatile("griddepcontrol.wait;" ::: "memory");  // x comes from the kernel before, weights don't
        for (int i = 0; i < ahead; ++i) x(i, i);
    }

    // Tile i once the tile that was in its stage is done with: for the `parity`th time modulo 2.
    __device__ __forceinline__ void again(int i, int stage, int parity) const {
        barrier_wait(empty + 8 * stage, parity);
        weight(i, stage);
        x(i, stage);
    }
};

// The product of this warpgroup's 64 rows of x and the block's weight rows.
__device__ __forceinline__ void consume(float (&sums)[COLUMNS / 2], const Loads& loads, int group) {
    const int lane = threadIdx.x & 127;
    for (int i = 0, stage = 0, before = STAGES - 1, parity = 0, turn = 0; i < loads.steps; ++i) {
        barrier_wait(loads.full + 8 * stage, parity);
        const u32 tile = loads.tiles + stage * STAGE_BYTES;
        const u64 x = operand(tile + group * 8192), weight = operand(tile + X_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply(sums, x + 2 * k, weight + 2 * k, (i | k) != 0);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (i > 0) {
            if (lane == 0) barrier_arrive(loads.empty + 8 * before);
            if (threadIdx.x == 0 && i - 1 + STAGES < loads.steps) loads.again(i - 1 + STAGES, before, turn);
            if (before == STAGES - 1) turn ^= 1;
        }
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    keep(sums);
}

// What is written of 64 rows: a thread has columns 8 j + 2 (lane % 4) and the next of rows lane / 4 and + 8.
__device__ __forceinline__ void write(
    const float (&sums)[COLUMNS / 2], void* out, int row, int column, int rows, int columns, int part) {
    const int lane = threadIdx.x & 31;
    row += ((threadIdx.x & 127) >> 5) * 16 + (lane >> 2);
    column += 2 * (lane & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
        if (row >= rows) continue;
        const long long line = (part * (long long)rows + row) * columns;
#pragma unroll
        for (int j = 0; j < WRITTEN / 8; ++j) {
            const int at = column + 8 * j, i = 4 * j + 2 * half;
            if (at >= columns) continue;
            if (KIND == GATED) {
                const u32 both = gated(sums[i], sums[i + 1], sums[i + COLUMNS / 4], sums[i + COLUMNS / 4 + 1]);
                *reinterpret_cast<u32*>(static_cast<u16*>(out) + line + at) = both;
            } else {
                const float2 both = make_float2(sums[i], sums[i + 1]);
                *reinterpret_cast<float2*>(static_cast<float*>(out) + line + at) = both;
            }
        }
    }
}

// Where BEST goes besides `out`.
struct Best {
    int* column;            // [rows, tiles], the first of equals
    const long long* step;  // copied to `step_copy` where not null, as the kernel after this one changes it
    long long* step_copy;
};

// The largest of each of 64 rows, placed as in `write`: four threads of a warp have one row.
__device__ __forceinline__ void write_best(
    const float (&sums)[COLUMNS / 2], float* out, int* best_column, int row, int column, int rows, int columns) {
    const int lane = threadIdx.x & 31, tiles = (columns + COLUMNS - 1) / COLUMNS, tile = column / COLUMNS;
    row += ((threadIdx.x & 127) >> 5) * 16 + (lane >> 2);
    column += 2 * (lane & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
        float largest = __int_as_float(0xff800000);  // -infinity, where all are NaN
        int at = column;
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; ++i) {
            const int next = column + 8 * (i / 2) + i % 2;
            const float value = rounded(sums[4 * (i / 2) + 2 * half + i % 2]);
            if (next < columns && value > largest) largest = value, at = next;
        }
#pragma unroll
        for (int other = 2; other; other /= 2) {
            const float value = __shfl_xor_sync(~0u, largest, other);
            const int its = __shfl_xor_sync(~0u, at, other);
            if (value > largest || (value == largest && its < at)) largest = value, at = its;
        }
        if ((lane & 3) || row >= rows) continue;
        out[(long long)row * tiles + tile] = largest;
        best_column[(long long)row * tiles + tile] = at;
    }
}

extern "C" __global__ void __launch_bounds__(128 * GROUPS, 1) many_rows(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, void* out, int rows,
    int columns, int depth, int row_blocks, u64 weight_hint,
    const __grid_constant__ Best best) {
    asm volatile("griddepcontrol.launch_dependents;");
    extern __shared__ unsigned char memory[];
    const u32 tiles = (address_of(memory) + 1023) & ~1023u;
    const u32 full = tiles + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    const int part = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT, group = threadIdx.x / 128;
    const int row = tile % row_blocks * ROWS, column = tile / row_blocks * WRITTEN;
    const int all = depth / 64, first = all * part / SPLIT, steps = all * (part + 1) / SPLIT - first;
    const Loads loads = {&x_map, &weight_map, tiles, full, empty, row, column, columns, first, steps, weight_hint};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) loads.begin();
    float sums[COLUMNS / 2];
    consume(sums, loads, group);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (KIND == BEST) {
        if (blockIdx.x == 0 && threadIdx.x == 0 && best.step != nullptr) *best.step_copy = *best.step;
        write_best(sums, static_cast<float*>(out), best.column, row + group * 64, column, rows, columns);
    } else {
        write(sums, out, row + group * 64, column, rows, columns, part);
    }
}
