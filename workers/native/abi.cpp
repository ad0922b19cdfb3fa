// The entries of abi.h except the model's: packing, and one op a call.
#include "abi.h"

#include <string.h>

#include <memory>

#include "engine.h"

using namespace baton;

#ifndef BATON_SOURCE_HASH
#error "build with workers/native/build.py, which gives the hash of the sources"
#endif

namespace {

bool has_level(int32_t level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (level == BATON_AVX2) return avx2;
    if (level == BATON_AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return level == BATON_PORTABLE;
}

const Kernels &kernels_of(int32_t level) {
#if defined(__x86_64__)
    if (level == BATON_AVX512) return kernels_avx512;
    if (level == BATON_AVX2) return kernels_avx2;
#endif
    (void)level;
    return kernels_portable;
}

// Runs `body`; what it throws becomes a code.
template <class Body>
int32_t guarded(Body body) {
    try {
        body();
        return BATON_OK;
    } catch (const std::bad_alloc &) {
        return BATON_NO_MEMORY;
    }
}

// body(row) for all rows, shared among the threads.
template <class Body>
int32_t each_row(BatonEngine *engine, int64_t num_rows, Body body) {
    return guarded([&] {
        engine->pool.run([&](int thread) {
            const Range own = share_of(num_rows, thread, engine->pool.size());
            for (int64_t row = own.low; row < own.high; row++) body(row);
        });
    });
}

// --- packing ----------------------------------------------------------------------------------------------------------

int64_t block_bytes_of(int64_t kind, int64_t k) {
    switch (kind) {
        case BATON_FP32: return k * LANES * 4;
        case BATON_BF16: return k * LANES * 2;
        case BATON_INT8: return num_groups(k) * 512;
        case BATON_Q8: return (num_groups(k) + 1) / 2 * Q8_PAIR_BYTES;
        default: return num_groups(k) * 320;
    }
}

template <class T>
void pack_dense(const BatonWeight &w, int64_t block, uint8_t *out) {
    const T *rows = static_cast<const T *>(w.data);
    T *columns = reinterpret_cast<T *>(out);
    for (int64_t lane = 0; lane < LANES && block * LANES + lane < w.n; lane++) {
        const T *row = rows + (block * LANES + lane) * w.k;
        for (int64_t k = 0; k < w.k; k++) columns[k * LANES + lane] = row[k];
    }
}

void pack_bytes(const Kernels &kernels, const BatonWeight &w, int64_t block, uint8_t *out) {
    const bool is_q8 = w.kind == BATON_Q8;
    const int64_t groups = num_groups(w.k);
    for (int64_t g = 0; g < groups; g++) {
        uint8_t *to = out + (is_q8 ? q8_group_offset(g) : g * 512);
        memset(to, kernels.q8_bias, 512);
        for (int64_t lane = 0; lane < LANES && block * LANES + lane < w.n; lane++) {
            const int64_t n = block * LANES + lane;
            const int8_t *from = static_cast<const int8_t *>(w.data) + n * w.k + g * GROUP;
            for (int k = 0; k < GROUP; k++) to[kernels.group_index(k, (int)lane)] = (uint8_t)(from[k] + kernels.q8_bias);
            if (is_q8)
                reinterpret_cast<uint16_t *>(out + q8_scale_offset(g))[lane] =
                    static_cast<const uint16_t *>(w.scale)[n * groups + g];
        }
    }
}

void pack_halves(const Kernels &kernels, const BatonWeight &w, int64_t block, uint8_t *out) {
    const int64_t groups = num_groups(w.k);
    for (int64_t lane = 0; lane < LANES && block * LANES + lane < w.n; lane++) {
        const int64_t n = block * LANES + lane;
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *from = static_cast<const uint8_t *>(w.data) + n * w.k / 2 + g * GROUP / 2;
            uint8_t *to = out + g * 320;
            for (int k = 0; k < GROUP; k++) {
                const uint8_t q = k < 16 ? from[k] & 15 : from[k - 16] >> 4;
                const int at = kernels.group_index(k, (int)lane);
                to[at % 256] |= (uint8_t)(at < 256 ? q : q << 4);
            }
            uint16_t *scales = reinterpret_cast<uint16_t *>(to + 256);
            scales[lane] = static_cast<const uint16_t *>(w.scale)[n * groups + g];
            scales[lane + LANES] = static_cast<const uint16_t *>(w.min)[n * groups + g];
        }
    }
}

void pack_block(const Kernels &kernels, const BatonWeight &w, int64_t block, uint8_t *out) {
    switch (w.kind) {
        case BATON_FP32: return pack_dense<uint32_t>(w, block, out);
        case BATON_BF16: return pack_dense<uint16_t>(w, block, out);
        case BATON_Q4: return pack_halves(kernels, w, block, out);
        default: return pack_bytes(kernels, w, block, out);
    }
}

void pack_into(BatonEngine *engine, const BatonWeight &w, BatonMatrix &matrix) {
    const int64_t blocks = (w.n + LANES - 1) / LANES, bytes = block_bytes_of(w.kind, w.k);
    matrix.place = engine->arena.take(blocks * bytes);
    matrix.view = {w.kind, w.n, w.k, blocks, bytes, matrix.place.data, nullptr};
    engine->pool.run([&](int thread) {
        const Range own = share_of(blocks, thread, engine->pool.size());
        memset(matrix.view.data + own.low * bytes, 0, (size_t)((own.high - own.low) * bytes));
        for (int64_t b = own.low; b < own.high; b++) pack_block(engine->kernels, w, b, matrix.view.data + b * bytes);
    });
    if (w.kind != BATON_INT8) return;
    matrix.scale.reserve(blocks * LANES * 4);
    matrix.view.scale = matrix.scale.as<float>();
    memset(matrix.view.scale, 0, (size_t)blocks * LANES * 4);
    memcpy(matrix.view.scale, w.scale, (size_t)w.n * 4);
}

}  // namespace

const char *baton_source_hash(void) { return BATON_SOURCE_HASH; }

int32_t baton_best_level(void) {
    return has_level(BATON_AVX512) ? BATON_AVX512 : has_level(BATON_AVX2) ? BATON_AVX2 : BATON_PORTABLE;
}

BatonEngine *baton_open(int32_t level, int32_t num_threads) {
    if (!has_level(level) || num_threads < 1) return nullptr;
    try {
        return new BatonEngine(kernels_of(level), num_threads);
    } catch (const std::exception &) {  // no memory, or the system gives no thread
        return nullptr;
    }
}

void baton_close(BatonEngine *engine) { delete engine; }

BatonMatrix *baton_pack(BatonEngine *engine, const BatonWeight *weight) {
    try {
        auto matrix = std::make_unique<BatonMatrix>();
        pack_into(engine, *weight, *matrix);
        return matrix.release();
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void baton_free_matrix(BatonMatrix *matrix) { delete matrix; }

int64_t baton_matrix_bytes(const BatonMatrix *m) {
    return m->view.num_blocks * (m->view.block_bytes + (m->view.scale ? LANES * 4 : 0));
}

int32_t baton_embed(BatonEngine *engine, const BatonMatrix *table, const int64_t *ids, int64_t num_tokens, float scale,
                    float *out) {
    const int64_t width = table->view.k;
    for (int64_t i = 0; i < num_tokens; i++)
        if (ids[i] < 0 || ids[i] >= table->view.n) return BATON_BAD_ARGUMENT;
    return each_row(engine, num_tokens, [&](int64_t row) {
        engine->kernels.unpack_row(table->view, ids[row], out + row * width);
        engine->kernels.scale_row(out + row * width, scale, width);
    });
}

int32_t baton_norm(BatonEngine *engine, float *x, const float *delta, const float *weight, float eps, int64_t num_rows,
                   int64_t width, float *out) {
    return each_row(engine, num_rows, [&](int64_t row) {
        float *own = x + row * width;
        if (delta) engine->kernels.add_row(own, delta + row * width, width);
        engine->kernels.norm_row(own, weight, eps, width, out + row * width);
    });
}

int32_t baton_linear(BatonEngine *engine, const BatonMatrix *weight, const float *x, int64_t num_rows,
                     const float *bias, float *out) {
    return guarded([&] {
        const Matrix &m = weight->view;
        engine->reserve_scratch(linear_scratch_bytes(m.k));
        if (m.is_grouped()) engine->rounded.reserve(num_rows, m.k);
        const LinearJob job = {&m, engine->rounded.view(x, m.k), bias, out};
        engine->pool.run([&](int thread) {
            const Range own = share_of(num_rows, thread, engine->pool.size());
            for (int64_t row = own.low; m.is_grouped() && row < own.high; row++)
                engine->kernels.round_row(job.in, row, {0, num_groups(m.k)}, x + row * m.k);
            engine->pool.barrier();
            engine->linear(thread, job, num_rows);
        });
    });
}

int32_t baton_rotate_and_store(BatonEngine *engine, const BatonAttention *a, const BatonTables *tables,
                               const BatonCache *cache, const float *qkv, float *q) {
    const int64_t width = (a->num_heads + 2 * a->num_kv_heads) * a->head_dim, kept = a->num_heads * a->head_dim;
    if (!are_sound(*tables, *a, *cache)) return BATON_BAD_ARGUMENT;
    return guarded([&] {
        engine->reserve_scratch(width * 4);
        engine->pool.run([&](int thread) {
            float *token = engine->scratch[thread].as<float>();
            const Range own = share_of(tables->num_tokens, thread, engine->pool.size());
            for (int64_t row = own.low; row < own.high; row++) {
                memcpy(token, qkv + row * width, (size_t)width * 4);
                engine->rotate_and_store(*a, *tables, *cache, row, token);
                memcpy(q + row * kept, token, (size_t)kept * 4);
            }
        });
    });
}

int32_t baton_attend(BatonEngine *engine, const BatonAttention *attention, const BatonTables *tables,
                     const BatonCache *cache, const float *q, float *out) {
    if (!are_sound(*tables, *attention, *cache)) return BATON_BAD_ARGUMENT;
    return guarded([&] {
        engine->reserve_scratch(attention_scratch_bytes(longest_context(*tables), attention->head_dim));
        const std::vector<AttentionUnit> units = plan_units(*tables, *attention);
        const AttentionJob job = {attention, tables, *cache, q, attention->num_heads * attention->head_dim, out};
        std::atomic<int64_t> next{0};
        engine->pool.run([&](int thread) { engine->attend(thread, job, units, next); });
    });
}

int32_t baton_activate(BatonEngine *engine, int64_t activation, const float *gate_up, int64_t num_rows, int64_t width,
                       float *out) {
    return each_row(engine, num_rows, [&](int64_t row) {
        const float *gate = gate_up + row * 2 * width;
        engine->kernels.activate_row(activation, gate, gate + width, width, out + row * width);
    });
}

int32_t baton_softcap(BatonEngine *engine, float *x, int64_t num_rows, int64_t width, float cap) {
    return each_row(engine, num_rows, [&](int64_t row) { engine->kernels.softcap_row(x + row * width, cap, width); });
}

int32_t baton_find_largest(BatonEngine *engine, const float *logits, int64_t num_rows, int64_t width, float *largest,
                           int64_t *places) {
    return each_row(engine, num_rows, [&](int64_t row) {
        places[row] = engine->kernels.find_largest(logits + row * width, width, largest + row);
    });
}

int32_t baton_draw(BatonEngine *engine, const float *logits, int64_t vocab, const BatonDraw *draws, int64_t num_draws,
                   int64_t *tokens) {
    if (vocab < 1 || vocab > INT32_MAX) return BATON_BAD_ARGUMENT;
    return guarded([&] {
        engine->reserve_scratch(draw_scratch_bytes(vocab));
        engine->pool.run([&](int thread) {
            float *scratch = engine->scratch[thread].as<float>();
            const Range own = share_of(num_draws, thread, engine->pool.size());
            for (int64_t i = own.low; i < own.high; i++)
                tokens[i] = engine->kernels.draw_row(logits + draws[i].row * vocab, vocab, draws[i], scratch);
        });
    });
}
