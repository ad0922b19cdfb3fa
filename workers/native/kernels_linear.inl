// Rows times a packed matrix, over the vectors F and I of the level that includes this.
//
// A tile is R rows by C blocks of 16 outputs. Each output is one chain of sums over K in order, the same in a tile of any
// size: R and C, and with them batch and threads, change no bit. A matrix is one stream of bytes: a gap of nine lines
// per block halves the speed of reading it (measured).

#define NOINLINE __attribute__((noinline))

constexpr int64_t Q4_BLOCK_BYTES = 320;     // a group of 16 outputs: 256 bytes of halves, float16 scale and min
constexpr int64_t PANEL_BYTES = 640;        // the same unpacked: 512 bytes, float scale and min
constexpr int64_t BYTES_PER_GROUP = 512;
constexpr int64_t PREFETCH_BYTES = 4096;
constexpr int64_t DENSE_CHAIN = 256;        // inputs summed in registers before they are added to the output

// --- grouped: integers within a group of 32 inputs, floats across groups ----------------------------------------------

// One row goes as fast as memory, and the processor's own prefetch does better alone; several rows compute for so long
// that it falls behind. Measured: a sixth of the time won at 16 rows, a sixth lost at one.
template <int R>
INLINE void prefetch_ahead(const uint8_t *p, int64_t bytes) {
    if constexpr (R > 1) {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + PREFETCH_BYTES + i);
    }
}

// What a tile needs of a kind of weight: where the bytes of a group lie, its floats once for the rows of a tile, `add`
// for each row, `finish` at the end. STREAM_BYTES of a group come from memory, 0 where they are in the cache already.
struct Q4Floats {
    F scale, low;
};

INLINE F add_q4(const Q4Floats &f, I product, const Activations &in, int64_t at, F total) {
    total = fma(to_float(product), mul(f.scale, splat(in.scale[at])), total);
    return fma(f.low, splat(in.scaled_sum[at]), total);
}

struct Q4Direct {
    static constexpr Storage STORAGE = Storage::HALVES;
    static constexpr int64_t STREAM_BYTES = Q4_BLOCK_BYTES;
    typedef Q4Floats Floats;
    const uint8_t *p;

    Q4Direct(const Matrix &m, int64_t block, const uint8_t *) : p(m.data + block * m.block_bytes) {}
    INLINE_METHOD const uint8_t *at(int64_t g) const { return p + g * Q4_BLOCK_BYTES; }
    INLINE_METHOD Floats floats(int64_t g) const { return {load_f16(at(g) + 256), load_f16(at(g) + 288)}; }
    static INLINE_METHOD F add(const Floats &f, I product, const Activations &in, int64_t at, F total) {
        return add_q4(f, product, in, at, total);
    }
    static INLINE_METHOD F finish(F total, const LinearJob &, int64_t) { return total; }
};

// Two blocks are unpacked at a time: an even one's panel comes first.
template <class P>
INLINE P *panel_of(const Matrix &m, int64_t block, P *panels) {
    return panels + block % 2 * num_groups(m.k) * PANEL_BYTES;
}

struct Q4Unpacked {
    static constexpr Storage STORAGE = Storage::UNSIGNED;
    static constexpr int64_t STREAM_BYTES = 0;
    typedef Q4Floats Floats;
    const uint8_t *p;

    Q4Unpacked(const Matrix &m, int64_t block, const uint8_t *panels) : p(panel_of(m, block, panels)) {}
    INLINE_METHOD const uint8_t *at(int64_t g) const { return p + g * PANEL_BYTES; }
    INLINE_METHOD Floats floats(int64_t g) const {
        return {load((const float *)(at(g) + 512)), load((const float *)(at(g) + 576))};
    }
    static INLINE_METHOD F add(const Floats &f, I product, const Activations &in, int64_t at, F total) {
        return add_q4(f, product, in, at, total);
    }
    static INLINE_METHOD F finish(F total, const LinearJob &, int64_t) { return total; }
};

struct Q8 {
    static constexpr Storage STORAGE = Storage::SIGNED;
    static constexpr int64_t STREAM_BYTES = Q8_PAIR_BYTES / 2;
    typedef F Floats;
    const uint8_t *p;

    Q8(const Matrix &m, int64_t block, const uint8_t *) : p(m.data + block * m.block_bytes) {}
    INLINE_METHOD const uint8_t *at(int64_t g) const { return p + q8_group_offset(g); }
    INLINE_METHOD Floats floats(int64_t g) const { return load_f16(p + q8_scale_offset(g)); }
    static INLINE_METHOD F add(const Floats &scale, I product, const Activations &in, int64_t at, F total) {
        return fma(to_float(product), mul(scale, splat(in.scale[at])), total);
    }
    static INLINE_METHOD F finish(F total, const LinearJob &, int64_t) { return total; }
};

struct Int8 {
    static constexpr Storage STORAGE = Storage::SIGNED;
    static constexpr int64_t STREAM_BYTES = BYTES_PER_GROUP;
    struct Floats {};
    const uint8_t *p;

    Int8(const Matrix &m, int64_t block, const uint8_t *) : p(m.data + block * m.block_bytes) {}
    INLINE_METHOD const uint8_t *at(int64_t g) const { return p + g * BYTES_PER_GROUP; }
    INLINE_METHOD Floats floats(int64_t) const { return {}; }
    static INLINE_METHOD F add(const Floats &, I product, const Activations &in, int64_t at, F total) {
        return fma(to_float(product), splat(in.scale[at]), total);
    }
    static INLINE_METHOD F finish(F total, const LinearJob &job, int64_t block) {
        return mul(total, load(job.weight->scale + block * LANES));
    }
};

INLINE int lanes_of(const Matrix &m, int64_t block) {
    const int64_t left = m.n - block * LANES;
    return left < LANES ? (int)left : LANES;
}

INLINE void write_block(const LinearJob &job, int64_t row, int64_t block, F total) {
    const int n = lanes_of(*job.weight, block);
    if (job.bias) total = add(total, load_some(job.bias + block * LANES, n));
    store_some(job.out + row * job.weight->n + block * LANES, total, n);
}

template <class W, int R, int C>
NOINLINE void grouped_tile(const LinearJob &job, const uint8_t *panels, int64_t row, int64_t block) {
    const Activations in = job.in;
    const int64_t groups = num_groups(in.k);
    const int8_t *q = in.q + row * in.k;
    const W first(*job.weight, block, panels), second(*job.weight, block + C - 1, panels);
    F total[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) total[r][c] = splat(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        I product[R][C];
        const uint8_t *bytes[2] = {first.at(g), second.at(g)};
        prefetch_ahead<R>(bytes[0], W::STREAM_BYTES);
        if (C > 1) prefetch_ahead<R>(bytes[1], W::STREAM_BYTES);
        multiply_group<W::STORAGE, R, C>(bytes, q + g * GROUP, in.k, in.offset + row * groups + g, groups, product);
        const typename W::Floats floats[2] = {first.floats(g), second.floats(g)};
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int c = 0; c < C; c++)
                total[r][c] = W::add(floats[c], product[r][c], in, (row + r) * groups + g, total[r][c]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) write_block(job, row + r, block + c, W::finish(total[r][c], job, block + c));
}

template <class W, int R, int C>
INLINE void grouped_rest(const LinearJob &job, const uint8_t *panels, int64_t row, int64_t block, int64_t left) {
    if (left == R) grouped_tile<W, R, C>(job, panels, row, block);
    if constexpr (R > 1) {
        if (left < R) grouped_rest<W, R - 1, C>(job, panels, row, block, left);
    }
}

template <class W, int R, int C>
void grouped_blocks(const LinearJob &job, Range rows, int64_t block, const uint8_t *panels) {
    int64_t row = rows.low;
    for (; row + R <= rows.high; row += R) grouped_tile<W, R, C>(job, panels, row, block);
    if constexpr (R > 1) grouped_rest<W, R - 1, C>(job, panels, row, block, rows.high - row);
}

template <class W>
void linear_grouped(const LinearJob &job, Range rows, Range blocks, const uint8_t *panels) {
    int64_t block = blocks.low;
    if constexpr (PAIR_ROWS > 0) {
        for (; rows.high - rows.low >= PAIRS_FROM && block + 2 <= blocks.high; block += 2)
            grouped_blocks<W, PAIR_ROWS, 2>(job, rows, block, panels);
    }
    for (; block < blocks.high; block++) grouped_blocks<W, TILE_ROWS, 1>(job, rows, block, panels);
}

void unpack_panel(const Matrix &m, int64_t block, uint8_t *panel) {
    const uint8_t *p = m.data + block * m.block_bytes;
    for (int64_t g = 0; g < num_groups(m.k); g++, p += Q4_BLOCK_BYTES, panel += PANEL_BYTES) {
        prefetch_ahead<2>(p, Q4_BLOCK_BYTES);
        unpack_halves(p, panel);
        store((float *)(panel + 512), load_f16(p + 256));
        store((float *)(panel + 576), load_f16(p + 288));
    }
}

void linear_q4(const LinearJob &job, Range rows, Range blocks, uint8_t *panels) {
    if (rows.high - rows.low <= DIRECT_ROWS) return linear_grouped<Q4Direct>(job, rows, blocks, nullptr);
    for (int64_t block = blocks.low; block < blocks.high; block += 2) {
        const Range pair = {block, block + 2 < blocks.high ? block + 2 : blocks.high};
        for (int64_t b = pair.low; b < pair.high; b++) unpack_panel(*job.weight, b, panel_of(*job.weight, b, panels));
        linear_grouped<Q4Unpacked>(job, rows, pair, panels);
    }
}

// --- dense: float32 or bfloat16 weights, float32 products and sums ----------------------------------------------------

template <class T, int R, int C>
NOINLINE void dense_tile(const LinearJob &job, int64_t row, int64_t block, Range inputs) {
    const int64_t k = job.in.k, stride = job.weight->block_bytes / (int64_t)sizeof(T);
    const T *w = (const T *)job.weight->data + block * stride;
    const float *x = job.in.x + row * k;
    F total[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) total[r][c] = splat(0.0f);
    for (int64_t i = inputs.low; i < inputs.high; i++) {
        F columns[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) columns[c] = load(w + c * stride + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const F input = splat(x[r * k + i]);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) total[r][c] = fma(input, columns[c], total[r][c]);
        }
    }
    const int64_t n = job.weight->n;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            float *out = job.out + (row + r) * n + (block + c) * LANES;
            const int lanes = lanes_of(*job.weight, block + c);
            if (inputs.low) total[r][c] = add(load_some(out, lanes), total[r][c]);
            if (job.bias && inputs.high == k)
                total[r][c] = add(total[r][c], load_some(job.bias + (block + c) * LANES, lanes));
            store_some(out, total[r][c], lanes);
        }
}

template <class T, int R, int C>
INLINE void dense_rest(const LinearJob &job, int64_t row, int64_t block, Range inputs, int64_t left) {
    if (left == R) dense_tile<T, R, C>(job, row, block, inputs);
    if constexpr (R > 1) {
        if (left < R) dense_rest<T, R - 1, C>(job, row, block, inputs, left);
    }
}

template <class T, int C>
void dense_blocks(const LinearJob &job, Range rows, int64_t block) {
    const int64_t k = job.in.k;
    for (int64_t from = 0; from < k; from += DENSE_CHAIN) {
        const Range inputs = {from, from + DENSE_CHAIN < k ? from + DENSE_CHAIN : k};
        int64_t row = rows.low;
        for (; row + DENSE_ROWS <= rows.high; row += DENSE_ROWS) dense_tile<T, DENSE_ROWS, C>(job, row, block, inputs);
        dense_rest<T, DENSE_ROWS - 1, C>(job, row, block, inputs, rows.high - row);
    }
}

template <class T>
void linear_dense(const LinearJob &job, Range rows, Range blocks) {
    int64_t block = blocks.low;
    for (; block + DENSE_BLOCKS <= blocks.high; block += DENSE_BLOCKS) dense_blocks<T, DENSE_BLOCKS>(job, rows, block);
    for (; block < blocks.high; block++) dense_blocks<T, 1>(job, rows, block);
}

void linear(const LinearJob &job, Range rows, Range blocks, uint8_t *scratch) {
    switch (job.weight->kind) {
        case BATON_FP32: return linear_dense<float>(job, rows, blocks);
        case BATON_BF16: return linear_dense<uint16_t>(job, rows, blocks);
        case BATON_INT8: return linear_grouped<Int8>(job, rows, blocks, nullptr);
        case BATON_Q8: return linear_grouped<Q8>(job, rows, blocks, nullptr);
        default: return linear_q4(job, rows, blocks, scratch);
    }
}

// --- one row of a matrix, for embeddings ------------------------------------------------------------------------------

INLINE float lane_of(F v, int lane) {
    float lanes[LANES];
    store(lanes, v);
    return lanes[lane];
}

template <class T>
void unpack_dense(const Matrix &m, int64_t row, float *out) {
    const T *w = (const T *)(m.data + row / LANES * m.block_bytes) + row % LANES;
    for (int64_t k = 0; k < m.k; k++) {
        T lanes[LANES] = {w[k * LANES]};
        out[k] = lane_of(load(lanes), 0);
    }
}

void unpack_grouped(const Matrix &m, int64_t row, float *out) {
    const int lane = (int)(row % LANES);
    const uint8_t *block = m.data + row / LANES * m.block_bytes;
    for (int64_t g = 0; g < num_groups(m.k); g++) {
        const bool is_q4 = m.kind == BATON_Q4;
        const bool is_q8 = m.kind == BATON_Q8;
        const uint8_t *p = block + (is_q4 ? g * Q4_BLOCK_BYTES : is_q8 ? q8_group_offset(g) : g * BYTES_PER_GROUP);
        const uint8_t *scales = is_q4 ? p + 256 : block + q8_scale_offset(g);
        const float scale = m.kind == BATON_INT8 ? m.scale[row] : lane_of(load_f16(scales), lane);
        const float low = is_q4 ? lane_of(load_f16(p + 288), lane) : 0.0f;
        for (int k = 0; k < GROUP; k++) {
            const int at = group_index(k, lane);
            int q = is_q4 ? (at < 256 ? p[at] & 15 : p[at - 256] >> 4) : (int8_t)(p[at] - Q8_BIAS);
            out[g * GROUP + k] = is_q4 ? scale * (float)q + low : scale * (float)q;
        }
    }
}

void unpack_row(const Matrix &m, int64_t row, float *out) {
    switch (m.kind) {
        case BATON_FP32: return unpack_dense<float>(m, row, out);
        case BATON_BF16: return unpack_dense<uint16_t>(m, row, out);
        default: unpack_grouped(m, row, out);
    }
}
